import assert from 'node:assert/strict'
import { describe, test, type TestContext } from 'node:test'
import { SMUGGLED, framing, statuses } from './exchange-cases.ts'
import {
  connect,
  head,
  problem,
  request,
  startBackend,
  startProxy,
  startRawBackend,
  until,
  write,
  type Backend,
} from './harness.ts'

/**
 * What breaks proxies, as exact bytes over real sockets: framing, smuggling, fields. Cases with a
 * number are public reports.
 */

async function refusedWithout(
  t: TestContext,
  bytes: string | Buffer,
  status: string | RegExp,
): Promise<Backend> {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const client = await connect(t, proxy.port)
  client.send(bytes)
  await until(() => client.closed || client.ended)
  assert.match(
    client.received,
    new RegExp(`^HTTP/1\\.1 ${status instanceof RegExp ? status.source : status} `),
  )
  assert.equal(
    client.received.match(/^HTTP\/1\.1/gm)?.length,
    1,
    'one answer, then the connection closes',
  )
  assert.equal(backend.seen.length, 0, 'the backend saw nothing')
  return backend
}

describe('smuggling', () => {
  for (const [name, check] of Object.entries(framing)) {
    test(name, (t) => check(t, startProxy))
  }

  for (const method of ['DELETE', 'OPTIONS', 'GET', 'POST']) {
    test(`a ${method} with a Content-Length and a body that is a request arrives as one request`, async (t) => {
      const backend = await startBackend(t)
      const proxy = await startProxy(t, backend.url, { upstream: { maxConnections: 1 } })
      const client = await connect(t, proxy.port)
      client.send(
        `${method} /jobs/17/x HTTP/1.1\r\nHost: api\r\nFencing-Token: 1\r\nContent-Length: ${SMUGGLED.length}\r\n\r\n${SMUGGLED}`,
      )
      await until(() => client.received.includes('done'))
      assert.equal((await request(proxy.port, { path: '/after' })).status, 200)
      assert.deepEqual(
        backend.seen.map(({ method, url }) => `${method} ${url}`),
        [`${method} /jobs/17/x`, 'GET /after'],
      )
      assert.equal(backend.seen[0]?.body, SMUGGLED)
      assert.equal(backend.seen[0].headers['content-length'], SMUGGLED.length.toString())
    })
  }

  test('a GET with 1500 small fields, then a length and a body that is a request: 431 (CVE-2026-58044)', async (t) => {
    const fields = Array.from({ length: 1500 }, (_, i) => `a${i}:b\r\n`).join('')
    const bytes = `GET /x HTTP/1.1\r\nHost: api\r\n${fields}Content-Length: ${SMUGGLED.length}\r\n\r\n${SMUGGLED}`
    await refusedWithout(t, bytes, '431')
  })

  test('a head of more than 16 KiB: 431', async (t) => {
    await refusedWithout(
      t,
      `GET /x HTTP/1.1\r\nHost: api\r\nX: ${'x'.repeat(20_000)}\r\n\r\n`,
      '431',
    )
  })

  const lines: Record<string, string[]> = {
    'Content-Length and Transfer-Encoding': ['Content-Length: 3', 'Transfer-Encoding: chunked'],
    'Transfer-Encoding and Content-Length': ['Transfer-Encoding: chunked', 'Content-Length: 3'],
    'two Content-Length': ['Content-Length: 3', 'Content-Length: 3'],
    'two different Content-Length': ['Content-Length: 3', 'Content-Length: 4'],
    'Content-Length +3': ['Content-Length: +3'],
    'Content-Length 0x3': ['Content-Length: 0x3'],
    'Content-Length 3, 3': ['Content-Length: 3, 3'],
    'Content-Length empty': ['Content-Length:'],
    'Content-Length 03': ['Content-Length: 03'],
    'Content-Length -3': ['Content-Length: -3'],
    'Content-Length beyond 2^53': ['Content-Length: 9007199254740993'],
    'Transfer-Encoding xchunked': ['Transfer-Encoding: xchunked'],
    'Transfer-Encoding chunked, identity': ['Transfer-Encoding: chunked, identity'],
    'Transfer-Encoding gzip, chunked': ['Transfer-Encoding: gzip, chunked'],
    'Transfer-Encoding twice': ['Transfer-Encoding: chunked', 'Transfer-Encoding: chunked'],
    'Transfer-Encoding with a control character': ['Transfer-Encoding: \x0bchunked'],
    'a field name with a blank': ['Content-Length : 3'],
    'a field name with a blank in it': ['X Y: 3', 'Content-Length: 3'],
    'a folded line': ['X-A: 1', ' folded', 'Content-Length: 3'],
    'a NUL in a field': ['X-A: a\0b', 'Content-Length: 3'],
    'a control character in a field': ['X-A: a\x01b', 'Content-Length: 3'],
    'a bare CR in a field': ['X-A: a\rb', 'Content-Length: 3'],
  }
  for (const [name, given] of Object.entries(lines)) {
    test(`${name}: 400, and the connection closes`, async (t) => {
      await refusedWithout(t, `${head(1, ...given)}abc`, '400')
    })
  }

  test('Transfer-Encoding in HTTP/1.0: 400', async (t) => {
    await refusedWithout(
      t,
      head(1, 'Transfer-Encoding: chunked').replace('HTTP/1.1', 'HTTP/1.0') + '0\r\n\r\n',
      '400',
    )
  })

  test('a chunk size that breaks in mid-body: the backend never sees a complete request', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    const client = await connect(t, proxy.port)
    client.send(head(1, 'Transfer-Encoding: chunked') + '3\r\nabc\r\n')
    await until(() => backend.seen[0]?.body === 'abc')
    client.send('zz\r\n')
    await until(() => backend.seen[0]?.broken === true)
    assert.equal(backend.seen[0]?.complete, false)
    await until(() => client.closed || client.ended)
  })

  const hosts: Record<string, string> = {
    'two Host fields': 'Host: a\r\nHost: a',
    'an empty Host': 'Host:',
    'a list of hosts': 'Host: a, b',
    'a user in Host': 'Host: u@h',
    'a path in Host': 'Host: h/x',
    'no Host': 'X: y',
  }
  for (const [name, line] of Object.entries(hosts)) {
    test(`${name}: 400`, async (t) => {
      await refusedWithout(t, `GET /x HTTP/1.1\r\n${line}\r\n\r\n`, '400')
    })
  }

  test('HTTP/0.9 with fields, HTTP/2.0 and lower-case http on this port: refused', async (t) => {
    await refusedWithout(t, 'PUT /jobs/17\nFencing-Token: 1\nContent-Length: 0\n\n', /400|505/)
    await refusedWithout(
      t,
      'PUT /jobs/17 HTTP/2.0\r\nHost: a\r\nFencing-Token: 1\r\nContent-Length: 0\r\n\r\n',
      /400|505/,
    )
    await refusedWithout(t, 'GET / http/1.1\r\nHost: a\r\n\r\n', '400')
    await refusedWithout(t, 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', /400|505/)
  })

  test('a request behind a refused one with a body is parsed right', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    await write(proxy.port, 42)
    const client = await connect(t, proxy.port)
    client.send(
      `${head(41, `Content-Length: ${SMUGGLED.length}`)}${SMUGGLED}${head(42, 'Content-Length: 2')}ok`,
    )
    await until(() => client.received.match(/HTTP\/1\.1/g)?.length === 2)
    assert.match(client.received, /^HTTP\/1\.1 409 [^]*HTTP\/1\.1 200 /)
    assert.deepEqual(
      backend.seen.map(({ body }) => body),
      ['by 42', 'ok'],
    )
  })

  test('behind a refused upload that is too large to read, the connection closes', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    await write(proxy.port, 42)
    const client = await connect(t, proxy.port)
    const body = 'x'.repeat(200_000)
    client.send(`${head(41, `Content-Length: ${body.length}`)}${body}${SMUGGLED}`)
    await until(() => client.ended || client.closed)
    assert.equal(client.received.match(/HTTP\/1\.1/g)?.length, 1)
    assert.equal(backend.seen.length, 1)
  })

  test('a framing error behind a request that is under way does not take its answer', async (t) => {
    const backend = await startBackend(t, () => undefined)
    const proxy = await startProxy(t, backend.url)
    const client = await connect(t, proxy.port)
    client.send(head(1, 'Content-Length: 0'))
    await until(() => backend.seen.length === 1)
    client.send('garbage\r\n\r\n')
    await until(() => client.closed || client.ended)
    assert.equal(client.received, '')
  })
})

