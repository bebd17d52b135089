import assert from 'node:assert/strict'
import type { ServerResponse } from 'node:http'
import path from 'node:path'
import { describe, test, type TestContext } from 'node:test'
import { openStore } from '../../src/store/open.ts'
import type { LeaseRow } from '../../src/store/store.ts'
import {
  connect,
  gate,
  head,
  problem,
  readMetric,
  request,
  ROUTE,
  startBackend,
  startProxy,
  temporaryFolder,
  until,
  write,
  type Seen,
} from '../harness.ts'
import { startProgram, type Started } from '../program.ts'
import { acquire, leased, lookUp, release, renew, type Leased } from './asks.ts'

/**
 * What leases add to the fence: the mark rises with the grant, not with the new owner's first write,
 * and by nothing else.
 */

const SCOPE = '/jobs/17'

async function scopesOn(adminPort: number): Promise<{ scope: string; mark: string }[]> {
  const { body } = await request(adminPort, { path: '/scopes' })
  return (JSON.parse(body) as { scopes: { scope: string; mark: string }[] }).scopes
}

/** A backend that answers a write when the test says so, and notes the tokens that began. */
async function heldBackend(t: TestContext) {
  const held: ServerResponse[] = []
  const begun: string[] = []
  const onHead = ({ headers }: Seen) => begun.push(String(headers['fencing-token']))
  const backend = await startBackend(t, ({ res }) => held.push(res), { onHead })
  return { url: backend.url, held, begun }
}

