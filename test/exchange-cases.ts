import assert from 'node:assert/strict'
import type { TestContext } from 'node:test'
import {
  connect,
  gate,
  head,
  request,
  startBackend,
  startProxy,
  startRawBackend,
  until,
  write,
  type Overrides,
  type RawClient,
  type Seen,
  type TestProxy,
} from './harness.ts'

/**
 * What one exchange with the backend must get right, whatever carries it. The barrier and HTTP tests
 * run these cases with the real forwarder, where they hold; known-bad.test.ts runs those that
 * http-proxy gets wrong with http-proxy in its place, where the same assertions must fail.
 */
export type ExchangeCase = (t: TestContext, start: Start) => Promise<void>

/** Starts the proxy in front of `url`; with which forwarder is for the caller to say. */
export type Start<P = TestProxy> = (
  t: TestContext,
  url: string,
  overrides?: Overrides,
) => Promise<P>

export const SETTLE_MS = 300

/** The length of a body that is sent on as it comes. */
export const LARGE = 'Content-Length: 100000'
/** The length of a body that is collected before anything of it is sent. */
export const SMALL = 'Content-Length: 100'

/** A backend that holds the write of token 41 until told, and answers all others at once. */
export async function holding(
  t: TestContext,
  overrides: Overrides = {},
  start: Start = startProxy,
) {
  const answered = gate()
  const begun: { token: string; at: number }[] = []
  const backend = await startBackend(
    t,
    ({ headers, res }) => {
      if (headers['fencing-token'] !== '41') res.end('done')
      else void answered.promise.then(() => res.end('done at last'))
    },
    {
      onHead: ({ headers }) =>
        begun.push({ token: String(headers['fencing-token']), at: performance.now() }),
    },
  )
  const proxy = await start(t, backend.url, overrides)
  return { backend, proxy, begun, release: () => answered.open() }
}

export const waiting = (proxy: TestProxy, count: number) => () =>
  proxy.metric('fencing_waiting').then((waits) => waits === count)
export const inFlight = (proxy: TestProxy, count: number) => () =>
  proxy.metric('fencing_in_flight').then((flies) => flies === count)

/** The newer owner's write got through, and not before the older one had settled. */
export async function settlesBefore42(
  proxy: TestProxy,
  endedAt: number,
  backendSeen: () => Seen[],
) {
  const before = backendSeen().length
  const same = await write(proxy.port, 41, { path: '/jobs/17/same' })
  assert.equal(same.headers['fencing-result'], 'accepted', 'the same token passes at once')
  assert.ok(performance.now() - endedAt < SETTLE_MS, 'the same token does not wait')
  const newer = await write(proxy.port, 42)
  assert.equal(newer.status, 200)
  assert.ok(performance.now() - endedAt >= SETTLE_MS, 'the newer token waited until it had settled')
  assert.equal(backendSeen().length, before + 2, 'each was sent once')
}

/** Sends bytes, and answers with the status lines that came by the time the connection closed or fell silent. */
export async function statuses(
  t: TestContext,
  port: number,
  bytes: string | Buffer,
): Promise<string[]> {
  const client = await connect(t, port)
  client.send(bytes)
  await until(() => client.closed || client.ended || client.received.includes('\r\n\r\n'))
  return [...client.received.matchAll(/^HTTP\/1\.1 (\d{3})/gm)].map((match) => match[1] as string)
}

export const SMUGGLED = 'PUT /jobs/17/smuggled HTTP/1.1\r\nHost: api\r\nContent-Length: 0\r\n\r\n'

