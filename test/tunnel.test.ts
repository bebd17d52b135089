import assert from 'node:assert/strict'
import { once } from 'node:events'
import http, { type IncomingMessage } from 'node:http'
import type { Duplex } from 'node:stream'
import { describe, test, type TestContext } from 'node:test'
import { WebSocket, WebSocketServer } from 'ws'
import {
  ROUTE,
  connect,
  listenOn,
  request,
  startBackend,
  startProxy,
  startRawBackend,
  until,
  write,
  type Overrides,
  type RawClient,
} from './harness.ts'

/** WebSocket connections through the fence: each is a write for its whole life. */

const SETTLE_MS = 300

/** A backend that echoes over WebSocket, answers other requests with `done`, and refuses `/refused`. */
async function echoBackend(t: TestContext) {
  const sockets = new WebSocketServer({ noServer: true })
  const requests: IncomingMessage[] = []
  const server = http.createServer((req, res) => {
    requests.push(req)
    res.end('done')
  })
  server.on('upgrade', (req: IncomingMessage, socket: Duplex, head: Buffer) => {
    requests.push(req)
    if (req.url?.endsWith('/refused') === true) {
      socket.end('HTTP/1.1 403 Forbidden\r\nContent-Length: 8\r\nX-Why: no\r\n\r\nnot here')
      return
    }
    sockets.handleUpgrade(req, socket, head, (peer) => {
      peer.on('message', (data, binary) => peer.send(data as Buffer, { binary }))
    })
  })
  const url = `http://127.0.0.1:${await listenOn(server)}`
  t.after(() => {
    for (const peer of sockets.clients) peer.terminate()
    server.closeAllConnections()
    server.close()
  })
  return { url, requests, peers: sockets.clients }
}

/** What came of opening a WebSocket: it is open, or refused with an answer. */
interface Opened {
  readonly socket: WebSocket
  readonly status: number
  readonly headers: IncomingMessage['headers']
  readonly body: string
  /** The code with which it was closed, once it is. */
  readonly closed: () => number | undefined
}

function open(
  t: TestContext,
  port: number,
  token?: number,
  path = '/jobs/17/feed',
): Promise<Opened> {
  const headers = token === undefined ? {} : { 'Fencing-Token': token.toString() }
  const socket = new WebSocket(`ws://127.0.0.1:${port}${path}`, { headers })
  let code: number | undefined
  socket.on('close', (given) => (code = given))
  socket.on('error', () => undefined)
  t.after(() => socket.terminate())
  return new Promise((resolve) => {
    const done = ({ statusCode: status = 0, headers }: IncomingMessage, body: string) =>
      resolve({ socket, status, headers, body, closed: () => code })
    socket.on('upgrade', (res) => {
      socket.once('open', () => done(res, ''))
    })
    socket.on('unexpected-response', (_req, res) => {
      let body = ''
      res.on('data', (part: Buffer) => (body += part.toString()))
      res.on('end', () => done(res, body))
    })
  })
}

async function echoes({ socket }: Opened, text: string): Promise<void> {
  const heard = once(socket, 'message') as Promise<[Buffer]>
  socket.send(text)
  assert.equal((await heard)[0].toString(), text)
}

async function setUp(t: TestContext, overrides: Overrides = {}) {
  const backend = await echoBackend(t)
  const proxy = await startProxy(t, backend.url, overrides)
  const inFlight = (count: number) =>
    until(async () => (await proxy.metric('fencing_in_flight')) === count, `${count} in flight`)
  return {
    backend,
    proxy,
    inFlight,
    open: (...args: [number?, string?]) => open(t, proxy.port, ...args),
  }
}

/** An opening handshake in bytes. */
function handshake(token: number, ...lines: string[]): string {
  return [
    'GET /jobs/17/feed HTTP/1.1',
    'Host: api',
    'Connection: Upgrade',
    'Upgrade: websocket',
    'Sec-WebSocket-Version: 13',
    'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==',
    `Fencing-Token: ${token}`,
    ...lines,
    '',
    '',
  ].join('\r\n')
}

const answered = (client: RawClient) => until(() => client.received.includes('\r\n\r\n'))

