import assert from 'node:assert/strict'
import { spawn, type ChildProcessByStdio } from 'node:child_process'
import { once } from 'node:events'
import { writeFile } from 'node:fs/promises'
import path from 'node:path'
import { createInterface } from 'node:readline'
import type { Readable } from 'node:stream'
import type { TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'
import type { FileSettings } from '../src/config.ts'
import { portOf, request, temporaryFolder, until } from './harness.ts'

/** The real program as a process of its own, which can be told to stop, killed, paused and starved. */
export interface Program {
  readonly child: ChildProcessByStdio<null, Readable, Readable>
  /** Everything it wrote to stdout so far, line by line. */
  readonly lines: string[]
  stderr: string
  /** Resolves when the process is gone and all that it wrote is read. */
  readonly ended: Promise<{ code: number | null; signal: NodeJS.Signals | null }>
  /** The log so far: all of stdout. Throws where a line is not JSON. */
  log(): Record<string, unknown>[]
  events(name: string): Record<string, unknown>[]
}

export interface Started extends Program {
  readonly port: number
  readonly adminPort: number
  scopes(): Promise<{ settlingMs: number }>
  kill(): Promise<void>
}

export interface Circumstances {
  /** What differs from a program on free ports with its store in `folder` and the route /jobs/{job}/**. */
  readonly settings?: Partial<FileSettings>
  readonly env?: NodeJS.ProcessEnv
  /** Where its configuration and its store are; without it, a new one. */
  readonly folder?: string
}

const CLI = fileURLToPath(new URL('../src/cli.js', import.meta.url))

/** Runs `serve` in front of `url`. It is gone after the test, however that went. */
export async function runProgram(
  t: TestContext,
  url: string,
  { settings = {}, env = {}, folder }: Circumstances = {},
): Promise<Program> {
  const where = folder ?? (await temporaryFolder(t))
  const file = path.join(where, 'config.json')
  const complete: FileSettings = {
    listen: '127.0.0.1:0',
    admin: '127.0.0.1:0',
    upstream: { url },
    store: { path: path.join(where, 'fence.db') },
    routes: [{ path: '/jobs/{job}/**' }],
    ...settings,
  }
  await writeFile(file, JSON.stringify(complete))
  const child = spawn(process.execPath, [CLI, 'serve', '--config', file], {
    env: { PATH: process.env['PATH'], ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const closed = once(child, 'close') as Promise<[number | null, NodeJS.Signals | null]>
  const program: Program = {
    child,
    lines: [],
    stderr: '',
    ended: closed.then(([code, signal]) => ({ code, signal })),
    log: () => program.lines.map((line) => JSON.parse(line) as Record<string, unknown>),
    events: (name) => program.log().filter(({ event }) => event === name),
  }
  createInterface(child.stdout).on('line', (line) => program.lines.push(line))
  child.stderr.on('data', (chunk: Buffer) => (program.stderr += chunk.toString()))
  t.after(async () => {
    child.kill('SIGKILL')
    await program.ended
  })
  return program
}

/** The same, up to the moment at which it takes requests. */
export async function startProgram(
  t: TestContext,
  url: string,
  circumstances: Circumstances = {},
): Promise<Started> {
  const program = await runProgram(t, url, circumstances)
  const { child } = program
  await until(() => {
    assert.equal(child.exitCode, null, program.stderr)
    return program.events('started').length === 1
  }, 'the program starts')
  const [started = {}] = program.events('started')
  const adminPort = portOf(String(started['admin']))
  return Object.assign(program, {
    port: portOf(String(started['data'])),
    adminPort,
    async scopes() {
      const { body } = await request(adminPort, { path: '/scopes' })
      return JSON.parse(body) as { settlingMs: number }
    },
    async kill() {
      child.kill('SIGKILL')
      await program.ended
    },
  })
}
