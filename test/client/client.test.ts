import assert from 'node:assert/strict'
import { once } from 'node:events'
import type { ServerResponse } from 'node:http'
import { Readable } from 'node:stream'
import { describe, test, type TestContext } from 'node:test'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import {
  FencingClient,
  LeaseHeldError,
  LeaseLostError,
  LeaseRequestError,
  LeaseUnavailableError,
  type Lease,
  type LossReason,
} from '../../src/client/client.ts'
import { freePort } from '../free-port.ts'
import {
  gate,
  request,
  startBackend,
  startProxy,
  until,
  type Backend,
  type Seen,
  type TestProxy,
} from '../harness.ts'
import { startRelay, type Relay } from './relay.ts'

/** The client library against the real service, over a network that the test can disturb. */

const SCOPE = '/jobs/17'

setFlagsFromString('--expose-gc')
const collectGarbage = runInNewContext('gc') as () => void

interface Site {
  readonly backend: Backend
  readonly proxy: TestProxy
  readonly relay: Relay
  /** Through the relay. */
  readonly client: FencingClient
  /** Straight to the sidecar. */
  readonly other: FencingClient
}

async function startSite(
  t: TestContext,
  answer?: Parameters<typeof startBackend>[1],
): Promise<Site> {
  const backend = await startBackend(t, answer)
  // A backend that does not answer stays silent for longer than a test may take.
  const upstream = { responseTimeoutMs: 120_000 }
  const proxy = await startProxy(t, backend.url, { leases: {}, upstream })
  const relay = await startRelay(t, proxy.port)
  const client = new FencingClient(relay.url)
  const other = new FencingClient(`http://127.0.0.1:${proxy.port}`)
  return { backend, proxy, relay, client, other }
}

async function isHeld(port: number): Promise<boolean> {
  const { status } = await request(port, { path: `/_fencing/leases?scope=${SCOPE}` })
  return status === 200
}

/** The service takes the lease away, as if it had run out there, without the client's knowledge. */
async function takeAway({ relay, proxy }: Site): Promise<void> {
  await until(() => relay.requests.some((line) => line.endsWith('/renew')), 'a renewal')
  const [, id = ''] = /leases\/([^/]+)\/renew/.exec(relay.requests.join('\n')) ?? []
  const { status } = await request(proxy.port, {
    method: 'DELETE',
    path: `/_fencing/leases/${id}`,
  })
  assert.equal(status, 204)
}

/** What a service says of a lease that it gives. */
function grant(scope: string, ttl: string): Record<string, string> {
  return { lease: 'l', token: '7', scope, ttl }
}

function grantOf(scope: string, ttl: string): string {
  return JSON.stringify(grant(scope, ttl))
}

/** A lease of a service that gives any, and leaves all else to `answer`. */
async function grantedBy(
  t: TestContext,
  scope: string,
  answer: (seen: Seen) => void,
): Promise<Lease> {
  let lease: Lease | undefined
  t.after(() => lease?.release())
  const backend = await startBackend(t, (seen) => {
    if (seen.method === 'DELETE') seen.res.writeHead(204).end()
    else if (seen.url.startsWith('/_fencing')) seen.res.writeHead(201).end(grantOf(scope, '1h'))
    else answer(seen)
  })
  return (lease = await new FencingClient(backend.url).acquire({ scope }))
}

/** Blanks without an end, as JSON allows them. */
function endless(): Readable {
  const blanks = Buffer.alloc(16_384, ' ')
  return new Readable({
    read() {
      this.push(blanks)
    },
  })
}

function unanswered(error: unknown): error is LeaseUnavailableError {
  assert.ok(error instanceof LeaseUnavailableError, String(error))
  return true
}

function lost(why: LossReason): (error: unknown) => true {
  return (error) => {
    assert.ok(error instanceof LeaseLostError, String(error))
    assert.equal(error.why, why)
    return true
  }
}

/** Fails where the lease is not lost before long. */
async function loss(lease: Lease): Promise<LeaseLostError> {
  const { signal } = lease
  if (!signal.aborted) await once(signal, 'abort')
  assert.ok(signal.reason instanceof LeaseLostError)
  return signal.reason
}

