import assert from 'node:assert/strict'
import { describe, test, type TestContext } from 'node:test'
import type { Route } from '../src/config.ts'
import {
  ROUTE,
  connect,
  head,
  problem,
  request,
  startBackend,
  startProxy,
  temporaryFolder,
  until,
  write,
  type Answer,
  type Ask,
  type Overrides,
  type Seen,
} from './harness.ts'

/** What a route can ask for, each through the whole proxy. */

const result = ({ headers }: Answer) => headers['fencing-result']

const put = (path: string, ask: Ask = {}): Ask => ({ method: 'PUT', path, ...ask })

/** A proxy with the given routes (each: what differs from /jobs/{job}/**) in front of a backend that answers all. */
async function setUp(t: TestContext, routes: Partial<Route>[], overrides: Overrides = {}) {
  const backend = await startBackend(t)
  const complete = routes.map((route) => ({ ...ROUTE, ...route }))
  const proxy = await startProxy(t, backend.url, { routes: complete, ...overrides })
  return {
    backend,
    proxy,
    ask: (given: Ask) => request(proxy.port, given),
    forwarded: () => backend.seen.map(({ method, url }) => `${method} ${url}`),
  }
}

describe('mode: observe', () => {
  const routes = [{ mode: 'observe' as const }]

  test('a stale write is forwarded, told in Fencing-Result, logged and counted as observed', async (t) => {
    const { backend, proxy } = await setUp(t, routes)
    assert.equal(result(await write(proxy.port, 42)), 'accepted')
    const stale = await write(proxy.port, 41, { path: '/jobs/17/state?secret=1' })
    assert.deepEqual([stale.status, result(stale), stale.body], [200, 'stale', 'done'])
    assert.equal(stale.headers['fencing-scope'], '/jobs/17')
    assert.equal(backend.seen[1]?.headers['fencing-token'], '41')
    const [event] = proxy.events('stale_write')
    assert.equal(event?.['mode'], 'observe')
    assert.deepEqual(
      [event['scope'], event['token'], event['highest'], event['method'], event['path']],
      ['/jobs/17', '41', '42', 'PUT', '/jobs/17/state'],
    )
    assert.equal(event['requestId'], stale.headers['x-request-id'])
    assert.equal(await proxy.metric('fencing_stale_writes_total', { mode: 'observe' }), 1)
    assert.equal(await proxy.metric('fencing_requests_total', { result: 'stale' }), 1)
    assert.equal(await proxy.metric('fencing_takeovers_total'), 0)
    await write(proxy.port, 43)
    assert.equal(await proxy.metric('fencing_takeovers_total'), 1)
  })

  test('what would be refused for its token or its target is forwarded as well', async (t) => {
    const { proxy, ask, forwarded } = await setUp(t, routes)
    const cases: [string, Ask][] = [
      ['missing', put('/jobs/17/a')],
      ['malformed', put('/jobs/17/b', { token: '-1' })],
      ['ambiguous', put('/jobs/17;x/c', { token: 1 })],
      ['ambiguous', put('/jobs//17/d', { token: 1 })],
    ]
    for (const [expected, given] of cases) {
      const answer = await ask(given)
      assert.deepEqual([answer.status, result(answer)], [200, expected])
      assert.equal((await proxy.metric('fencing_requests_total', { result: expected })) > 0, true)
    }
    assert.deepEqual(
      forwarded(),
      cases.map(([, { path }]) => `PUT ${path}`),
    )
  })

  test('there is no barrier: a newer write passes while an older one is in flight, and the other way round', async (t) => {
    const backend = await startBackend(t, ({ url, res }) => {
      if (!url.endsWith('held')) res.end('done')
    })
    const proxy = await startProxy(t, backend.url, { routes: [{ ...ROUTE, mode: 'observe' }] })
    const held = write(proxy.port, 41, { path: '/jobs/17/held' })
    await until(() => backend.seen.length === 1)
    assert.equal(result(await write(proxy.port, 42)), 'accepted')
    assert.equal(result(await write(proxy.port, 41)), 'stale')
    assert.equal(await proxy.metric('fencing_waiting'), 0)
    backend.seen[0]?.res.end('done at last')
    assert.equal((await held).body, 'done at last')
    assert.deepEqual(await proxy.close(), { clean: true }, 'nothing is left in flight')
  })

  test('one route observes, the other enforces: spelling is refused where a route that enforces may be meant', async (t) => {
    const { ask, forwarded } = await setUp(t, [
      { path: '/old/**', scope: '/old', mode: 'observe' },
      { path: '/jobs/{job}/**' },
    ])
    assert.equal((await ask(put('/old//x', { token: 1 }))).status, 400)
    assert.equal((await ask(put('/jobs/17/x'))).status, 428)
    assert.equal((await ask(put('/old/x'))).status, 200)
    assert.deepEqual(forwarded(), ['PUT /old/x'])
  })
})