describe('a WebSocket', () => {
  test('is let through with a current token, in both directions, and told what the fence made of it', async (t) => {
    const { backend, open } = await setUp(t)
    const opened = await open(41)
    assert.equal(opened.status, 101)
    assert.equal(opened.headers['fencing-result'], 'accepted')
    assert.equal(opened.headers['fencing-scope'], '/jobs/17')
    assert.equal(typeof opened.headers['x-request-id'], 'string')
    for (const text of ['one', 'two', 'x'.repeat(200_000)]) await echoes(opened, text)
    const [seen] = backend.requests
    assert.equal(seen?.url, '/jobs/17/feed')
    assert.equal(seen.headers['fencing-token'], '41')
    assert.equal(seen.headers['fencing-scope'], '/jobs/17')
    assert.equal(seen.headers['x-forwarded-for'], '127.0.0.1')
  })

  test('passes on what the client sends right behind its handshake', async (t) => {
    const { proxy } = await setUp(t)
    const client = await connect(t, proxy.port)
    // A masked text frame: "hi", the mask all zero.
    client.send(handshake(41) + '\x81\x82\0\0\0\0hi')
    await until(() => client.received.endsWith('\x81\x02hi'))
    assert.match(client.received, /^HTTP\/1\.1 101 /)
  })

  test('needs a token, a current one, and a route that covers it', async (t) => {
    const { backend, proxy, open } = await setUp(t)
    await write(proxy.port, 42)
    const without = await open()
    assert.deepEqual([without.status, without.headers['fencing-result']], [428, 'missing'])
    const stale = await open(41)
    assert.deepEqual([stale.status, stale.headers['fencing-result']], [409, 'stale'])
    assert.equal((JSON.parse(stale.body) as { highest: string }).highest, '42')
    const unmatched = await open(43, '/elsewhere')
    assert.deepEqual([unmatched.status, unmatched.headers['fencing-result']], [403, 'unmatched'])
    const ambiguous = await open(43, '/jobs//17')
    assert.deepEqual([ambiguous.status, ambiguous.headers['fencing-result']], [400, 'ambiguous'])
    assert.equal(backend.requests.length, 1)
    assert.equal(await proxy.metric('fencing_stale_writes_total'), 1)
  })

  test('is in flight for its whole life, together with others of its token', async (t) => {
    const { proxy, inFlight, open } = await setUp(t)
    const first = await open(41)
    const second = await open(41)
    await inFlight(2)
    assert.equal((await write(proxy.port, 41)).status, 200)
    await echoes(first, 'still')
    first.socket.close()
    second.socket.close()
    await inFlight(0)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
    assert.equal(await proxy.metric('fencing_requests_total', { result: 'accepted' }), 3)
    const since = performance.now()
    assert.equal((await write(proxy.port, 42)).status, 200)
    assert.ok(performance.now() - since < SETTLE_MS, 'both sides said goodbye: nothing settles')
  })

  test('is closed at both ends at once by a newer owner, who begins only after it has settled', async (t) => {
    const { backend, proxy, open } = await setUp(t)
    const opened = await open(41)
    await echoes(opened, 'mine')
    const [peer] = backend.peers
    const since = performance.now()
    const newer = write(proxy.port, 42)
    await until(() => opened.closed() !== undefined && peer?.readyState === WebSocket.CLOSED)
    assert.ok(performance.now() - since < SETTLE_MS, 'closed at once')
    assert.equal(opened.closed(), 1006, 'without a goodbye')
    assert.equal(backend.requests.length, 1, 'the newer write has not begun')
    assert.equal((await newer).status, 200)
    assert.ok(performance.now() - since >= SETTLE_MS)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'overtaken' }), 1)
    assert.equal(proxy.events('outcome_unknown')[0]?.['token'], '41')
    assert.equal((await open(41)).status, 409)
  })

  test('of a newer owner waits for older writes itself', async (t) => {
    const { backend, open } = await setUp(t)
    await open(41)
    const since = performance.now()
    const newer = await open(42)
    assert.equal(newer.status, 101)
    assert.ok(performance.now() - since >= SETTLE_MS)
    await echoes(newer, 'mine now')
    assert.equal(backend.peers.size, 1)
  })

  test('that the backend closes is closed, and has ended', async (t) => {
    const { backend, inFlight, proxy, open } = await setUp(t)
    const opened = await open(41)
    for (const peer of backend.peers) peer.close(4_000)
    await until(() => opened.closed() === 4_000)
    await inFlight(0)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
  })

  test('that the backend drops is closed, and its outcome is unknown', async (t) => {
    const { url, sockets } = await startRawBackend(t, (socket) =>
      socket.once('data', () =>
        socket.write(
          'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
        ),
      ),
    )
    const proxy = await startProxy(t, url)
    const client = await connect(t, proxy.port)
    client.send(handshake(41))
    await answered(client)
    sockets[0]?.resetAndDestroy()
    await until(() => client.closed || client.ended)
    await until(async () => (await proxy.metric('fencing_unknown_outcomes_total')) === 1)
    assert.equal(await proxy.metric('fencing_in_flight'), 0)
    assert.equal(await proxy.metric('fencing_settling_scopes'), 1)
  })

  test('whose client vanishes is closed towards the backend, and ends', async (t) => {
    const { backend, inFlight, open } = await setUp(t)
    const opened = await open(41)
    await inFlight(1)
    opened.socket.terminate()
    await until(() => backend.peers.size === 0)
    await inFlight(0)
  })

  test('whose client vanishes has responseTimeout to end at a backend that does not notice', async (t) => {
    const { url } = await startRawBackend(t, (socket) =>
      socket.once('data', () =>
        socket.write(
          'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
        ),
      ),
    )
    const proxy = await startProxy(t, url, { upstream: { responseTimeoutMs: 200 } })
    const client = await connect(t, proxy.port)
    client.send(handshake(41))
    await answered(client)
    client.socket.destroy()
    await until(async () => (await proxy.metric('fencing_in_flight')) === 0)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'timeout' }), 1)
  })
})

