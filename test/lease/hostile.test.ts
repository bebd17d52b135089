import assert from 'node:assert/strict'
import { test, type TestContext } from 'node:test'
import fc from 'fast-check'
import {
  connect,
  request,
  startBackend,
  startProxy,
  until,
  type Answer,
  type TestProxy,
} from '../harness.ts'
import { acquire, acquireBytes, isProblem, leased, lookUp, release, renew } from './asks.ts'

/** Whatever is sent to the lease service: what it does not understand is told, and changes nothing. */

async function start(t: TestContext, clientTimeoutMs = 5_000) {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url, { leases: {}, clientTimeoutMs })
  return { proxy, port: proxy.port }
}

/** What there is to change. */
async function everything(proxy: TestProxy): Promise<unknown[]> {
  const { body } = await request(proxy.adminPort, { path: '/scopes' })
  const { scopes } = JSON.parse(body) as { scopes: { leasedUntil?: string }[] }
  return [
    // When a lease ends is reckoned anew for each look, from two clocks.
    scopes.map((scope) => ({ ...scope, leasedUntil: undefined })),
    await proxy.metric('fencing_tokens_issued_total'),
    await proxy.metric('fencing_leases_active'),
    proxy.events('lease_granted').length,
  ]
}

/** A 4xx in words. */
function isRefusal(answer: Answer, what: string): Record<string, unknown> {
  const { status } = answer
  assert.ok(status >= 400 && status < 500, `${what}: ${status} ${answer.body}`)
  const told = isProblem(answer, status, 'lease-request')
  assert.match(String(told['detail']), /\S+ \S+ .*\.$/s, what)
  return told
}

const DEEP = `${'['.repeat(16_000)}${']'.repeat(16_000)}`

const BODIES: readonly [what: string, body: string | Buffer, words: RegExp][] = [
  ['nothing', '', /body/i],
  ['no JSON', 'scope=/a', /JSON/],
  ['half of JSON', '{"scope":"/a"', /JSON/],
  ['JSON and more', '{"scope":"/a"}{}', /JSON/],
  ['single quotes', "{'scope':'/a'}", /JSON/],
  ['null', 'null', /object/],
  ['a list', '["/a"]', /object/],
  ['a text', '"/a"', /object/],
  ['a number', '17', /object/],
  ['a very deep list', DEEP, /object|JSON/],
  ['no scope', '{}', /scope/],
  ['an empty scope', '{"scope":""}', /scope/],
  ['a scope that is a number', '{"scope":17}', /scope/],
  ['a scope that is null', '{"scope":null}', /scope/],
  ['a scope that is a list', '{"scope":["/a"]}', /scope/],
  ['a scope that is an object', '{"scope":{"toString":"/a"}}', /scope/],
  ['a scope that is true', '{"scope":true}', /scope/],
  ['a scope that is too long', JSON.stringify({ scope: 'x'.repeat(4097) }), /scope/],
  [
    'a scope longer than any route makes',
    JSON.stringify({ scope: '\u{1f512}'.repeat(257) }),
    /1024 bytes/,
  ],
  ['a scope with a control character', '{"scope":"/\\u0000"}', /control/],
  ['a holder with a control character', '{"scope":"/a","holder":"\\u001b[2J"}', /control/],
  ['a scope with half of a surrogate pair', '{"scope":"/\\ud800"}', /Unicode/],
  ['a holder with half of a surrogate pair', '{"scope":"/a","holder":"\\udc00x"}', /Unicode/],
  ['an empty holder', '{"scope":"/a","holder":""}', /holder/],
  ['a holder that is too long', JSON.stringify({ scope: '/a', holder: 'x'.repeat(257) }), /holder/],
  ['a holder that is no text', '{"scope":"/a","holder":1}', /holder/],
  ['an unknown key', '{"scope":"/a","tll":"5s"}', /has "tll"/],
  ['a token of its own', '{"scope":"/a","token":"9"}', /has "token"/],
  ['a prototype', '{"scope":"/a","__proto__":{"ttl":"5s"}}', /has "__proto__"/],
  ['a prototype alone', '{"__proto__":{"scope":"/a"}}', /scope/],
  ['a constructor', '{"scope":"/a","constructor":{"prototype":{"ttl":"5s"}}}', /has "constructor"/], // prettier-ignore
  ['a ttl without a unit', '{"scope":"/a","ttl":"15"}', /ttl must be a duration.*from 100ms to 1h/],
  ['a ttl that is a number', '{"scope":"/a","ttl":15}', /ttl/],
  ['a ttl that is too short', '{"scope":"/a","ttl":"99ms"}', /ttl .*from 100ms to 1h/],
  ['a ttl that is too long', '{"scope":"/a","ttl":"61m"}', /ttl .*from 100ms to 1h/],
  ['a ttl that is negative', '{"scope":"/a","ttl":"-5s"}', /ttl/],
  ['a ttl that is endless', '{"scope":"/a","ttl":"Infinity"}', /ttl/],
  ['a wait that is too long', '{"scope":"/a","wait":"2h"}', /wait .*from 0s to 1h/],
  ['a wait with a blank', '{"scope":"/a","wait":"5 s"}', /wait/],
  ['NUL bytes', Buffer.alloc(64), /JSON/],
]