describe('missingToken: pass', () => {
  test('a write without a token passes and says so; one that has a token is checked', async (t) => {
    const { backend, proxy, ask } = await setUp(t, [{ missingToken: 'pass' }])
    assert.equal(result(await write(proxy.port, 42)), 'accepted')
    const without = await ask(put('/jobs/17/state'))
    assert.deepEqual([without.status, result(without)], [200, 'missing'])
    assert.equal(backend.seen[1]?.headers['fencing-token'], undefined)
    assert.equal((await write(proxy.port, 41)).status, 409)
    assert.equal((await write(proxy.port, '041')).status, 400)
    assert.equal((await write(proxy.port, '')).status, 400, 'an empty token is not a missing one')
    assert.equal(backend.seen.length, 2)
  })
})

describe('unmatchedWrites', () => {
  test('reject: a write that no route covers is 403, reads pass', async (t) => {
    const { ask, forwarded } = await setUp(t, [{ methods: ['PUT'] }])
    for (const given of [put('/other'), { method: 'POST', path: '/jobs/17/x', token: 1 }]) {
      const answer = await ask(given)
      assert.deepEqual([answer.status, result(answer)], [403, 'unmatched'])
      assert.equal(problem(answer)['status'], 403)
    }
    assert.equal((await ask({ path: '/other' })).status, 200)
    assert.deepEqual(forwarded(), ['GET /other'])
  })

  test('pass: it is forwarded and says so; a write of the route is still fenced', async (t) => {
    const { proxy, ask, forwarded } = await setUp(t, [{}], { unmatchedWrites: 'pass' })
    const answer = await ask(put('/other'))
    assert.deepEqual([answer.status, result(answer)], [200, 'unmatched'])
    assert.equal((await ask(put('/jobs/17/x'))).status, 428)
    assert.equal((await ask(put('/jobs//17'))).status, 400, 'its spelling is in doubt')
    assert.deepEqual(forwarded(), ['PUT /other'])
    assert.equal(await proxy.metric('fencing_requests_total', { result: 'unmatched' }), 1)
  })
})

describe('repeat: once', () => {
  const routes = [{ repeat: 'once' as const }]

  test('a token serves once, also across a restart; the next one serves again', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const overrides = { routes: [{ ...ROUTE, repeat: 'once' as const }] }
    const first = await startProxy(t, backend.url, overrides, {}, folder)
    assert.equal(result(await write(first.port, 41)), 'accepted')
    const again = await write(first.port, 41)
    assert.deepEqual([again.status, result(again)], [409, 'repeated'])
    assert.equal(problem(again)['highest'], '41')
    assert.equal(result(await write(first.port, 42)), 'accepted')
    await first.close()
    const second = await startProxy(t, backend.url, overrides, {}, folder)
    assert.equal(result(await write(second.port, 42)), 'repeated')
    assert.equal(result(await write(second.port, 43)), 'accepted')
    assert.equal(backend.seen.length, 3)
  })

  test('a token whose outcome is unknown is spent', async (t) => {
    const backend = await startBackend(t, ({ req }) => req.socket.resetAndDestroy())
    const proxy = await startProxy(t, backend.url, { routes: [{ ...ROUTE, ...routes[0] }] })
    assert.equal(result(await write(proxy.port, 41)), 'unknown')
    assert.equal(result(await write(proxy.port, 41)), 'repeated')
    assert.equal(backend.seen.length, 1)
  })
})

