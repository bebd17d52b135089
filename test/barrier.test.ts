import assert from 'node:assert/strict'
import http from 'node:http'
import { test } from 'node:test'
import {
  LARGE,
  SETTLE_MS,
  SMALL,
  endings,
  holding,
  inFlight,
  settlesBefore42,
  waiting,
} from './exchange-cases.ts'
import {
  ROUTE,
  connect,
  head,
  problem,
  request,
  startBackend,
  startProxy,
  startRawBackend,
  until,
  write,
} from './harness.ts'

/**
 * Every ending of a write, and that the next owner's write begins at the backend only after it.
 * The backend is real, and what counts is when it began to receive what.
 */

for (const [name, check] of Object.entries(endings)) {
  test(name, (t) => check(t, startProxy))
}

test('a newer write begins only after the older one was answered', async (t) => {
  const { proxy, begun, release } = await holding(t)
  const old = write(proxy.port, 41)
  await until(() => begun.length === 1)
  const newer = write(proxy.port, 42)
  await until(waiting(proxy, 1))
  assert.deepEqual(
    begun.map(({ token }) => token),
    ['41'],
  )
  release()
  assert.equal((await old).body, 'done at last')
  assert.equal((await newer).status, 200)
  assert.deepEqual(
    begun.map(({ token }) => token),
    ['41', '42'],
  )
  assert.equal((await write(proxy.port, 41)).status, 409)
})

test('writes of the same token run together, other scopes do not wait, reads pass', async (t) => {
  const { proxy, begun, release } = await holding(t)
  const first = write(proxy.port, 41)
  const second = write(proxy.port, 41)
  await until(() => begun.length === 2)
  const newer = write(proxy.port, 42)
  await until(waiting(proxy, 1))
  assert.equal((await write(proxy.port, 42, { path: '/jobs/18' })).status, 200)
  const read = await request(proxy.port, { path: '/jobs/17/state' })
  assert.equal(read.status, 200)
  assert.equal(read.headers['fencing-result'], undefined)
  release()
  await Promise.all([first, second, newer])
})

test('a client that leaves in mid-body leaves an unknown outcome: newer owners wait until it settled', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const client = await connect(t, proxy.port)
  client.send(head(41, LARGE) + 'only this')
  await until(() => backend.seen[0]?.body === 'only this')
  const endedAt = performance.now()
  client.socket.destroy()
  await until(inFlight(proxy, 0))
  await until(() => backend.seen[0]?.broken === true)
  assert.equal(backend.seen[0]?.complete, false)
  await settlesBefore42(proxy, endedAt, () => backend.seen)
  assert.equal(await proxy.metric('fencing_unknown_outcomes_total', { reason: 'left' }), 1)
})

test('a client that leaves before its small body is whole: never sent, the next owner does not wait', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url, { fence: { settleMs: 60_000 } })
  const client = await connect(t, proxy.port)
  client.send(head(41, SMALL) + 'only this')
  await until(inFlight(proxy, 1))
  client.socket.destroy()
  await until(inFlight(proxy, 0))
  assert.equal((await write(proxy.port, 42)).status, 200)
  assert.deepEqual(
    backend.seen.map(({ headers }) => headers['fencing-token']),
    ['42'],
  )
  assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
  assert.equal(await proxy.metric('fencing_settling_scopes'), 0)
})

test('a newer owner overtakes a write whose small body is not whole: 409 superseded, nothing settles', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url, { fence: { settleMs: 60_000 } })
  const client = await connect(t, proxy.port)
  client.send(head(41, SMALL) + 'only this')
  await until(inFlight(proxy, 1))
  assert.equal((await write(proxy.port, 42)).status, 200)
  await until(() => client.received.includes('\r\n\r\n'))
  assert.match(client.received, /^HTTP\/1\.1 409 [^]*Fencing-Result: superseded[^]*"highest":"42"/)
  // The rest of its body is read, and what comes behind it is the next request.
  client.send('x'.repeat(91) + head(42, 'Content-Length: 0'))
  await until(() => client.received.includes('HTTP/1.1 200'))
  assert.deepEqual(
    backend.seen.map(({ headers }) => headers['fencing-token']),
    ['42', '42'],
  )
  assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
})

