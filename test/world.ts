import assert from 'node:assert/strict'
import type { Clock } from '../src/clock.ts'
import { Fence, type Decision, type FenceEvents, type FenceSettings } from '../src/fence.ts'
import { InFlight, Write, type BarrierSettings, type Outcome } from '../src/inflight.ts'
import {
  StoreError,
  type LeaseTerms,
  type MarkRow,
  type Raised,
  type Store,
} from '../src/store/store.ts'
import { FIRST_ISSUED, formatToken, nextToken, type Token } from '../src/token.ts'

/**
 * A small world for the real fence and the real barrier: time, the disk and the backend are owned
 * by the test, so that it can choose every interleaving, a crash included. The world judges by
 * DESIGN's promise alone and knows nothing of how the fence keeps it.
 */

export class ManualClock implements Clock {
  #now = 1_000
  #timers: { at: number; then: () => void }[] = []

  now(): number {
    return this.#now
  }

  after(ms: number, then: () => void): () => void {
    const timer = { at: this.#now + ms, then }
    this.#timers.push(timer)
    return () => {
      this.#timers = this.#timers.filter((other) => other !== timer)
    }
  }

  advance(ms: number): void {
    const end = this.#now + ms
    for (;;) {
      const [next] = this.#timers.filter(({ at }) => at <= end).sort((a, b) => a.at - b.at)
      if (next === undefined) break
      this.#timers = this.#timers.filter((other) => other !== next)
      this.#now = Math.max(this.#now, next.at)
      next.then()
    }
    this.#now = end
  }

  /** What a crash does to timers. */
  forget(): void {
    this.#timers = []
  }
}

interface OnDisk {
  mark: Token
  overlapping: boolean
}

/** A disk whose commits succeed or fail when the test says so. */
export class ManualStore implements Store {
  stoppedCleanly = true
  readonly disk = new Map<string, OnDisk>()
  #pending: { act: () => void; fail: () => void }[] = []
  #remnant: (() => void) | undefined

  get scopes(): number {
    return this.disk.size
  }

  get pending(): number {
    return this.#pending.length
  }

  raise(scope: string, token: Token, overlapping: boolean): Promise<Raised> {
    return this.#later(() => this.#raise(scope, token, overlapping))
  }

  grant(scope: string, _lease: LeaseTerms, overlapping: boolean): Promise<Raised> {
    return this.#later(() => {
      const highest = this.disk.get(scope)?.mark
      const next = highest === undefined ? FIRST_ISSUED : nextToken(highest)
      assert.ok(next !== undefined)
      return this.#raise(scope, next, overlapping)
    })
  }

  read(scope: string): Promise<MarkRow | undefined> {
    return this.#later(() => {
      const row = this.disk.get(scope)
      return row && { scope, raisedAt: 0, ...row }
    })
  }

  #raise(scope: string, token: Token, overlapping: boolean): Raised {
    const before = this.disk.get(scope)
    if (before !== undefined && token <= before.mark) return { ...before, from: before.mark }
    const row = { mark: token, overlapping: before !== undefined && overlapping }
    this.disk.set(scope, row)
    return { ...row, from: before?.mark }
  }

  #later<T>(act: () => T): Promise<T> {
    return new Promise((resolve, reject) => {
      const fail = () => reject(new StoreError('the disk said no'))
      this.#pending.push({ act: () => resolve(act()), fail })
    })
  }

  /** One that fails leaves what it wrote behind; the next that succeeds writes over it. */
  commit(ok: boolean): void {
    const next = this.#pending.shift()
    if (next === undefined) return
    this.#remnant = ok ? undefined : next.act
    if (ok) next.act()
    else next.fail()
  }

  /** The process is gone; of what was being committed, the first `kept` reached the disk unseen. */
  crash(kept: number): void {
    this.#remnant?.()
    this.#remnant = undefined
    for (const { act } of this.#pending.splice(0).slice(0, kept)) act()
    this.stoppedCleanly = false
  }

  forget(): Promise<void> {
    return Promise.resolve()
  }
  leases(): Promise<[]> {
    return Promise.resolve([])
  }
  list(): Promise<[]> {
    return Promise.resolve([])
  }
  probe(): Promise<void> {
    return Promise.resolve()
  }
  close(): Promise<void> {
    return Promise.resolve()
  }
}

export const SETTINGS: BarrierSettings = { takeoverTimeoutMs: 100, settleMs: 50, maxWaiting: 100 }

