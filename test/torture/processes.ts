import { fork, spawn, type ChildProcess } from 'node:child_process'
import { randomInt } from 'node:crypto'
import { createSocket } from 'node:dgram'
import { mkdtempSync, openSync, readFileSync, rmSync } from 'node:fs'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'

/** All that must not outlive this program. */
const children = new Set<ChildProcess>()
const removals = new Set<() => void>()

// Whatever ends it, this runs: a failure, Ctrl-C, a violation.
process.on('exit', () => {
  // SIGKILL also ends a process that is stopped.
  for (const child of children) child.kill('SIGKILL')
  for (const remove of removals) remove()
})

/** Calls `remove` at the end, unless `cleanUp` did so before. */
export function cleanUpAtExit(remove: () => void): void {
  removals.add(remove)
}

export function cleanUp(remove: () => void): void {
  removals.delete(remove)
  remove()
}

export interface Folder {
  readonly path: string
  remove(): void
  /** It stays after the end, for somebody to look into. */
  keep(): void
}

export function createFolder(): Folder {
  const folder = mkdtempSync(path.join(tmpdir(), 'fencing-torture-'))
  const remove = () => rmSync(folder, { recursive: true, force: true, maxRetries: 5 })
  cleanUpAtExit(remove)
  return { path: folder, remove: () => cleanUp(remove), keep: () => void removals.delete(remove) }
}

/** Runs a program of this folder that talks by messages. `failed` is told where it ends by a mistake. */
export function startPart(
  script: string,
  args: readonly string[],
  failed: (error: Error) => void,
): ChildProcess {
  const file = fileURLToPath(new URL(script, import.meta.url))
  const child = fork(file, args, { stdio: ['ignore', 'inherit', 'inherit', 'ipc'], execArgv: [] })
  child.once('exit', (code) => {
    // Not null, as after a SIGKILL, and not in order.
    if (code !== null && code !== 0) failed(new Error(`${script} failed; it said why above`))
  })
  return watched(child)
}

/** Runs a program whose output goes to a file. */
export function startProgram(
  script: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv,
  output: string,
): ChildProcess {
  const file = fileURLToPath(new URL(script, import.meta.url))
  const out = openSync(output, 'a')
  return watched(spawn(process.execPath, [file, ...args], { stdio: ['ignore', out, out], env }))
}

function watched(child: ChildProcess): ChildProcess {
  children.add(child)
  child.once('exit', () => children.delete(child))
  // Telling something to a process that has just ended is no failure.
  child.on('error', () => undefined)
  return child
}

export function isRunning({ exitCode, signalCode }: ChildProcess): boolean {
  return exitCode === null && signalCode === null
}

export async function endedWithin(child: ChildProcess, limitMs: number): Promise<boolean> {
  return within(limitMs, () => !isRunning(child))
}

export async function kill(child: ChildProcess): Promise<void> {
  child.kill('SIGKILL')
  await endedWithin(child, 10_000)
}

/** Polls; false where it does not hold in time. */
export async function within(
  limitMs: number,
  condition: () => boolean | Promise<boolean>,
): Promise<boolean> {
  const deadline = performance.now() + limitMs
  while (!(await condition())) {
    if (performance.now() > deadline) return false
    await delay(10)
  }
  return true
}

/**
 * A port that stays free while nobody listens on it, until this process ends: it lies outside of
 * the range from which the system gives ports to connections. Not chosen by the seed: runs of one
 * seed may go on side by side. They keep off each other's ports by the UDP port of the same number,
 * which is held for nothing else.
 */
export async function reservePort(): Promise<number> {
  const [firstGiven = 0] = rangeOfConnections()
  const end = firstGiven > 20_000 ? firstGiven : 32_768
  for (;;) {
    const port = randomInt(end - 12_000, end)
    if ((await hold(port)) && (await canListen(port))) return port
  }
}

function hold(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = createSocket('udp4').unref()
    socket.once('error', () => socket.close(() => resolve(false)))
    socket.bind({ port, address: '127.0.0.1', exclusive: true }, () => resolve(true))
  })
}

function rangeOfConnections(): number[] {
  try {
    return readFileSync('/proc/sys/net/ipv4/ip_local_port_range', 'utf8').split(/\s+/).map(Number)
  } catch {
    return []
  }
}

function canListen(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const server = createServer()
    server.once('error', () => resolve(false))
    server.listen(port, '127.0.0.1', () => server.close(() => resolve(true)))
  })
}