test('a client that stops sending before its small body is whole: 408 after clientTimeout, nothing settles', async (t) => {
  const backend = await startBackend(t)
  const overrides = { clientTimeoutMs: 300, fence: { settleMs: 60_000 } }
  const proxy = await startProxy(t, backend.url, overrides)
  const client = await connect(t, proxy.port)
  const started = performance.now()
  client.send(head(41, SMALL) + 'only')
  await until(() => performance.now() - started > 200)
  // Between two reads, not in all.
  client.send(' this')
  await until(() => client.received.includes('\r\n\r\n'))
  assert.ok(performance.now() - started >= 500)
  assert.match(
    client.received,
    /^HTTP\/1\.1 408 [^]*Fencing-Result: incomplete\r[^]*Nothing was forwarded/,
  )
  assert.equal((await write(proxy.port, 42)).status, 200)
  assert.equal(backend.seen.length, 1)
  assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
})

test('a small body that comes in parts reaches the backend whole, once, in one piece with its head', async (t) => {
  const received: string[] = []
  const { url } = await startRawBackend(t, (socket) =>
    socket.on('data', (bytes: Buffer) => {
      received.push(bytes.toString())
      socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
    }),
  )
  const proxy = await startProxy(t, url)
  const client = await connect(t, proxy.port)
  client.send(head(41, 'Content-Length: 9') + 'one')
  await until(inFlight(proxy, 1))
  client.send('two')
  client.send('six' + head(41, 'Content-Length: 3') + 'ten')
  await until(() => client.received.match(/HTTP\/1\.1 200/g)?.length === 2)
  assert.equal(received.length, 2)
  assert.match(received[0] ?? '', /\r\ncontent-length: 9\r\n(?:[^]*\n)?\r\nonetwosix$/i)
  assert.match(received[1] ?? '', /\r\ncontent-length: 3\r\n(?:[^]*\n)?\r\nten$/i)
})

test('a small body on a route that takes each token once: cut off unsent, the token may be used again', async (t) => {
  const backend = await startBackend(t)
  const routes = [{ ...ROUTE, repeat: 'once' as const }]
  const proxy = await startProxy(t, backend.url, { routes })
  const client = await connect(t, proxy.port)
  client.send(head(41, SMALL) + 'only this')
  await until(inFlight(proxy, 1))
  client.socket.destroy()
  await until(inFlight(proxy, 0))
  assert.equal((await write(proxy.port, 41)).headers['fencing-result'], 'accepted')
})

test('a stop while a small body is not whole: the write ends as its client does, and the stop is clean', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url, { clientTimeoutMs: 400 })
  const [whole, stalled] = [await connect(t, proxy.port), await connect(t, proxy.port)]
  whole.send(head(41, SMALL) + 'only this')
  stalled.send(head(41, SMALL) + 'only this')
  await until(inFlight(proxy, 2))
  const stopped = proxy.close()
  whole.send('x'.repeat(91))
  await until(() => whole.received.includes('HTTP/1.1 200'))
  assert.deepEqual(await stopped, { clean: true })
  assert.match(stalled.received, /^HTTP\/1\.1 408 /)
  assert.equal(backend.seen.length, 1)
})

test('a client that leaves in mid-body of a chunked upload: unknown, however small, and settles', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const client = await connect(t, proxy.port)
  client.send(head(41, 'Transfer-Encoding: chunked') + '9\r\nonly this\r\n')
  await until(() => backend.seen[0]?.body === 'only this')
  const endedAt = performance.now()
  client.socket.destroy()
  await until(inFlight(proxy, 0))
  await settlesBefore42(proxy, endedAt, () => backend.seen)
})

test('a client that leaves while its write waits at the barrier: never sent', async (t) => {
  const { proxy, begun, release } = await holding(t)
  const old = write(proxy.port, 41)
  await until(() => begun.length === 1)
  const client = await connect(t, proxy.port)
  client.send(head(42, 'Content-Length: 4') + 'body')
  await until(waiting(proxy, 1))
  client.socket.destroy()
  await until(waiting(proxy, 0))
  release()
  await old
  assert.equal((await write(proxy.port, 42, { path: '/jobs/17/later' })).status, 200)
  assert.deepEqual(
    begun.map(({ token }) => token),
    ['41', '42'],
  )
})