export interface Parts {
  inflight?: (settings: BarrierSettings, clock: Clock) => InFlight
  store?: (inner: ManualStore) => Store
  fence?: (
    store: Store,
    inflight: InFlight,
    settings: FenceSettings,
    clock: Clock,
    events: FenceEvents,
  ) => Fence
  /** Tokens are issued by `grant` alone. */
  leases?: boolean
  /** How a client's leaving in mid-exchange ends its write. Right: not at all, the exchange runs on. */
  onLeave?: (inflight: InFlight, write: Write) => void
}

/** A write as the backend knows it: it began to arrive, and perhaps its end is known. */
interface AtBackend {
  readonly write: Write
  /** undefined: still going on. Otherwise the time until which it may still land. */
  until: number | undefined
}

export class World {
  readonly clock = new ManualClock()
  readonly store = new ManualStore()
  readonly #parts: Parts
  #inflight: InFlight
  #fence: Fence
  /** Everything that began at the backend, per scope. */
  readonly #begun: AtBackend[] = []
  /** Sent and not ended, in this life of the process. */
  readonly sending: Write[] = []
  readonly waiting = new Set<Write>()
  /** The highest token that a holder was told, per scope. */
  readonly issued = new Map<string, Token>()
  /** Scopes with a grant under way. */
  readonly granting = new Set<string>()
  /** What broke the promise while nobody could catch it. */
  readonly violations: unknown[] = []

  constructor(parts: Parts = {}) {
    this.#parts = parts
    ;[this.#inflight, this.#fence] = this.#boot()
  }

  #boot(): [InFlight, Fence] {
    const build = this.#parts.inflight ?? ((settings, clock) => new InFlight(settings, clock))
    const inflight = build(SETTINGS, this.clock)
    const store = this.#parts.store?.(this.store) ?? this.store
    const { leases = false, fence: buildFence = buildRealFence } = this.#parts
    const settings = { ...SETTINGS, leases, cachedMarks: 2 }
    const events = { takeover: () => undefined }
    return [inflight, buildFence(store, inflight, settings, this.clock, events)]
  }