describe('spelling', () => {
  test('caseInsensitive: every case is one scope, and the target is forwarded as it came', async (t) => {
    const { proxy, forwarded } = await setUp(t, [{ caseInsensitive: true }])
    assert.equal((await write(proxy.port, 42, { path: '/JOBS/Alpha/x' })).status, 200)
    const stale = await write(proxy.port, 41, { path: '/jobs/aLPHA/x' })
    assert.equal(result(stale), 'stale')
    assert.equal(stale.headers['fencing-scope'], '/jobs/alpha')
    assert.deepEqual(forwarded(), ['PUT /JOBS/Alpha/x'])
  })

  test('without it, another case is another scope', async (t) => {
    const { proxy } = await setUp(t, [{}])
    assert.equal((await write(proxy.port, 42, { path: '/jobs/Alpha/x' })).status, 200)
    assert.equal((await write(proxy.port, 41, { path: '/jobs/alpha/x' })).status, 200)
    assert.equal((await write(proxy.port, 41, { path: '/JOBS/alpha/x' })).status, 403)
  })

  test('allow: a character that is refused elsewhere is part of its segment', async (t) => {
    const { proxy, ask, forwarded } = await setUp(t, [
      { path: '/loose/{name}', scope: '/loose/{name}', allow: [';'] },
      { path: '/strict/{name}', scope: '/strict/{name}' },
    ])
    assert.equal((await ask(put('/loose/a;v=1', { token: 42 }))).status, 200)
    assert.equal(result(await ask(put('/loose/a%3Bv=1', { token: 41 }))), 'stale')
    assert.equal(result(await ask(put('/loose/a;v=2', { token: 41 }))), 'accepted')
    assert.equal(result(await ask(put('/strict/a;v=1', { token: 1 }))), 'ambiguous')
    assert.deepEqual(forwarded(), ['PUT /loose/a;v=1', 'PUT /loose/a;v=2'])
    assert.equal(await proxy.metric('fencing_scopes'), 2)
  })
})

describe('scopes from elsewhere than the path', () => {
  test('from a header field: one value, or 400 unscoped', async (t) => {
    const { ask, forwarded } = await setUp(t, [
      { path: '/api/**', scope: 'tenant-{header.X-Tenant}' },
    ])
    const as = (...tenant: string[]) => ({ headers: { 'X-Tenant': tenant } })
    assert.equal(result(await ask(put('/api/x', { token: 42, ...as('a') }))), 'accepted')
    const stale = await ask(put('/api/y', { token: 41, ...as('a') }))
    assert.equal(problem(stale)['scope'], 'tenant-a')
    assert.equal(result(await ask(put('/api/x', { token: 41, ...as('b') }))), 'accepted')
    for (const headers of [{}, as('').headers, as('a', 'b').headers, as('a, b').headers]) {
      const answer = await ask(put('/api/x', { token: 43, headers }))
      assert.deepEqual([answer.status, result(answer)], [400, 'unscoped'])
    }
    assert.equal(forwarded().length, 2)
  })

  test('from the query: one value, or 400 unscoped; other parameters do not matter', async (t) => {
    const { ask, forwarded } = await setUp(t, [{ path: '/api', scope: 'job-{query.job}' }])
    assert.equal(result(await ask(put('/api?job=17', { token: 42 }))), 'accepted')
    assert.equal(result(await ask(put('/api?x=1&job=%317', { token: 41 }))), 'stale')
    assert.equal(result(await ask(put('/api?job=18', { token: 41 }))), 'accepted')
    for (const path of ['/api', '/api?job=', '/api?job=17&job=18', '/api?Job=17']) {
      assert.equal(result(await ask(put(path, { token: 43 }))), 'unscoped', path)
    }
    assert.deepEqual(forwarded(), ['PUT /api?job=17', 'PUT /api?job=18'])
  })

  test('from the host, whatever its case', async (t) => {
    const { ask } = await setUp(t, [{ path: '/api/**', scope: '{host}' }])
    const to = (host: string, token: number) =>
      ask(put('/api/x', { token, headers: { Host: host } }))
    assert.equal(result(await to('a.example', 42)), 'accepted')
    assert.equal(result(await to('A.Example', 41)), 'stale')
    assert.equal(result(await to('b.example', 41)), 'accepted')
  })
})

