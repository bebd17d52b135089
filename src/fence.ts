import type { Clock } from './clock.ts'
import type { InFlight, Write } from './inflight.ts'
import { StoreError, type LeaseTerms, type Raised, type Store } from './store/store.ts'
import type { Token } from './token.ts'

/**
 * The fence: marks in memory over marks on disk. It decides each write: stale, repeated, or
 * admitted; and a mark is on disk before anything is admitted under it, or refused because of it.
 *
 * The mark of a scope lies in one of three states:
 * - on disk only: the next write asks the store, which compares and raises in one step;
 * - known: tokens up to the mark are decided here, without the store;
 * - rising: a raise is on its way to the disk. Every write of the scope waits for its outcome, for
 *   no answer may name a mark that a crash could take back, and no older write may slip in between.
 *
 * A mark rises by a write that brings a higher token; or, where the lease service issues the
 * tokens, by a grant and by nothing else: a mark is then the highest token that was issued, and a
 * write above it carries an invented one.
 */

export type Decision =
  /** In flight from now on: `inflight.turn` is next. */
  | { readonly verdict: 'admitted' }
  /** Lower than the mark, which is `highest`. */
  | { readonly verdict: 'stale'; readonly highest: Token }
  /** Equal to the mark, on a route that takes each token once. */
  | { readonly verdict: 'repeated'; readonly highest: Token }
  /** Higher than every token issued for the scope; `highest` is undefined where none was. */
  | { readonly verdict: 'unissued'; readonly highest: Token | undefined }
  /** The mark could not be made durable (in time). */
  | { readonly verdict: 'unavailable' }
  /** Too many wait in this scope. */
  | { readonly verdict: 'busy' }
  /** The client left before the decision. */
  | { readonly verdict: 'left' }

export interface FenceSettings {
  /** How long a write waits for its mark to reach the disk. */
  readonly takeoverTimeoutMs: number
  readonly settleMs: number
  readonly maxWaiting: number
  /** Tokens are issued by `grant` alone. */
  readonly leases?: boolean
  /** Marks kept in memory; those of scopes in use, as a rule. */
  readonly cachedMarks?: number
}

export interface FenceEvents {
  /** A mark rose over an earlier one because of this write. */
  takeover(write: Write, from: Token): void
}

/** A write that waits for the outcome of a raise. */
interface Claim {
  readonly write: Write
  /** False in observe mode: decided and recorded, but kept out of the barrier. */
  readonly enters: boolean
  readonly resolve: (decision: Decision) => void
  /** When it gives up, by the fence's clock. */
  readonly until: number
}

/** A scope whose mark is being raised, or read to begin with. */
interface Rising {
  /** In the order of their arrival. */
  readonly claims: Claim[]
  grant: Grant | undefined
}

interface Grant {
  readonly lease: LeaseTerms
  readonly resolve: (raised: Raised) => void
  readonly reject: (error: StoreError) => void
}

const ADMITTED: Decision = { verdict: 'admitted' }

export class Fence {
  readonly #store: Store
  readonly #inflight: InFlight
  readonly #settings: FenceSettings
  readonly #clock: Clock
  readonly #events: FenceEvents
  readonly #marks: MarkCache
  readonly #rising = new Map<string, Rising>()
  #cancelGivingUp: (() => void) | undefined
  /** Until then nobody knows what the process before this one left in flight. */
  readonly #settlesUntil: number

  constructor(
    store: Store,
    inflight: InFlight,
    settings: FenceSettings,
    clock: Clock,
    events: FenceEvents,
  ) {
    this.#store = store
    this.#inflight = inflight
    this.#settings = settings
    this.#clock = clock
    this.#events = events
    this.#marks = new MarkCache(settings.cachedMarks ?? 50_000)
    this.#settlesUntil = store.stoppedCleanly ? -Infinity : clock.now() + settings.settleMs
  }

  /**
   * Decides a write, and where it is admitted lets it enter the barrier in the same turn of the
   * event loop. Answers at once where the mark is known, else after one commit.
   */
  decide(write: Write): Decision | Promise<Decision> {
    return this.#decide(write, true)
  }

  /** The same decision and the same record for a route that only observes: nothing enters the barrier. */
  observe(write: Write): Decision | Promise<Decision> {
    return this.#decide(write, false)
  }

