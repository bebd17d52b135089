import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { writeFileSync } from 'node:fs'
import path from 'node:path'
import { describe, test, type TestContext } from 'node:test'
import { FencingClient } from '../../src/client/client.ts'
import { freePort } from '../free-port.ts'
import { gate, request, startBackend, startProxy, temporaryFolder, until } from '../harness.ts'
import { PATH, isInstalled, readRecipe } from './recipe.ts'

/** The README's programs that take a lease, each as it stands there but for port and TTL. */

interface Language {
  /** As in `recipe=NAME`. */
  readonly recipe: string
  readonly commands: readonly string[]
  /** The Debian packages that bring the commands to CI; undefined where that would be too much. */
  readonly packages: string | undefined
  /** How the program spells a TTL of 15 s, and one of 3 s. */
  readonly ttl: readonly [string, string]
  /** How it spells its wait for the lease, and a short one; only where it fails in words. */
  readonly wait?: readonly [string, string]
  readonly run: (program: string, file: string) => readonly string[]
}

const LANGUAGES: readonly Language[] = [
  {
    recipe: 'lease-js',
    commands: ['node'],
    packages: 'nodejs',
    ttl: ["'15s'", "'3s'"],
    wait: ["'1m'", "'50ms'"],
    // In this folder the package is found by its own name.
    run: (program) => ['node', '--input-type=module', '--eval', program],
  },
  {
    recipe: 'lease-curl',
    commands: ['curl', 'jq'],
    packages: 'curl jq',
    ttl: ['ttl=15', 'ttl=3'],
    run: (program) => ['bash', '-c', program],
  },
  {
    recipe: 'lease-python',
    commands: ['python3'],
    packages: 'python3',
    ttl: ['", 15', '", 3'],
    wait: ['"60s"', '"50ms"'],
    run: (program) => ['python3', '-c', program],
  },
  {
    recipe: 'lease-go',
    commands: ['go'],
    packages: undefined,
    ttl: ['15 * time.Second', '3 * time.Second'],
    run: (_, file) => ['go', 'run', file],
  },
  {
    recipe: 'lease-java',
    commands: ['java'],
    packages: undefined,
    ttl: ['15_000', '3_000'],
    run: (_, file) => ['java', file],
  },
]
const TTL_MS = 3_000

/** Runs a program of the README against the sidecar on `port`. */
async function start(
  t: TestContext,
  { recipe, ttl, run }: Language,
  port: number,
  wait: readonly [string, string] = ['', ''],
) {
  const text = readRecipe(recipe)
  const changes = [['127.0.0.1:8080', `127.0.0.1:${port}`], ttl, wait] as const
  for (const [placeholder] of changes) assert.ok(text.includes(placeholder), placeholder)
  const program = changes.reduce((changed, [from, to]) => changed.replace(from, to), text)
  const folder = await temporaryFolder(t)
  const file = path.join(folder, recipe === 'lease-go' ? 'worker.go' : 'Worker.java')
  writeFileSync(file, program)
  const [command = '', ...args] = run(program, file)
  const child = spawn(command, args, {
    env: { PATH, HOME: folder },
    stdio: ['ignore', 'pipe', 'pipe'],
    // A process group of its own: the worker is paused as a whole.
    detached: true,
  })
  const signal = (name: NodeJS.Signals) => {
    const isGone = child.exitCode !== null || child.signalCode !== null
    if (child.pid !== undefined && !isGone) process.kill(-child.pid, name)
  }
  const worker = { said: '', signal, ended: once(child, 'close') as Promise<[number | null]> }
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk: Buffer) => (worker.said += chunk.toString()))
  }
  t.after(async () => {
    signal('SIGKILL')
    await worker.ended
  })
  return worker
}

async function holderToken(port: number): Promise<string | undefined> {
  const { body } = await request(port, { path: '/_fencing/leases?scope=/jobs/17' })
  return (JSON.parse(body) as { token?: string }).token
}