describe('sharper than a mark that rises with writes', () => {
  test('the old holder is refused from the moment of the grant, before the new one has written', async (t) => {
    const backend = await startBackend(t)
    const { port } = await startProxy(t, backend.url, { leases: {} })
    const first = await leased(port, { scope: SCOPE })
    assert.equal((await write(port, first.token)).status, 200)
    await release(port, first.lease)
    assert.equal((await write(port, first.token)).status, 200, 'nobody has taken over yet')
    const second = await leased(port, { scope: SCOPE })
    const answer = await write(port, first.token)
    assert.equal(answer.headers['fencing-result'], 'stale')
    assert.equal(problem(answer)['highest'], second.token)
    assert.equal(backend.seen.length, 2)
  })

  test('an expired lease whose scope nobody took does not stop its writes: the mark decides, not time', async (t) => {
    const backend = await startBackend(t)
    const { port } = await startProxy(t, backend.url, { leases: {} })
    const { token } = await leased(port, { scope: SCOPE, ttl: '100ms' })
    await until(async () => (await lookUp(port, SCOPE)).status === 404)
    assert.equal((await write(port, token)).status, 200)
  })

  test('an invented token is refused, locks nothing and leaves no trace on disk', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const proxy = await startProxy(t, backend.url, { leases: {} }, {}, folder)
    const { port, adminPort } = proxy
    const { token } = await leased(port, { scope: SCOPE })
    for (const invented of ['2', '9223372036854775807', '1.0', '9223372036854775807.0']) {
      const held = await write(port, invented)
      assert.deepEqual([held.status, held.headers['fencing-result']], [403, 'unissued'])
      assert.equal(problem(held)['highest'], token)
      // Also where there never was a lease, 0 included.
      for (const fresh of [invented, '0']) {
        const never = await write(port, fresh, { path: '/jobs/18/state' })
        assert.deepEqual([never.status, never.headers['fencing-result']], [403, 'unissued'])
        assert.equal(problem(never)['highest'], undefined)
      }
    }
    assert.deepEqual((await scopesOn(adminPort)).map(({ scope }) => scope), [SCOPE]) // prettier-ignore
    assert.equal(await proxy.metric('fencing_scopes'), 1)
    assert.equal((await write(port, token)).status, 200, 'the holder goes on')
    assert.equal((await leased(port, { scope: '/jobs/18' })).token, '1', 'and it can be taken')
    assert.equal(backend.seen.length, 1)
    await proxy.close()

    const events = { committed: () => undefined, failed: () => undefined, died: () => undefined }
    const { store } = await openStore(proxy.config.store, events)
    t.after(() => store.close(true))
    const marks = (await store.list('', undefined, 10)).map(({ scope, mark }) => [scope, mark])
    assert.deepEqual(marks, [[SCOPE, 1n], ['/jobs/18', 1n]]) // prettier-ignore
  })

  test('a lease granted while a write of the old holder is in flight lets the new one through only at its end', async (t) => {
    const { url, held, begun } = await heldBackend(t)
    const proxy = await startProxy(t, url, { leases: {} })
    const { port } = proxy
    const first = await leased(port, { scope: SCOPE })
    const old = write(port, first.token)
    await until(() => held.length === 1)
    await release(port, first.lease)
    const second = await leased(port, { scope: SCOPE })
    const next = write(port, second.token)
    await until(async () => (await proxy.metric('fencing_waiting')) === 1)
    assert.equal((await write(port, first.token)).status, 409)
    assert.deepEqual(begun, ['1'], 'the new holder waits')
    held[0]?.end('old')
    assert.equal((await old).body, 'old', 'what was admitted runs to its end')
    await until(() => held.length === 2)
    held[1]?.end('new')
    assert.equal((await next).body, 'new')
    assert.deepEqual(begun, ['1', '2'])
  })

  test('an upload of the old holder is cut off by the grant alone', async (t) => {
    const { url, begun } = await heldBackend(t)
    const { port, events } = await startProxy(t, url, { leases: {} })
    const first = await leased(port, { scope: SCOPE })
    const upload = await connect(t, port)
    upload.send(head(first.token, 'Content-Length: 1000000') + 'x'.repeat(100_000))
    await until(() => begun.length === 1)
    await release(port, first.lease)
    await leased(port, { scope: SCOPE })
    await until(() => upload.received.includes('\r\n\r\n'))
    assert.match(upload.received, /^HTTP\/1\.1 409 [^]*Fencing-Result: superseded/)
    assert.equal(events('superseded')[0]?.['highest'], '2')
  })

  test('a write of the old holder that comes while the grant is being committed waits, and is stale', async (t) => {
    const { promise, open } = gate()
    const granting = gate()
    const backend = await startBackend(t)
    let grants = 0
    const { port, metric } = await startProxy(
      t,
      backend.url,
      { leases: {} },
      {
        async store(config, events) {
          const { store, created } = await openStore(config, events)
          const real = store.grant.bind(store)
          store.grant = async (...call) => {
            if (++grants === 2) {
              granting.open()
              await promise
            }
            return real(...call)
          }
          return { store, created }
        },
      },
    )
    const first = await leased(port, { scope: SCOPE })
    await release(port, first.lease)
    const second = leased(port, { scope: SCOPE })
    await granting.promise
    const old = write(port, first.token)
    const early = write(port, 2)
    await until(async () => (await metric('fencing_waiting')) === 2)
    assert.equal(backend.seen.length, 0)
    open()
    assert.equal((await second).token, '2')
    assert.equal((await old).status, 409)
    assert.equal((await early).status, 200, 'its token is issued by now')
  })

  test('repeat: once takes the token of a lease once', async (t) => {
    const backend = await startBackend(t)
    const routes = [{ ...ROUTE, repeat: 'once' } as const]
    const { port } = await startProxy(t, backend.url, { leases: {}, routes })
    const first = await leased(port, { scope: SCOPE })
    assert.equal((await write(port, first.token)).status, 200)
    assert.equal((await write(port, first.token)).headers['fencing-result'], 'repeated')
    await release(port, first.lease)
    const second = await leased(port, { scope: SCOPE })
    assert.equal((await write(port, second.token)).status, 200)
  })

  test('a route that only observes says what the fence would have said, and forwards', async (t) => {
    const backend = await startBackend(t)
    const routes = [{ ...ROUTE, mode: 'observe' } as const]
    const { port, events, adminPort } = await startProxy(t, backend.url, { leases: {}, routes })
    const answer = await write(port, 5)
    assert.deepEqual([answer.status, answer.headers['fencing-result']], [200, 'unissued'])
    assert.match(String(events('unissued_write')[0]?.['msg']), /was forwarded/)
    assert.deepEqual(await scopesOn(adminPort), [])
  })

  test('marks from before leases were on stay: their token is good until the first grant', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const without = await startProxy(t, backend.url, {}, {}, folder)
    await write(without.port, 1000)
    await without.close()
    const { port } = await startProxy(t, backend.url, { leases: {} }, {}, folder)
    assert.equal((await write(port, 1000)).status, 200)
    assert.equal((await write(port, 1001)).headers['fencing-result'], 'unissued')
    assert.equal((await write(port, 999)).headers['fencing-result'], 'stale')
    assert.equal((await leased(port, { scope: SCOPE })).token, '1001')
    assert.equal((await write(port, 1000)).headers['fencing-result'], 'stale')
    assert.equal((await write(port, 1001)).status, 200)
  })
})

/** What a program that is gone has left. */
async function leasesOn(file: string): Promise<readonly LeaseRow[]> {
  const events = { committed: () => undefined, failed: () => undefined, died: () => undefined }
  const { store } = await openStore({ type: 'sqlite', path: file, create: false }, events)
  try {
    return await store.leases(undefined, 10_000)
  } finally {
    await store.close(false)
  }
}