test('every body that is no acquire is a 4xx that says what is wrong, and changes nothing', async (t) => {
  const { proxy, port } = await start(t)
  await leased(port, { scope: '/held' })
  const before = await everything(proxy)
  for (const [what, body, words] of BODIES) {
    const answer = await acquire(port, '', { body })
    const { detail } = isRefusal(answer, what)
    assert.match(String(detail), words, what)
  }
  assert.deepEqual(await everything(proxy), before)
})

test('what is large, old or odd but right is taken', async (t) => {
  const { port } = await start(t)
  const bodies = [
    JSON.stringify({ scope: '\u{1f512}'.repeat(256), holder: '\u{1f512}'.repeat(128) }),
    '{"scope":"/\\ud83d\\udd12"}',
    ' {"scope" : "/b", "ttl":"100ms", "wait":"0s"}\r\n',
    '{"scope":"constructor"}',
    '{"scope":"__proto__"}',
    '{"scope":"x\'); DROP TABLE marks; --"}',
    // The last one counts, as everywhere in JavaScript.
    '{"scope":"/c","scope":"/d"}',
  ]
  for (const body of bodies) {
    const answer = await acquire(port, body)
    assert.equal(answer.status, 201, answer.body)
    const { scope } = JSON.parse(body) as { scope: string }
    assert.equal((await lookUp(port, scope)).status, 200)
  }
  assert.equal((await lookUp(port, '/c')).status, 404)
})

test('a body of another type is a 415, with the type that is wanted', async (t) => {
  const { proxy, port } = await start(t)
  const before = await everything(proxy)
  const types = ['text/plain', 'application/x-www-form-urlencoded', 'application/xml', 'application/jsonx', 'x', ''] // prettier-ignore
  for (const type of types) {
    const headers = { 'Content-Type': type }
    const answer = await acquire(port, { scope: '/a' }, { headers })
    const { detail } = isRefusal(answer, type)
    assert.equal(answer.status, 415, type)
    assert.match(String(detail), /application\/json/)
  }
  assert.equal((await acquire(port, { scope: '/a' }, { headers: {} })).status, 415)
  assert.deepEqual(await everything(proxy), before)
  const headers = { 'Content-Type': 'application/json; charset=utf-8' }
  assert.equal((await acquire(port, { scope: '/a' }, { headers })).status, 201)
})

test('a body over the limit is a 413 that arrives, whether its length is told or not, and however it goes on', async (t) => {
  const { proxy, port } = await start(t)
  const before = await everything(proxy)
  const large = JSON.stringify({ scope: 'x'.repeat(3_000_000) })
  for (const framing of [`Content-Length: ${large.length}`, 'Transfer-Encoding: chunked']) {
    for (let i = 0; i < 5; i++) {
      const client = await connect(t, port)
      client.send(`POST /_fencing/leases HTTP/1.1\r\nHost: api\r\nContent-Type: application/json\r\n${framing}\r\n\r\n`) // prettier-ignore
      const chunked = framing.startsWith('T')
      client.send(chunked ? `${large.length.toString(16)}\r\n${large}\r\n0\r\n\r\n` : large)
      await until(() => client.received.endsWith('}') || client.closed, framing)
      assert.match(client.received, /^HTTP\/1\.1 413 /, framing)
      client.socket.destroy()
    }
  }
  const slightly = JSON.stringify({ scope: 'x'.repeat(40_000) })
  isRefusal(await acquire(port, slightly), 'slightly over')
  assert.deepEqual(await everything(proxy), before)
})

test('a body that does not arrive in time is a 408', async (t) => {
  const { proxy, port } = await start(t, 100)
  const before = await everything(proxy)
  const client = await connect(t, port)
  client.send(acquireBytes({ scope: '/a' }).slice(0, -1))
  await until(() => client.received.endsWith('}'))
  assert.match(client.received, /^HTTP\/1\.1 408 [^]*urn:fencing-proxy:problem:client-timeout/)
  await until(() => client.ended || client.closed, 'the connection ends')
  assert.deepEqual(await everything(proxy), before)
  const closed = await proxy.close()
  assert.equal(closed.clean, true)
})

test('a client that leaves in the middle of its body changes nothing', async (t) => {
  const { proxy, port } = await start(t)
  const before = await everything(proxy)
  const client = await connect(t, port)
  client.send(acquireBytes({ scope: '/a' }).slice(0, -1))
  await until(async () => (await proxy.metric('fencing_requests_total', { result: 'lease' })) === 1)
  client.socket.destroy()
  await proxy.close().then(({ clean }) => assert.ok(clean))
  assert.equal(proxy.events('lease_granted').length, before[3])
  assert.equal(proxy.events('lease_failed').length, 0)
})

