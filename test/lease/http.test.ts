import assert from 'node:assert/strict'
import { createServer } from 'node:http'
import type { Socket } from 'node:net'
import { describe, test, type TestContext } from 'node:test'
import { monotonicClock } from '../../src/clock.ts'
import type { Config } from '../../src/config.ts'
import { Fence } from '../../src/fence.ts'
import { InFlight } from '../../src/inflight.ts'
import type { End } from '../../src/lease/lease.ts'
import { Leases, type LeaseEvents } from '../../src/lease/leases.ts'
import { createLeaseDoor } from '../../src/lease/routes.ts'
import { createLog } from '../../src/log.ts'
import { createMetrics } from '../../src/metrics.ts'
import { MemoryStore } from '../../src/store/memory.ts'
import { openStore } from '../../src/store/open.ts'
import { StoreError, type Store } from '../../src/store/store.ts'
import {
  connect,
  gate,
  listenOn,
  request,
  startBackend,
  startProxy,
  temporaryFolder,
  until,
  write,
  type Overrides,
  type RawClient,
  type TestProxy,
} from '../harness.ts'
import {
  acquire,
  acquireBytes,
  isProblem,
  leased,
  lookUp,
  release,
  renew,
  type Leased,
} from './asks.ts'

/** A proxy with leases, in front of a backend that answers at once. */
async function start(t: TestContext, overrides: Overrides = {}, folder?: string) {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url, { leases: {}, ...overrides }, {}, folder)
  return { backend, proxy, port: proxy.port }
}

/** A proxy whose store is `change`d. */
async function startOver(
  t: TestContext,
  change: (store: Store) => Partial<Store>,
  overrides: Overrides = {},
) {
  const backend = await startBackend(t)
  const proxy = await startProxy(
    t,
    backend.url,
    { leases: {}, ...overrides },
    {
      async store(config, events) {
        const { store, created } = await openStore(config, events)
        const changed = change(store)
        const get = (target: Store, key: keyof Store): unknown => {
          const value: unknown = changed[key] ?? target[key]
          return typeof value === 'function' ? (value.bind(target) as unknown) : value
        }
        return {
          store: new Proxy(store, { get: (target, key) => get(target, key as keyof Store) }),
          created,
        }
      },
    },
  )
  return { backend, proxy, port: proxy.port }
}

function configured({ config }: TestProxy): NonNullable<Config['leases']> {
  assert.ok(config.leases !== undefined)
  return config.leases
}

/** Until so many were asked, which is when they wait or are being granted. */
function asked(proxy: TestProxy, count: number): Promise<void> {
  const counted = async () =>
    (await proxy.metric('fencing_requests_total', { result: 'lease' })) === count
  return until(counted, `${count} lease requests`)
}

const SCOPE = '/jobs/17'