describe('recipes for leases', { concurrency: 2, timeout: 300_000 }, () => {
  for (const language of LANGUAGES) {
    const { recipe } = language

    test(`${recipe}: waits for its turn, renews while it works, and gives the lease back`, async (t) => {
      if (isMissing(t, language)) return
      const slow = gate()
      const backend = await startBackend(t, (seen) => void slow.promise.then(() => seen.res.end()))
      const proxy = await startProxy(t, backend.url, {
        leases: {},
        upstream: { responseTimeoutMs: 60_000 },
      })
      const other = new FencingClient(`http://127.0.0.1:${proxy.port}`)
      const first = await other.acquire({ scope: '/jobs/17', ttl: '10s' })
      const worker = await start(t, language, proxy.port)
      const waits = async () => (await proxy.metric('fencing_lease_renewals_total')) > 0
      await until(waits, 'a renewal of the first owner', 60_000)
      await first.release()
      await until(() => backend.seen.length === 1, `${recipe} writes: ${worker.said}`, 60_000)
      const token = String(backend.seen[0]?.headers['fencing-token'])
      assert.ok(BigInt(token) > BigInt(first.token))

      const began = performance.now()
      await until(() => performance.now() - began > TTL_MS * 1.5, 'longer than the TTL')
      assert.equal(await holderToken(proxy.port), token, 'renewed')
      slow.open()
      assert.deepEqual(await worker.ended, [0, null], worker.said)
      assert.deepEqual(
        backend.seen.map(({ url, body, headers }) => [url, body, headers['fencing-token']]),
        [1, 2, 3].map((step) => ['/jobs/17/state', `step ${step}`, token]),
      )
      assert.equal(await holderToken(proxy.port), undefined, 'given back')
    })

    test(`${recipe}: paused and overtaken, it stops, and nothing of it reaches the backend`, async (t) => {
      if (isMissing(t, language)) return
      const slow = gate()
      const backend = await startBackend(t, (seen) => void slow.promise.then(() => seen.res.end()))
      const proxy = await startProxy(t, backend.url, { leases: {} })
      const worker = await start(t, language, proxy.port)
      await until(() => backend.seen.length === 1, 'its first write', 60_000)
      worker.signal('SIGSTOP')
      slow.open()
      const other = new FencingClient(`http://127.0.0.1:${proxy.port}`)
      const next = await other.acquire({ scope: '/jobs/17', ttl: '30s', wait: '20s' })
      await next.fetch('/jobs/17/state', { method: 'PUT', body: 'next' })
      worker.signal('SIGCONT')
      const [code] = await worker.ended
      assert.notEqual(code, 0, worker.said)
      assert.deepEqual(
        backend.seen.map(({ body }) => body),
        ['step 1', 'next'],
      )
      assert.equal(await holderToken(proxy.port), next.token, 'the new lease is untouched')
      await next.release()
    })

    if (language.wait === undefined) continue
    test(`${recipe}: without a sidecar, or while another has the lease, it says so in a line and exits with 1`, async (t) => {
      if (isMissing(t, language)) return
      const nowhere = await start(t, language, await freePort(), language.wait)
      assert.deepEqual(await nowhere.ended, [1, null])
      assert.match(nowhere.said, /^[^\n]*(failed|answer)[^\n]*\n$/)

      const backend = await startBackend(t)
      const { port } = await startProxy(t, backend.url, { leases: {} })
      const other = await new FencingClient(`http://127.0.0.1:${port}`).acquire({
        scope: '/jobs/17',
      })
      const late = await start(t, language, port, language.wait)
      assert.deepEqual(await late.ended, [1, null])
      assert.match(late.said, /^[^\n]*(taken|another worker)[^\n]*\n$/)
      assert.equal(backend.seen.length, 0)
      await other.release()
    })
  }
})

/** Skips aloud where the language is not on the machine. In CI those with packages are a must. */
function isMissing(t: TestContext, { commands, packages }: Language): boolean {
  const missing = commands.filter((command) => !isInstalled(command))
  if (missing.length === 0) return false
  const why = `${missing.join(', ')} not found`
  if (process.env['CI'] === 'true' && packages !== undefined) {
    assert.fail(`${why}: apt-get install ${packages}`)
  }
  t.skip(why)
  return true
}