describe('a lease that is held', { timeout: 60_000 }, () => {
  test('writes carry its token, relative targets go to the sidecar, and leaving releases it', async (t) => {
    const { client, backend, proxy } = await startSite(t)
    const token = await client.withLease({ scope: SCOPE, ttl: '5s' }, async (lease) => {
      assert.equal(lease.scope, SCOPE)
      const response = await lease.fetch('/jobs/17/state', { method: 'PUT', body: 'done' })
      assert.equal(response.status, 200)
      assert.equal(response.headers.get('Fencing-Result'), 'accepted')
      assert.equal(await response.text(), 'done')
      assert.ok(await isHeld(proxy.port))
      return lease.token
    })
    assert.match(token, /^\d+$/)
    assert.deepEqual(
      backend.seen.map(({ method, url, headers, body }) => [method, url, headers['fencing-token'], body]),
      [['PUT', '/jobs/17/state', token, 'done']],
    ) // prettier-ignore
    assert.equal(await isHeld(proxy.port), false)
  })

  test('it lives for many TTLs, by renewals at about a third of one', async (t) => {
    const { client, proxy, relay, backend } = await startSite(t)
    const lease = await client.acquire({ scope: SCOPE, ttl: '1s' })
    const began = performance.now()
    await until(() => performance.now() - began > 4_000, 'four TTLs')
    assert.equal(lease.signal.aborted, false)
    assert.ok(await isHeld(proxy.port))
    const renewals = relay.requests.filter((line) => line.endsWith('/renew')).length
    // 4 s at 267 to 333 ms and the way there and back, which a busy machine makes long.
    assert.ok(renewals >= 4 && renewals <= 15, `${renewals} renewals`)
    await lease.fetch('/jobs/17', { method: 'POST' })
    assert.equal(backend.seen[0]?.headers['fencing-token'], lease.token)
    await lease.release()
  })

  test('release is idempotent, aborts what is under way, and nothing starts after it', async (t) => {
    const { client, backend, proxy, relay } = await startSite(t, () => undefined)
    const lease = await client.acquire({ scope: SCOPE })
    const writing = lease.fetch('/jobs/17', { method: 'PUT', body: 'x' })
    const rejected = assert.rejects(writing, lost('released'))
    await until(() => backend.seen.length === 1)
    await Promise.all([lease.release(), lease.release()])
    await lease.release()
    await rejected
    assert.equal((await loss(lease)).why, 'released')
    await assert.rejects(lease.fetch('/jobs/17', { method: 'PUT' }), lost('released'))
    assert.equal(backend.seen.length, 1)
    assert.equal(relay.requests.filter((line) => line.startsWith('DELETE')).length, 1)
    assert.equal(await isHeld(proxy.port), false)
  })

  test('it is released when the function throws, and the error is the function’s', async (t) => {
    const { client, proxy } = await startSite(t)
    const error = new Error('of the work')
    await assert.rejects(
      client.withLease({ scope: SCOPE }, () => {
        throw error
      }),
      error,
    )
    assert.equal(await isHeld(proxy.port), false)
  })

  test('a release that fails hides neither the result nor the error of the function', async (t) => {
    const { client, proxy, relay } = await startSite(t)
    const error = new Error('of the work')
    const terms = { scope: SCOPE, ttl: '1s', wait: '3s' }
    const result = client.withLease(terms, () => {
      relay.loses = () => true
      return 'result'
    })
    assert.equal(await result, 'result')
    relay.loses = () => false
    const failing = client.withLease(terms, async () => {
      await proxy.close()
      throw error
    })
    await assert.rejects(failing, error)
  })

  test('an explicit release that the service does not answer fails by its type', async (t) => {
    const { client, proxy } = await startSite(t)
    const lease = await client.acquire({ scope: SCOPE, ttl: '400ms' })
    await proxy.close()
    await assert.rejects(lease.release(), LeaseUnavailableError)
  })

  test('"await using" releases it', async (t) => {
    const { client, proxy } = await startSite(t)
    {
      await using lease = await client.acquire({ scope: SCOPE })
      assert.ok(await isHeld(proxy.port))
      assert.equal(lease.signal.aborted, false)
    }
    assert.equal(await isHeld(proxy.port), false)
  })
})