/** How an exchange ends, and what the next owner's write waits for. */
export const endings: Record<string, ExchangeCase> = {
  'a client that leaves after its body changes nothing: the write ends when the backend answers':
    async (t, start) => {
      const { proxy, begun, release } = await holding(t, {}, start)
      const client = await connect(t, proxy.port)
      client.send(head(41, 'Content-Length: 4') + 'body')
      await until(() => begun.length === 1)
      client.socket.destroy()
      const newer = write(proxy.port, 42)
      await until(waiting(proxy, 1))
      assert.equal(begun.length, 1)
      assert.equal(await proxy.metric('fencing_in_flight'), 1)
      release()
      assert.equal((await newer).status, 200)
      assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
    },

  'a client that leaves in mid-response changes nothing: the rest is read and dropped': async (
    t,
    start,
  ) => {
    const more = gate()
    const backend = await startBackend(t, ({ headers, res }) => {
      if (headers['fencing-token'] !== '41') return void res.end('done')
      res.write('first half, ')
      void more.promise.then(() => res.end('y'.repeat(1024 * 1024)))
    })
    const proxy = await start(t, backend.url)
    const client = await connect(t, proxy.port)
    client.send(head(41, 'Content-Length: 0'))
    await until(() => client.received.includes('first half'))
    client.socket.destroy()
    const newer = write(proxy.port, 42)
    await until(waiting(proxy, 1))
    assert.equal(backend.seen.length, 1)
    more.open()
    assert.equal((await newer).status, 200)
    assert.equal(backend.seen[0]?.broken, false, 'the backend could answer to its end')
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
  },

  'a client that leaves while its write is queued for a connection: never sent': async (
    t,
    start,
  ) => {
    const { proxy, begun, release } = await holding(t, { upstream: { maxConnections: 1 } }, start)
    const old = write(proxy.port, 41, { path: '/jobs/other' })
    await until(() => begun.length === 1)
    const client = await connect(t, proxy.port)
    client.send(head(7, 'Content-Length: 4') + 'body')
    await until(inFlight(proxy, 2))
    client.socket.end()
    await until(inFlight(proxy, 1))
    release()
    await old
    assert.equal((await write(proxy.port, 8)).status, 200)
    assert.deepEqual(
      begun.map(({ token }) => token),
      ['41', '8'],
    )
  },

  'an answer before the body was read is delivered, both connections close, the outcome is known':
    async (t, start) => {
      const { url, sockets } = await startRawBackend(t, (socket) =>
        socket.once('data', () =>
          socket.write('HTTP/1.1 413 Content Too Large\r\nContent-Length: 8\r\n\r\ntoo much'),
        ),
      )
      const proxy = await start(t, url)
      const client = await connect(t, proxy.port)
      client.send(head(41, 'Content-Length: 1000000') + 'x'.repeat(1000))
      await until(() => client.received.includes('too much'))
      assert.match(client.received, /^HTTP\/1\.1 413 /)
      assert.match(client.received, /Connection: close/i)
      await until(() => client.ended)
      await until(() => sockets[0]?.readableEnded === true || sockets[0]?.destroyed === true)
      // Still sending, as clients do that have not read the answer yet: it must not be lost to a reset.
      client.send('x'.repeat(1000))
      await until(inFlight(proxy, 0))
      assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
      assert.equal(await proxy.metric('fencing_settling_scopes'), 0)
    },

  'a client that stops sending in mid-body: 408 unknown after clientTimeout, settles': async (
    t,
    start,
  ) => {
    const backend = await startBackend(t)
    const proxy = await start(t, backend.url, { clientTimeoutMs: 200 })
    const client = await connect(t, proxy.port)
    client.send(head(41, LARGE) + 'only this')
    const endedAt = performance.now() + 200
    await until(() => client.received.includes('\r\n\r\n'))
    assert.match(client.received, /^HTTP\/1\.1 408 [^]*Fencing-Result: unknown/)
    await settlesBefore42(proxy, endedAt, () => backend.seen)
  },

  'a newer owner overtakes a write of which nothing was sent: 409 superseded, nothing settles':
    async (t, start) => {
      const { proxy, begun, release } = await holding(
        t,
        {
          upstream: { maxConnections: 1 },
          fence: { settleMs: 60_000 },
        },
        start,
      )
      const other = write(proxy.port, 41, { path: '/jobs/other' })
      await until(() => begun.length === 1)
      const queued = write(proxy.port, 7)
      await until(inFlight(proxy, 2))
      const newer = write(proxy.port, 8)
      const answer = await queued
      assert.equal(answer.status, 409)
      assert.equal(answer.headers['fencing-result'], 'superseded')
      release()
      await other
      assert.equal((await newer).status, 200)
      assert.deepEqual(
        begun.map(({ token }) => token),
        ['41', '8'],
      )
    },

  'a client that does not read its response cannot hold the scope': async (t, start) => {
    const size = 64 * 1024 * 1024
    const backend = await startBackend(t, ({ headers, res }) => {
      res.end(headers['fencing-token'] === '41' ? Buffer.alloc(size, 'x') : 'done')
    })
    const proxy = await start(t, backend.url)
    const client = await connect(t, proxy.port)
    client.socket.pause()
    client.send(head(41, 'Content-Length: 0'))
    await until(() => backend.seen.length === 1)
    const newer = await write(proxy.port, 42)
    assert.equal(newer.status, 200)
    assert.equal(backend.seen[0]?.broken, false, 'the backend could answer to its end')
    client.socket.resume()
    await until(() => client.closed || client.ended)
    assert.ok(client.received.length < size)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
  },

  'a response that drips has responseTimeout in all once a newer owner waits': async (t, start) => {
    const backend = await startBackend(t, ({ headers, res }) => {
      if (headers['fencing-token'] !== '41') return void res.end('done')
      const drip = setInterval(() => res.write('.'), 20)
      res.on('close', () => clearInterval(drip))
    })
    // Longer than a busy machine holds up a drip.
    const responseTimeoutMs = 1_500
    const proxy = await start(t, backend.url, { upstream: { responseTimeoutMs } })
    const client = await connect(t, proxy.port)
    client.send(head(41, 'Content-Length: 0'))
    await until(() => client.received.includes('\r\n.\r\n'))
    const started = performance.now()
    assert.equal((await write(proxy.port, 42)).status, 200)
    assert.ok(performance.now() - started >= responseTimeoutMs + SETTLE_MS)
    assert.ok(client.closed)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'timeout' }), 1)
  },

  ...Object.fromEntries(
    ['1.1', '1.0'].flatMap((version) => [
      [
        `a response cut short (a Content-Length that is not reached) never looks complete to an HTTP/${version} client`,
        cutShort('HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort', version),
      ],
      [
        `a response cut short (chunks without their end) never looks complete to an HTTP/${version} client`,
        cutShort('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n', version),
      ],
    ]),
  ),

  'a backend that answers with an invalid chunk: a broken connection': oddAnswer(
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n',
    (client) => until(() => client.closed || client.ended),
  ),

  ...Object.fromEntries(
    Object.entries({
      'Content-Length and Transfer-Encoding':
        'HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n',
      'no HTTP at all': 'SSH-2.0-OpenSSH_9.2\r\n',
      'a 101 that nobody asked for':
        'HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n',
      'a control character in a field':
        'HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 0\r\n\r\n',
    }).map(([name, bytes]) => [
      `a backend that answers with ${name}: one well-formed 502`,
      oddAnswer(bytes, (client) =>
        assert.match(client.received, /^HTTP\/1\.1 502 [^]*Fencing-Result: unknown/),
      ),
    ]),
  ),
}