describe('the interface of leases', () => {
  test('acquire: 201 with lease, scope, token and ttl, and where the lease is', async (t) => {
    const { port } = await start(t)
    const answer = await acquire(port, { scope: SCOPE, ttl: '10s', holder: 'worker-1' })
    assert.equal(answer.status, 201)
    assert.match(String(answer.headers['content-type']), /^application\/json/)
    assert.equal(answer.headers['cache-control'], 'no-store')
    assert.equal(answer.headers['fencing-result'], undefined)
    const body = JSON.parse(answer.body) as Leased
    assert.match(body.lease, /^[A-Za-z0-9_-]{24}$/)
    assert.deepEqual(body, { lease: body.lease, scope: SCOPE, token: '1', ttl: '10s' })
    assert.equal(answer.headers['location'], `/_fencing/leases/${body.lease}`)
  })

  test('acquire: the scope alone is enough', async (t) => {
    const { port } = await start(t)
    const lease = await leased(port, { scope: SCOPE })
    assert.equal(lease.ttl, '15s')
    const found = JSON.parse((await lookUp(port, SCOPE)).body) as Record<string, unknown>
    assert.equal(found['holder'], '127.0.0.1', 'its address says who holds it')
  })

  test('acquire: 409 with the time to try again while another holds the scope', async (t) => {
    const { port } = await start(t)
    await leased(port, { scope: SCOPE, ttl: '90s', holder: 'worker-1' })
    const answer = await acquire(port, { scope: SCOPE, holder: 'worker-2' })
    const { scope, token, detail } = isProblem(answer, 409, 'lease-held')
    assert.deepEqual([scope, token], [SCOPE, '1'])
    assert.match(String(detail), /^Held by worker-1 for another \d+ s/)
    const after = Number(answer.headers['retry-after'])
    assert.ok(after >= 85 && after <= 90, `Retry-After: ${after}`)
  })

  test('acquire: 409 once the wait is over, and not before', async (t) => {
    const { port } = await start(t)
    await leased(port, { scope: SCOPE })
    const since = performance.now()
    isProblem(await acquire(port, { scope: SCOPE, wait: '150ms' }), 409, 'lease-held')
    assert.ok(performance.now() - since >= 149)
  })

  test('acquire: 503 when too many wait', async (t) => {
    const { port, proxy } = await start(t, { leases: { maxWaiting: 1 } })
    const { lease } = await leased(port, { scope: SCOPE })
    const waiting = acquire(port, { scope: SCOPE, wait: '1m' })
    await asked(proxy, 2)
    const answer = await acquire(port, { scope: SCOPE, wait: '1m' })
    isProblem(answer, 503, 'lease-full')
    assert.ok(Number(answer.headers['retry-after']) >= 1)
    await release(port, lease)
    assert.equal((await waiting).status, 201)
  })

  test('renew: 200 with the same fields and the whole time again; 410 when it is over', async (t) => {
    const { port } = await start(t)
    const lease = await leased(port, { scope: SCOPE, ttl: '300ms' })
    const until300 = performance.now() + 300
    while (performance.now() < until300 + 100) {
      const answer = await renew(port, lease.lease)
      assert.equal(answer.status, 200)
      assert.deepEqual(JSON.parse(answer.body), lease)
    }
    await until(async () => (await lookUp(port, SCOPE)).status === 404, 'it expires')
    isProblem(await renew(port, lease.lease), 410, 'lease-over')
    isProblem(await renew(port, 'no-lease-at-all'), 410, 'lease-over')
  })

  test('renew and release need no body, and take an empty one as JSON, or none', async (t) => {
    const { port } = await start(t)
    const { lease } = await leased(port, { scope: SCOPE })
    const headers = { 'Content-Type': 'application/json' }
    assert.equal((await renew(port, lease, { headers })).status, 200)
    assert.equal((await renew(port, lease, { headers, body: '' })).status, 200)
    assert.equal((await renew(port, lease, { headers, body: '{}' })).status, 200)
    assert.equal((await release(port, lease, { headers })).status, 204)
  })

  test('release: 204 without a body; 410 when it was over; the next one has the scope at once', async (t) => {
    const { port } = await start(t)
    const { lease } = await leased(port, { scope: SCOPE })
    const answer = await release(port, lease)
    assert.deepEqual([answer.status, answer.body], [204, ''])
    isProblem(await release(port, lease), 410, 'lease-over')
    isProblem(await renew(port, lease), 410, 'lease-over')
    assert.equal((await leased(port, { scope: SCOPE })).token, '2')
  })

  test('look up: holder, token and what is left, and never the lease id; 404 while nobody holds it', async (t) => {
    const { port } = await start(t)
    isProblem(await lookUp(port, SCOPE), 404, 'lease-none')
    const { lease } = await leased(port, { scope: SCOPE, ttl: '1h', holder: 'worker-1' })
    const answer = await lookUp(port, SCOPE)
    assert.equal(answer.status, 200)
    const { remaining, ...found } = JSON.parse(answer.body) as Record<string, unknown>
    assert.deepEqual(found, { scope: SCOPE, holder: 'worker-1', token: '1' })
    assert.match(String(remaining), /^(1h|\d+(ms|s|m))$/)
    const others = [
      answer,
      await acquire(port, { scope: SCOPE }),
      await lookUp(port, '/jobs/18'),
      await write(port, 2),
    ]
    for (const { body, rawHeaders } of others) {
      assert.ok(!`${body}${rawHeaders.join()}`.includes(lease), 'the id is its holder’s alone')
    }
  })

  test('two spellings of one Unicode text are one scope, as in the routes', async (t) => {
    const { port } = await start(t)
    const { token } = await leased(port, { scope: '/jobs/e\u0301' })
    assert.equal((await lookUp(port, '/jobs/e\u0301')).status, 200)
    assert.equal((await acquire(port, { scope: '/jobs/\u00e9' })).status, 409)
    const written = await write(port, token, { path: '/jobs/e%CC%81/state' })
    assert.equal(written.status, 200)
  })

  test('a lease of exactly the scope of the route opens it, and the token does not open its neighbour', async (t) => {
    const { port, backend } = await start(t)
    const { token } = await leased(port, { scope: SCOPE })
    assert.equal((await write(port, token)).status, 200)
    assert.equal((await write(port, token, { path: '/jobs/18/state' })).status, 403)
    assert.equal(backend.seen.length, 1)
  })

  test('an X-Request-Id is kept, or made, on every answer', async (t) => {
    const { port } = await start(t)
    const headers = { 'Content-Type': 'application/json', 'X-Request-Id': 'mine' }
    const answer = await acquire(port, { scope: SCOPE }, { headers })
    assert.equal(answer.headers['x-request-id'], 'mine')
    const { requestId } = isProblem(await acquire(port, {}, { headers }), 400, 'lease-request')
    assert.equal(requestId, 'mine')
    assert.match(String((await lookUp(port, SCOPE)).headers['x-request-id']), /^[0-9a-f-]{36}$/)
  })
})

