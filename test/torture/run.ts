import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import path from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { createFaultyDisk, noFaultyDisk, type DiskFault, type FaultyDisk } from '../faults/disk.ts'
import type { BrokenName } from './broken/variants.ts'
import { check, countBeyondSettle, type Promised, type Violation } from './checker.ts'
import { Client } from './client.ts'
import { inflictFaults } from './faults.ts'
import { appendTo, HistoryReader, now, type Happened, type Happening } from './history.ts'
import { LeaseSource } from './leases.ts'
import {
  cleanUp,
  cleanUpAtExit,
  createFolder,
  isRunning,
  kill,
  reservePort,
  startPart,
  within,
} from './processes.ts'
import { Random } from './random.ts'
import type { ToRelay } from './relay.ts'
import { RESPONSE_TIMEOUT_MS, SETTLE_MS, SILENCE_SECONDS, type FaultName } from './settings.ts'
import { Sidecar, Stuck } from './sidecar.ts'
import type { LeaseAnswer, Task, ToLeases } from './worker.ts'

export interface Options {
  readonly seconds: number
  readonly seed: number
  readonly workers: number
  readonly scopes: number
  readonly faults: readonly FaultName[]
  /** Not the real sidecar. */
  readonly broken?: BrokenName
  /** How often the history is checked while the run goes on. */
  readonly checkEverySeconds: number
}

export interface Outcome {
  readonly happenings: readonly Happening[]
  readonly violation: Violation | undefined
  /** Writes that landed later than `settle` after they were unknown: the machine was too busy. */
  readonly beyondSettle: number
  /** Where the history and the sidecar's log are; only after a violation. */
  readonly folder: string | undefined
}

export const PROMISED: Promised = { settleMs: SETTLE_MS, responseTimeoutMs: RESPONSE_TIMEOUT_MS }

/** One run, up to its end or the first violation. `watch` is told now and then how it goes. */
export async function run(
  options: Options,
  watch: (happenings: readonly Happening[]) => void = () => undefined,
): Promise<Outcome> {
  const folder = createFolder()
  const history = path.join(folder.path, 'history.jsonl')
  const append = appendTo(history)
  const reader = new HistoryReader(history)
  const world = await createWorld(options, folder.path, history, append)
  let violation: Violation | undefined
  try {
    violation = await Promise.race([watched(options, reader, world, watch), world.failed])
    if (violation === undefined) {
      await Promise.race([conclude(options, world, append), world.failed])
    }
  } catch (error) {
    if (!(error instanceof Stuck)) throw error
    append({ kind: 'stuck', why: error.message })
  } finally {
    await world.end()
  }
  const happenings = reader.happenings()
  violation ??= check(happenings, PROMISED)
  const isKept = violation !== undefined && options.broken === undefined
  if (isKept) folder.keep()
  else folder.remove()
  return {
    happenings,
    violation,
    beyondSettle: countBeyondSettle(happenings, PROMISED),
    folder: isKept ? folder.path : undefined,
  }
}

/** Lets the faults and the workers go on, and looks at the history meanwhile. */
async function watched(
  { seconds, checkEverySeconds }: Options,
  reader: HistoryReader,
  world: World,
  watch: (happenings: readonly Happening[]) => void,
): Promise<Violation | undefined> {
  const over = new AbortController()
  const faults = world.inflictFaults(over.signal)
  const end = now() + seconds * 1_000
  let violation: Violation | undefined
  try {
    while (violation === undefined && now() < end) {
      await Promise.race([delay(Math.min(checkEverySeconds * 1_000, end - now())), faults])
      const happenings = reader.happenings()
      watch(happenings)
      violation = check(happenings, PROMISED)
    }
  } finally {
    over.abort()
    // Mended, or found to be beyond that: nothing is started again behind the back of what follows.
    await faults.catch(() => undefined)
  }
  if (violation === undefined) await faults
  return violation
}

/** Everything is in order again: the workers stop, every scope must go on, and nothing be left. */
async function conclude(
  { workers }: Options,
  world: World,
  append: (happened: Happened) => void,
): Promise<void> {
  append({ kind: 'calm' })
  for (const worker of world.workers) worker.send('stop')
  const limit = (SILENCE_SECONDS + 3) * 1_000
  if (!(await within(limit, () => world.workers.every((worker) => !isRunning(worker))))) {
    const left = world.workers.filter(isRunning).length
    append({ kind: 'stuck', why: `${left} of ${workers} workers have writes that do not end` })
    return
  }
  for (const scope of world.scopes) {
    if (await world.getsOn(scope)) continue
    append({ kind: 'stuck', scope, why: `a new owner of ${scope} is not let through` })
    return
  }
  if (!(await within(SETTLE_MS + 5_000, () => world.sidecar.isIdle()))) {
    append({ kind: 'stuck', why: 'something stays in flight, waiting or settling' })
    return
  }
  if (await world.sidecar.stop()) return
  append({ kind: 'stuck', why: 'with nothing in flight, the sidecar does not stop cleanly' })
}

type World = Awaited<ReturnType<typeof createWorld>>