describe('an upgrade that does not come about', () => {
  test('the refusal of the backend passes on', async (t) => {
    const { proxy, inFlight, open } = await setUp(t)
    const refused = await open(41, '/jobs/17/refused')
    assert.equal(refused.status, 403)
    assert.equal(refused.body, 'not here')
    assert.equal(refused.headers['x-why'], 'no')
    assert.equal(refused.headers['fencing-result'], 'accepted')
    await inFlight(0)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
    assert.equal((await write(proxy.port, 42)).status, 200)
  })

  test('a backend that cannot be reached: 502 unreachable, nothing unknown', async (t) => {
    const proxy = await startProxy(t, 'http://127.0.0.1:1', { fence: { settleMs: 60_000 } })
    const answer = await open(t, proxy.port, 41)
    assert.deepEqual([answer.status, answer.headers['fencing-result']], [502, 'unreachable'])
    assert.equal(await proxy.metric('fencing_in_flight'), 0)
    assert.equal(await proxy.metric('fencing_settling_scopes'), 0)
  })

  test('a backend that resets in the handshake: 502 unknown, one attempt, settles', async (t) => {
    const { url, sockets } = await startRawBackend(t, (socket) =>
      socket.once('data', () => socket.resetAndDestroy()),
    )
    const proxy = await startProxy(t, url)
    const answer = await open(t, proxy.port, 41)
    assert.deepEqual([answer.status, answer.headers['fencing-result']], [502, 'unknown'])
    assert.equal(sockets.length, 1)
    assert.equal(await proxy.metric('fencing_settling_scopes'), 1)
  })

  test('a backend that does not answer the handshake: 504 unknown after responseTimeout', async (t) => {
    const { url } = await startRawBackend(t, () => undefined)
    const proxy = await startProxy(t, url, { upstream: { responseTimeoutMs: 200 } })
    const answer = await open(t, proxy.port, 41)
    assert.deepEqual([answer.status, answer.headers['fencing-result']], [504, 'unknown'])
  })

  test('a newer owner overtakes it in the handshake: 409 superseded', async (t) => {
    const { url, sockets } = await startRawBackend(t, () => undefined)
    const proxy = await startProxy(t, url, { upstream: { responseTimeoutMs: 1_000 } })
    const opening = open(t, proxy.port, 41)
    await until(() => sockets.length === 1)
    await until(async () => (await proxy.metric('fencing_in_flight')) === 1)
    const newer = write(proxy.port, 42)
    const answer = await opening
    assert.deepEqual([answer.status, answer.headers['fencing-result']], [409, 'superseded'])
    assert.equal((await newer).status, 504)
  })

  test('bytes that a handshake frames as a body never reach the backend as a request', async (t) => {
    const smuggled = 'PUT /jobs/17/smuggled HTTP/1.1\r\nHost: api\r\nContent-Length: 0\r\n\r\n'
    for (const framing of [
      [`Content-Length: ${smuggled.length}`, smuggled],
      ['Transfer-Encoding: chunked', `${smuggled.length.toString(16)}\r\n${smuggled}\r\n0\r\n\r\n`],
    ] as const) {
      const backend = await startBackend(t)
      const proxy = await startProxy(t, backend.url)
      const client = await connect(t, proxy.port)
      client.send(handshake(41, framing[0]) + framing[1])
      await answered(client)
      await request(proxy.port, { path: '/after' })
      const seen = backend.seen.map(({ method, url }) => `${method} ${url}`)
      assert.ok(!seen.includes('PUT /jobs/17/smuggled'), seen.join())
      assert.match(client.received, /^HTTP\/1\.1 400 /)
    }
  })

  test('h2c is dropped: the request is an ordinary one, and a write needs its token', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    const headers = {
      Connection: 'Upgrade, HTTP2-Settings',
      Upgrade: 'h2c',
      'HTTP2-Settings': 'AA',
    }
    const read = await request(proxy.port, { path: '/jobs/17', headers })
    assert.deepEqual([read.status, read.body], [200, 'done'])
    const fenced = await write(proxy.port, 41, { headers })
    assert.deepEqual([fenced.status, fenced.headers['fencing-result']], [200, 'accepted'])
    assert.equal((await write(proxy.port, 40, { headers })).status, 409)
    for (const { headers } of backend.seen) {
      assert.deepEqual([headers.upgrade, headers['http2-settings']], [undefined, undefined])
    }
  })

  test('a GET that asks for it is fenced on every route of its path, whatever methods that names', async (t) => {
    const { backend, open } = await setUp(t, { routes: [{ ...ROUTE, methods: ['PUT'] }] })
    assert.equal((await open()).headers['fencing-result'], 'missing')
    assert.equal((await open(42)).headers['fencing-result'], 'accepted')
    assert.equal((await open(41)).headers['fencing-result'], 'stale')
    assert.equal((await open(42, '/other')).headers['fencing-result'], 'unmatched')
    assert.equal(backend.requests.length, 1)
  })
})