describe('where the service lies', () => {
  test('what is not there is a 404 in words, whatever the method, and nothing of it reaches the backend', async (t) => {
    const { port, backend } = await start(t)
    const { lease } = await leased(port, { scope: SCOPE })
    const asks = [
      ['GET', '/_fencing'],
      ['GET', '/_fencing/'],
      ['GET', '/_fencing?x'],
      ['GET', '/_fencing/leases/'],
      ['GET', `/_fencing/leases/${lease}`],
      ['GET', `/_fencing/leases/${lease}/renew`],
      ['PUT', '/_fencing/leases'],
      ['DELETE', '/_fencing/leases'],
      ['POST', `/_fencing/leases/${lease}`],
      ['POST', '/_fencing/leases//renew'],
      ['POST', '/_fencing/Leases'],
      ['OPTIONS', '/_fencing/leases'],
      ['TRACE', '/_fencing/leases'],
      ['PROPFIND', '/_fencing/leases'],
      ['PUT', '/_fencing/../jobs/17/state'],
      ['GET', '/_fencing/../jobs/17/state'],
      ['GET', '/_fencing/%2e%2e/jobs/17'],
      ['PUT', '/_fencing//jobs/17'],
      ['POST', '/_fencing/leases;x'],
    ] as const
    for (const [method, path] of asks) {
      const { status, headers } = await request(port, { method, path, token: 1 })
      // Node answers no TRACE and no unknown method in the framework's router.
      assert.ok(status === 404 || status === 410, `${method} ${path}: ${status}`)
      assert.equal(headers['content-type'], 'application/problem+json', `${method} ${path}`)
    }
    const head = await request(port, { method: 'HEAD', path: '/_fencing/nowhere' })
    assert.deepEqual([head.status, head.body], [404, ''])
    assert.equal(backend.seen.length, 0)
    assert.equal((await renew(port, lease)).status, 200, 'and the lease lives')
  })

  test('HEAD is answered as GET is, without the body', async (t) => {
    const { port } = await start(t)
    const ask = { method: 'HEAD', path: `/_fencing/leases?scope=${SCOPE}` }
    assert.equal((await request(port, ask)).status, 404)
    await leased(port, { scope: SCOPE })
    const { status, body } = await request(port, ask)
    assert.deepEqual([status, body], [200, ''])
  })

  test('paths that only resemble the prefix belong to the backend, as any other', async (t) => {
    const { port, backend } = await start(t)
    for (const path of ['/_fencingx', '/_fencin', '/_Fencing/leases', '/x/_fencing/leases']) {
      const answer = await request(port, { path })
      assert.equal(answer.status, 200, path)
      assert.equal(backend.seen.at(-1)?.url, path)
    }
    for (const path of ['/%5ffencing/leases', '/x/../_fencing/leases', '//_fencing/leases']) {
      const { status, headers } = await request(port, { method: 'POST', path, token: 1 })
      assert.ok(status === 400 || status === 403, `${path}: ${status}`)
      assert.notEqual(headers['fencing-result'], undefined, 'the fence has answered')
    }
    assert.equal((await lookUp(port, SCOPE)).status, 404)
  })

  test('the prefix is configurable; then /_fencing is the backend’s', async (t) => {
    const { port, backend } = await start(t, { leases: { prefix: '/locks/v1' } })
    const answer = await acquire(port, { scope: SCOPE }, { path: '/locks/v1/leases' })
    assert.equal(answer.status, 201)
    const { lease } = JSON.parse(answer.body) as Leased
    assert.equal(answer.headers['location'], `/locks/v1/leases/${lease}`)
    const renewed = await renew(port, lease, { path: `/locks/v1/leases/${lease}/renew` })
    assert.equal(renewed.status, 200)
    assert.equal((await request(port, { path: '/_fencing/leases?scope=x' })).body, 'done')
    assert.equal(backend.seen.length, 1)
    const { detail } = isProblem(await request(port, { path: '/locks/v1/x' }), 404, 'lease-request')
    assert.match(String(detail), /POST and GET \/locks\/v1\/leases/)
  })

  test('without leases the prefix is the backend’s and tokens come from elsewhere', async (t) => {
    const backend = await startBackend(t)
    const { port, metric } = await startProxy(t, backend.url)
    assert.equal((await request(port, { path: '/_fencing/leases?scope=x' })).body, 'done')
    assert.equal((await write(port, 1000)).status, 200)
    assert.equal(await metric('fencing_leases_active'), 0)
  })

  test('an upgrade of a lease is refused', async (t) => {
    const { port } = await start(t)
    const client = await connect(t, port)
    client.send(
      'GET /_fencing/leases?scope=x HTTP/1.1\r\nHost: api\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
    )
    await until(() => client.received.includes('\r\n\r\n'))
    assert.match(client.received, /^HTTP\/1\.1 400 /)
  })
})

