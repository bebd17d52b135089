import type { ChildProcess } from 'node:child_process'
import { setTimeout as delay } from 'node:timers/promises'
import type { FaultyDisk } from '../faults/disk.ts'
import { now, type Happened } from './history.ts'
import type { Random } from './random.ts'
import type { ToRelay } from './relay.ts'
import { RESPONSE_TIMEOUT_MS, type FaultName } from './settings.ts'
import type { Sidecar } from './sidecar.ts'

/** What faults are done to. */
export interface Targets {
  readonly sidecar: Sidecar
  readonly disk: FaultyDisk | undefined
  readonly workers: readonly [ChildProcess, ...ChildProcess[]]
  tellRelay(told: ToRelay): void
  /** Resolves when somebody takes a lease. */
  leaseTaken(): Promise<void>
  /** Kills the backend and starts it again after a while. */
  restartBackend(downMs: number): Promise<void>
}

interface Fault {
  /** Two faults of one place do not overlap. */
  readonly place: 'sidecar' | 'disk' | 'network' | 'backend' | 'workers'
  /** Resolves when it is over and mended. */
  inflict(targets: Targets, random: Random): Promise<void>
}

/** How long a place is left alone after a fault, so that there is something to disturb again. */
const REST_MS: Record<Fault['place'], readonly [number, number]> = {
  sidecar: [500, 3_000],
  disk: [1_000, 4_000],
  network: [500, 3_000],
  backend: [1_000, 4_000],
  workers: [0, 500],
}

const WEATHER_MS = [200, 2 * RESPONSE_TIMEOUT_MS] as const

/** Faults that happen to a process or a place; the others are made by workers, with a write. */
const FAULTS: Partial<Record<FaultName, Fault>> = {
  'pause-worker': {
    place: 'workers',
    async inflict({ workers }, random) {
      const worker = random.pick(workers)
      worker.kill('SIGSTOP')
      // Beyond any lease that it can have.
      await delay(random.between(500, 1_500))
      worker.kill('SIGCONT')
    },
  },
  'kill-sidecar': {
    place: 'sidecar',
    async inflict({ sidecar, leaseTaken }, random) {
      // Where it hurts: while a new owner's first write is on its way.
      await Promise.race([leaseTaken(), delay(500)])
      await delay(random.between(0, random.pick([50, 150, 500])))
      await sidecar.killAndStart()
    },
  },
  'stop-sidecar': {
    place: 'sidecar',
    inflict: ({ sidecar }) => sidecar.stopAndStart(),
  },
  'pause-sidecar': {
    place: 'sidecar',
    async inflict({ sidecar }, random) {
      sidecar.pause()
      await delay(random.between(50, 1_500))
      sidecar.resume()
    },
  },
  'slow-disk': {
    place: 'disk',
    async inflict({ disk }, random) {
      disk?.fail({ slowFsyncMs: random.between(20, 300) })
      await delay(random.between(500, 2_000))
      disk?.heal()
    },
  },
  'failing-disk': {
    place: 'disk',
    async inflict({ disk }, random) {
      disk?.fail('eio-fsync')
      await delay(random.between(100, 800))
      disk?.heal()
    },
  },
  'full-disk': {
    place: 'disk',
    async inflict({ disk }, random) {
      disk?.fail('enospc-write')
      await delay(random.between(100, 800))
      disk?.heal()
    },
  },
  'slow-network': {
    place: 'network',
    async inflict({ tellRelay }, random) {
      tellRelay({ say: 'weather', weather: 'slow' })
      await delay(random.between(...WEATHER_MS))
      tellRelay({ say: 'weather', weather: 'fair' })
    },
  },
  'stall-network': {
    place: 'network',
    async inflict({ tellRelay }, random) {
      tellRelay({ say: 'weather', weather: 'still' })
      await delay(random.between(...WEATHER_MS))
      tellRelay({ say: 'weather', weather: 'fair' })
    },
  },
  'cut-network': {
    place: 'network',
    inflict({ tellRelay }) {
      tellRelay({ say: 'cut' })
      return Promise.resolve()
    },
  },
  'kill-backend': {
    place: 'backend',
    inflict: ({ restartBackend }, random) => restartBackend(random.between(0, 400)),
  },
}

/** Inflicts the named faults, at random moments, until the signal. Resolves when all are mended. */
export async function inflictFaults(
  names: readonly FaultName[],
  targets: Targets,
  random: Random,
  append: (happened: Happened) => void,
  signal: AbortSignal,
): Promise<void> {
  const chosen = names.flatMap((name) => {
    const fault = FAULTS[name]
    return fault === undefined ? [] : [{ name, ...fault }]
  })
  const underway = new Map<Fault['place'], Promise<void>>()
  let failed: (error: unknown) => void = () => undefined
  const failure = new Promise<never>((_, reject) => (failed = reject))
  const rest = (ms: number) => delay(ms, undefined, { signal }).catch(() => undefined)
  const inflictAll = async () => {
    while (!signal.aborted) {
      await rest(random.between(50, 500))
      const [first, ...more] = chosen.filter(({ place }) => !underway.has(place))
      if (first === undefined || signal.aborted) continue
      const { name, place, inflict } = random.pick([first, ...more])
      append({ kind: 'fault', fault: name, does: 'begins' })
      const began = now()
      const over = inflict(targets, random)
        .then(() => append({ kind: 'fault', fault: name, does: 'ends' }))
        // On a slow machine, where a start takes long, no less of the time is left for work.
        .then(() => rest(Math.max(now() - began, random.between(...REST_MS[place]))))
        .finally(() => underway.delete(place))
      over.catch(failed)
      underway.set(place, over)
    }
    await Promise.all(underway.values())
  }
  await Promise.race([inflictAll(), failure])
}
