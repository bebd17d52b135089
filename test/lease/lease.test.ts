import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import fc from 'fast-check'
import {
  NOBODY,
  dueAt,
  restored,
  step,
  type Answer,
  type LeaseRequest,
  type Effect,
  type Event,
  type Lease,
  type ScopeState,
} from '../../src/lease/lease.ts'
import type { Token } from '../../src/token.ts'

const LIMITS = { maxWaiting: 3, commitTimeoutMs: 40 }

/** One scope, whose time and whose disk belong to the test. */
class Scope {
  state: ScopeState = NOBODY
  now = 1_000
  #asked = 0
  #issued = 0n
  readonly #limits: typeof LIMITS

  constructor(limits = LIMITS) {
    this.#limits = limits
  }

  happens(event: Event): Effect[] {
    const { state, effects } = step(this.state, event, this.now, this.#limits)
    this.state = state
    return effects
  }

  request(holder: string, { ttlMs = 100, waitMs = 0 } = {}): LeaseRequest {
    const id = `${this.#asked++}`
    const { now: askedAt } = this
    return { id, holder, ttlMs, askedAt, waitsUntil: askedAt + waitMs, requestId: `r${id}` }
  }

  asks(by: LeaseRequest): Effect[] {
    return this.happens({ is: 'asked', by })
  }

  granted(): Effect[] {
    const from = this.#issued === 0n ? undefined : (this.#issued as Token)
    this.#issued += 1n
    return this.happens({ is: 'granted', token: this.#issued as Token, from })
  }

  passes(ms: number): Effect[] {
    this.now += ms
    return this.happens({ is: 'time passed' })
  }

  /** Asks and is granted. */
  held(by: LeaseRequest): Lease {
    this.asks(by)
    this.granted()
    return this.lease
  }

  get lease(): Lease {
    const { now } = this.state
    assert.ok(now.is === 'held')
    return now.lease
  }
}

function answersIn(effects: readonly Effect[]): [LeaseRequest, Answer][] {
  return effects.flatMap((effect) =>
    effect.do === 'answer' ? [[effect.to, effect.answer] as [LeaseRequest, Answer]] : [],
  )
}

describe('the rules of leases', () => {
  test('a free scope is granted to whoever asks, and the lease counts from when it is on disk', () => {
    const scope = new Scope()
    const a = scope.request('a', { ttlMs: 70 })
    assert.deepEqual(scope.asks(a), [{ do: 'grant', to: a }])
    scope.now += 30
    const lease = {
      ...{ id: a.id, holder: 'a', ttlMs: 70, token: 1n as Token },
      ...{ grantedAt: scope.now, until: scope.now + 70 },
    }
    assert.deepEqual(scope.granted(), [
      { do: 'begin', lease, of: a, from: undefined },
      { do: 'answer', to: a, answer: { is: 'granted', lease } },
    ])
    assert.deepEqual(scope.state, { now: { is: 'held', lease }, queue: [] })
  })

  test('who does not want to wait learns at once who holds the scope', () => {
    const scope = new Scope()
    const lease = scope.held(scope.request('a'))
    const b = scope.request('b')
    assert.deepEqual(answersIn(scope.asks(b)), [[b, { is: 'held', lease }]])
    assert.deepEqual(scope.state.queue, [])
  })

  test('while a grant is on its way nobody is named as the holder', () => {
    const scope = new Scope()
    scope.asks(scope.request('a'))
    const b = scope.request('b')
    assert.deepEqual(answersIn(scope.asks(b)), [[b, { is: 'held', lease: undefined }]])
  })

  test('those who wait are served in the order in which they came', () => {
    const scope = new Scope()
    scope.held(scope.request('a'))
    const waiting = ['b', 'c', 'd'].map((name) => scope.request(name, { waitMs: 1_000 }))
    for (const by of waiting) assert.deepEqual(scope.asks(by), [])
    for (const by of waiting) {
      const effects = scope.happens({ is: 'released' })
      assert.deepEqual(effects.slice(1), [{ do: 'grant', to: by }])
      scope.granted()
      assert.equal(scope.lease.holder, by.holder)
    }
  })

  test('who leaves the queue loses its place, and nobody else does', () => {
    const scope = new Scope()
    scope.held(scope.request('a'))
    const [b, c, d] = ['b', 'c', 'd'].map((name) => scope.request(name, { waitMs: 1_000 })) as [
      LeaseRequest,
      LeaseRequest,
      LeaseRequest,
    ]
    for (const by of [b, c, d]) scope.asks(by)
    assert.deepEqual(scope.happens({ is: 'left', who: b }), [])
    assert.deepEqual(scope.state.queue, [c, d])
    assert.deepEqual(scope.happens({ is: 'released' }).slice(1), [{ do: 'grant', to: c }])
  })

  test('a grant whose client left meanwhile ends as soon as it is there, and the next one has its turn', () => {
    const scope = new Scope()
    const a = scope.request('a')
    const b = scope.request('b', { waitMs: 1_000 })
    scope.asks(a)
    scope.asks(b)
    assert.deepEqual(scope.happens({ is: 'left', who: a }), [])
    const effects = scope.granted()
    assert.deepEqual(
      effects.map((effect) => (effect.do === 'end' ? `end ${effect.why}` : effect.do)),
      ['begin', 'end abandoned', 'grant'],
    )
    scope.granted()
    assert.equal(scope.lease.holder, 'b')
    assert.equal(scope.lease.token, 2n, 'the token of the abandoned lease is used up')
  })

  test('a lease lives until just before its end, and is over at that very moment', () => {
    const scope = new Scope()
    const lease = scope.held(scope.request('a', { ttlMs: 100 }))
    assert.deepEqual(scope.passes(99.9), [])
    assert.deepEqual(scope.passes(0.1), [{ do: 'end', lease, why: 'expired' }])
    assert.deepEqual(scope.state, NOBODY)
  })

  test('a renewal gives the whole time again, from the renewal on', () => {
    const scope = new Scope()
    scope.held(scope.request('a', { ttlMs: 100 }))
    scope.now += 99
    const { grantedAt } = scope.lease
    assert.deepEqual(scope.happens({ is: 'renewed' }), [])
    assert.equal(scope.lease.until, scope.now + 100)
    assert.equal(scope.lease.grantedAt, grantedAt, 'its age goes on')
  })

  test('a renewal at the very end is too late, whether or not a timer has said so', () => {
    for (const event of [{ is: 'renewed' }, { is: 'released' }] as const) {
      const scope = new Scope()
      scope.held(scope.request('a', { ttlMs: 100 }))
      scope.now += 100
      assert.throws(() => scope.happens(event), /only a lease that is held/)
    }
  })

  test('time decides, not the timer: whoever asks after the end gets the scope, however late the timer is', () => {
    const scope = new Scope()
    const lease = scope.held(scope.request('a', { ttlMs: 100 }))
    scope.now += 100
    const b = scope.request('b')
    assert.deepEqual(scope.asks(b), [
      { do: 'end', lease, why: 'expired' },
      { do: 'grant', to: b },
    ])
  })

  test('a scope that becomes free while the timer is late goes to the first in the queue, not to a newcomer', () => {
    const scope = new Scope()
    scope.held(scope.request('a', { ttlMs: 100 }))
    const b = scope.request('b', { waitMs: 500 })
    scope.asks(b)
    scope.now += 200
    const c = scope.request('c')
    const effects = scope.asks(c)
    assert.deepEqual(effects.slice(1, 2), [{ do: 'grant', to: b }])
    assert.deepEqual(answersIn(effects), [[c, { is: 'held', lease: undefined }]])
  })

  test('who has waited long enough is told who holds the scope', () => {
    const scope = new Scope()
    const lease = scope.held(scope.request('a', { ttlMs: 100 }))
    const b = scope.request('b', { waitMs: 50 })
    const c = scope.request('c', { waitMs: 30 })
    scope.asks(b)
    scope.asks(c)
    assert.equal(dueAt(scope.state), scope.now + 30)
    assert.deepEqual(answersIn(scope.passes(30)), [[c, { is: 'held', lease }]])
    assert.equal(dueAt(scope.state), scope.now + 20)
    assert.deepEqual(answersIn(scope.passes(20)), [[b, { is: 'held', lease }]])
  })

  test('no more than maxWaiting wait; nobody is turned away from a free scope, even with 0', () => {
    const scope = new Scope()
    scope.held(scope.request('a'))
    for (const name of ['b', 'c', 'd']) scope.asks(scope.request(name, { waitMs: 50 }))
    const e = scope.request('e', { waitMs: 50 })
    assert.deepEqual(answersIn(scope.asks(e)), [[e, { is: 'full' }]])

    const narrow = new Scope({ ...LIMITS, maxWaiting: 0 })
    narrow.held(narrow.request('a', { waitMs: 50 }))
    const b = narrow.request('b', { waitMs: 50 })
    assert.deepEqual(answersIn(narrow.asks(b)), [[b, { is: 'full' }]])
  })

  test('a grant that fails is told to who asked for it, and the next one is tried', () => {
    const scope = new Scope()
    const a = scope.request('a')
    const b = scope.request('b', { waitMs: 50 })
    scope.asks(a)
    scope.asks(b)
    const effects = scope.happens({ is: 'failed' })
    assert.deepEqual(effects, [
      { do: 'answer', to: a, answer: { is: 'unavailable' } },
      { do: 'grant', to: b },
    ])
  })

  test('a grant that takes too long is refused, and ended when it comes after all', () => {
    const scope = new Scope()
    const a = scope.request('a')
    scope.asks(a)
    assert.equal(dueAt(scope.state), scope.now + LIMITS.commitTimeoutMs)
    assert.deepEqual(answersIn(scope.passes(40)), [[a, { is: 'unavailable' }]])
    assert.equal(dueAt(scope.state), undefined)
    const b = scope.request('b', { waitMs: 1_000 })
    assert.deepEqual(scope.asks(b), [], 'two grants are never under way')
    const effects = scope.granted()
    assert.deepEqual(
      effects.map((effect) => (effect.do === 'end' ? `end ${effect.why}` : effect.do)),
      ['begin', 'end abandoned', 'grant'],
    )
    assert.deepEqual(answersIn(effects), [], 'a was answered already')
  })

  test('a lease found after a restart has its whole time again', () => {
    const state = restored({ id: 'x', holder: 'a', ttlMs: 100, token: 7n as Token }, 5_000)
    assert.deepEqual(state.now, {
      is: 'held',
      lease: { id: 'x', holder: 'a', ttlMs: 100, token: 7n, grantedAt: 5_000, until: 5_100 },
    })
  })

  test('what is granted or failed was being granted', () => {
    const scope = new Scope()
    assert.throws(() => scope.granted(), /was being granted/)
    assert.throws(() => scope.happens({ is: 'failed' }), /was being granted/)
    assert.throws(() => scope.happens({ is: 'renewed' }), /only a lease that is held/)
    assert.throws(() => scope.happens({ is: 'released' }), /only a lease that is held/)
  })
})

type Move =
  | { do: 'ask'; ttlMs: number; waitMs: number }
  | { do: 'disk'; ok: boolean }
  | { do: 'leave'; index: number }
  | { do: 'renew' }
  | { do: 'release' }
  /** `noticed`: a timer fired. */
  | { do: 'pass'; ms: number; noticed: boolean }

const TIMES = [0, 1, 10, 25, 40, 60]
const move: fc.Arbitrary<Move> = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant('ask' as const), ttlMs: fc.constantFrom(10, 25, 60), waitMs: fc.constantFrom(...TIMES) }) },
  { weight: 5, arbitrary: fc.record({ do: fc.constant('disk' as const), ok: fc.oneof({ weight: 5, arbitrary: fc.constant(true) }, fc.constant(false)) }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant('leave' as const), index: fc.nat(6) }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('renew' as const) }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('release' as const) }) },
  { weight: 5, arbitrary: fc.record({ do: fc.constant('pass' as const), ms: fc.constantFrom(...TIMES), noticed: fc.boolean() }) },
) // prettier-ignore