describe('on the wire', () => {
  test('Expect: 100-continue is answered before the body is sent', async (t) => {
    const { port } = await start(t)
    const client = await connect(t, port)
    const bytes = acquireBytes({ scope: SCOPE }, 'Expect: 100-continue')
    const [head = '', body = ''] = bytes.split('\r\n\r\n')
    client.send(`${head}\r\n\r\n`)
    await until(() => client.received.startsWith('HTTP/1.1 100 Continue\r\n\r\n'))
    client.send(body)
    await until(() => client.received.includes('"token":"1"'))
  })

  test('an absolute-form target is the service’s, whatever host it names, and reaches no backend', async (t) => {
    const { port, backend } = await start(t)
    const origins = [backend.url, 'http://example.org', 'HTTPS://[::1]:9']
    const ask = async (line: string, body = ''): Promise<[string, string]> => {
      const client = await connect(t, port)
      const type = body === '' ? '' : 'Content-Type: application/json\r\n'
      client.send(
        `${line} HTTP/1.1\r\nHost: api\r\nConnection: close\r\n${type}Content-Length: ${body.length}\r\n\r\n${body}`,
      )
      await until(() => client.ended)
      const [head = '', answer = ''] = client.received.split('\r\n\r\n')
      return [head.split(' ')[1] ?? '', answer]
    }
    for (const [i, origin] of origins.entries()) {
      const [status, answer] = await ask(`POST ${origin}/_fencing/leases`, `{"scope":"${SCOPE}"}`)
      assert.equal(status, '201', `${origin}: ${answer}`)
      const { lease, token } = JSON.parse(answer) as Leased
      assert.equal(token, String(i + 1))
      const at = `${origin}/_fencing/leases`
      const [looked, found] = await ask(`GET ${at}?scope=${SCOPE}`)
      assert.deepEqual([looked, (JSON.parse(found) as Leased).token], ['200', token])
      assert.equal((await ask(`POST ${at}/${lease}/renew`))[0], '200')
      assert.equal((await ask(`DELETE ${at}/${lease}`))[0], '204')
      assert.equal((await ask(`PUT ${at}`))[0], '404')
    }
    assert.equal(backend.seen.length, 0)
  })

  test('pipelined requests are answered in their order', async (t) => {
    const { port } = await start(t)
    const client = await connect(t, port)
    const look = `GET /_fencing/leases?scope=${SCOPE} HTTP/1.1\r\nHost: api\r\n\r\n`
    const asks = [acquireBytes({ scope: SCOPE }), look, acquireBytes({ scope: SCOPE }), look]
    client.send(asks.join(''))
    const statuses = () => [...client.received.matchAll(/HTTP\/1\.1 (\d+)/g)].map(([, s]) => s)
    await until(() => statuses().length === 4)
    assert.deepEqual(statuses(), ['201', '200', '409', '200'])
  })

  test('a connection is kept from request to request, refusals included', async (t) => {
    const { port } = await start(t)
    const client = await connect(t, port)
    for (const [scope, status] of [
      [SCOPE, 201],
      [SCOPE, 409],
      ['', 400],
      ['/b', 201],
    ] as const) {
      // prettier-ignore
      client.received = ''
      client.send(acquireBytes({ scope }))
      await until(() => client.received.includes(`HTTP/1.1 ${status} `))
      await until(() => client.received.endsWith('}'))
    }
    assert.equal(client.ended, false)
  })

  test('HTTP/1.0 is understood', async (t) => {
    const { port } = await start(t)
    const client = await connect(t, port)
    client.send(acquireBytes({ scope: SCOPE }).replace('HTTP/1.1', 'HTTP/1.0'))
    await until(() => client.ended)
    assert.match(client.received, /^HTTP\/1\.1 201 [^]*"token":"1"/)
  })

  test('a chunked body is a body', async (t) => {
    const { port } = await start(t)
    const headers = { 'Content-Type': 'application/json', 'Transfer-Encoding': 'chunked' }
    assert.equal((await acquire(port, { scope: SCOPE }, { headers })).status, 201)
  })
})