describe('a lease that is lost', { timeout: 60_000 }, () => {
  test('410 on renewal: the signal is aborted, and what is under way with it', async (t) => {
    const site = await startSite(t, () => undefined)
    const lease = await site.client.acquire({ scope: SCOPE, ttl: '1500ms' })
    const writing = assert.rejects(lease.fetch('/jobs/17', { method: 'PUT' }), lost('over'))
    await takeAway(site)
    const error = await loss(lease)
    assert.equal(error.why, 'over')
    assert.equal(error.scope, SCOPE)
    assert.equal(error.token, lease.token)
    await writing
    await assert.rejects(lease.fetch('/jobs/17', { method: 'PUT' }), lost('over'))
    assert.equal(site.backend.seen.length, 1)
  })

  test('a write that comes back stale loses the lease, and tells the mark that refused it', async (t) => {
    const site = await startSite(t)
    const lease = await site.client.acquire({ scope: SCOPE, ttl: '3s' })
    await takeAway(site)
    const next = await site.other.acquire({ scope: SCOPE })
    await assert.rejects(lease.fetch('/jobs/17', { method: 'PUT', body: 'late' }), (error) => {
      assert.ok(error instanceof LeaseLostError)
      assert.equal(error.why, 'stale')
      assert.equal(error.problem?.highest, next.token)
      return true
    })
    assert.equal((await loss(lease)).why, 'stale')
    await assert.rejects(lease.fetch('/jobs/17', { method: 'PUT', body: 'again' }), lost('stale'))
    assert.equal(site.relay.requests.filter((line) => line.startsWith('PUT')).length, 1)
    assert.equal(site.backend.seen.length, 0)
    await next.release()
  })

  test('a write that is overtaken in mid-upload loses the lease as superseded', async (t) => {
    const site = await startSite(t)
    const lease = await site.client.acquire({ scope: SCOPE, ttl: '3s' })
    const body = new ReadableStream({ start: (to) => to.enqueue(new TextEncoder().encode('part')) })
    const writing = lease.fetch('/jobs/17', { method: 'PUT', body, duplex: 'half' })
    const rejected = assert.rejects(writing, lost('superseded'))
    await until(() => site.backend.seen.length === 1)
    await takeAway(site)
    const next = await site.other.acquire({ scope: SCOPE })
    const write = await next.fetch('/jobs/17', { method: 'PUT', body: 'new' })
    assert.equal(write.status, 200)
    await rejected
    assert.equal((await loss(lease)).why, 'superseded')
    await next.release()
  })

  test('other 409s, and refusals that say nothing of a newer owner, are plain answers', async (t) => {
    const { client } = await startSite(t, ({ res }) => {
      res.writeHead(409, { 'Fencing-Result': 'stale' }).end('conflict')
    })
    const lease = await client.acquire({ scope: SCOPE })
    const conflict = await lease.fetch('/jobs/17', { method: 'PUT' })
    assert.equal(conflict.status, 409)
    assert.equal(await conflict.text(), 'conflict')
    const unissued = await lease.fetch('/jobs/18', { method: 'PUT' })
    assert.equal(unissued.headers.get('Fencing-Result'), 'unissued')
    assert.equal(lease.signal.aborted, false)
    await lease.release()
  })

  test('a write elsewhere that comes back stale says nothing of this lease, and is the answer', async (t) => {
    const { client, other, proxy } = await startSite(t)
    const lease = await client.acquire({ scope: SCOPE })
    for (const name of ['18', 'ä%']) {
      const scope = `/jobs/${name}`
      for (let owner = 0; owner < 3; owner++) await (await other.acquire({ scope })).release()
    }
    const elsewhere = await lease.fetch('/jobs/18', { method: 'PUT' })
    assert.equal(elsewhere.headers.get('Fencing-Result'), 'stale')
    const { scope } = (await elsewhere.json()) as { scope: string }
    assert.equal(scope, '/jobs/18')
    assert.equal(lease.signal.aborted, false)
    await lease.fetch('/jobs/17', { method: 'PUT' })
    assert.ok(await isHeld(proxy.port))
    await lease.release()
  })

  test('the scope of a refusal is compared decoded', async (t) => {
    const fields = { 'Fencing-Result': 'stale', 'Fencing-Scope': '' }
    const lease = await grantedBy(
      t,
      '/jobs/ä b',
      ({ res }) => void res.writeHead(409, fields).end(),
    )
    for (const other of ['', '/jobs/%', '/jobs/%C3%A4', '/jobs/%25C3%25A4%2520b', '%ff']) {
      fields['Fencing-Scope'] = other
      assert.equal((await lease.fetch('/', { method: 'PUT' })).status, 409)
      assert.equal(lease.signal.aborted, false, other)
    }
    fields['Fencing-Scope'] = '/jobs/%C3%A4%20b'
    await assert.rejects(lease.fetch('/', { method: 'PUT' }), lost('stale'))
  })

  const BODIES: Readonly<Record<string, (res: ServerResponse) => void>> = {
    stalls: (res) => void res.write('{"highest":'),
    breaks: (res) => {
      res.write('{"highest":')
      setImmediate(() => res.destroy())
    },
    'never ends': (res) => void endless().pipe(res),
    'is no JSON': (res) => void res.end('late'),
  }
  for (const [name, answer] of Object.entries(BODIES)) {
    test(`the head of a refusal is enough: the lease is lost also where the body ${name}`, async (t) => {
      const lease = await grantedBy(t, SCOPE, ({ url, res }) => {
        if (url === '/slow') return
        res.writeHead(409, { 'Fencing-Result': 'superseded', 'Fencing-Scope': SCOPE })
        res.flushHeaders()
        answer(res)
      })
      const began = performance.now()
      const slow = lease.fetch('/slow', { method: 'PUT' })
      const abortedAfterMs = once(lease.signal, 'abort').then(() => performance.now() - began)
      const slowAfterMs = assert
        .rejects(slow, lost('superseded'))
        .then(() => performance.now() - began)
      await assert.rejects(lease.fetch('/', { method: 'PUT' }), lost('superseded'))
      const rejectedAfterMs = performance.now() - began
      assert.ok(rejectedAfterMs < 3_000, `${rejectedAfterMs} ms`)
      // What is under way is cut off with the loss, and does not wait for the explanation.
      assert.ok((await abortedAfterMs) < 800, `aborted after ${await abortedAfterMs} ms`)
      assert.ok((await slowAfterMs) < 800, `cut off after ${await slowAfterMs} ms`)
    })
  }

  test('an answer that is lost: the renewal is tried again, and the lease lives on', async (t) => {
    const { client, relay, proxy } = await startSite(t)
    const lease = await client.acquire({ scope: SCOPE, ttl: '2s' })
    await until(() => relay.requests.length > 1, 'the first renewal')
    const heard = relay.requests.length
    relay.loses = () => relay.requests.length === heard + 1
    await until(() => relay.requests.length > heard + 1, 'the next renewal, and a second try of it')
    const began = performance.now()
    await until(() => performance.now() - began > 3_000, 'more than a TTL')
    assert.equal(lease.signal.aborted, false)
    assert.ok(await isHeld(proxy.port))
    await lease.release()
  })

  test('answers that stay lost: aborted by the client’s own clock, though the service still counts it as held', async (t) => {
    const { client, relay, proxy } = await startSite(t, () => undefined)
    const acquiring = performance.now()
    const lease = await client.acquire({ scope: SCOPE, ttl: '1200ms' })
    relay.loses = () => true
    const writing = assert.rejects(lease.fetch('/jobs/17', { method: 'PUT' }), lost('expired'))
    const error = await loss(lease)
    const heldMs = performance.now() - acquiring
    assert.equal(error.why, 'expired')
    assert.ok(error.cause instanceof LeaseUnavailableError, 'it says why no renewal succeeded')
    assert.ok(heldMs >= 1_195 && heldMs < 1_600, `${heldMs} ms`)
    assert.ok(await isHeld(proxy.port), 'renewed there by requests whose answers were lost')
    await writing
  })

  test('an answer that comes after the end does not bring the lease back', async (t) => {
    const held = gate()
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url, { leases: {} })
    let renewals = 0
    const slow: typeof fetch = async (...args) => {
      const response = await fetch(...args)
      if (!response.url.endsWith('/renew')) return response
      renewals++
      // Whole already, so that no signal can take it back.
      const whole = Response.json(await response.json())
      await held.promise
      return whole
    }
    const client = new FencingClient(`http://127.0.0.1:${proxy.port}`, { fetch: slow })
    const lease = await client.acquire({ scope: SCOPE, ttl: '1s' })
    assert.equal((await loss(lease)).why, 'expired')
    held.open()
    const began = performance.now()
    await until(() => performance.now() - began > 600, 'longer than from one renewal to the next')
    assert.equal(renewals, 1)
    assert.equal((await loss(lease)).why, 'expired')
    await lease.release()
  })

  test('what answers in the place of the service does not prolong a lease', async (t) => {
    const proxied = await startSite(t)
    const elsewhere: typeof fetch = async (input, init) => {
      const response = await fetch(input, init)
      if (!response.url.endsWith('/renew')) return response
      return Response.json({ lease: 'another', token: '1', scope: SCOPE, ttl: '1h' })
    }
    const client = new FencingClient(proxied.relay.url, { fetch: elsewhere })
    const lease = await client.acquire({ scope: SCOPE, ttl: '1s' })
    assert.equal((await loss(lease)).why, 'expired')
  })
})