test('a look-up names one scope', async (t) => {
  const { port } = await start(t)
  for (const query of ['', '?', '?scope=', '?scope=a&scope=b', '?scope=a&x=1', '?Scope=a', `?scope=${'x'.repeat(4097)}`]) {
    isRefusal(await request(port, { path: `/_fencing/leases${query}` }), query)
  } // prettier-ignore
  assert.equal((await lookUp(port, 'a b/\u{1f512}')).status, 404)
  await leased(port, { scope: 'a b/\u{1f512}' })
  assert.equal((await lookUp(port, 'a b/\u{1f512}')).status, 200)
})

test('a lease id that is none is over, or refused: never an error of ours', async (t) => {
  const { proxy, port } = await start(t)
  const { lease } = await leased(port, { scope: '/a' })
  const ids = ['x', '__proto__', 'constructor', '..', '%2e%2e', '%00', '%2f', `${lease}%20`, `${lease}%00`, lease.slice(0, -1), lease.toLowerCase() + 'x', 'x'.repeat(99), 'x'.repeat(4_000), '%zz', '%', '%ff'] // prettier-ignore
  for (const id of ids) {
    for (const answer of [await renew(port, id), await release(port, id)]) {
      assert.ok(answer.status >= 400 && answer.status < 500, `${id}: ${answer.status}`)
      assert.equal(answer.headers['content-type'], 'application/problem+json', id)
    }
  }
  assert.equal((await renew(port, lease)).status, 200)
  assert.equal(proxy.events('lease_failed').length, 0)
})

const key = fc.oneof(
  { weight: 6, arbitrary: fc.constantFrom('scope', 'ttl', 'holder', 'wait') },
  fc.constantFrom('__proto__', 'constructor', 'prototype', 'toString', 'token', '', 'Scope'),
  fc.string({ unit: 'binary', maxLength: 3 }),
)
const value = fc.oneof(
  { weight: 5, arbitrary: fc.constantFrom('/a', '/b', '5s', '0s', '15', '', '\0', '\ud800') },
  fc.string({ unit: 'binary', maxLength: 5 }),
  fc.jsonValue({ maxDepth: 2 }),
)
/** Objects as text, so that keys may come twice. */
const text = fc.oneof(
  {
    weight: 5,
    arbitrary: fc
      .array(fc.tuple(key, value), { maxLength: 4 })
      .map((pairs) => pairs.map(([k, v]) => `${JSON.stringify(k)}:${JSON.stringify(v)}`).join(','))
      .map((inner) => `{${inner}}`),
  },
  fc.json({ maxDepth: 3 }),
  fc.string({ unit: 'binary', maxLength: 20 }),
)

const CONTROL = /[\u0000-\u001f\u007f-\u009f]/

/** The rules once more, by other means: the scope that is asked for, where it is asked for rightly. */
function rightScope(body: string): string | undefined {
  let asked: unknown
  try {
    // A body of bytes that are no UTF-8 is read with replacement characters.
    asked = JSON.parse(Buffer.from(body).toString())
  } catch {
    return undefined
  }
  if (typeof asked !== 'object' || asked === null || Array.isArray(asked)) return undefined
  const entries = Object.entries(asked)
  const { scope, holder = 'h', ttl = '1s', wait = '0s' } = asked as Record<string, unknown>
  const right =
    entries.every(([name]) => ['scope', 'holder', 'ttl', 'wait'].includes(name)) &&
    typeof scope === 'string' && scope.isWellFormed() && scope !== '' && !CONTROL.test(scope) &&
    typeof holder === 'string' && holder.isWellFormed() && holder !== '' && !CONTROL.test(holder) &&
    typeof ttl === 'string' && /^[1-9][0-9]*(ms|s|m)$/.test(ttl) &&
    typeof wait === 'string' && /^(0|[1-9][0-9]*)(ms|s|m)$/.test(wait) // prettier-ignore
  return right ? scope.normalize('NFC') : undefined
}

test('any text is either an acquire or a 4xx in words that changes nothing', async (t) => {
  const { proxy, port } = await start(t)
  const seen = { taken: 0, refused: 0 }
  await fc.assert(
    fc.asyncProperty(text, async (body) => {
      const issued = proxy.events('lease_granted').length
      const answer = await acquire(port, body)
      const right = rightScope(body)
      if (right === undefined) {
        isRefusal(answer, body)
        assert.equal(proxy.events('lease_granted').length, issued)
        seen.refused++
        return
      }
      assert.equal(answer.status, 201, `${body} ${answer.body}`)
      assert.equal(proxy.events('lease_granted').at(-1)?.['scope'], right)
      const { lease } = JSON.parse(answer.body) as { lease: string }
      assert.equal((await release(port, lease)).status, 204)
      seen.taken++
    }),
    { numRuns: 400 },
  )
  assert.ok(seen.taken > 5 && seen.refused > 50, JSON.stringify(seen))
  assert.equal(proxy.events('lease_failed').length, 0)
})