/** Asks on a connection of its own, and waits until the service has it. */
async function waitingClient(t: TestContext, proxy: TestProxy, body: object): Promise<RawClient> {
  const before = await proxy.metric('fencing_requests_total', { result: 'lease' })
  const client = await connect(t, proxy.port)
  client.send(acquireBytes({ scope: SCOPE, wait: '1m', ...body }))
  await asked(proxy, before + 1)
  return client
}

describe('the queue', () => {
  test('whoever waits has the scope in the order of asking', async (t) => {
    const { port, proxy } = await start(t)
    let { lease } = await leased(port, { scope: SCOPE, holder: 'a' })
    const clients: RawClient[] = []
    for (const holder of ['b', 'c', 'd']) clients.push(await waitingClient(t, proxy, { holder }))
    for (const [i, client] of clients.entries()) {
      await release(port, lease)
      await until(() => client.received.endsWith('}'))
      assert.match(client.received, /^HTTP\/1\.1 201 /)
      const granted = JSON.parse(client.received.split('\r\n\r\n')[1] ?? '') as Leased
      assert.equal(granted.token, String(i + 2))
      assert.deepEqual(clients.slice(i + 1).map(({ received }) => received), clients.slice(i + 1).map(() => '')) // prettier-ignore
      lease = granted.lease
    }
  })

  const DEPARTURES: Record<string, (client: RawClient) => void> = {
    'closes its connection': (client) => client.socket.destroy(),
    'resets its connection': (client) => client.socket.resetAndDestroy(),
    'ends its side': (client) => client.socket.end(),
  }
  for (const [how, leave] of Object.entries(DEPARTURES)) {
    test(`a client that waits and ${how} loses its place`, async (t) => {
      const { port, proxy } = await start(t)
      const { lease } = await leased(port, { scope: SCOPE, holder: 'a' })
      const gone = await waitingClient(t, proxy, { holder: 'gone' })
      const next = await waitingClient(t, proxy, { holder: 'next' })
      leave(gone)
      // Its end arrives, for it is looked at before what is sent later on another connection.
      await until(() => gone.closed || gone.socket.writableFinished)
      for (let i = 0; i < 5; i++) await lookUp(port, SCOPE)
      await release(port, lease)
      await until(() => next.received.endsWith('}'))
      assert.match(next.received, /"token":"2"/)
      assert.deepEqual(
        proxy.events('lease_granted').map(({ holder }) => holder),
        ['a', 'next'],
      )
      assert.equal(gone.received, '')
      assert.equal(proxy.events('lease_abandoned').length, 0)
    })
  }

  test('a client that half-closes right behind its request waits on, and gets its answer', async (t) => {
    const { port, proxy } = await start(t)
    const { lease } = await leased(port, { scope: SCOPE })
    const client = await connect(t, port)
    client.socket.end(acquireBytes({ scope: SCOPE, wait: '1m' }))
    await asked(proxy, 2)
    await release(port, lease)
    await until(() => client.received.endsWith('}'))
    assert.match(client.received, /"token":"2"/)
  })

  test('a client that leaves during the commit holds nothing: its lease ends as soon as it is there', async (t) => {
    const { promise, open } = gate()
    let grants = 0
    const { port, proxy } = await startOver(t, (store) => ({
      async grant(...call) {
        if (grants++ === 0) await promise
        return store.grant(...call)
      },
    }))
    const client = await connect(t, port)
    client.send(acquireBytes({ scope: SCOPE, holder: 'gone' }))
    await until(() => grants === 1)
    // An end that comes within 2 ms would be that of a client that half-closes and waits.
    const since = performance.now()
    await until(() => performance.now() - since > 20)
    client.socket.destroy()
    const next = acquire(port, { scope: SCOPE, wait: '1m', holder: 'next' })
    await asked(proxy, 2)
    open()
    const answer = await next
    assert.equal((JSON.parse(answer.body) as Leased).token, '2')
    const [abandoned] = proxy.events('lease_abandoned')
    assert.deepEqual([abandoned?.['token'], abandoned?.['holder']], ['1', 'gone'])
    await until(async () => (await proxy.metric('fencing_leases_active')) === 1)
  })

  test('a client that has left before the service looks at it holds up nothing, and takes nothing', async (t) => {
    const { service, store } = await startService(t, {})
    const handled = gate()
    const server = createServer((req, res) => {
      res.once('close', () => void service.handle(req, res, 'id').then(handled.open))
      req.socket.destroy()
    })
    t.after(() => server.close())
    const client = await connect(t, await listenOn(server))
    client.send(acquireBytes({ scope: SCOPE }))
    await handled.promise
    assert.equal(store.scopes, 0)
  })

  test('a client that leaves between the grant and the answer holds nothing: the lease is given back', async (t) => {
    const sockets: Socket[] = []
    const ends: End[] = []
    const { service, leases } = await startService(t, {
      granted(_scope, { holder }) {
        if (holder === 'gone') sockets[0]?.destroy()
      },
      ended: (_scope, _lease, why) => void ends.push(why),
    })
    const server = createServer((req, res) => void service.handle(req, res, 'id'))
    server.on('connection', (socket) => sockets.push(socket))
    t.after(() => server.close())
    const port = await listenOn(server)
    const gone = await connect(t, port)
    gone.send(acquireBytes({ scope: SCOPE, holder: 'gone', ttl: '1h' }))
    await until(() => gone.ended && ends.length > 0)
    assert.deepEqual(ends, ['abandoned'])
    assert.equal(gone.received, '')
    assert.equal(leases.find(SCOPE), undefined)
    assert.equal((await leased(port, { scope: SCOPE })).token, '2')
  })

  test('a client that is gone before it reads its answer holds the scope for its TTL, and no longer', async (t) => {
    const { port, proxy } = await start(t)
    const gone = await connect(t, port)
    gone.socket.pause()
    gone.send(acquireBytes({ scope: SCOPE, holder: 'gone', ttl: '400ms' }))
    await until(() => proxy.events('lease_granted').length === 1)
    gone.socket.resetAndDestroy()
    isProblem(await acquire(port, { scope: SCOPE }), 409, 'lease-held')
    assert.equal((await leased(port, { scope: SCOPE, wait: '1m' })).token, '2')
    const [expired] = proxy.events('lease_expired')
    assert.deepEqual([expired?.['holder'], expired?.['token']], ['gone', '1'])
    assert.ok(Number(expired?.['heldMs']) < 5_000)
    assert.equal(proxy.events('lease_abandoned').length, 0)
  })
})