/** The real program with leases, in `folder`. */
function start(t: TestContext, url: string, folder: string, settings: object = {}) {
  return startProgram(t, url, { folder, settings: { leases: {}, ...settings } })
}

describe('leases over kill -9', () => {
  test('a grant after the crash waits until what was in flight has settled', async (t) => {
    const settleMs = 4_000
    const { url, held, begun } = await heldBackend(t)
    const folder = await temporaryFolder(t)
    const settings = { fence: { settle: `${settleMs}ms` } }
    const first = await start(t, url, folder, settings)
    const { token, lease } = await leased(first.port, { scope: SCOPE })
    const lost = assert.rejects(write(first.port, token))
    await until(() => held.length === 1)
    await first.kill()
    await lost

    const second = await start(t, url, folder, settings)
    const [unclean] = second.events('unclean_start')
    const since = Date.parse(String(unclean?.['time']))
    assert.equal((await renew(second.port, lease)).status, 200, 'the lease has outlived the crash')
    await release(second.port, lease)
    const next = await leased(second.port, { scope: SCOPE })
    assert.ok((await second.scopes()).settlingMs > 0, 'the grant itself need not wait')
    const written = write(second.port, next.token)
    await until(() => begun.length === 2)
    assert.ok(Date.now() - since >= settleMs - 1, 'it began when all had settled')
    held[1]?.end('done')
    assert.equal((await written).status, 200)
  })

  test('no token is issued twice, and tokens rise, over kill -9 in the midst of many grants', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const issued = new Map<string, bigint[]>()
    let left: readonly LeaseRow[] = []
    for (let round = 1; round <= 4; round++) {
      const program = await start(t, backend.url, folder, { fence: { settle: '0s' } })
      for (const { id } of left) assert.equal((await release(program.port, id)).status, 204)
      /** Told to their holders, and not given back. */
      const alive = new Map<string, Leased>()
      let answers = 0
      const worker = async (scope: string) => {
        for (;;) {
          const answer = await acquire(program.port, { scope, ttl: '1h' })
          const granted = JSON.parse(answer.body) as Leased
          issued.set(scope, [...(issued.get(scope) ?? []), BigInt(granted.token)])
          alive.set(scope, granted)
          if (++answers === round * 20) void program.kill()
          await write(program.port, granted.token, { path: `${scope}/state` })
          alive.delete(scope)
          await release(program.port, granted.lease)
        }
      }
      const scopes = Array.from({ length: 12 }, (_, i) => `/jobs/${i}`)
      await Promise.allSettled(scopes.map(worker))
      await program.kill()
      left = await leasesOn(path.join(folder, 'fence.db'))
      for (const { scope, lease, token } of alive.values()) {
        const row = left.find(({ id }) => id === lease)
        assert.deepEqual([row?.scope, row?.token], [scope, BigInt(token)])
      }
    }
    const all = [...issued.values()]
    assert.ok(all.flat().length > 100, `${all.flat().length} tokens`)
    for (const tokens of all) {
      assert.ok(
        tokens.every((token, i) => i === 0 || token > (tokens[i - 1] ?? 0n)),
        tokens.join(),
      )
    }
  })

  test('every lease that lives is there again, with its whole time, and at once', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const first = await start(t, backend.url, folder)
    const COUNT = 2_000
    const leases: Leased[] = []
    const scopes = Array.from({ length: COUNT }, (_, i) => `/jobs/${i}`)
    const worker = async () => {
      for (let scope = scopes.pop(); scope !== undefined; scope = scopes.pop()) {
        leases.push(await leased(first.port, { scope, ttl: '1h' }))
      }
    }
    await Promise.all(Array.from({ length: 50 }, worker))
    const [released, ...living] = leases
    await release(first.port, released?.lease ?? '')
    await first.kill()

    const second = await start(t, backend.url, folder)
    const active = () => readMetric(second.adminPort, 'fencing_leases_active')
    assert.equal(await active(), COUNT - 1)
    assert.equal((await renew(second.port, released?.lease ?? '')).status, 410)
    for (const { lease, scope, token } of living.slice(0, 5)) {
      const answer = await renew(second.port, lease)
      assert.deepEqual(JSON.parse(answer.body), { lease, scope, token, ttl: '1h' })
      assert.equal((await acquire(second.port, { scope })).status, 409)
    }
    assert.equal(await exitCodeOf(second), 0)
  })
})

/** The exit code of an orderly end. */
async function exitCodeOf(program: Started): Promise<number | null> {
  program.child.kill('SIGTERM')
  const { code } = await program.ended
  return code
}
