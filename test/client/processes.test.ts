import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { writeFileSync } from 'node:fs'
import path from 'node:path'
import { createInterface } from 'node:readline'
import { describe, test, type TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'
import { FencingClient, LeaseLostError, LeaseUnavailableError } from '../../src/client/client.ts'
import { freePort } from '../free-port.ts'
import { startBackend, startProxy, temporaryFolder, until } from '../harness.ts'
import { startProgram } from '../program.ts'

/** Processes that are paused and killed. */

function run(t: TestContext, program: string[]) {
  const child = spawn(process.execPath, program, { stdio: ['ignore', 'pipe', 'inherit'] })
  const lines: string[] = []
  createInterface(child.stdout).on('line', (line) => lines.push(line))
  t.after(() => child.kill('SIGKILL'))
  return { child, lines, exit: once(child, 'exit') as Promise<[number | null]> }
}

/** Several processes on one port, one after the other, over one store. */
async function inTurn(t: TestContext, url: string) {
  const port = await freePort()
  const folder = await temporaryFolder(t)
  const settings = { listen: `127.0.0.1:${port}`, leases: {}, fence: { settle: '100ms' } }
  const start = () => startProgram(t, url, { folder, settings })
  return { client: new FencingClient(`http://127.0.0.1:${port}`), start }
}

describe('a client', { timeout: 60_000 }, () => {
  for (const habit of ['looks', 'writes']) {
    test(`that was paused for longer than its TTL and ${habit} next finds its lease lost before any timer has run, and starts nothing`, async (t) => {
      const backend = await startBackend(t)
      const proxy = await startProxy(t, backend.url, { leases: {} })
      const url = `http://127.0.0.1:${proxy.port}`
      const file = path.join(await temporaryFolder(t), 'go')
      const worker = run(t, [
        fileURLToPath(new URL('worker.js', import.meta.url)),
        ...[url, '2s', file, habit],
      ])
      await until(() => worker.lines.length === 1, 'its first write')
      worker.child.kill('SIGSTOP')
      const next = await new FencingClient(url).acquire({ scope: '/jobs/17', wait: '10s' })
      await next.fetch('/jobs/17/state', { method: 'PUT', body: 'next' })
      writeFileSync(file, '')
      worker.child.kill('SIGCONT')
      await until(() => worker.lines.length === 2, 'it wakes')
      assert.deepEqual(JSON.parse(worker.lines[1] ?? ''), {
        before: false,
        ...(habit === 'looks' ? { after: true } : {}),
        outcome: 'lost: expired',
      })
      assert.deepEqual(
        backend.seen.map(({ body }) => body),
        ['first', 'next'],
      )
      assert.equal(proxy.events('stale_write').length, 0, 'nothing even reached the sidecar')
      assert.deepEqual(await worker.exit, [0, null])
      assert.equal(next.signal.aborted, false, 'what it released was not the next one’s')
      await next.release()
    })
  }

  test('whose sidecar is killed and started again keeps its lease', async (t) => {
    const backend = await startBackend(t)
    const { client, start } = await inTurn(t, backend.url)
    const first = await start()
    const lease = await client.acquire({ scope: '/jobs/17', ttl: '6s' })
    await lease.fetch('/jobs/17', { method: 'PUT', body: 'before' })
    await first.kill()
    await assert.rejects(lease.fetch('/jobs/17', { method: 'PUT' }), TypeError)
    const second = await start()
    const began = performance.now()
    await until(() => performance.now() - began > 6_500, 'more than a TTL')
    assert.equal(lease.signal.aborted, false)
    await lease.fetch('/jobs/17', { method: 'PUT', body: 'after' })
    assert.deepEqual(
      backend.seen.map(({ body, headers }) => [body, headers['fencing-token']]),
      [
        ['before', lease.token],
        ['after', lease.token],
      ],
    )
    await lease.release()
    await second.kill()
  })

  test('whose sidecar stays away for longer than the TTL is told in time', async (t) => {
    const backend = await startBackend(t)
    const { client, start } = await inTurn(t, backend.url)
    const sidecar = await start()
    const began = performance.now()
    const lease = await client.acquire({ scope: '/jobs/17', ttl: '2s' })
    await sidecar.kill()
    await once(lease.signal, 'abort')
    // The last success is its acquire: the renewal was not due before the kill, unless that was slow.
    const ms = performance.now() - began
    assert.ok(ms < 4_000, `${ms} ms`)
    assert.ok(lease.signal.reason instanceof LeaseLostError)
    assert.equal(lease.signal.reason.why, 'expired')
    assert.ok(lease.signal.reason.cause instanceof LeaseUnavailableError)
  })

  test('ends by itself in Node, though it holds a lease', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url, { leases: {} })
    const module = new URL('../../src/client/client.js', import.meta.url).href
    const holder = run(t, [
      ...['--input-type=module', '--eval'],
      `import { FencingClient } from '${module}'
       const client = new FencingClient('http://127.0.0.1:${proxy.port}')
       const lease = await client.acquire({ scope: '/jobs/17', ttl: '10m' })
       console.log(lease.token)`,
    ])
    assert.deepEqual(await holder.exit, [0, null])
    assert.equal(holder.lines.length, 1)
  })
})