/** The service without a proxy before it. */
async function startService(t: TestContext, events: Partial<LeaseEvents>) {
  const { proxy } = await start(t)
  const store = new MemoryStore()
  const settings = { ...configured(proxy), commitTimeoutMs: 1_000 }
  const barrier = { takeoverTimeoutMs: 1_000, settleMs: 0, maxWaiting: 1 }
  const inflight = new InFlight(barrier, monotonicClock)
  const ignore = () => undefined
  const fence = new Fence(store, inflight, barrier, monotonicClock, { takeover: ignore })
  const ignored = { granted: ignore, ended: ignore }
  const leases = new Leases(fence, store, settings, monotonicClock, { ...ignored, ...events })
  const sources = { settlingScopes: () => 0, scopes: () => 0, leases: undefined }
  const log = createLog('silent', { write: ignore })
  const service = createLeaseDoor(leases, 1_000, createMetrics(sources), log)
  await service.ready()
  t.after(() => service.close())
  t.after(() => leases.stop())
  return { service, leases, store }
}

describe('a disk that is slow or fails', () => {
  test('503 for what could not be recorded; nothing is lost, and it goes on', async (t) => {
    let fails = false
    const fail = () => Promise.reject(new StoreError('the disk said no'))
    const { port, proxy } = await startOver(t, (store) => ({
      grant: (...call) => (fails ? fail() : store.grant(...call)),
      forget: (...call) => (fails ? fail() : store.forget(...call)),
    }))
    const { lease } = await leased(port, { scope: SCOPE })
    fails = true
    for (const answer of [await release(port, lease), await acquire(port, { scope: '/b' })]) {
      isProblem(answer, 503, 'lease-unavailable')
      assert.ok(Number(answer.headers['retry-after']) >= 1)
    }
    assert.equal((await renew(port, lease)).status, 200)
    assert.equal((await write(port, 1)).status, 200)
    fails = false
    assert.equal((await release(port, lease)).status, 204)
    assert.equal((await leased(port, { scope: '/b' })).token, '1')
    assert.equal(await proxy.metric('fencing_leases_acquired_total'), 2)
  })

  test('a release that takes longer than a body may is not late', async (t) => {
    const { promise, open } = gate()
    const forgetting = gate()
    const { port } = await startOver(
      t,
      (store) => ({
        async forget(...call) {
          forgetting.open()
          await promise
          return store.forget(...call)
        },
      }),
      { clientTimeoutMs: 50 },
    )
    const { lease } = await leased(port, { scope: SCOPE })
    const answer = release(port, lease)
    await forgetting.promise
    const since = performance.now()
    await until(() => performance.now() - since > 150)
    assert.equal((await lookUp(port, SCOPE)).status, 200, 'held until its end is on disk')
    open()
    assert.equal((await answer).status, 204)
  })

  test('a grant that does not reach the disk in time is a 503', async (t) => {
    const { promise, open } = gate()
    const { port, proxy } = await startOver(
      t,
      (store) => ({
        async grant(...call) {
          await promise
          return store.grant(...call)
        },
      }),
      { fence: { takeoverTimeoutMs: 100 } },
    )
    isProblem(await acquire(port, { scope: SCOPE }), 503, 'lease-unavailable')
    open()
    await until(() => proxy.events('lease_abandoned').length === 1)
    assert.equal((await leased(port, { scope: SCOPE })).token, '2')
  })
})