describe('fields', () => {
  test('hop-by-hop fields and those that Connection names end here, in both directions (node-http-proxy #446, #1488)', async (t) => {
    const backend = await startBackend(t, ({ res }) => {
      res.writeHead(200, [
        'Connection', 'X-Hop-Back', 'X-Hop-Back', '1', 'Proxy-Authenticate', 'Basic', 'Keep-Alive', 'timeout=9',
        'X-End', '1', 'Set-Cookie', 'a=1', 'Set-Cookie', 'b=2', 'Fencing-Result', 'forged', 'Fencing-Other', 'x',
      ]) // prettier-ignore
      res.end('x')
    })
    const proxy = await startProxy(t, backend.url)
    const answer = await request(proxy.port, {
      method: 'PUT',
      path: '/jobs/17',
      token: 1,
      headers: {
        Connection: 'close, X-Hop', 'X-Hop': '1', 'Keep-Alive': 'timeout=5', TE: 'trailers',
        'Proxy-Connection': 'keep-alive', 'Proxy-Authorization': 'Basic x', 'X-End': '1', Upgrade: 'h2c',
      },
    }) // prettier-ignore
    const seen = backend.seen[0]?.headers ?? {}
    for (const gone of [
      'x-hop',
      'keep-alive',
      'te',
      'proxy-connection',
      'proxy-authorization',
      'upgrade',
    ]) {
      assert.equal(seen[gone], undefined, gone)
    }
    assert.equal(seen['x-end'], '1')
    assert.equal(answer.headers['x-hop-back'], undefined)
    assert.equal(answer.headers['proxy-authenticate'], undefined)
    assert.equal(answer.headers['x-end'], '1')
    assert.deepEqual(
      answer.headers['set-cookie'],
      ['a=1', 'b=2'],
      'repeated fields stay apart (node-http-proxy #1151)',
    )
    assert.equal(answer.headers['fencing-result'], 'accepted')
    assert.equal(answer.headers['fencing-other'], undefined)
  })

  test('the backend gets the token and the scope as the proxy decided them, and where the request came from', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    await write(proxy.port, '0.7', {
      path: '/jobs/a%20b/x?q=1',
      headers: {
        Host: 'api.example:8080', 'X-Forwarded-For': '1.2.3.4', Via: '1.0 front', 'X-Request-Id': 'r-1',
        'Fencing-Scope': '/forged', 'Fencing-Result': 'forged',
      },
    }) // prettier-ignore
    const seen = backend.seen[0]
    assert.equal(seen?.url, '/jobs/a%20b/x?q=1')
    assert.equal(seen.headers.host, 'api.example:8080')
    assert.equal(seen.headers['fencing-token'], '7')
    assert.equal(seen.headers['fencing-scope'], '/jobs/a%20b')
    assert.equal(seen.headers['fencing-result'], undefined)
    assert.equal(seen.headers['x-forwarded-for'], '1.2.3.4, 127.0.0.1')
    assert.equal(seen.headers['x-forwarded-host'], 'api.example:8080')
    assert.equal(seen.headers['x-forwarded-proto'], 'http')
    assert.equal(seen.headers.via, '1.0 front, 1.1 fencing-proxy')
    assert.equal(seen.headers['x-request-id'], 'r-1')
  })

  test('a request id is kept, or made, and answered', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    const kept = await request(proxy.port, { headers: { 'X-Request-Id': 'mine' } })
    assert.equal(kept.headers['x-request-id'], 'mine')
    const made = await request(proxy.port, {})
    assert.match(String(made.headers['x-request-id']), /^[0-9a-f-]{36}$/)
    assert.equal(backend.seen[1]?.headers['x-request-id'], made.headers['x-request-id'])
    const odd = await request(proxy.port, { headers: { 'X-Request-Id': 'x'.repeat(500) } })
    assert.match(String(odd.headers['x-request-id']), /^[0-9a-f-]{36}$/)
  })

  test('two token fields, equal or not: 400 malformed (node-v0.x-archive #1604)', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    for (const second of ['7', '8']) {
      const answer = await request(proxy.port, {
        method: 'PUT',
        path: '/jobs/17',
        headers: { 'Fencing-Token': ['7', second] },
      })
      assert.equal(answer.status, 400)
      assert.equal(answer.headers['fencing-result'], 'malformed')
    }
    assert.equal(backend.seen.length, 0)
  })

  test('Expect: 100-continue is answered once the write is admitted; a stale upload never sends its body (node-http-proxy #1219)', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    const current = await connect(t, proxy.port)
    current.send(head(42, 'Content-Length: 4', 'Expect: 100-continue'))
    await until(() => current.received.includes('100 Continue'))
    current.send('body')
    await until(() => current.received.includes('done'))
    assert.equal(backend.seen[0]?.body, 'body')
    const stale = await connect(t, proxy.port)
    stale.send(head(41, 'Content-Length: 4', 'Expect: 100-continue'))
    await until(() => stale.ended)
    assert.match(stale.received, /^HTTP\/1\.1 409 /)
    assert.doesNotMatch(stale.received, /100 Continue/)
    assert.equal((await request(proxy.port, { headers: { Expect: 'other' } })).status, 417)
  })

  test('OPTIONS with Max-Forwards 0 and OPTIONS * are answered here, CONNECT is refused', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    assert.equal(
      (await request(proxy.port, { method: 'OPTIONS', headers: { 'Max-Forwards': '0' } })).status,
      204,
    )
    assert.deepEqual(await statuses(t, proxy.port, 'OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n'), [
      '204',
    ])
    assert.deepEqual(await statuses(t, proxy.port, 'CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n'), [
      '405',
    ])
    assert.equal(backend.seen.length, 0)
    await request(proxy.port, { method: 'OPTIONS', headers: { 'Max-Forwards': '3' } })
    assert.equal(backend.seen[0]?.headers['max-forwards'], '2')
  })

  test('answers without a body keep the next answer on the connection readable', async (t) => {
    const { url } = await startRawBackend(t, (socket) =>
      socket.on('data', (data) => {
        const text = data.toString()
        if (text.startsWith('HEAD')) socket.write('HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n')
        else if (text.includes('/304'))
          socket.write('HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\n\r\n')
        else if (text.includes('/204'))
          socket.write('HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n')
        else if (text.includes('/length'))
          socket.write('HTTP/1.1 204 No Content\r\nContent-Length: 9\r\n\r\n')
        else socket.write('HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlast')
      }),
    )
    const proxy = await startProxy(t, url, { upstream: { maxConnections: 1 } })
    const client = await connect(t, proxy.port)
    for (const [i, line] of [
      'HEAD /',
      'GET /304',
      'GET /204',
      'PUT /jobs/length',
      'GET /200',
    ].entries()) {
      client.send(`${line} HTTP/1.1\r\nHost: a\r\nFencing-Token: 1\r\n\r\n`)
      await until(() => client.received.match(/HTTP\/1\.1 /g)?.length === i + 1)
    }
    await until(() => client.received.endsWith('last'))
    const codes = [...client.received.matchAll(/HTTP\/1\.1 (\d+)/g)].map((match) => match[1])
    assert.deepEqual(codes, ['200', '304', '204', '204', '200'])
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
  })

  for (const [name, phrase, passedOn] of [
    ['ASCII', 'Not: "this"', 'Not: "this"'],
    ['Latin-1', 'Ung\xfcltig', 'Bad Request'],
    ['UTF-8', 'Ung\xc3\xbcltig \xe2\x82\xac', 'Bad Request'],
    ['a control character', 'a\x01b', 'Bad Request'],
    ['nothing', '', ''],
  ] as const) {
    test(`a reason phrase with ${name} does not cost the answer; fields pass byte for byte`, async (t) => {
      const { url } = await startRawBackend(t, (socket) =>
        socket.once('data', () =>
          socket.write(
            `HTTP/1.1 400 ${phrase}\r\nX-A: \xfc \xc3\xbc \xff\r\nContent-Length: 2\r\n\r\nok`,
            'latin1',
          ),
        ),
      )
      const proxy = await startProxy(t, url)
      const client = await connect(t, proxy.port)
      client.send(head(1, 'Content-Length: 0'))
      await until(() => client.received.endsWith('ok'))
      assert.ok(client.received.startsWith(`HTTP/1.1 400 ${passedOn}\r\n`))
      assert.match(client.received, /\r\nFencing-Result: accepted\r\n/)
      assert.ok(client.received.includes('\r\nX-A: \xfc \xc3\xbc \xff\r\n'))
      assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
    })
  }

  test('a backend that ends its answer with the connection: passed on whole', async (t) => {
    const { url } = await startRawBackend(t, (socket) =>
      socket.once('data', () => socket.end('HTTP/1.0 200 OK\r\n\r\nto the end')),
    )
    const proxy = await startProxy(t, url)
    const answer = await write(proxy.port, 1)
    assert.equal(answer.body, 'to the end')
    assert.equal(await proxy.metric('fencing_unknown_outcomes_total'), 0)
  })

  test('problem details name what the client needs, and nothing else of the request', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url)
    await write(proxy.port, 42)
    const answer = await write(proxy.port, 41, {
      path: '/jobs/17/state?secret=1',
      headers: { Authorization: 'Bearer secret', Cookie: 'secret' },
      body: 'secret',
    })
    assert.equal(answer.status, 409)
    assert.equal(answer.headers['fencing-scope'], '/jobs/17')
    const details = problem(answer)
    assert.deepEqual(
      { ...details, detail: undefined, requestId: undefined },
      { type: 'urn:fencing-proxy:problem:stale', title: 'A newer owner has taken this scope over', status: 409, scope: '/jobs/17', token: '41', highest: '42', detail: undefined, requestId: undefined },
    ) // prettier-ignore
    assert.equal(details['requestId'], answer.headers['x-request-id'])
    const [line] = proxy.events('stale_write')
    assert.deepEqual(
      { ...line, time: undefined, msg: undefined, requestId: undefined },
      { level: 'warn', event: 'stale_write', route: '/jobs/{job}/**', mode: 'enforce', scope: '/jobs/17', token: '41', highest: '42', method: 'PUT', path: '/jobs/17/state', remote: '127.0.0.1', time: undefined, msg: undefined, requestId: undefined },
    ) // prettier-ignore
    assert.doesNotMatch(JSON.stringify(proxy.log), /secret/)
    assert.doesNotMatch((await request(proxy.adminPort, { path: '/metrics' })).body, /jobs\/17/)
  })
})