  /**
   * Gives the scope a new owner: raises its mark to the next token and keeps the lease, in one
   * commit. Older owners are stale from then on. One grant of a scope at a time. Rejects with a
   * `StoreError`: nothing has changed then.
   */
  grant(scope: string, lease: LeaseTerms): Promise<Raised> {
    return new Promise((resolve, reject) => {
      const grant: Grant = { lease, resolve, reject }
      const rising = this.#rising.get(scope)
      if (rising === undefined) this.#begin(scope, { claims: [], grant })
      else if (rising.grant === undefined) rising.grant = grant
      else throw new Error('a scope has one grant under way at a time')
    })
  }

  /** Nothing of an admitted write was sent after all: a `repeat: once` route may take its token again. */
  giveBack(write: Write): void {
    const mark = this.#marks.get(write.scope)
    if (mark?.token === write.token) mark.spent = false
  }

  /** Until the scopes of an unclean predecessor have settled, in ms from now; 0: they have. */
  get settlingMs(): number {
    return Math.max(0, this.#settlesUntil - this.#clock.now())
  }

  /** Resolves when nothing is in flight or settling, what a predecessor left included. */
  async whenSettled(): Promise<void> {
    await this.#inflight.whenIdle()
    const { settlingMs } = this
    if (settlingMs > 0) await new Promise<void>((resolve) => this.#clock.after(settlingMs, resolve))
  }

  #decide(write: Write, enters: boolean): Decision | Promise<Decision> {
    const rising = this.#rising.get(write.scope)
    if (rising !== undefined) {
      if (rising.claims.length >= this.#settings.maxWaiting) return { verdict: 'busy' }
      return this.#waitIn(rising.claims, write, enters)
    }
    const mark = this.#marks.get(write.scope)
    if (mark !== undefined && (this.#settings.leases === true || write.token <= mark.token)) {
      return this.#compare(write, enters, mark)
    }
    const claims: Claim[] = []
    const decision = this.#waitIn(claims, write, enters)
    this.#begin(write.scope, { claims, grant: undefined })
    return decision
  }

  #begin(scope: string, rising: Rising): void {
    this.#rising.set(scope, rising)
    void this.#raise(scope, rising)
  }

  #waitIn(claims: Claim[], write: Write, enters: boolean): Promise<Decision> {
    return new Promise((resolve) => {
      const until = this.#clock.now() + this.#settings.takeoverTimeoutMs
      claims.push({ write, enters, resolve, until })
      if (this.#cancelGivingUp === undefined) this.#giveUpAt(until)
    })
  }

  /** One timer for the claims of all scopes: all wait equally long, so whoever came first gives up first. */
  #giveUpAt(until: number): void {
    this.#cancelGivingUp = this.#clock.after(until - this.#clock.now(), () => {
      this.#cancelGivingUp = undefined
      const now = this.#clock.now()
      let next = Infinity
      for (const { claims } of this.#rising.values()) {
        for (const { resolve } of takeOut(claims, ({ until }) => until <= now)) {
          resolve({ verdict: 'unavailable' })
        }
        next = Math.min(next, claims[0]?.until ?? Infinity)
      }
      if (next !== Infinity) this.#giveUpAt(next)
    })
  }

  /** Until every claim on the scope is decided and what was to be granted is. */
  async #raise(scope: string, rising: Rising): Promise<void> {
    while (rising.claims.length > 0 || rising.grant !== undefined) {
      const { grant, claims } = rising
      rising.grant = undefined
      try {
        if (grant !== undefined) await this.#raiseByGrant(scope, claims, grant)
        else if (this.#settings.leases === true) await this.#recall(scope, claims)
        else await this.#raiseByWrite(scope, claims)
      } catch (error) {
        if (!(error instanceof StoreError)) throw error
        grant?.reject(error)
        this.#refuseRaises(scope, claims)
      }
    }
    this.#rising.delete(scope)
    if (this.#rising.size > 0) return
    this.#cancelGivingUp?.()
    this.#cancelGivingUp = undefined
  }

  /**
   * The highest token goes first: whatever came together with it and is lower is stale by then, at
   * the price of one commit, not of many.
   */
  async #raiseByWrite(scope: string, claims: Claim[]): Promise<void> {
    const first = claims.reduce((a, b) => (b.write.token > a.write.token ? b : a))
    const raised = await this.#store.raise(scope, first.write.token, this.#overlapping(scope))
    const mark = this.#learn(scope, raised)
    const { from } = raised
    if (raised.mark !== from && from !== undefined) this.#events.takeover(first.write, from)
    this.#decideUpTo(
      mark,
      takeOut(claims, ({ write }) => write.token <= mark.token),
    )
  }

  async #raiseByGrant(scope: string, claims: Claim[], { lease, resolve }: Grant): Promise<void> {
    const raised = await this.#store.grant(scope, lease, this.#overlapping(scope))
    const mark = this.#learn(scope, raised)
    resolve(raised)
    this.#decideUpTo(mark, claims.splice(0))
  }

  /** Looks up what the store has; writes do not raise marks here. */
  async #recall(scope: string, claims: Claim[]): Promise<void> {
    const row = await this.#store.read(scope)
    const mark = row && this.#learn(scope, { ...row, from: row.mark })
    this.#decideUpTo(mark, claims.splice(0))
  }

  /** What the store made of the mark is known from now on, and older owners are told. */
  #learn(scope: string, raised: Raised): Mark {
    const { mark, from } = raised
    const rose = mark !== from
    this.#settleAfterUncleanStop(scope, raised)
    if (rose && from !== undefined) this.#inflight.overtake(scope, mark)
    // A mark that was found on disk counts as spent: whether a write of it was sent is not kept.
    return this.#marks.set(scope, { token: mark, spent: !rose })
  }

  #decideUpTo(mark: Mark | undefined, claims: Claim[]): void {
    for (const { write, enters, resolve } of claims) {
      resolve(
        mark === undefined
          ? { verdict: 'unissued', highest: undefined }
          : this.#compare(write, enters, mark),
      )
    }
  }

  /**
   * Whether older writes of the scope are, or may be, under way. While a raise is, no write of the
   * scope can be admitted, so what overlaps at its beginning is all that can.
   */
  #overlapping(scope: string): boolean {
    return this.#inflight.overlapping(scope) || this.settlingMs > 0
  }

  /**
   * Fails closed. A crash may still bring the higher mark to the disk, as one that was raised over
   * nothing; so older tokens are refused, too, until the store says again what the mark is.
   */
  #refuseRaises(scope: string, claims: Claim[]): void {
    this.#marks.delete(scope)
    for (const { resolve } of claims.splice(0)) resolve({ verdict: 'unavailable' })
  }

  /**
   * After a crash, writes older than the mark that was on disk may still be on their way, and so
   * newer tokens wait; where that mark itself had been raised over older writes, it waits too.
   */
  #settleAfterUncleanStop(scope: string, { mark, from, overlapping }: Raised): void {
    if (this.settlingMs === 0 || from === undefined) return
    if (mark !== from) this.#inflight.settle(scope, from, this.#settlesUntil)
    else if (overlapping) this.#inflight.settle(scope, (mark - 1n) as Token, this.#settlesUntil)
  }

  #compare(write: Write, enters: boolean, mark: Mark): Decision {
    if (write.token < mark.token) return { verdict: 'stale', highest: mark.token }
    if (write.token > mark.token) return { verdict: 'unissued', highest: mark.token }
    if (write.once && mark.spent) return { verdict: 'repeated', highest: mark.token }
    if (write.left) return { verdict: 'left' }
    if (enters && !this.#inflight.enter(write)) return { verdict: 'busy' }
    mark.spent = true
    return ADMITTED
  }
}