describe('asking for a lease', { timeout: 60_000 }, () => {
  test('while it is held: refused with the holder and a time; with a wait: in turn', async (t) => {
    const { client, other } = await startSite(t)
    const first = await client.acquire({ scope: SCOPE, ttl: '3s', holder: 'worker A' })
    await assert.rejects(other.acquire({ scope: SCOPE }), (error) => {
      assert.ok(error instanceof LeaseHeldError, String(error))
      assert.match(error.detail, /worker A/)
      assert.match(error.message, /\/jobs\/17.*worker A/)
      assert.equal(error.scope, SCOPE)
      assert.equal(error.retryAfterMs, 3_000)
      return true
    })
    await assert.rejects(other.acquire({ scope: SCOPE, wait: '50ms' }), LeaseHeldError)
    const second = other.acquire({ scope: SCOPE, wait: '10s' })
    await first.release()
    assert.ok(BigInt((await second).token) > BigInt(first.token))
    await (await second).release()
  })

  test('a wait that took longer than the TTL: renewed at once, so that it is handed out fresh', async (t) => {
    const { client, other, relay, proxy } = await startSite(t)
    const first = await other.acquire({ scope: SCOPE, ttl: '3s' })
    const second = client.acquire({ scope: SCOPE, ttl: '1500ms', wait: '10s' })
    const began = performance.now()
    await until(
      () => relay.requests.length === 1 && performance.now() - began > 1_600,
      'a long wait',
    )
    await first.release()
    const lease = await second
    assert.equal(lease.signal.aborted, false)
    assert.equal(relay.requests.filter((line) => line.endsWith('/renew')).length, 1)
    assert.ok(await isHeld(proxy.port))
    await lease.release()
  })

  test('a signal ends the waiting, and the place in the queue is given up', async (t) => {
    const { client, other, proxy } = await startSite(t)
    const first = await other.acquire({ scope: SCOPE, ttl: '5s' })
    const leaving = new AbortController()
    const second = client.acquire({ scope: SCOPE, wait: '10s', signal: leaving.signal })
    const reason = new Error('changed its mind')
    const rejected = assert.rejects(second, reason)
    leaving.abort(reason)
    await rejected
    await first.release()
    await until(async () => !(await isHeld(proxy.port)), 'nobody holds it')
    await (await other.acquire({ scope: SCOPE })).release()
  })

  test('a signal that comes during the renewal after a wait: the lease is given back', async (t) => {
    const { client, other, relay, proxy } = await startSite(t)
    relay.loses = (line) => line.endsWith('/renew')
    const leaving = new AbortController()
    const first = await other.acquire({ scope: SCOPE, ttl: '3s' })
    const second = client.acquire({ scope: SCOPE, ttl: '2s', wait: '10s', signal: leaving.signal })
    const rejected = assert.rejects(second, { name: 'AbortError' })
    const began = performance.now()
    await until(() => relay.requests.length === 1 && performance.now() - began > 700, 'waiting')
    await first.release()
    await until(() => relay.requests.length > 1, 'its renewal')
    leaving.abort()
    await rejected
    await until(() => relay.requests.some((line) => line.startsWith('DELETE')), 'given back', 1_500)
    await until(async () => !(await isHeld(proxy.port)), 'free')
  })

  test('what the service does not take is told in its words', async (t) => {
    const { client, proxy } = await startSite(t)
    await assert.rejects(client.acquire({ scope: SCOPE, ttl: '15' }), (error) => {
      assert.ok(error instanceof LeaseRequestError)
      assert.equal(error.status, 400)
      assert.match(error.message, /ttl must be a duration such as 15s/)
      return true
    })
    const misplaced = new FencingClient(`http://127.0.0.1:${proxy.port}`, { prefix: '/leases' })
    await assert.rejects(misplaced.acquire({ scope: SCOPE }), LeaseRequestError)
  })

  test('no service there, one that fails, and one that is none', async (t) => {
    const nobody = new FencingClient(`http://127.0.0.1:${await freePort()}`)
    await assert.rejects(nobody.acquire({ scope: SCOPE }), (error) => {
      assert.ok(error instanceof LeaseUnavailableError)
      assert.equal(error.status, undefined)
      assert.equal(((error.cause as Error).cause as { code?: string }).code, 'ECONNREFUSED')
      return true
    })
    const failing = await startBackend(t, ({ res, url }) => {
      res.writeHead(url.startsWith('/none') ? 200 : 503).end('{"detail":"Try again."}')
    })
    await assert.rejects(new FencingClient(failing.url).acquire({ scope: SCOPE }), (error) => {
      assert.ok(error instanceof LeaseUnavailableError)
      assert.equal(error.status, 503)
      assert.match(error.message, /Try again\./)
      return true
    })
    const none = new FencingClient(failing.url, { prefix: '/none' })
    await assert.rejects(none.acquire({ scope: SCOPE }), LeaseUnavailableError)
  })

  test('a wait of many minutes is asked for in parts', async (t) => {
    const backend = await startBackend(t, ({ res }) => void res.writeHead(409).end())
    const client = new FencingClient(backend.url)
    await assert.rejects(client.acquire({ scope: SCOPE, wait: '9m' }), LeaseHeldError)
    assert.deepEqual(
      backend.seen.map(({ body }) => (JSON.parse(body) as { wait: string }).wait),
      ['240000ms', '240000ms', '60000ms'],
    )
  })
})

