import assert from 'node:assert/strict'
import path from 'node:path'
import { describe, test, type TestContext } from 'node:test'
import { Fence } from '../../src/fence.ts'
import { InFlight, Write } from '../../src/inflight.ts'
import type { Answer, End, Lease } from '../../src/lease/lease.ts'
import { Leases, type Acquiring } from '../../src/lease/leases.ts'
import { MemoryStore } from '../../src/store/memory.ts'
import { openStore } from '../../src/store/open.ts'
import { StoreError, type Store } from '../../src/store/store.ts'
import { MAX_PART, formatToken, joinToken, type Token } from '../../src/token.ts'
import { temporaryFolder, until } from '../harness.ts'
import { ManualClock, ManualStore } from '../world.ts'

const FENCE = { takeoverTimeoutMs: 60_000, settleMs: 50, maxWaiting: 100 }
const SETTINGS = {
  ...{ prefix: '/_fencing', minTtlMs: 1, maxTtlMs: 3_600_000, defaultTtlMs: 15_000 },
  ...{ maxWaiting: 100, commitTimeoutMs: 60_000 },
}

/** The lease service over `store`, in a time of its own. */
class Service {
  readonly clock = new ManualClock()
  readonly fence: Fence
  readonly leases: Leases
  readonly granted: { scope: string; lease: Lease; from: Token | undefined }[] = []
  readonly ended: { scope: string; lease: Lease; why: End; heldMs: number }[] = []

  constructor(store: Store, settings = SETTINGS, clock = new ManualClock()) {
    this.clock = clock
    const inflight = new InFlight(FENCE, clock)
    const takeover = () => undefined
    this.fence = new Fence(store, inflight, { ...FENCE, leases: true }, clock, { takeover })
    this.leases = new Leases(this.fence, store, settings, clock, {
      granted: (scope, lease, _request, from) => this.granted.push({ scope, lease, from }),
      ended: (scope, lease, why, heldMs) => this.ended.push({ scope, lease, why, heldMs }),
    })
  }

  ask(scope: string, { holder = 'h', ttlMs = 1_000, waitMs = 0 } = {}): Acquiring {
    return this.leases.acquire(scope, { holder, ttlMs, waitMs, requestId: 'r' })
  }

  async acquire(scope: string, terms: { ttlMs?: number } = {}): Promise<Lease> {
    const answer = await this.ask(scope, terms).answer
    assert.ok(answer.is === 'granted', answer.is)
    return answer.lease
  }
}

async function started(store: Store): Promise<Service> {
  const service = new Service(store)
  await service.leases.restore()
  return service
}

function tokenOf(answer: Answer): string | undefined {
  return answer.is === 'granted' ? formatToken(answer.lease.token) : undefined
}

/** An answer, if it is there without waiting for anything else. */
async function soon(answer: Promise<Answer>): Promise<Answer | undefined> {
  for (let i = 0; i < 20; i++) await Promise.resolve()
  return Promise.race([answer, Promise.resolve(undefined)])
}

async function sqlite(t: TestContext): Promise<{ open(): Promise<Store> }> {
  const folder = await temporaryFolder(t)
  const opened: Store[] = []
  t.after(() => Promise.allSettled(opened.map((store) => store.close(false))))
  const events = { committed: () => undefined, failed: () => undefined, died: () => undefined }
  return {
    async open() {
      const file = { type: 'sqlite', path: path.join(folder, 'fence.db'), create: true } as const
      const { store } = await openStore(file, events)
      opened.push(store)
      return store
    },
  }
}

const ENGINES: Record<string, (t: TestContext) => Promise<Store>> = {
  memory: () => Promise.resolve(new MemoryStore()),
  SQLite: async (t) => (await sqlite(t)).open(),
}