describe('a stop', () => {
  test('those who wait get a 503 and the end is clean; the leases outlive it', async (t) => {
    const folder = await temporaryFolder(t)
    const { port, proxy } = await start(t, {}, folder)
    const lease = await leased(port, { scope: SCOPE, ttl: '1h' })
    const waiting = [1, 2].map(() => acquire(port, { scope: SCOPE, wait: '1h' }))
    await asked(proxy, 3)
    const closing = proxy.close()
    for (const answer of await Promise.all(waiting)) isProblem(answer, 503, 'lease-unavailable')
    assert.equal((await closing).clean, true)

    const again = await start(t, {}, folder)
    const renewed = await renew(again.port, lease.lease)
    assert.deepEqual(JSON.parse(renewed.body), lease)
    assert.equal((await write(again.port, lease.token)).status, 200)
  })

  test('who comes on a kept connection while it stops is told so', async (t) => {
    const held = gate()
    const backend = await startBackend(t, (seen) => void held.promise.then(() => seen.res.end('x')))
    const proxy = await startProxy(t, backend.url, { leases: {} })
    const { token } = await leased(proxy.port, { scope: SCOPE })
    const idle = await connect(t, proxy.port)
    idle.send(`GET /_fencing/leases?scope=${SCOPE} HTTP/1.1\r\nHost: api\r\n`)
    const writing = write(proxy.port, token)
    await until(() => backend.seen.length === 1)
    const closing = proxy.close()
    idle.send('\r\n')
    await until(() => idle.received.includes('HTTP/1.1 503'))
    assert.match(idle.received, /urn:fencing-proxy:problem:stopping/)
    held.open()
    assert.equal((await writing).status, 200)
    assert.equal((await closing).clean, true)
  })
})