function cutShort(bytes: string, version: string): ExchangeCase {
  return async (t, start) => {
    const { url } = await startRawBackend(t, (socket) =>
      socket.once('data', () => socket.end(bytes)),
    )
    const proxy = await start(t, url)
    const client = await connect(t, proxy.port)
    let reset = false
    client.socket.on(
      'error',
      (error: NodeJS.ErrnoException) => (reset = error.code === 'ECONNRESET'),
    )
    client.send(head(41, 'Content-Length: 0').replace('HTTP/1.1', `HTTP/${version}`))
    await until(() => client.closed)
    assert.ok(reset, 'the connection was reset, not ended')
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'reset' }), 1)
    assert.equal(await proxy.metric('fencing_settling_scopes'), 1)
  }
}

function oddAnswer(
  bytes: string,
  check: (client: RawClient) => void | Promise<void>,
): ExchangeCase {
  return async (t, start) => {
    const { url } = await startRawBackend(t, (socket) =>
      socket.once('data', () => socket.write(bytes, 'latin1')),
    )
    const proxy = await start(t, url)
    const client = await connect(t, proxy.port)
    client.send(head(41, 'Content-Length: 0'))
    await until(() => client.closed || client.received.includes('\r\n\r\n'))
    await check(client)
    assert.equal(client.received.match(/HTTP\/1\.1/g)?.length ?? 1, 1)
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'reset' }), 1)
  }
}

