import { execFileSync, spawn, type ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { closeSync, mkdirSync, mkdtempSync, openSync, readFileSync, rmSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import net from 'node:net'
import path from 'node:path'
import { listenOn, until } from '../harness.ts'

/** One core makes the load and plays the backend, the other runs what is measured. */
export type Core = 'load' | 'proxy'

/** Undefined: this machine has one core, and all share it. */
const CORES: Readonly<Record<Core, string>> | undefined =
  availableParallelism() > 1 ? { load: '0', proxy: '1' } : undefined

/** Settings of the sidecar that stand in the environment are not meant for the benchmark. */
const ENV = { PATH: process.env['PATH'], NODE_ENV: 'production' }

export interface Started {
  readonly pid: number
  readonly child: ChildProcess
}

/** What the kernel has counted for some processes, with all their threads and children. */
export interface Usage {
  readonly cpuUs: number
  readonly residentBytes: number
}

/** Where a run keeps its files, and what it has started. Both are gone after `close`. */
export class Site {
  readonly folder: string
  readonly #children = new Set<ChildProcess>()

  /** `base` has to be on a real disk: what is measured there includes its fsync. */
  constructor(base: string) {
    mkdirSync(base, { recursive: true })
    this.folder = mkdtempSync(path.join(base, 'run-'))
    process.once('exit', this.#clear)
  }

  /** A new folder in the site's own. */
  newFolder(): string {
    return mkdtempSync(path.join(this.folder, 'part-'))
  }

  /** Starts a program, pinned. What it writes goes to a file, as a service's log would. */
  start(core: Core, command: string, args: readonly string[]): Started {
    const log = openSync(path.join(this.newFolder(), 'output.log'), 'w')
    const child = spawn(...pinned(core, command, args), { stdio: ['ignore', log, log], env: ENV })
    closeSync(log)
    return { pid: this.#adopt(child), child }
  }

  /** Runs a program to its end and resolves with what it wrote to stdout. */
  async run(core: Core, command: string, args: readonly string[]): Promise<string> {
    const child = spawn(...pinned(core, command, args), {
      stdio: ['ignore', 'pipe', 'inherit'],
      env: ENV,
    })
    this.#adopt(child)
    let output = ''
    child.stdout.on('data', (chunk: Buffer) => (output += chunk.toString()))
    const [code] = (await once(child, 'close')) as [number | null]
    if (code !== 0) throw new Error(`${command} ended with ${code}: ${output}`)
    return output
  }

  async stop({ child }: Started): Promise<void> {
    if (!this.#children.has(child)) return
    const gone = once(child, 'exit')
    child.kill('SIGTERM')
    await gone
  }

  async close(): Promise<void> {
    await Promise.all([...this.#children].map((child) => this.stop({ child, pid: 0 })))
    this.#clear()
    process.off('exit', this.#clear)
  }

  #adopt(child: ChildProcess): number {
    if (child.pid === undefined) throw new Error('a program could not be started')
    this.#children.add(child)
    child.once('exit', () => this.#children.delete(child))
    return child.pid
  }

  readonly #clear = (): void => {
    for (const child of this.#children) child.kill('SIGKILL')
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 5 })
  }
}

function pinned(core: Core, command: string, args: readonly string[]): [string, string[]] {
  if (CORES === undefined) return [command, [...args]]
  return ['taskset', ['-c', CORES[core], command, ...args]]
}

/** This process belongs to the load. */
export function pinThisProcess(): void {
  if (CORES === undefined) return
  execFileSync('taskset', ['-a', '-p', '-c', CORES.load, String(process.pid)])
}

/** How the cores are shared out, for the report. */
export function describeCores(): string {
  return CORES === undefined
    ? 'there is one core, which everything shares: take latencies and rates as rough'
    : `load and backend are pinned to core ${CORES.load}, what is measured to core ${CORES.proxy}`
}

/** A port that nobody listens on. */
export async function freePort(): Promise<number> {
  const server = net.createServer()
  const port = await listenOn(server)
  server.close()
  await once(server, 'close')
  return port
}

/** Resolves as soon as the program takes connections. */
export async function listening({ child }: Started, port: number): Promise<void> {
  await until(
    () => {
      if (child.exitCode !== null) throw new Error(`${child.spawnargs.join(' ')} ended at once`)
      return takesConnections(port)
    },
    `${child.spawnargs.join(' ')} listens`,
    60_000,
  )
}

function takesConnections(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = net.connect({ port, host: '127.0.0.1' })
    socket.once('connect', () => resolve(true)).once('error', () => resolve(false))
    socket.once('connect', () => socket.destroy())
  })
}

/** proc(5): the kernel counts in hundredths of a second. */
const TICK_US = 10_000
const PAGE_BYTES = 4096

export function usageOf(pids: readonly number[]): Usage {
  let cpuUs = 0
  let residentBytes = 0
  for (const pid of pids.flatMap(withChildren)) {
    const stat = readFileSync(`/proc/${pid}/stat`, 'latin1')
    // The name of the program may hold blanks and parentheses; behind it are numbers.
    const fields = stat
      .slice(stat.lastIndexOf(')') + 2)
      .split(' ')
      .map(Number)
    const [utime = 0, stime = 0] = fields.slice(11, 13)
    cpuUs += (utime + stime) * TICK_US
    residentBytes += (fields[21] ?? 0) * PAGE_BYTES
  }
  return { cpuUs, residentBytes }
}

function withChildren(pid: number): number[] {
  const children = readFileSync(`/proc/${pid}/task/${pid}/children`, 'latin1')
  return [pid, ...children.split(' ').filter(Boolean).map(Number).flatMap(withChildren)]
}