describe('methods', () => {
  test('a GET that names another method is the write that it names', async (t) => {
    const { ask, forwarded } = await setUp(t, [{ methods: ['DELETE'] }])
    const as = (method: string, token?: number): Ask => ({
      path: '/jobs/17/x',
      headers: { 'X-HTTP-Method-Override': method },
      ...(token === undefined ? {} : { token }),
    })
    assert.equal(result(await ask(as('DELETE'))), 'missing')
    assert.equal(result(await ask(as('delete', 42))), 'accepted')
    assert.equal(result(await ask(as('DELETE', 41))), 'stale')
    assert.equal(result(await ask(as('PUT', 43))), 'unmatched')
    const read = await ask(as('HEAD'))
    assert.deepEqual([read.status, result(read)], [200, undefined])
    assert.equal(forwarded().length, 2)
  })

  for (const method of ['MOVE', 'COPY']) {
    test(`${method} writes its Destination too: it must be in the same scope`, async (t) => {
      const { ask, forwarded } = await setUp(t, [{}])
      const to = (destination: string, token: number) =>
        ask({ method, path: '/jobs/17/a', token, headers: { Destination: destination } })
      assert.equal(result(await to('/jobs/17/b', 42)), 'accepted')
      assert.equal(result(await to('http://127.0.0.1/jobs/17/b', 41)), 'stale')
      for (const other of ['/jobs/18/b', '/elsewhere', '/jobs//17/b', 'http://h/jobs/18/b']) {
        const answer = await to(other, 43)
        assert.deepEqual([answer.status, result(answer)], [400, 'ambiguous'], other)
      }
      assert.deepEqual(forwarded(), [`${method} /jobs/17/a`])
    })
  }

  test('Expect: 100-continue is answered once the write is admitted, and never before', async (t) => {
    const { backend, proxy } = await setUp(t, [{}])
    const current = await connect(t, proxy.port)
    current.send(head(42, 'Content-Length: 4', 'Expect: 100-continue'))
    await until(() => current.received === 'HTTP/1.1 100 Continue\r\n\r\n')
    current.send('body')
    await until(() => current.received.includes('done'))
    const [seen] = backend.seen
    assert.equal(seen?.body, 'body')
    assert.equal(seen.headers.expect, undefined)

    const stale = await connect(t, proxy.port)
    stale.send(head(41, 'Content-Length: 4', 'Expect: 100-continue'))
    await until(() => stale.received.includes('\r\n\r\n'))
    assert.match(stale.received, /^HTTP\/1\.1 409 /)

    const other = await connect(t, proxy.port)
    other.send(head(43, 'Content-Length: 4', 'Expect: a miracle'))
    await until(() => other.received.includes('\r\n\r\n'))
    assert.match(other.received, /^HTTP\/1\.1 417 /)
    assert.equal(backend.seen.length, 1)
  })
})

test('1000 writes with mixed tokens at once, and marks that are evicted meanwhile: never backwards, and every 409 names a higher mark', async (t) => {
  const begun: { scope: string; token: number }[] = []
  const onHead = ({ headers }: Seen) =>
    begun.push({ scope: String(headers['fencing-scope']), token: Number(headers['fencing-token']) })
  const backend = await startBackend(t, undefined, { onHead })
  const fence = { takeoverTimeoutMs: 20_000, maxWaiting: 2_000, cachedMarks: 2 }
  const proxy = await startProxy(t, backend.url, { fence })
  const highest = new Map<string, number>()
  let random = 17
  const next = (below: number) => (random = (random * 16_807) % 2_147_483_647) % below
  const answers = await Promise.all(
    Array.from({ length: 1_000 }, async (_, i) => {
      // Most in one scope; the others push its mark out of memory.
      const scope = i % 4 === 0 ? `/jobs/${1 + (i % 12)}` : '/jobs/0'
      const token = 1 + next(60)
      const answer = await write(proxy.port, token, { path: `${scope}/state`, body: 'x' })
      return { scope, token, answer }
    }),
  )
  for (const { scope, token, answer } of answers) {
    if (answer.status === 200) {
      highest.set(scope, Math.max(token, highest.get(scope) ?? 0))
      continue
    }
    assert.equal(answer.status, 409)
    assert.ok(Number(problem(answer)['highest']) > token)
  }
  for (const [scope, mark] of highest) {
    const tokens = begun.filter((one) => one.scope === scope).map(({ token }) => token)
    assert.deepEqual(
      tokens,
      tokens.toSorted((a, b) => a - b),
      `${scope} never went backwards`,
    )
    const sent = answers.filter((one) => one.scope === scope).map(({ token }) => token)
    assert.equal(mark, Math.max(...sent), 'the highest token got through')
  }
  assert.equal(begun.length, answers.filter(({ answer }) => answer.status === 200).length)
  assert.ok(new Set(begun.map(({ token }) => token)).size > 1, 'more than one owner was seen')
})