/** That the backend reads the message that the proxy read, and no other. */
export const framing: Record<string, ExchangeCase> = {
  ...Object.fromEntries(
    ['DELETE', 'OPTIONS', 'GET', 'POST'].map((method) => [
      `a chunked ${method} whose chunk holds a request arrives as one request (CVE-2026-29057, node-http-proxy #1721)`,
      chunkedSmuggling(method),
    ]),
  ),

  'Trailer fields and trailers: the process lives, and a trailer is never a header (node-http-proxy #1647)':
    trailers,

  'a target is forwarded as it came, byte for byte': async (t, start) => {
    const backend = await startBackend(t)
    const proxy = await start(t, backend.url)
    const targets = [
      '/a//b',
      '//a/b',
      '/a/./b',
      '/a/../b',
      '/a/%2e%2e/b',
      '/a%2fb',
      '/a\\b',
      '/a|b"<>^`{}',
      "/a?q=//x/../y|'",
      '/a?',
    ]
    for (const [i, target] of targets.entries()) {
      assert.deepEqual(await statuses(t, proxy.port, `GET ${target} HTTP/1.1\r\nHost: a\r\n\r\n`), [
        '200',
      ])
      assert.equal(backend.seen[i]?.url, target)
    }
  },
}

function chunkedSmuggling(method: string): ExchangeCase {
  return async (t, start) => {
    const backend = await startBackend(t)
    const proxy = await start(t, backend.url, { upstream: { maxConnections: 1 } })
    const client = await connect(t, proxy.port)
    client.send(
      `${method} /jobs/17/x HTTP/1.1\r\nHost: api\r\nFencing-Token: 1\r\nTransfer-Encoding: chunked\r\n\r\n` +
        `${SMUGGLED.length.toString(16)}\r\n${SMUGGLED}\r\n0\r\n\r\n`,
    )
    await until(() => client.received.includes('done'))
    assert.equal((await request(proxy.port, { path: '/after' })).status, 200)
    assert.deepEqual(
      backend.seen.map(({ method, url }) => `${method} ${url}`),
      [`${method} /jobs/17/x`, 'GET /after'],
    )
    assert.equal(backend.seen[0]?.body, SMUGGLED)
  }
}

/** A case of its own, because the process that does not pass it dies. */
export async function trailers(
  t: TestContext,
  start: Start<{ readonly port: number }>,
): Promise<void> {
  const backend = await startBackend(t)
  const proxy = await start(t, backend.url)
  assert.deepEqual(
    await statuses(t, proxy.port, 'GET /x HTTP/1.1\r\nHost: a\r\nTrailer: X-T\r\n\r\n'),
    ['200'],
  )
  const bytes =
    'PUT /jobs/17 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: Fencing-Token\r\n\r\n1\r\nx\r\n0\r\nFencing-Token: 5\r\n\r\n'
  assert.deepEqual(await statuses(t, proxy.port, bytes), ['428'])
  assert.equal(backend.seen.length, 1)
}