test('a client that half-closes after its request still gets its answer', async (t) => {
  const { proxy, begun, release } = await holding(t)
  const client = await connect(t, proxy.port)
  client.send(head(41, 'Content-Length: 4') + 'body')
  client.socket.end()
  await until(() => begun.length === 1)
  release()
  await until(() => client.ended)
  assert.match(client.received, /^HTTP\/1\.1 200 [^]*done at last/)
})

test('a backend that refuses the connection: 502 unreachable, nothing unknown, no settling', async (t) => {
  const { url } = await startRawBackend(t, () => undefined)
  const dead = await startBackend(t)
  const proxy = await startProxy(t, url.replace(/\d+$/, '1'), { fence: { settleMs: 60_000 } })
  const answer = await write(proxy.port, 41)
  assert.equal(answer.status, 502)
  assert.equal(answer.headers['fencing-result'], 'unreachable')
  assert.equal((await write(proxy.port, 42)).headers['fencing-result'], 'unreachable')
  assert.equal(await proxy.metric('fencing_settling_scopes'), 0)
  assert.equal(dead.seen.length, 0)
})

test('a backend that resets before it answers: 502 unknown, one attempt, settles', async (t) => {
  let endedAt = 0
  const backend = await startBackend(t, ({ headers, url, req, res }) => {
    if (headers['fencing-token'] !== '41' || !url.endsWith('state')) return void res.end('done')
    endedAt = performance.now()
    req.socket.resetAndDestroy()
  })
  const proxy = await startProxy(t, backend.url)
  const answer = await write(proxy.port, 41)
  assert.equal(answer.status, 502)
  assert.equal(answer.headers['fencing-result'], 'unknown')
  assert.equal(backend.seen.length, 1)
  await settlesBefore42(proxy, endedAt, () => backend.seen)
})

test('a backend that resets a kept-alive connection: also exactly one attempt', async (t) => {
  const backend = await startBackend(t, ({ url, req, res }) => {
    if (url.endsWith('reset')) req.socket.resetAndDestroy()
    else res.end('done')
  })
  const proxy = await startProxy(t, backend.url, { upstream: { maxConnections: 1 } })
  assert.equal((await write(proxy.port, 41)).status, 200)
  const answer = await write(proxy.port, 41, { path: '/jobs/17/reset' })
  assert.equal(backend.connections, 1, 'the connection was reused')
  assert.equal(answer.headers['fencing-result'], 'unknown')
  assert.equal((await write(proxy.port, 41, { path: '/jobs/17/after' })).status, 200)
  assert.deepEqual(
    backend.seen.map(({ url }) => url),
    ['/jobs/17/state', '/jobs/17/reset', '/jobs/17/after'],
  )
})

