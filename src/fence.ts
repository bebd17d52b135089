import type { Clock } from './clock.ts'
import type { InFlight, Write } from './inflight.ts'
import { StoreError, type Raised, type Store } from './store/store.ts'
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
 */

export type Decision =
  /** In flight from now on: `inflight.turn` is next. */
  | { readonly verdict: 'admitted' }
  /** Lower than the mark, which is `highest`. */
  | { readonly verdict: 'stale'; readonly highest: Token }
  /** Equal to the mark, on a route that takes each token once. */
  | { readonly verdict: 'repeated'; readonly highest: Token }
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
  readonly cancel: () => void
}

const ADMITTED: Decision = { verdict: 'admitted' }

export class Fence {
  readonly #store: Store
  readonly #inflight: InFlight
  readonly #settings: FenceSettings
  readonly #clock: Clock
  readonly #events: FenceEvents
  readonly #marks: MarkCache
  readonly #rising = new Map<string, Claim[]>()
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
      if (rising.length >= this.#settings.maxWaiting) return { verdict: 'busy' }
      return this.#waitIn(rising, write, enters)
    }
    const mark = this.#marks.get(write.scope)
    if (mark !== undefined && write.token <= mark.token) return this.#compare(write, enters, mark)
    const claims: Claim[] = []
    this.#rising.set(write.scope, claims)
    const decision = this.#waitIn(claims, write, enters)
    void this.#raise(write.scope, claims)
    return decision
  }

  #waitIn(claims: Claim[], write: Write, enters: boolean): Promise<Decision> {
    return new Promise((resolve) => {
      const cancel = this.#clock.after(this.#settings.takeoverTimeoutMs, () => {
        claims.splice(claims.indexOf(claim), 1)
        resolve({ verdict: 'unavailable' })
      })
      const claim: Claim = { write, enters, resolve, cancel }
      claims.push(claim)
    })
  }

  /**
   * Raises the scope's mark until every claim is decided. The highest token goes first: whatever
   * came together with it and is lower is stale by then, at the price of one commit, not of many.
   */
  async #raise(scope: string, claims: Claim[]): Promise<void> {
    while (claims.length > 0) {
      const first = claims.reduce((a, b) => (b.write.token > a.write.token ? b : a))
      // No write of the scope can be admitted while this raise is under way, so what overlaps now
      // is all that can.
      const overlapping = this.#inflight.overlapping(scope) || this.settlingMs > 0
      let raised: Raised
      try {
        raised = await this.#store.raise(scope, first.write.token, overlapping)
      } catch (error) {
        this.#refuseRaises(scope, claims, error)
        continue
      }
      const { mark, from } = raised
      const rose = mark !== from
      // A mark that was found on disk counts as spent: whether a write of it was sent is not kept.
      const known = this.#marks.set(scope, { token: mark, spent: !rose })
      this.#settleAfterUncleanStop(scope, raised)
      if (rose && from !== undefined) {
        this.#inflight.overtake(scope, mark)
        this.#events.takeover(first.write, from)
      }
      for (const claim of takeDecidable(claims, mark)) {
        claim.cancel()
        claim.resolve(this.#compare(claim.write, claim.enters, known))
      }
    }
    this.#rising.delete(scope)
  }

  /** Fails closed: the mark is what it was, and what needed it higher is refused. */
  #refuseRaises(scope: string, claims: Claim[], error: unknown): void {
    if (!(error instanceof StoreError)) throw error
    const mark = this.#marks.get(scope)
    const decidable = mark === undefined ? [] : takeDecidable(claims, mark.token)
    for (const claim of decidable) {
      claim.cancel()
      if (mark !== undefined) claim.resolve(this.#compare(claim.write, claim.enters, mark))
    }
    for (const claim of claims.splice(0)) {
      claim.cancel()
      claim.resolve({ verdict: 'unavailable' })
    }
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
    if (write.once && mark.spent) return { verdict: 'repeated', highest: mark.token }
    if (write.left) return { verdict: 'left' }
    if (enters && !this.#inflight.enter(write)) return { verdict: 'busy' }
    mark.spent = true
    return ADMITTED
  }
}

/** Removes and returns the claims that a mark decides; those with higher tokens stay. */
function takeDecidable(claims: Claim[], mark: Token): Claim[] {
  const decidable = claims.filter(({ write }) => write.token <= mark)
  const higher = claims.filter(({ write }) => write.token > mark)
  claims.splice(0, claims.length, ...higher)
  return decidable
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

  set(scope: string, mark: Mark): Mark {
    if (this.#young.size >= this.#half && !this.#young.has(scope)) {
      this.#old = this.#young
      this.#young = new Map()
    }
    this.#young.set(scope, mark)
    return mark
  }
}