for (const [engine, open] of Object.entries(ENGINES)) {
  describe(`leases over a store: ${engine}`, () => {
    test('a scope is granted, held, renewed and released, each time by a higher token', async (t) => {
      const service = await started(await open(t))
      const first = await service.acquire('/jobs/17')
      assert.equal(formatToken(first.token), '1')
      assert.equal(service.leases.find('/jobs/17'), service.granted[0]?.lease)
      const held = await service.ask('/jobs/17').answer
      assert.ok(held.is === 'held' && held.lease?.id === first.id)
      service.clock.advance(900)
      assert.equal(service.leases.remainingMs(first), 100)
      const renewed = service.leases.renew(first.id)
      assert.equal(renewed?.scope, '/jobs/17')
      assert.equal(renewed.lease.token, first.token)
      assert.equal(service.leases.remainingMs(renewed.lease), 1_000)
      assert.equal(service.leases.active, 1)
      assert.equal(service.leases.oldestMs, 900)
      assert.equal(await service.leases.release(first.id), true)
      assert.equal(await service.leases.release(first.id), false, 'once')
      assert.equal(service.leases.renew(first.id), undefined)
      assert.equal(service.leases.find('/jobs/17'), undefined)
      const second = await service.acquire('/jobs/17')
      assert.equal(formatToken(second.token), '2')
      assert.notEqual(second.id, first.id)
      assert.deepEqual(
        service.ended.map(({ why, heldMs }) => [why, heldMs]),
        [['released', 900]],
      )
      assert.deepEqual(
        service.granted.map(({ from }) => from),
        [undefined, first.token],
      )
    })

    test('scopes have sequences and leases of their own', async (t) => {
      const service = await started(await open(t))
      const scopes = ['/a', '/b', '/c']
      const leases = await Promise.all(scopes.map((scope) => service.acquire(scope)))
      assert.deepEqual(leases.map(({ token }) => formatToken(token)), ['1', '1', '1']) // prettier-ignore
      assert.equal(new Set(leases.map(({ id }) => id)).size, 3)
      await service.leases.release(leases[0]?.id ?? '')
      assert.equal(service.leases.find('/b')?.id, leases[1]?.id)
    })

    test('an id cannot be guessed: 144 random bits, in an alphabet for URLs', async (t) => {
      const service = await started(await open(t))
      const { id } = await service.acquire('/a')
      assert.match(id, /^[A-Za-z0-9_-]{24}$/)
      for (const other of ['', id.slice(1), `${id}=`, id.toUpperCase(), '__proto__']) {
        if (other === id) continue
        assert.equal(service.leases.renew(other), undefined)
        assert.equal(await service.leases.release(other), false)
      }
      assert.equal(service.leases.find('/a')?.id, id)
    })

    test('expiry is noticed by time alone, and the one who waits has the scope then', async (t) => {
      const service = await started(await open(t))
      await service.acquire('/a', { ttlMs: 100 })
      const waiting = service.ask('/a', { holder: 'next', waitMs: 500 })
      service.clock.advance(99)
      assert.equal(await soon(waiting.answer), undefined)
      service.clock.advance(1)
      const answer = await waiting.answer
      assert.equal(tokenOf(answer), '2')
      assert.deepEqual(
        service.ended.map(({ why, heldMs }) => [why, heldMs]),
        [['expired', 100]],
      )
    })

    test('a token is never issued twice: not after release, expiry, or when a client left', async (t) => {
      const store = await open(t)
      const service = await started(store)
      const tokens: string[] = []
      for (let round = 0; round < 4; round++) {
        const lease = await service.acquire('/a', { ttlMs: 100 })
        tokens.push(formatToken(lease.token))
        if (round % 2 === 0) await service.leases.release(lease.id)
        else service.clock.advance(100)
        const acquiring = service.ask('/a')
        acquiring.leave()
        await until(() => service.ended.length === 2 * (round + 1))
      }
      assert.deepEqual(tokens, ['1', '3', '5', '7'])
      assert.equal(service.ended.filter(({ why }) => why === 'abandoned').length, 4)
      assert.deepEqual(await store.leases(undefined, 10_000), [], 'nothing that is over is kept')
      assert.equal(service.leases.active, 0)
    })

    test('the sequence goes on above a mark from elsewhere, into the next generation if need be', async (t) => {
      const store = await open(t)
      await store.raise('/a', 1000n as Token, false)
      await store.raise('/b', joinToken(0n, MAX_PART), false)
      await store.raise('/c', joinToken(7n, 41n), false)
      await store.raise('/d', joinToken(MAX_PART, MAX_PART), false)
      const service = await started(store)
      const tokens = ['/a', '/b', '/c'].map((scope) => service.ask(scope).answer)
      assert.deepEqual((await Promise.all(tokens)).map(tokenOf), ['1001', '1.0', '7.42'])
      assert.equal((await service.ask('/d').answer).is, 'unavailable', 'nothing is above the last')
      assert.equal((await store.read('/d'))?.mark, joinToken(MAX_PART, MAX_PART))
    })

    test('the fence knows the new owner before its client does', async (t) => {
      const service = await started(await open(t))
      const lease = await service.acquire('/a')
      const next = service.ask('/a', { waitMs: 500 })
      await service.leases.release(lease.id)
      await next.answer
      const decision = service.fence.decide(new Write('/a', lease.token, 'r', false))
      assert.deepEqual(decision, { verdict: 'stale', highest: 2n })
    })
  })
}

