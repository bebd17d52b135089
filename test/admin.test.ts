import assert from 'node:assert/strict'
import { test, type TestContext } from 'node:test'
import { loadConfig } from '../src/config.ts'
import {
  connect,
  head,
  request,
  startBackend,
  startProxy,
  until,
  write,
  type Answer,
} from './harness.ts'

/** What an operator and a scraper see. */

async function setUp(t: TestContext) {
  const backend = await startBackend(t, ({ url, req, res }) => {
    if (url.endsWith('/reset')) req.socket.resetAndDestroy()
    else if (!url.endsWith('/held')) res.end('done')
  })
  const fence = { settleMs: 20_000 }
  const proxy = await startProxy(t, backend.url, { fence, shutdownTimeoutMs: 100 })
  const admin = (path: string, method = 'GET') => request(proxy.adminPort, { method, path })
  return { backend, proxy, admin }
}

const json = ({ body }: Answer) =>
  JSON.parse(Buffer.from(body, 'latin1').toString()) as Record<string, unknown>

interface Page {
  readonly scopes: readonly { readonly scope: string; readonly mark: string }[]
  readonly next: string | null
  readonly total: number
}
const page = ({ body }: Answer) => JSON.parse(body) as Page

test('the admin port is loopback unless told otherwise', () => {
  const flags = { upstream: 'http://h', scope: ['/a'] }
  const loaded = loadConfig({ env: {}, flags })
  assert.ok(loaded.ok)
  assert.equal(loaded.config.admin.host, '127.0.0.1')
})

test('healthz and readyz answer 200 while all is well', async (t) => {
  const { admin } = await setUp(t)
  assert.deepEqual(json(await admin('/healthz')), { status: 'ok' })
  assert.deepEqual(json(await admin('/readyz')), { status: 'ready' })
})

test('what does not exist is told in words', async (t) => {
  const { admin } = await setUp(t)
  for (const [path, method] of [
    ['/', 'GET'],
    ['/nothing', 'GET'],
    ['/scopes', 'POST'],
    ['/metrics', 'DELETE'],
  ] as const) {
    const answer = await admin(path, method)
    assert.equal(answer.status, 404, `${method} ${path}`)
    assert.match(String(answer.headers['content-type']), /^application\/problem\+json/)
    assert.match(String(json(answer)['detail']), /\/healthz, \/readyz, \/metrics, \/scopes/)
  }
  const unknown = await admin('/scopes/jobs/never')
  assert.equal(unknown.status, 404)
  assert.match(String(json(unknown)['detail']), /No mark is recorded/)
})

test('a mistaken query is told in words', async (t) => {
  const { admin } = await setUp(t)
  for (const [query, word] of [
    ['limit=0', /limit/],
    ['limit=1001', /limit/],
    ['limit=many', /limit/],
    ['prefix=/a&prefix=/b', /prefix/],
  ] as const) {
    const answer = await admin(`/scopes?${query}`)
    assert.equal(answer.status, 400, query)
    assert.match(String(answer.headers['content-type']), /^application\/problem\+json/)
    assert.match(String(json(answer)['detail']), word)
  }
})

test('scopes are paged in order, and by prefix', async (t) => {
  const { proxy, admin } = await setUp(t)
  assert.deepEqual(page(await admin('/scopes')).scopes, [])
  for (const job of [3, 1, 2, 12, 11]) await write(proxy.port, job, { path: `/jobs/${job}/x` })
  const names = (one: Page) => one.scopes.map(({ scope }) => scope)

  const all = page(await admin('/scopes'))
  assert.deepEqual(names(all), ['/jobs/1', '/jobs/11', '/jobs/12', '/jobs/2', '/jobs/3'])
  assert.equal(all.next, null)
  assert.equal(all.total, 5)
  assert.equal(all.scopes[2]?.mark, '12')

  const walked: string[] = []
  let after = ''
  do {
    const one = page(await admin(`/scopes?limit=2${after}`))
    walked.push(...names(one))
    after = one.next === null ? '' : `&after=${encodeURIComponent(one.next)}`
  } while (after !== '')
  assert.deepEqual(walked, names(all))

  const prefixed = page(await admin('/scopes?prefix=/jobs/1&limit=2'))
  assert.deepEqual(names(prefixed), ['/jobs/1', '/jobs/11'])
  assert.equal(prefixed.next, '/jobs/11')
  const rest = page(await admin('/scopes?prefix=/jobs/1&limit=2&after=/jobs/11'))
  assert.deepEqual(names(rest), ['/jobs/12'])
  assert.equal(rest.next, null)
})

test('a scope is found by its name, raw or encoded', async (t) => {
  const { proxy, admin } = await setUp(t)
  await write(proxy.port, '3.42', { path: '/jobs/a%20%25%C3%A9/x' })
  const scope = '/jobs/a %é'
  for (const path of [
    `/scopes/${encodeURIComponent(scope)}`,
    '/scopes//jobs/a%20%25%C3%A9',
    '/scopes/jobs/a%20%25%C3%A9',
  ]) {
    const answer = await admin(path)
    assert.equal(answer.status, 200, path)
    const { raisedAt, ...rest } = json(answer)
    assert.deepEqual(rest, { scope, mark: '3.42', inFlight: 0, waiting: 0, settlingUntil: null })
    assert.ok(Math.abs(Date.parse(String(raisedAt)) - Date.now()) < 60_000)
  }
})