describe('what is told of leases', () => {
  test('every metric, with its value', async (t) => {
    const { port, proxy } = await start(t)
    const value = (name: string, labels?: Record<string, string>) => proxy.metric(name, labels)
    const first = await leased(port, { scope: SCOPE })
    await leased(port, { scope: '/jobs/18' })
    await renew(port, first.lease)
    await renew(port, first.lease)
    await release(port, first.lease)
    await renew(port, first.lease)
    await leased(port, { scope: SCOPE })
    await acquire(port, { scope: SCOPE })
    await write(port, 1)
    await write(port, 9)
    assert.equal(await value('fencing_leases_acquired_total'), 3)
    assert.equal(await value('fencing_tokens_issued_total'), 3)
    assert.equal(await value('fencing_lease_takeovers_total'), 1)
    assert.equal(await value('fencing_lease_renewals_total', { result: 'renewed' }), 2)
    assert.equal(await value('fencing_lease_renewals_total', { result: 'over' }), 1)
    assert.equal(await value('fencing_leases_active'), 2)
    const age = await value('fencing_lease_age_seconds')
    assert.ok(age > 0 && age < 30, `${age} s`)
    assert.equal(await value('fencing_stale_writes_total'), 1)
    assert.equal(await value('fencing_requests_total', { result: 'lease' }), 8)
    assert.equal(await value('fencing_requests_total', { result: 'unissued' }), 1)
    const { body } = await request(proxy.adminPort, { path: '/metrics' })
    assert.ok(!body.includes('/jobs/17'), 'no scope in a label')
  })

  test('the oldest lease counts, and none is no age', async (t) => {
    const { port, proxy } = await start(t)
    assert.equal(await proxy.metric('fencing_lease_age_seconds'), 0)
    const { lease } = await leased(port, { scope: SCOPE })
    await until(async () => (await proxy.metric('fencing_lease_age_seconds')) > 0.05)
    await leased(port, { scope: '/b' })
    assert.ok((await proxy.metric('fencing_lease_age_seconds')) > 0.05)
    await release(port, lease)
    const since = performance.now()
    const age = await proxy.metric('fencing_lease_age_seconds')
    assert.ok(age < (performance.now() - since) / 1000 + 30)
  })

  test('the log says who held what, when, and which token was refused by which mark', async (t) => {
    const { port, proxy } = await start(t)
    const headers = { 'Content-Type': 'application/json', 'X-Request-Id': 'first' }
    const answer = await acquire(port, { scope: SCOPE, ttl: '100ms', holder: 'a' }, { headers })
    assert.equal(answer.status, 201)
    await until(() => proxy.events('lease_expired').length === 1)
    const second = await leased(port, { scope: SCOPE, ttl: '1h', holder: 'b' })
    await write(port, 1)
    await write(port, 7)
    await write(port, 7, { path: '/jobs/18/state?secret=1' })
    await release(port, second.lease)

    const told = (name: string) =>
      proxy.events(name).map((line) => {
        const { level, time, msg, requestId, ...rest } = line
        assert.ok(typeof time === 'string' && typeof msg === 'string' && msg !== '')
        const fields: Record<string, unknown> = rest
        return [level, fields, requestId] as const
      })
    const [[level, granted, requestId] = [], [, next] = []] = told('lease_granted')
    assert.deepEqual([level, requestId], ['info', 'first'])
    const { waitedMs, ...rest } = granted ?? {}
    assert.ok(Number.isInteger(waitedMs))
    assert.deepEqual(rest, {
      ...{ event: 'lease_granted', scope: SCOPE, token: '1', holder: 'a', ttlMs: 100 },
    })
    assert.deepEqual([next?.['token'], next?.['from'], next?.['holder']], ['2', '1', 'b'])

    const { heldMs, ...expired } = told('lease_expired')[0]?.[1] ?? {}
    assert.deepEqual(expired, { event: 'lease_expired', scope: SCOPE, token: '1', holder: 'a' })
    assert.ok(Number(heldMs) >= 100)
    const { heldMs: whole, ...released } = told('lease_released')[0]?.[1] ?? {}
    assert.deepEqual(released, { event: 'lease_released', scope: SCOPE, token: '2', holder: 'b' })
    assert.ok(Number.isInteger(whole))

    const [[staleLevel, stale] = []] = told('stale_write')
    assert.equal(staleLevel, 'warn')
    assert.deepEqual([stale?.['token'], stale?.['highest']], ['1', '2'])
    const [[unissuedLevel, unissued] = [], [, never] = []] = told('unissued_write')
    assert.equal(unissuedLevel, 'warn')
    const about = { event: 'unissued_write', mode: 'enforce', route: '/jobs/{job}/**', token: '7', method: 'PUT', remote: '127.0.0.1' } // prettier-ignore
    assert.deepEqual(unissued, { ...about, scope: SCOPE, highest: '2', path: '/jobs/17/state' })
    assert.deepEqual(never, { ...about, scope: '/jobs/18', path: '/jobs/18/state' })
  })

  test('no lease id is ever logged, at the finest level too', async (t) => {
    const { port, proxy } = await start(t, { log: { level: 'trace' } })
    const ids: string[] = []
    const { lease } = await leased(port, { scope: SCOPE, ttl: '1h' })
    ids.push(lease)
    await renew(port, lease)
    await renew(port, `${lease}x`)
    await request(port, { path: `/_fencing/leases/${lease}` })
    await request(port, { method: 'PUT', path: `/_fencing/leases/${lease}/x`, token: 1 })
    await release(port, lease)
    await release(port, lease)
    await renew(port, lease)
    ids.push((await leased(port, { scope: SCOPE, ttl: '100ms' })).lease)
    await until(() => proxy.events('lease_expired').length === 1)
    const [failed] = proxy.events('lease_renewal_failed')
    assert.equal(failed?.['level'], 'warn')
    await proxy.close()
    const log = JSON.stringify(proxy.log)
    for (const id of ids) assert.ok(!log.includes(id))
  })
})