describe('leases over several runs', () => {
  test('every lease that lives has its whole time again; what was released or expired is gone', async (t) => {
    const { open } = await sqlite(t)
    const store = await open()
    const first = await started(store)
    const [kept, renewed, released] = [
      await first.acquire('/kept', { ttlMs: 1_000 }),
      await first.acquire('/renewed', { ttlMs: 500 }),
      await first.acquire('/released', { ttlMs: 1_000 }),
    ]
    await first.acquire('/expired', { ttlMs: 100 })
    first.clock.advance(400)
    first.leases.renew(renewed.id)
    await first.leases.release(released.id)
    await store.probe()
    first.leases.stop()
    await store.close(false)

    const again = await open()
    const second = await started(again)
    assert.equal(second.leases.active, 2)
    assert.equal(second.leases.find('/released'), undefined)
    assert.equal(second.leases.find('/expired'), undefined)
    const found = second.leases.find('/kept')
    assert.deepEqual([found?.id, found?.token, found?.holder], [kept.id, kept.token, 'h'])
    assert.equal(found && second.leases.remainingMs(found), 1_000)
    const also = second.leases.find('/renewed')
    assert.equal(also && second.leases.remainingMs(also), 500)

    assert.ok(second.leases.renew(kept.id), 'its holder goes on')
    assert.equal((await second.ask('/renewed').answer).is, 'held')
    second.clock.advance(999)
    assert.equal(second.leases.find('/renewed'), undefined, 'expired without any question')
    assert.ok(second.leases.find('/kept'))
    second.clock.advance(1)
    assert.equal(second.leases.find('/kept'), undefined)
    for (const scope of ['/kept', '/renewed', '/released', '/expired']) {
      const { token } = await second.acquire(scope)
      assert.equal(formatToken(token), '2')
    }
  })

  test('a mark that rose while leases were off ends the lease below it, and counts for the next one', async (t) => {
    const { open } = await sqlite(t)
    const store = await open()
    const first = await started(store)
    const { id, token } = await first.acquire('/a')
    assert.equal(formatToken(token), '1')
    first.leases.stop()
    await store.close(true)

    const without = await open()
    assert.equal((await without.raise('/a', 1000n as Token, false)).from, token)
    await without.close(true)

    const second = await started(await open())
    assert.equal(second.leases.find('/a'), undefined)
    assert.equal(second.leases.renew(id), undefined)
    assert.equal(formatToken((await second.acquire('/a')).token), '1001')
  })

  test('two leases of one scope are never found: the last one granted counts', async (t) => {
    const { open } = await sqlite(t)
    const store = await open()
    const lease = (id: string) => ({ id, holder: id, ttlMs: 1_000 })
    await store.grant('/a', lease('first'), false)
    await store.grant('/a', lease('second'), false)
    await store.close(false)
    const service = await started(await open())
    assert.equal(service.leases.active, 1)
    assert.equal(service.leases.find('/a')?.id, 'second')
  })
})

/** A disk that does what the test says, under a service. */
function slow() {
  const store = new ManualStore()
  const forgetting: { resolve: () => void; reject: (error: StoreError) => void; token: Token }[] =
    []
  store.forget = (_scope?: string, token?: Token) =>
    new Promise((resolve, reject) => forgetting.push({ resolve, reject, token: token as Token }))
  return { store, forgetting }
}