  arrive(scope: string, token: Token, once = false): Write {
    const write = new Write(scope, token, 'route', once)
    this.waiting.add(write)
    const [inflight, fence] = [this.#inflight, this.#fence]
    void this.#live(write, inflight, fence)
      .catch((violation: unknown) => this.violations.push(violation))
      .finally(() => this.waiting.delete(write))
    return write
  }

  /** The scope has a new owner, once that is on disk; one grant of a scope at a time. */
  grant(scope: string): void {
    if (this.granting.has(scope)) return
    this.granting.add(scope)
    const fence = this.#fence
    void fence
      .grant(scope, { id: 'id', holder: 'holder', ttlMs: 1 })
      .then(
        ({ mark }) => {
          if (fence === this.#fence) this.#issue(scope, mark)
        },
        (error: unknown) => assert.ok(error instanceof StoreError),
      )
      .catch((violation: unknown) => this.violations.push(violation))
      .finally(() => {
        if (fence === this.#fence) this.granting.delete(scope)
      })
  }

  /** Each token is issued once, and durable before anybody has it. */
  #issue(scope: string, token: Token): void {
    const said = `${formatToken(token)} was issued for ${scope}`
    const before = this.issued.get(scope)
    const durable = this.store.disk.get(scope)?.mark
    assert.ok(durable !== undefined && token <= durable, `${said}, but is not durable`)
    assert.ok(before === undefined || token > before, `${said} after a token as high`)
    this.issued.set(scope, token)
  }

  async #live(write: Write, inflight: InFlight, fence: Fence): Promise<void> {
    const decision = await fence.decide(write)
    if (inflight !== this.#inflight) return
    this.#check(write, decision)
    if (decision.verdict !== 'admitted') return
    const turn = await inflight.turn(write)
    if (inflight !== this.#inflight) return
    if (turn !== 'go') return
    this.#begin(write)
  }

  /** A 409 names a mark that no crash can take back; a 403 refuses what was issued to nobody. */
  #check(write: Write, decision: Decision): void {
    const durable = this.store.disk.get(write.scope)?.mark
    if (decision.verdict === 'unissued') {
      assert.ok(this.#parts.leases, 'a token was unissued although anybody may issue')
      assert.ok(durable === undefined || durable < write.token, 'a 403 refused an issued token')
    }
    if (decision.verdict !== 'stale') return
    assert.ok(
      durable !== undefined && decision.highest <= durable,
      'a 409 named a mark that is not durable',
    )
    assert.ok(decision.highest > write.token, 'a 409 named a mark that is not higher')
  }

  /** The promise, checked at the moment at which it counts. */
  #begin(write: Write): void {
    const { scope, token } = write
    const said = `${formatToken(token)} began in ${scope}`
    assert.equal(this.store.disk.get(scope)?.mark, token, `${said}, but is not its durable mark`)
    assert.equal(write.left, false, `${said}, but its client had left before`)
    for (const other of this.#begun) {
      if (other.write.scope !== scope || other.write.token >= token) continue
      assert.ok(
        other.until !== undefined,
        `${said} while ${formatToken(other.write.token)} was going on`,
      )
      assert.ok(
        other.until <= this.clock.now(),
        `${said} before ${formatToken(other.write.token)} had settled`,
      )
    }
    assert.ok(
      this.#begun.every(({ write: other }) => other.scope !== scope || other.token <= token),
      `${said} after a newer token`,
    )
    this.#begun.push({ write, until: undefined })
    this.sending.push(write)
    write.onOvertaken = () => undefined
  }

  /** The exchange of the `index`th write under way is over. */
  end(index: number, outcome: Outcome): void {
    const write = this.sending.splice(index % Math.max(1, this.sending.length), 1)[0]
    if (write === undefined) return
    this.#landsUntil(
      write,
      outcome === 'known' ? this.clock.now() : this.clock.now() + SETTINGS.settleMs,
    )
    this.#inflight.end(write, outcome)
  }

  #landsUntil(write: Write, until: number): void {
    for (const begun of this.#begun) if (begun.write === write) begun.until = until
  }

  /** The client of the `index`th write that is not over goes away. */
  leave(index: number): void {
    const writes = [...this.waiting, ...this.sending]
    const write = writes[index % Math.max(1, writes.length)]
    if (write === undefined) return
    if (this.sending.includes(write)) this.#parts.onLeave?.(this.#inflight, write)
    else this.#inflight.leave(write)
  }

  /** kill -9 and a new start: what was under way may land until `settle` after it. */
  crash(kept: number): void {
    for (const write of this.sending.splice(0))
      this.#landsUntil(write, this.clock.now() + SETTINGS.settleMs)
    this.waiting.clear()
    this.granting.clear()
    this.clock.forget()
    this.store.crash(kept)
    ;[this.#inflight, this.#fence] = this.#boot()
  }

  /** A stop with nothing in flight and nothing settling, and a new start. */
  restartCleanly(): void {
    if (!this.#inflight.idle || this.#fence.settlingMs > 0 || this.store.pending > 0) return
    this.clock.forget()
    this.store.stoppedCleanly = true
    ;[this.#inflight, this.#fence] = this.#boot()
  }

  /** Lets everything that can happen without time or the disk happen. */
  async calm(): Promise<void> {
    for (let i = 0; i < 12; i++) await Promise.resolve()
    if (this.violations.length > 0) throw this.violations[0]
  }

  /** Once every fault is gone, nothing is left behind, and a new owner gets through. */
  async checkProgress(scopes: readonly string[]): Promise<void> {
    for (
      let i = 0;
      i < 50 && (this.store.pending > 0 || this.sending.length > 0 || this.waiting.size > 0);
      i++
    ) {
      this.store.commit(true)
      await this.calm()
      this.end(0, 'known')
      this.clock.advance(SETTINGS.settleMs)
      await this.calm()
    }
    assert.equal(this.waiting.size, 0, 'a write waits for ever')
    this.clock.advance(SETTINGS.settleMs)
    for (const scope of scopes) {
      const write = this.arrive(scope, await this.#nextToken(scope))
      await this.calm()
      this.store.commit(true)
      await this.calm()
      this.clock.advance(SETTINGS.settleMs)
      await this.calm()
      assert.ok(this.sending.includes(write), `no progress in ${scope}`)
      this.end(this.sending.indexOf(write), 'known')
    }
    assert.equal(this.granting.size, 0, 'a grant waits for ever')
    assert.ok(this.#inflight.idle, 'something was left in flight')
    assert.equal(this.#inflight.settlingScopes, 0)
  }

  /** For a new owner of the scope. */
  async #nextToken(scope: string): Promise<Token> {
    if (!this.#parts.leases) return ((this.store.disk.get(scope)?.mark ?? 0n) + 1n) as Token
    this.grant(scope)
    await this.calm()
    this.store.commit(true)
    await this.calm()
    const token = this.issued.get(scope)
    assert.ok(token !== undefined, `nobody can take ${scope}`)
    return token
  }
}

const buildRealFence: NonNullable<Parts['fence']> = (...parts) => new Fence(...parts)