test('a backend that closes a kept-alive connection the moment a request comes: one attempt', async (t) => {
  let requests = 0
  const { url } = await startRawBackend(t, (socket) =>
    socket.on('data', () => {
      requests++
      if (requests === 1) socket.write('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
      else socket.end()
    }),
  )
  const proxy = await startProxy(t, url)
  assert.equal((await write(proxy.port, 41)).status, 200)
  const answer = await write(proxy.port, 41)
  assert.equal(answer.headers['fencing-result'], 'unknown')
  assert.equal(requests, 2)
})

test('a 103 before the 200: the 200 arrives intact', async (t) => {
  const { url } = await startRawBackend(t, (socket) =>
    socket.once('data', () =>
      socket.write(
        'HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok',
      ),
    ),
  )
  const proxy = await startProxy(t, url)
  const answer = await write(proxy.port, 41)
  assert.equal(answer.status, 200)
  assert.equal(answer.body, 'ok')
})

test('a silent backend: 504 unknown at responseTimeout, settles', async (t) => {
  const { backend, proxy } = await holding(t, { upstream: { responseTimeoutMs: 200 } })
  const endedAt = performance.now() + 200
  const answer = await write(proxy.port, 41)
  assert.equal(answer.status, 504)
  assert.equal(answer.headers['fencing-result'], 'unknown')
  const newer = await write(proxy.port, 42)
  assert.equal(newer.status, 200)
  assert.ok(performance.now() - endedAt >= SETTLE_MS)
  assert.equal(backend.seen.length, 2)
})

for (const [name, length] of Object.entries({ small: SMALL, large: LARGE })) {
  test(`a silent backend: 504 at responseTimeout, however long a ${name} body was waited for`, async (t) => {
    const backend = await startBackend(t, () => undefined)
    const responseTimeoutMs = 200
    const proxy = await startProxy(t, backend.url, {
      clientTimeoutMs: 60_000,
      upstream: { responseTimeoutMs },
    })
    const client = await connect(t, proxy.port)
    client.send(head(41, length))
    await until(inFlight(proxy, 1))
    const since = performance.now()
    await until(() => performance.now() - since > 2 * responseTimeoutMs)
    assert.equal(client.received, '', 'the client has clientTimeout')
    client.send('x'.repeat(Number(/\d+/.exec(length))))
    await until(() => client.received.includes('\r\n\r\n'))
    assert.match(client.received, /^HTTP\/1\.1 504 [^]*Fencing-Result: unknown/)
    assert.equal(backend.seen[0]?.complete, true)
  })
}

test('a newer owner cuts off an upload that is not sent whole: 409 superseded, then settles', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const client = await connect(t, proxy.port)
  client.send(head(41, LARGE) + 'only this')
  await until(() => backend.seen[0]?.body === 'only this')
  const started = performance.now()
  const newer = write(proxy.port, 42)
  await until(() => client.received.includes('\r\n\r\n'))
  assert.match(client.received, /^HTTP\/1\.1 409 [^]*Fencing-Result: superseded[^]*"highest":"42"/)
  await until(() => backend.seen[0]?.broken === true)
  assert.equal((await newer).status, 200)
  assert.ok(performance.now() - started >= SETTLE_MS, 'what the backend had of it could still land')
  assert.equal(proxy.events('superseded').length, 1)
})

test('a barrier that takes too long: 503 busy with Retry-After; the mark stays', async (t) => {
  const { proxy, begun, release } = await holding(t, { fence: { takeoverTimeoutMs: 150 } })
  const old = write(proxy.port, 41)
  await until(() => begun.length === 1)
  const answer = await write(proxy.port, 42)
  assert.equal(answer.status, 503)
  assert.equal(answer.headers['fencing-result'], 'busy')
  assert.equal(answer.headers['retry-after'], '1')
  assert.equal(problem(await write(proxy.port, 41))['highest'], '42')
  release()
  await old
  assert.equal((await write(proxy.port, 42)).status, 200)
  assert.equal(proxy.events('barrier_timeout').length, 1)
})

test('at most maxWaiting wait per scope, the next is busy', async (t) => {
  const { proxy, begun, release } = await holding(t, { fence: { maxWaiting: 2 } })
  const old = write(proxy.port, 41)
  await until(() => begun.length === 1)
  const first = write(proxy.port, 42)
  await until(waiting(proxy, 1))
  const second = write(proxy.port, 42)
  await until(waiting(proxy, 2))
  assert.equal((await write(proxy.port, 42)).headers['fencing-result'], 'busy')
  release()
  await old
  assert.deepEqual([(await first).status, (await second).status], [200, 200])
})

test('a write that waits and is overtaken: 409 stale, never sent', async (t) => {
  const { proxy, begun, release } = await holding(t)
  const old = write(proxy.port, 41)
  await until(() => begun.length === 1)
  const overtaken = write(proxy.port, 42)
  await until(waiting(proxy, 1))
  const newest = write(proxy.port, 43)
  const answer = await overtaken
  assert.equal(answer.status, 409)
  assert.equal(answer.headers['fencing-result'], 'stale')
  assert.equal(problem(answer)['highest'], '43')
  release()
  await Promise.all([old, newest])
  assert.deepEqual(
    begun.map(({ token }) => token),
    ['41', '43'],
  )
})