test('a scope shows what is in flight, what waits, and until when it settles', async (t) => {
  const { backend, proxy, admin } = await setUp(t)
  const shown = async () => json(await admin('/scopes/jobs/17'))
  const held = write(proxy.port, 41, { path: '/jobs/17/held' })
  await until(() => backend.seen.length === 1)
  assert.equal((await shown())['inFlight'], 1)
  assert.equal((await shown())['waiting'], 0)
  const newer = write(proxy.port, 42)
  await until(async () => (await shown())['waiting'] === 1)
  assert.equal((await shown())['mark'], '42')
  backend.seen[0]?.res.end()
  await Promise.all([held, newer])
  assert.equal((await shown())['inFlight'], 0)

  await write(proxy.port, 42, { path: '/jobs/17/reset' })
  const left = Date.parse(String((await shown())['settlingUntil'])) - Date.now()
  assert.ok(left > 10_000 && left <= 20_000, `${left} ms`)
})

const NAMES = [
  ...['fencing_requests_total', 'fencing_stale_writes_total', 'fencing_takeovers_total'],
  ...['fencing_in_flight', 'fencing_waiting', 'fencing_barrier_wait_seconds_count'],
  ...['fencing_settling_scopes', 'fencing_unknown_outcomes_total', 'fencing_commit_seconds_count'],
  ...['fencing_commit_batch_size_count', 'fencing_store_errors_total', 'fencing_scopes'],
  ...['fencing_upstream_seconds_count', 'process_resident_memory_bytes'],
]

test('every metric is there after one request of each kind, and none says a scope, a token or a path', async (t) => {
  const { backend, proxy, admin } = await setUp(t)
  const to = (job: string, what: string) => ({ path: `/jobs/hidden-${job}/${what}` })
  const held = write(proxy.port, 7041, to('a', 'held'))
  await until(() => backend.seen.length === 1)
  const newer = write(proxy.port, 7042, to('a', 'state'))
  await until(async () => (await proxy.metric('fencing_waiting')) === 1)
  backend.seen[0]?.res.end()
  await Promise.all([held, newer])
  await write(proxy.port, 7041, to('a', 'state'))
  await write(proxy.port, 7041, to('b', 'reset'))
  await write(proxy.port, 'x', to('a', 'state'))
  await write(proxy.port, 1, { path: '/elsewhere/hidden-c' })
  await request(proxy.port, { method: 'PUT', ...to('a', 'state') })
  await request(proxy.port, to('a', 'read'))
  await request(proxy.port, { method: 'OPTIONS', path: '*' })
  const broken = await connect(t, proxy.port)
  broken.send(head(1, 'Content-Length: 3', 'Content-Length: 3') + 'abc')
  await until(() => broken.received.includes('\r\n\r\n'))

  const answer = await admin('/metrics')
  assert.match(String(answer.headers['content-type']), /^text\/plain/)
  const present = new Set(answer.body.match(/^[a-z_]+(?=[ {])/gm))
  assert.deepEqual(
    NAMES.filter((name) => !present.has(name)),
    [],
  )
  assert.doesNotMatch(answer.body, /hidden|704[12]/)
  const routes = new Set([...answer.body.matchAll(/route="([^"]*)"/g)].map(([, route]) => route))
  assert.deepEqual([...routes].sort(), ['/jobs/{job}/**', 'none'])
  const results = Object.entries({
    accepted: 2,
    stale: 1,
    unknown: 1,
    malformed: 1,
    unmatched: 1,
    missing: 1,
    read: 1,
    answered: 1,
  })
  for (const [result, count] of results) {
    assert.equal(await proxy.metric('fencing_requests_total', { result }), count, result)
  }
  assert.equal(await proxy.metric('fencing_takeovers_total'), 1)
  assert.equal(await proxy.metric('fencing_scopes'), 2)
  assert.equal(await proxy.metric('fencing_settling_scopes'), 1)
  assert.equal(await proxy.metric('fencing_in_flight'), 0)
  assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'reset' }), 1)
  assert.equal(await proxy.metric('fencing_barrier_wait_seconds_count'), 1)
})

test('with leases on, a scope names its holder and when the lease ends', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url, { leases: {} })
  const scopeNow = async () => json(await request(proxy.adminPort, { path: '/scopes/jobs/17' }))
  const granted = await request(proxy.port, {
    method: 'POST',
    path: '/_fencing/leases',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ scope: '/jobs/17', holder: 'worker-a', ttl: '1h' }),
  })
  const { lease = '' } = json(granted) as { lease?: string }
  const { mark, holder, leasedUntil } = await scopeNow()
  assert.deepEqual([mark, holder], ['1', 'worker-a'])
  const left = Date.parse(String(leasedUntil)) - Date.now()
  assert.ok(left > 3_500_000 && left <= 3_600_000, `${left} ms`)
  assert.ok(!JSON.stringify(await scopeNow()).includes(lease), 'the id is for the holder alone')
  await request(proxy.port, { method: 'DELETE', path: `/_fencing/leases/${lease}` })
  assert.equal((await scopeNow())['holder'], undefined)
})