describe('leases while the disk is slow or fails', () => {
  test('nobody hears of a grant before it is on disk', async () => {
    const { store } = slow()
    const service = new Service(store)
    const { answer } = service.ask('/a')
    assert.equal(await soon(answer), undefined)
    assert.equal(service.leases.find('/a'), undefined)
    assert.equal(service.leases.active, 0)
    store.commit(true)
    assert.equal(tokenOf(await answer), '1')
  })

  test('a grant that fails is told, changes nothing, and the next one goes on', async () => {
    const { store } = slow()
    const service = new Service(store)
    const first = service.ask('/a')
    const second = service.ask('/a', { waitMs: 500 })
    await soon(first.answer)
    store.commit(false)
    assert.deepEqual(await soon(first.answer), { is: 'unavailable' })
    assert.equal(service.granted.length, 0)
    store.commit(true)
    assert.equal(tokenOf(await second.answer), '1')
  })

  test('a grant that takes too long is told, and ended when it comes after all', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store, { ...SETTINGS, commitTimeoutMs: 100 })
    const first = service.ask('/a')
    service.clock.advance(100)
    assert.deepEqual(await soon(first.answer), { is: 'unavailable' })
    const second = service.ask('/a', { waitMs: 500 })
    store.commit(true)
    assert.equal(await soon(second.answer), undefined)
    assert.deepEqual(service.ended.map(({ why }) => why), ['abandoned']) // prettier-ignore
    assert.deepEqual(forgetting.map(({ token }) => token), [1n]) // prettier-ignore
    store.commit(true)
    assert.equal(tokenOf(await second.answer), '2')
  })

  test('a lease is over for its holder only when the disk says so; a failure leaves it as it was', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store)
    const { answer } = service.ask('/a')
    store.commit(true)
    const granted = await answer
    assert.ok(granted.is === 'granted')
    const { id } = granted.lease
    const waiting = service.ask('/a', { waitMs: 10_000 })

    const failing = service.leases.release(id)
    assert.ok(service.leases.find('/a'), 'held while its end is on its way')
    forgetting[0]?.reject(new StoreError('the disk said no'))
    await assert.rejects(failing, StoreError)
    assert.ok(service.leases.renew(id), 'nothing was lost')

    let released: boolean | undefined
    const releasing = service.leases.release(id).then((was) => (released = was))
    assert.equal(await soon(waiting.answer), undefined)
    assert.equal(released, undefined)
    assert.equal(store.pending, 0, 'the next grant waits for the release')
    forgetting[1]?.resolve()
    assert.equal(await releasing, true)
    await until(() => store.pending === 1)
    store.commit(true)
    assert.equal(tokenOf(await waiting.answer), '2')
  })

  test('two releases at once: one ends the lease, the other finds it ended', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store)
    const { answer } = service.ask('/a')
    store.commit(true)
    const granted = await answer
    assert.ok(granted.is === 'granted')
    const both = [1, 2].map(() => service.leases.release(granted.lease.id))
    for (const { resolve } of forgetting) resolve()
    assert.deepEqual(await Promise.all(both), [true, false])
    assert.equal(service.ended.length, 1)
  })

  test('a release whose lease expires meanwhile does not end the next one', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store)
    const { answer } = service.ask('/a', { ttlMs: 100 })
    store.commit(true)
    const granted = await answer
    assert.ok(granted.is === 'granted')
    const releasing = service.leases.release(granted.lease.id)
    const next = service.ask('/a', { waitMs: 500 })
    service.clock.advance(100)
    store.commit(true)
    assert.equal(tokenOf(await next.answer), '2')
    forgetting[0]?.resolve()
    assert.equal(await releasing, false)
    assert.equal(service.leases.find('/a')?.token, 2n)
    assert.deepEqual(forgetting.map(({ token }) => token), [1n, 1n], 'only the old one') // prettier-ignore
  })

  test('an expiry that cannot be written is expired all the same', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store)
    const first = service.ask('/a', { ttlMs: 100 })
    store.commit(true)
    await first.answer
    service.clock.advance(100)
    forgetting[0]?.reject(new StoreError('the disk said no'))
    const second = service.ask('/a')
    store.commit(true)
    assert.equal(tokenOf(await second.answer), '2')
  })

  test('a client that leaves during the commit leaves nothing behind', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store)
    const first = service.ask('/a')
    const second = service.ask('/a', { waitMs: 500 })
    first.leave()
    first.leave()
    store.commit(true)
    assert.equal(await soon(second.answer), undefined)
    store.commit(true)
    assert.equal(tokenOf(await second.answer), '2')
    assert.deepEqual(service.ended.map(({ why }) => why), ['abandoned']) // prettier-ignore
    assert.deepEqual(forgetting.map(({ token }) => token), [1n]) // prettier-ignore
    assert.equal(await soon(first.answer), undefined)
  })

  test('a stop refuses those who wait and those who come, lets a grant under way end, and keeps every lease', async () => {
    const { store, forgetting } = slow()
    const service = new Service(store)
    const held = service.ask('/a')
    store.commit(true)
    await held.answer
    const waiting = service.ask('/a', { waitMs: 500 })
    const granting = service.ask('/b')
    service.leases.stop()
    assert.deepEqual(await soon(waiting.answer), { is: 'unavailable' })
    assert.deepEqual(await soon(service.ask('/c').answer), { is: 'unavailable' })
    store.commit(true)
    assert.equal(tokenOf(await granting.answer), '1')
    service.clock.advance(1_000_000)
    assert.deepEqual(service.ended, [], 'no time is watched any longer')
    assert.deepEqual(forgetting, [])
  })
})

/** A time that goes on with every look, as the real one does. */
class RunningClock extends ManualClock {
  #looks = 0
  #perLook = 0
  #skipped = 0

  override now(): number {
    return super.now() + this.#skipped + this.#perLook * this.#looks++
  }

  /** Time passes, and no timer notices. */
  skip(ms: number): void {
    this.#skipped += ms
  }

  run(msPerLook: number): void {
    this.#perLook = msPerLook
    this.#looks = 0
  }
}

test('a lease whose time runs out in the middle of a renewal or a release is either over or not', async () => {
  for (const perLook of [1, 2, 3, 5, 10]) {
    for (let left = 0; left <= 12; left++) {
      for (const act of ['renew', 'release'] as const) {
        const clock = new RunningClock()
        const service = new Service(new MemoryStore(), SETTINGS, clock)
        const { id } = await service.acquire('/a', { ttlMs: 100 })
        clock.skip(100 - left)
        clock.run(perLook)
        if (act === 'renew') service.leases.renew(id)
        else await service.leases.release(id)
        clock.run(0)
        assert.ok(service.leases.active <= 1)
      }
    }
  }
})