test('a backend that is killed in the middle of many: each is counted once, in flight returns to 0', async (t) => {
  const backend = await startBackend(t, () => undefined)
  const proxy = await startProxy(t, backend.url)
  const many = Array.from({ length: 40 }, (_, i) => write(proxy.port, 41, { path: `/jobs/${i}` }))
  await until(() => backend.seen.length === 40)
  for (const { req } of backend.seen) req.socket.destroy()
  const answers = await Promise.all(many)
  assert.ok(answers.every(({ headers }) => headers['fencing-result'] === 'unknown'))
  assert.equal(await proxy.metric('fencing_in_flight'), 0)
  assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 40)
  assert.equal(await proxy.metric('fencing_requests_total', { result: 'unknown' }), 40)
})

test('a route that takes each token once: the second is repeated, unless nothing of the first was sent', async (t) => {
  const backend = await startBackend(t)
  const routes = [{ ...ROUTE, repeat: 'once' as const }]
  const proxy = await startProxy(t, backend.url, { routes })
  const both = await Promise.all([write(proxy.port, 41), write(proxy.port, 41)])
  assert.deepEqual(both.map(({ headers }) => headers['fencing-result']).sort(), [
    'accepted',
    'repeated',
  ])
  assert.equal(backend.seen.length, 1)

  const dead = await startProxy(t, 'http://127.0.0.1:1', { routes })
  assert.equal((await write(dead.port, 41)).headers['fencing-result'], 'unreachable')
  assert.equal((await write(dead.port, 41)).headers['fencing-result'], 'unreachable')
})

for (const second of [
  'CONNECT api:80 HTTP/1.1\r\nHost: api:80\r\n\r\n',
  'GET /jobs/17/x HTTP/1.1\r\nHost: api\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n',
]) {
  test(`a ${second.slice(0, 7)} pipelined behind a request not answered yet closes its connection, and nothing else`, async (t) => {
    const { proxy, release } = await holding(t)
    const client = await connect(t, proxy.port)
    client.send(head(41, 'Content-Length: 0') + second)
    await until(() => client.closed || client.ended)
    release()
    assert.equal((await write(proxy.port, 42)).status, 200)
  })
}

test('a connection may pipeline a hundred requests, not a hundred thousand', async (t) => {
  const { proxy, release } = await holding(t)
  const read = 'GET / HTTP/1.1\r\nHost: a\r\n\r\n'
  const modest = await connect(t, proxy.port)
  modest.send(head(41, 'Content-Length: 0') + read.repeat(100))
  const greedy = await connect(t, proxy.port)
  greedy.send(head(41, 'Content-Length: 0') + read.repeat(2_000))
  await until(() => greedy.closed || greedy.ended)
  release()
  await until(() => (modest.received.match(/HTTP\/1\.1 200/g) ?? []).length === 101)
  assert.equal((await proxy.close()).clean, true)
})

test('pipelined writes are taken one after the other, answered in order', async (t) => {
  const { proxy, begun, release } = await holding(t)
  const client = await connect(t, proxy.port)
  client.send(head(41, 'Content-Length: 2') + 'ab' + head(42, 'Content-Length: 2') + 'cd')
  await until(() => begun.length === 1)
  const probe = await request(proxy.port, { path: '/read' })
  assert.equal(probe.status, 200)
  release()
  await until(() => client.received.match(/HTTP\/1\.1 200/g)?.length === 2)
  assert.deepEqual(
    begun.map(({ token }) => token).filter((token) => token !== 'undefined'),
    ['41', '42'],
  )
})

test('a kept-alive client connection serves on after refusals with a body', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 })
  t.after(() => agent.destroy())
  await write(proxy.port, 42, { agent })
  for (let i = 0; i < 20; i++) {
    assert.equal((await write(proxy.port, 41, { agent, body: 'x'.repeat(1000) })).status, 409)
  }
  assert.equal((await write(proxy.port, 42, { agent })).status, 200)
  assert.equal(backend.seen.length, 2)
})