test('a client that resets its WebSocket, or goes while the backend sends, ends that tunnel and nothing else', async (t) => {
  const backend = await startRawBackend(t, (socket) => {
    socket.write(
      'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
    )
    const push = setInterval(() => socket.write('x'.repeat(1000)), 1)
    socket.once('close', () => clearInterval(push))
  })
  const proxy = await startProxy(t, backend.url)
  for (const leave of ['resetAndDestroy', 'destroy'] as const) {
    for (let i = 0; i < 5; i++) {
      const client = await connect(t, proxy.port)
      client.send(
        'GET /jobs/17/live HTTP/1.1\r\nHost: api\r\nFencing-Token: 7\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n',
      )
      await until(() => client.received.includes('101'))
      client.socket[leave]()
      await until(async () => (await proxy.metric('fencing_in_flight')) === 0)
    }
  }
  assert.equal((await proxy.close()).clean, true)
})

test('a stop closes an open WebSocket at once, lets it settle, and is clean', async (t) => {
  const { backend, proxy, open } = await setUp(t, {})
  const opened = await open(41)
  await echoes(opened, 'mine')
  const { clean } = await proxy.close()
  assert.equal(clean, true)
  await until(() => opened.closed() !== undefined && backend.peers.size === 0)
  assert.deepEqual(
    proxy.events('outcome_unknown').map(({ reason }) => reason),
    ['stopping'],
  )
})
