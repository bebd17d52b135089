import { execFileSync, spawn, type ChildProcess } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import type { Happening, Told, WorkerName } from './happening.ts'

/** What happened is not what the demo claims. */
export class Disproved extends Error {
  override readonly name = 'Disproved'
}

export function claim(holds: boolean, words: string): asserts holds {
  if (!holds) throw new Disproved(words)
}

/** Polls until `condition` holds: nothing here relies on a pause being long enough. */
export async function until(
  condition: () => boolean | Promise<boolean>,
  words: string,
): Promise<void> {
  const deadline = performance.now() + WAIT_MS
  while (!(await condition())) {
    claim(performance.now() < deadline, `${words}, not within ${WAIT_MS / 1000} s`)
    await delay(5)
  }
}

const WAIT_MS = 8_000

const children = new Set<ChildProcess>()
let folder: string | undefined

// Whatever ends the demo, this runs: a failure, Ctrl-C, or a reader (`| head`) that has gone.
process.on('exit', () => {
  // SIGKILL also ends a process that is stopped.
  for (const child of children) child.kill('SIGKILL')
  if (folder !== undefined) rmSync(folder, { recursive: true, force: true, maxRetries: 5 })
})

/** Runs a script with Node; `onLine` gets each line that it prints. */
function run(script: string, args: readonly string[], onLine: (line: string) => void) {
  const path = fileURLToPath(new URL(script, import.meta.url))
  const child = spawn(process.execPath, [path, ...args], {
    stdio: ['pipe', 'pipe', 'inherit'],
    // Settings of the sidecar that stand in the environment are not meant for the demo.
    env: { PATH: process.env['PATH'] },
  })
  children.add(child)
  child.once('exit', () => children.delete(child))
  // A process that has ended cannot be told anything; whoever waits for it says so.
  child.stdin.on('error', () => undefined)
  createInterface(child.stdout).on('line', onLine)
  return child
}

/** A worker, in a process of its own. */
export interface Worker {
  /** Stops the whole process, as a frozen machine or a long garbage collection does. */
  pause(): Promise<void>
  resume(): void
  /** The worker's work is done: it writes its result next. A paused one does so once it is awake. */
  finishWork(): void
  ended(): Promise<void>
}

export function startWorker(
  name: WorkerName,
  urls: { readonly leases: string; readonly target: string },
  happened: (happening: Happening) => void,
  tell: (told: Told) => void,
): Worker {
  const child = run('worker.js', [name, urls.leases, urls.target], (line) =>
    happened(JSON.parse(line) as Happening),
  )
  let closed = false
  child.once('close', () => (closed = true))
  return {
    async pause() {
      child.kill('SIGSTOP')
      await until(() => isStopped(child), `worker ${name} was to stop at a SIGSTOP`)
      tell({ kind: 'paused', worker: name })
    },
    resume() {
      tell({ kind: 'resumed', worker: name })
      child.kill('SIGCONT')
    },
    finishWork: () => void child.stdin.write('done\n'),
    async ended() {
      await until(() => closed, `worker ${name} was to end`)
      claim(child.exitCode === 0, `worker ${name} failed`)
    },
  }
}

/** Whether the operating system says that the process is stopped (`T`). */
function isStopped({ pid = 0 }: ChildProcess): boolean {
  const file = `/proc/${pid}/stat`
  const state = existsSync(file)
    ? readFileSync(file, 'latin1').replace(/^.*\) /s, '')
    : execFileSync('ps', ['-o', 'state=', '-p', String(pid)], { encoding: 'latin1' })
  return state.startsWith('T')
}

/** The real sidecar, as a user starts it. */
export interface Sidecar {
  readonly url: string
  /** Its log so far. */
  readonly log: readonly LogLine[]
  /** What its admin port says of the job. */
  job(): Promise<{
    readonly mark?: string
    readonly raisedAt?: string
    readonly inFlight?: number
    readonly waiting?: number
  }>
  stop(): Promise<void>
}

export interface LogLine {
  readonly event: string
  readonly [field: string]: unknown
}

export async function startSidecar(
  upstream: string,
  onLog: (line: LogLine) => void,
): Promise<Sidecar> {
  folder ??= mkdtempSync(join(tmpdir(), 'fencing-proxy-demo-'))
  const data = mkdtempSync(join(folder, 'data-'))
  const log: LogLine[] = []
  const args = ['serve', '--upstream', upstream, '--scope', '/jobs/{job}/**']
  const places = ['--listen', '127.0.0.1:0', '--admin', '127.0.0.1:0', '--data', data]
  const child = run('../../src/cli.js', [...args, ...places], (text) => {
    const line = JSON.parse(text) as LogLine
    log.push(line)
    onLog(line)
  })
  let started: LogLine | undefined
  await until(() => {
    claim(child.exitCode === null, 'the sidecar did not start')
    started = log.find(({ event }) => event === 'started')
    return started !== undefined
  }, 'the sidecar was to start')
  return {
    url: `http://${String(started?.['data'])}`,
    log,
    async job() {
      const answer = await fetch(`http://${String(started?.['admin'])}/scopes/jobs/17`)
      return (await answer.json()) as Awaited<ReturnType<Sidecar['job']>>
    },
    async stop() {
      child.kill('SIGTERM')
      await until(() => !children.has(child), 'the sidecar was to stop')
      claim(child.exitCode === 0, 'the sidecar was to stop cleanly')
    },
  }
}