describe('an answer whose head is all that comes', { timeout: 60_000, concurrency: true }, () => {
  const BODIES: Readonly<Record<string, (res: ServerResponse) => void>> = {
    stalls: (res) => void res.write('{"lease":'),
    'never ends': (res) => void endless().pipe(res),
    drips: (res) => {
      const drip = setInterval(() => res.write(' '), 50)
      res.on('close', () => clearInterval(drip))
    },
  }
  for (const [name, answer] of Object.entries(BODIES)) {
    test(`a body that ${name}: acquire, renewal and release have an end, and so has the connection`, async (t) => {
      // What is only weakly referenced goes, as it does in the minutes of a real program.
      const collecting = setInterval(collectGarbage, 200)
      t.after(() => clearInterval(collecting))
      let isWell = false
      const backend = await startBackend(t, ({ res }) => {
        if (isWell) return void res.writeHead(201).end(grantOf(SCOPE, '1500ms'))
        res.writeHead(200)
        res.flushHeaders()
        answer(res)
      })
      const client = new FencingClient(backend.url)
      const areBroken = () => backend.seen.every(({ res, broken }) => res.writableEnded || broken)
      await assert.rejects(client.acquire({ scope: SCOPE }), unanswered)
      await until(areBroken, 'cut off', 2_000)
      isWell = true
      const lease = await client.acquire({ scope: SCOPE, ttl: '1500ms' })
      isWell = false
      const { why, cause } = await loss(lease)
      assert.equal(why, 'expired')
      assert.ok(unanswered(cause))
      if (name === 'never ends') assert.ok(cause.cause instanceof RangeError, 'by its size')
      await assert.rejects(lease.release(), unanswered)
      await until(areBroken, 'cut off', 2_000)
    })
  }
})