/** Removes and returns the claims for which `goes` holds; the others stay in order. */
function takeOut(claims: Claim[], goes: (claim: Claim) => boolean): Claim[] {
  const taken = claims.filter(goes)
  const left = claims.filter((claim) => !goes(claim))
  claims.splice(0, claims.length, ...left)
  return taken
}

interface Mark {
  readonly token: Token
  /** A write of this token was admitted; only `repeat: once` asks. */
  spent: boolean
}

/**
 * The marks used lately. Two maps instead of a linked list: what is in neither the young nor the
 * old half was not asked for while `limit / 2` other scopes were, and is read from disk again.
 */
class MarkCache {
  #young = new Map<string, Mark>()
  #old = new Map<string, Mark>()
  readonly #half: number

  constructor(limit: number) {
    this.#half = Math.max(1, limit / 2)
  }

  get(scope: string): Mark | undefined {
    const young = this.#young.get(scope)
    if (young !== undefined) return young
    const old = this.#old.get(scope)
    return old === undefined ? undefined : this.set(scope, old)
  }

  delete(scope: string): void {
    this.#young.delete(scope)
    this.#old.delete(scope)
  }

  set(scope: string, mark: Mark): Mark {
    if (this.#young.size >= this.#half && !this.#young.has(scope)) {
      this.#old = this.#young
      this.#young = new Map()
    }
    this.#young.set(scope, mark)
    return mark
  }
}