/** Starts all processes of a run. */
async function createWorld(
  options: Options,
  folder: string,
  history: string,
  append: (happened: Happened) => void,
) {
  const random = new Random(options.seed)
  const scopes = nonEmpty(Array.from({ length: options.scopes }, (_, i) => `/jobs/${i + 1}`))
  const port = await reservePort()
  const adminPort = await reservePort()
  const backendPort = await reservePort()
  const leases = new LeaseSource(new Random(random.seed()), append)
  const disk = noFaultyDisk === false ? remembering(createFaultyDisk(DISK_WORD)) : undefined
  if (disk !== undefined) cleanUpAtExit(disk.remove)
  let fail: (error: Error) => void = () => undefined
  /** Rejects where a part of the test fails: nothing that happens from then on says anything. */
  const failed = new Promise<never>((_, reject) => (fail = reject))
  failed.catch(() => undefined)
  const start = (script: string, ...args: string[]) => startPart(script, args, fail)
  const relay = start('relay.js', history, String(backendPort), String(random.seed()))
  const tellRelay = (told: ToRelay) => void relay.send(told)

  let backend: ChildProcess | undefined
  const startBackend = async () => {
    backend = start('backend.js', history)
    const told = once(backend, 'message') as Promise<[{ port: number }]>
    const [{ port }] = await Promise.race([told, failed])
    tellRelay({ say: 'backend', port })
  }
  await startBackend()
  const restartBackend = async (downMs: number) => {
    if (backend !== undefined) await kill(backend)
    tellRelay({ say: 'backend', port: undefined })
    await delay(downMs)
    await startBackend()
  }

  const { PATH } = process.env
  const { LD_PRELOAD, DISK_FAULT_CONTROL, DISK_FAULT_WORD } = disk?.env ?? {}
  // Settings of a sidecar that stand in the environment are not meant for this one.
  const env = { PATH, LD_PRELOAD, DISK_FAULT_CONTROL, DISK_FAULT_WORD }
  const diskFailedSince = (at: number) => disk?.failedSince(at) ?? false
  const ports = { port, adminPort, backendPort }
  const place = { folder, diskWord: DISK_WORD, env, ...ports, diskFailedSince }
  const sidecar = new Sidecar(place, append, options.broken)
  await sidecar.start()

  const startWorker = (name: string) => {
    const { faults } = options
    const task: Task = { name, seed: random.seed(), port, scopes, faults, history }
    const worker = start('worker.js', JSON.stringify(task))
    worker.on('message', (said: ToLeases) => {
      if (said.say === 'gone') {
        leases.release(said.scope, said.token)
        return
      }
      const token = leases.take(said.scope, name)
      worker.send((token === undefined ? {} : { token }) satisfies LeaseAnswer)
    })
    return worker
  }
  const workers = nonEmpty(
    Array.from({ length: options.workers }, (_, i) => startWorker(`worker-${i + 1}`)),
  )
  const leaseTaken = () => leases.taken()
  const targets = { sidecar, disk, workers, tellRelay, restartBackend, leaseTaken }

  return {
    failed,
    sidecar,
    workers,
    scopes,
    inflictFaults: (signal: AbortSignal) =>
      inflictFaults(options.faults, targets, new Random(random.seed()), append, signal),
    /** Whether a new owner of the scope can write. */
    async getsOn(scope: string): Promise<boolean> {
      const client = new Client(port, append)
      const token = leases.seize(scope, 'last')
      let tries = 0
      const getsThrough = async () => {
        const told = await client.write(plainWrite(`last-${scope}-${++tries}`, scope, token))
        return told?.status === 200
      }
      const gotThrough = await within(PROGRESS_WITHIN_MS, getsThrough)
      client.close()
      return gotThrough
    },
    async end() {
      for (const worker of workers) await kill(worker)
      await sidecar.kill()
      for (const part of [relay, backend]) if (part !== undefined) await kill(part)
      if (disk !== undefined) cleanUp(disk.remove)
    },
  }
}

const DISK_WORD = 'faulty'

/** A disk, and whether it failed at any time from some moment on. */
function remembering(disk: FaultyDisk) {
  let isFailing = false
  let healed = -Infinity
  return {
    ...disk,
    fail(fault: DiskFault) {
      isFailing = true
      disk.fail(fault)
    },
    heal() {
      disk.heal()
      isFailing = false
      healed = now()
    },
    failedSince: (at: number) => isFailing || healed >= at,
  }
}

const PROGRESS_WITHIN_MS = 10_000

function plainWrite(id: string, scope: string, token: string) {
  return {
    id,
    scope,
    token,
    method: 'PUT',
    chunked: false,
    parts: [10],
    pauseMs: 0,
    leaves: undefined,
    conduct: { applyMs: 0, answerMs: 0, answer: 'whole', answerBytes: 10 },
    faults: [],
  } as const
}

function nonEmpty<T>(list: readonly T[]): readonly [T, ...T[]] {
  const [first, ...more] = list
  if (first === undefined) throw new Error('at least one is needed')
  return [first, ...more]
}