describe('answers that are none', { timeout: 60_000 }, () => {
  test('a signal ends a request also while its body stalls', async (t) => {
    const backend = await startBackend(t, ({ res }) => void res.writeHead(200).write(' '))
    const leaving = new AbortController()
    const { signal } = leaving
    const rejected = assert.rejects(
      new FencingClient(backend.url).acquire({ scope: SCOPE, signal }),
      { name: 'AbortError' },
    )
    await until(() => backend.seen.length === 1 && backend.seen[0]?.res.headersSent === true)
    const began = performance.now()
    leaving.abort()
    await rejected
    assert.ok(performance.now() - began < 2_000)
  })

  test('a Retry-After that is no number of seconds counts as a second', async (t) => {
    let field = ''
    const backend = await startBackend(t, ({ res }) => {
      res.writeHead(409, { 'Retry-After': field }).end('{}')
    })
    const client = new FencingClient(backend.url)
    for (const [said, ms] of Object.entries({
      ...{ '7': 7_000, '0': 0, soon: 1_000, '-1': 1_000, '1e9': 1_000, '': 1_000 },
      'Wed, 21 Oct 2026 07:28:00 GMT': 1_000,
    })) {
      field = said
      await assert.rejects(client.acquire({ scope: SCOPE }), (error) => {
        assert.ok(error instanceof LeaseHeldError, String(error))
        assert.equal(error.retryAfterMs, ms, said)
        return true
      })
    }
  })

  test('a lease id stays one segment of the path, whatever it holds', async (t) => {
    const id = '../a?b#c/é'
    const backend = await startBackend(t, ({ method, res }) => {
      if (method === 'DELETE') res.writeHead(204).end()
      else res.writeHead(200).end(JSON.stringify({ ...grant(SCOPE, '300ms'), lease: id }))
    })
    const lease = await new FencingClient(backend.url).acquire({ scope: SCOPE, ttl: '300ms' })
    await until(() => backend.seen.length > 1, 'a renewal')
    await lease.release()
    const path = `/_fencing/leases/${encodeURIComponent(id)}`
    assert.equal(backend.seen[1]?.url, `${path}/renew`)
    assert.equal(backend.seen.at(-1)?.url, path)
  })

  test('what is no token is no lease', async (t) => {
    let token = ''
    const backend = await startBackend(t, ({ res }) => {
      res.writeHead(201).end(JSON.stringify({ ...grant(SCOPE, '1s'), token }))
    })
    const client = new FencingClient(backend.url)
    for (token of ['', 'x', '-1', '1.', '.1', '1.2.3', '1e3', ' 1', '1\n', '１', '1\r\nX: y']) {
      await assert.rejects(client.acquire({ scope: SCOPE }), unanswered, JSON.stringify(token))
    }
    for (token of ['7', '2.7']) {
      const lease = await client.acquire({ scope: SCOPE })
      assert.equal(lease.token, token)
      await lease.release().catch(() => undefined)
    }
  })

  test('a release that fails each time is given up after some seconds, however long the TTL', async (t) => {
    const backend = await startBackend(t, ({ method, res }) => {
      if (method === 'DELETE') res.writeHead(503).end()
      else res.writeHead(201).end(grantOf(SCOPE, '24h'))
    })
    const lease = await new FencingClient(backend.url).acquire({ scope: SCOPE })
    const began = performance.now()
    await assert.rejects(lease.release(), LeaseUnavailableError)
    const ms = performance.now() - began
    assert.ok(ms > 2_900 && ms < 3_600, `${ms} ms`)
  })
})

