import type { ChildProcess } from 'node:child_process'
import { mkdirSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import type { FileSettings } from '../../src/config.ts'
import { readMetric, request } from '../harness.ts'
import type { BrokenName } from './broken/variants.ts'
import { now, type Happened } from './history.ts'
import { endedWithin, isRunning, kill, startProgram, within } from './processes.ts'
import {
  CLIENT_TIMEOUT_MS,
  RESPONSE_TIMEOUT_MS,
  SETTLE_MS,
  SHUTDOWN_TIMEOUT_MS,
  TAKEOVER_TIMEOUT_MS,
} from './settings.ts'

/** The run cannot go on because the sidecar, or a part of the test, does not do what it has to. */
export class Stuck extends Error {
  override readonly name = 'Stuck'
}

export interface Place {
  readonly folder: string
  /** Files whose path contains this lie on the disk that can fail. */
  readonly diskWord: string
  readonly env: NodeJS.ProcessEnv
  readonly port: number
  readonly adminPort: number
  readonly backendPort: number
  /** Whether the disk failed at any time from `at` on. */
  diskFailedSince(at: number): boolean
}

/** The sidecar: a process that is started again and again, on the same ports and the same store. */
export class Sidecar {
  readonly #place: Place
  readonly #append: (happened: Happened) => void
  readonly #program: { script: string; args: readonly string[] }
  #child: ChildProcess | undefined
  /** It has been told to, or has not begun to run yet. */
  #isToEnd = true

  /** `broken`: not the real program, but one with a part replaced. */
  constructor(place: Place, append: (happened: Happened) => void, broken: BrokenName | undefined) {
    this.#place = place
    this.#append = append
    const config = writeConfig(place)
    this.#program =
      broken === undefined
        ? { script: '../../src/cli.js', args: ['serve', '--config', config] }
        : { script: 'broken/sidecar.js', args: [broken, config] }
  }

  /** What it logged, for whoever looks into a violation. */
  get log(): string {
    return path.join(this.#place.folder, 'sidecar.log')
  }

  /**
   * Starts it, and where the disk fails meanwhile, again: on a bad disk it refuses, as it should.
   * Then notes what marks it has.
   */
  async start(): Promise<void> {
    for (;;) {
      const began = now()
      this.#append({ kind: 'sidecar', does: 'starts' })
      const { script, args } = this.#program
      const child = startProgram(script, args, this.#place.env, this.log)
      this.#child = child
      child.once('exit', (code) => this.#onExit(code))
      await within(START_WITHIN_MS, async () => !isRunning(child) || (await this.#lives()))
      if (isRunning(child) && (await this.#lives())) break
      await kill(child)
      if (!this.#place.diskFailedSince(began)) throw new Stuck('the sidecar does not start')
      await delay(100)
    }
    this.#isToEnd = false
    this.#append({ kind: 'sidecar', does: 'runs' })
    await this.#readMarks()
  }

  async kill(): Promise<void> {
    if (this.#child === undefined || !isRunning(this.#child)) return
    this.#isToEnd = true
    this.#append({ kind: 'sidecar', does: 'ends' })
    await kill(this.#child)
    this.#append({ kind: 'sidecar', does: 'killed' })
  }

  async killAndStart(): Promise<void> {
    await this.kill()
    await this.start()
  }

  async stopAndStart(): Promise<void> {
    await this.stop()
    await this.start()
  }

  /** Resolves with whether it stopped cleanly. */
  async stop(): Promise<boolean> {
    const child = this.#child
    if (child === undefined) return true
    this.#isToEnd = true
    this.#append({ kind: 'sidecar', does: 'ends' })
    child.kill('SIGTERM')
    if (!(await endedWithin(child, SHUTDOWN_TIMEOUT_MS + 10_000))) {
      throw new Stuck('the sidecar does not stop')
    }
    const isClean = child.exitCode === 0
    this.#append({ kind: 'sidecar', does: isClean ? 'stopped cleanly' : 'killed' })
    return isClean
  }

  pause(): void {
    this.#child?.kill('SIGSTOP')
  }

  resume(): void {
    this.#child?.kill('SIGCONT')
  }

  /** Nothing is in flight, waits or settles. */
  async isIdle(): Promise<boolean> {
    const gauges = ['fencing_in_flight', 'fencing_waiting', 'fencing_settling_scopes']
    const values = await Promise.all(gauges.map((name) => readMetric(this.#place.adminPort, name)))
    return values.every((value) => value === 0)
  }

  #onExit(code: number | null): void {
    if (this.#isToEnd) return
    const why = `the sidecar ended by itself, with exit code ${code}`
    this.#append({ kind: 'stuck', why })
  }

  async #lives(): Promise<boolean> {
    try {
      return (await request(this.#place.adminPort, { path: '/healthz' })).status === 200
    } catch {
      return false
    }
  }

  async #readMarks(): Promise<void> {
    const at = now()
    const read = await request(this.#place.adminPort, { path: '/scopes?limit=1000' })
    // On a bad disk there is no answer to have.
    if (read.status !== 200) return
    const { scopes } = JSON.parse(read.body) as { scopes: { scope: string; mark: string }[] }
    const marks = Object.fromEntries(scopes.map(({ scope, mark }) => [scope, mark]))
    this.#append({ kind: 'marks', since: at, marks })
  }
}

/** On a busy machine a start takes its time, and a slow disk more. */
const START_WITHIN_MS = 60_000

function writeConfig({ folder, diskWord, port, adminPort, backendPort }: Place): string {
  const data = path.join(folder, diskWord)
  mkdirSync(data)
  const settings: FileSettings = {
    listen: `127.0.0.1:${port}`,
    admin: `127.0.0.1:${adminPort}`,
    clientTimeout: `${CLIENT_TIMEOUT_MS}ms`,
    shutdownTimeout: `${SHUTDOWN_TIMEOUT_MS}ms`,
    upstream: {
      url: `http://127.0.0.1:${backendPort}`,
      responseTimeout: `${RESPONSE_TIMEOUT_MS}ms`,
      // Few, so that writes are queued for a connection, too.
      maxConnections: 6,
    },
    store: { path: path.join(data, 'fence.db') },
    fence: { takeoverTimeout: `${TAKEOVER_TIMEOUT_MS}ms`, settle: `${SETTLE_MS}ms` },
    routes: [{ path: '/jobs/{job}/**' }],
  }
  const file = path.join(folder, 'config.json')
  writeFileSync(file, JSON.stringify(settings))
  return file
}