/** What anybody can see from outside: who asked, who was answered, whose lease is known to live. */
class Witness {
  readonly scope = new Scope()
  /** In the order in which they came; neither answered nor gone. */
  readonly unanswered: LeaseRequest[] = []
  readonly #answered = new Set<LeaseRequest>()
  readonly #gone = new Set<LeaseRequest>()
  granting: { to: LeaseRequest; since: number } | undefined
  live: { lease: Lease; until: number } | undefined
  #highest = 0n

  play(move: Move): void {
    const { scope } = this
    switch (move.do) {
      case 'ask': {
        const by = scope.request('h', move)
        this.unanswered.push(by)
        this.#see(scope.asks(by), 'asked')
        break
      }
      case 'disk':
        if (this.granting === undefined) return
        if (move.ok) this.#see(scope.granted(), 'granted')
        else {
          const { to } = this.granting
          this.granting = undefined
          this.#see(scope.happens({ is: 'failed' }), 'failed')
          assert.ok(this.#answered.has(to) || this.#gone.has(to), 'a failure is told')
        }
        break
      case 'leave': {
        const who = this.unanswered[move.index]
        if (who === undefined) return
        // What was due before it left comes first, an answer included.
        this.#see(scope.happens({ is: 'left', who }), 'left')
        this.#gone.add(who)
        if (this.unanswered.includes(who)) this.unanswered.splice(this.unanswered.indexOf(who), 1)
        break
      }
      case 'renew':
        if (this.live === undefined) return
        if (this.live.until <= scope.now) {
          assert.throws(() => scope.happens({ is: 'renewed' }))
          return
        }
        this.#see(scope.happens({ is: 'renewed' }), 'renewed')
        this.live.until = scope.now + this.live.lease.ttlMs
        break
      case 'release':
        if (this.live === undefined || this.live.until <= scope.now) return
        this.#see(scope.happens({ is: 'released' }), 'released')
        assert.equal(this.live, undefined)
        break
      case 'pass':
        scope.now += move.ms
        if (!move.noticed) return
        this.#see(scope.happens({ is: 'time passed' }), 'time passed')
        break
      default:
        move satisfies never
    }
    this.#check()
  }

  /** Each effect, judged where it stands. */
  #see(effects: readonly Effect[], because: Event['is']): void {
    const { now } = this.scope
    for (const effect of effects) {
      switch (effect.do) {
        case 'grant':
          assert.equal(this.granting, undefined, 'one grant at a time')
          assert.equal(this.live, undefined, 'nobody holds the scope')
          assert.equal(effect.to, this.unanswered[0], 'first come, first served')
          this.granting = { to: effect.to, since: now }
          break
        case 'begin':
          assert.equal(because, 'granted')
          assert.equal(effect.of, this.granting?.to)
          assert.equal(this.live, undefined, 'never two holders')
          assert.ok(effect.lease.token > this.#highest, 'tokens rise')
          assert.equal(effect.lease.until, now + effect.of.ttlMs)
          this.#highest = effect.lease.token
          this.granting = undefined
          this.live = { lease: effect.lease, until: effect.lease.until }
          break
        case 'answer': {
          const { to, answer } = effect
          assert.ok(!this.#answered.has(to), 'answered once')
          assert.ok(!this.#gone.has(to), 'who has left is not answered')
          this.#answered.add(to)
          this.unanswered.splice(this.unanswered.indexOf(to), 1)
          if (answer.is === 'granted') assert.deepEqual(this.live?.lease, answer.lease)
          if (answer.is === 'held') {
            assert.ok(to.waitsUntil <= now, 'nobody is turned away before its time')
            assert.equal(answer.lease?.id, this.live?.lease.id, 'the holder is named')
            assert.equal(answer.lease?.until, this.live?.until, 'with what it has left')
          }
          if (answer.is === 'full') assert.ok(this.#waiting >= LIMITS.maxWaiting)
          break
        }
        case 'end':
          assert.equal(effect.lease.id, this.live?.lease.id, 'what ends was live')
          if (effect.why === 'expired') assert.ok(now >= (this.live?.until ?? Infinity))
          else assert.equal(because, effect.why === 'released' ? 'released' : 'granted')
          if (effect.why === 'abandoned') {
            const alone = !this.unanswered.some(({ id }) => id === effect.lease.id)
            assert.ok(alone, 'nobody waits for what is abandoned')
          }
          this.live = undefined
          break
        default:
          effect satisfies never
      }
    }
  }

  get #waiting(): number {
    return this.unanswered.filter((by) => by !== this.granting?.to).length
  }

  /** The state says what the effects said, and nothing that was due is left. */
  #check(): void {
    const { state, now } = this.scope
    const { now: holding, queue } = state
    assert.deepEqual(
      queue,
      this.unanswered.filter((by) => by !== this.granting?.to),
    )
    assert.ok(queue.length <= LIMITS.maxWaiting)
    if (holding.is === 'free') {
      assert.equal(this.live, undefined)
      assert.equal(this.granting, undefined)
      assert.equal(queue.length, 0, 'nobody waits for a free scope')
    } else if (holding.is === 'granting') assert.equal(holding.to, this.granting?.to)
    else {
      assert.equal(holding.lease.id, this.live?.lease.id)
      assert.equal(holding.lease.until, this.live?.until)
      assert.ok(holding.lease.until > now, 'no lease outlives its time')
    }
    for (const by of this.unanswered) {
      const limit = by === this.granting?.to ? this.granting.since + 40 : by.waitsUntil
      assert.ok(limit > now, 'nobody waits beyond its time')
      assert.ok((dueAt(state) ?? Infinity) <= limit, 'and a timer sees to that')
    }
    if (this.live !== undefined) assert.ok((dueAt(state) ?? Infinity) <= this.live.until)
    assert.ok((dueAt(state) ?? Infinity) > now, 'what is due is done')
  }

  /** Left alone, with a disk that works or one that hangs, all are answered and the scope is free. */
  runOut(disk: 'works' | 'hangs'): void {
    for (let i = 0; i < 100; i++) {
      if (disk === 'works') this.play({ do: 'disk', ok: true })
      const due = dueAt(this.scope.state)
      if (due === undefined) break
      this.play({ do: 'pass', ms: due - this.scope.now, noticed: true })
    }
    assert.deepEqual(this.unanswered, [], 'nobody waits for ever')
    if (disk === 'works') assert.deepEqual(this.scope.state, NOBODY)
  }
}

test('in every history: one holder at most, first come first served, each answered once, time alone ends a lease', () => {
  const histories = fc.array(move, { maxLength: 60, size: 'max' })
  fc.assert(
    fc.property(histories, fc.constantFrom('works', 'hangs'), (moves, disk) => {
      const witness = new Witness()
      for (const each of moves) witness.play(each)
      witness.play({ do: 'pass', ms: 0, noticed: true })
      witness.runOut(disk)
    }),
    { numRuns: 3_000 },
  )
})