describe('lease.fetch', { timeout: 60_000 }, () => {
  test('takes what fetch takes: URL objects, requests, fields and signals of the caller’s own', async (t) => {
    const { client, relay, backend } = await startSite(t, ({ url, res }) => {
      if (!url.endsWith('/slow')) res.end('done')
    })
    const lease = await client.acquire({ scope: SCOPE })
    const url = new URL('/jobs/17/a?x=1', relay.url)
    await lease.fetch(url, { method: 'PUT', headers: { 'X-Own': 'a', 'Fencing-Token': '999' } })
    await lease.fetch(new Request(url, { method: 'POST', headers: { 'X-Own': 'b' }, body: 'b' }))
    assert.deepEqual(
      backend.seen.map(({ method, url, headers, body }) => [
        ...[method, url, headers['x-own'], headers['fencing-token'], body],
      ]),
      [
        ['PUT', '/jobs/17/a?x=1', 'a', lease.token, ''],
        ['POST', '/jobs/17/a?x=1', 'b', lease.token, 'b'],
      ],
    )
    for (const carry of ['init', 'request'] as const) {
      const leaving = new AbortController()
      const slow = { method: 'PUT', signal: leaving.signal }
      const writing =
        carry === 'init'
          ? lease.fetch('/jobs/17/slow', slow)
          : lease.fetch(new Request(new URL('/jobs/17/slow', relay.url), slow))
      const rejected = assert.rejects(writing, { name: 'AbortError' }, carry)
      leaving.abort()
      await rejected
    }
    assert.equal(lease.signal.aborted, false, 'the caller’s signal is not the lease’s')
    await lease.release()
  })

  test('the token is not sent to another origin, neither directly nor by a redirect', async (t) => {
    const elsewhere = await startBackend(t)
    const { client } = await startSite(t, ({ res }) => {
      res.writeHead(307, { Location: `${elsewhere.url}/jobs/17` }).end()
    })
    const lease = await client.acquire({ scope: SCOPE })
    for (const target of [
      ...[`${elsewhere.url}/jobs/17`, new URL(elsewhere.url), new Request(elsewhere.url)],
      `//127.0.0.1:${elsewhere.port}/jobs/17`,
    ]) {
      await assert.rejects(lease.fetch(target, { method: 'PUT' }), TypeError)
    }
    const redirect = await lease.fetch('/jobs/17', { method: 'PUT', redirect: 'follow' })
    assert.equal(redirect.status, 307)
    assert.equal(elsewhere.seen.length, 0)
    await lease.release()
  })

  test('a base URL that is more than an origin is refused in words', () => {
    for (const url of ['http://h/x', 'http://h/?x', 'http://h/#x', 'http://u:p@h/', 'file:///x']) {
      assert.throws(
        () => new FencingClient(url),
        (error) => {
          assert.ok(error instanceof TypeError)
          assert.match(error.message, /scheme, host and port only/)
          assert.doesNotMatch(error.message, /u:p/)
          return true
        },
        url,
      )
    }
    for (const url of ['http://h', 'http://h/', 'HTTPS://H:443']) new FencingClient(url)
  })

  test('another prefix, a header of another name and a fetch that insists on being a function', async (t) => {
    const backend = await startBackend(t)
    const proxy = await startProxy(t, backend.url, {
      leases: { prefix: '/own/leases' },
      token: { header: 'X-Token' },
    })
    const strict = function (this: unknown, ...args: Parameters<typeof fetch>) {
      // As in browsers: "Illegal invocation" otherwise.
      assert.ok(this === undefined || this === globalThis)
      return fetch(...args)
    }
    const client = new FencingClient(`http://127.0.0.1:${proxy.port}`, {
      prefix: '/own/leases',
      tokenHeader: 'X-Token',
      fetch: strict,
    })
    const lease = await client.acquire({ scope: SCOPE })
    await lease.fetch('jobs/17', { method: 'PUT' })
    assert.equal(backend.seen[0]?.headers['x-token'], lease.token)
    await lease.release()
  })
})
