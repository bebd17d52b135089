import type { Clock } from './clock.ts'
import type { Token } from './token.ts'

/**
 * The barrier: which writes are in flight in a scope, which wait for them, and what settles.
 *
 * A check followed by a forward fences nothing: 41 is checked and forwarded, is slow on its way,
 * 42 is checked, forwarded and applied, and then 41 lands. So a write may only be sent when every
 * admitted write of an older token in its scope has ended.
 *
 * Everything here is synchronous: a write enters in the same turn of the event loop in which its
 * token was compared, so no newer mark can come between the comparison and the entry.
 */

/** One write from its decision to its end. Created by the proxy, moved along by Fence and InFlight. */
export class Write {
  readonly scope: string
  readonly token: Token
  /** The route's label, for metrics and logs. */
  readonly route: string
  /** A second write of the same token is refused (`repeat: once`). */
  readonly once: boolean
  /** The client is gone; a write that was not sent yet must not be. */
  left = false
  /** The newer token that took the scope over, once one has. */
  overtakenBy: Token | undefined
  /** Called once, when a newer owner takes the scope over after this write was let through. */
  onOvertaken: ((by: Token) => void) | undefined
  /** Where the write is; only InFlight changes it. */
  place: Place = OUTSIDE

  constructor(scope: string, token: Token, route: string, once: boolean) {
    this.scope = scope
    this.token = token
    this.route = route
    this.once = once
  }
}

type Place =
  | { readonly at: 'outside' }
  | {
      readonly at: 'waiting'
      readonly since: number
      resolve?: (turn: Turn) => void
      cancel?: () => void
    }
  | { readonly at: 'sending' }

const OUTSIDE: Place = { at: 'outside' }
const SENDING: Place = { at: 'sending' }

/** What came of waiting: it may be sent, or a newer token overtook it, or it took too long, or its client left. */
export type Turn = 'go' | 'stale' | 'busy' | 'left'

/** How a write ended: known (answered whole, or never sent), or nobody knows whether it was applied. */
export type Outcome = 'known' | 'unknown'

/** Writes of `token` may still be on their way until the clock reads `until`; newer ones wait for that. */
interface Settling {
  readonly token: Token
  readonly until: number
}

/**
 * Lists, not Sets: what is added to a Set and deleted all the time leaves its outgrown tables in V8's
 * old generation, and those hold on to every write that they name until a full collection.
 */
class Scope {
  /** The newest token that entered; those sending or waiting have this one. */
  newest: Token
  sending: Write[] = []
  /** Let through before a newer token came, and not ended yet. */
  readonly older: Write[] = []
  /** In the order of their arrival. */
  readonly waiting: Write[] = []
  settling: Settling[] = []
  cancelWake: (() => void) | undefined

  constructor(newest: Token) {
    this.newest = newest
  }
}

export interface BarrierSettings {
  readonly takeoverTimeoutMs: number
  readonly settleMs: number
  readonly maxWaiting: number
}

/** What the barrier says of one scope, for the admin port. Times by the barrier's clock, in ms. */
export interface ScopeState {
  readonly inFlight: number
  readonly waiting: number
  /** How long the scope still settles. 0: not settling. */
  readonly settlingMs: number
}

export class InFlight {
  readonly #scopes = new Map<string, Scope>()
  readonly #settings: BarrierSettings
  readonly #clock: Clock
  #settlingScopes = 0
  #onIdle: (() => void)[] = []

  constructor(settings: BarrierSettings, clock: Clock) {
    this.#settings = settings
    this.#clock = clock
  }

  /**
   * A write whose token is the scope's mark enters. It is in flight from here on, and has to be
   * given to `turn` next and to `end` at last. False: too many wait in the scope already.
   */
  enter(write: Write): boolean {
    if (write.place.at !== 'outside') throw new Error('a write enters once')
    this.overtake(write.scope, write.token)
    const scope = this.#scopes.get(write.scope) ?? this.#open(write.scope, write.token)
    if (!this.#mustWait(scope)) {
      write.place = SENDING
      scope.sending.push(write)
    } else if (scope.waiting.length < this.#settings.maxWaiting) {
      write.place = { at: 'waiting', since: this.#clock.now() }
      scope.waiting.push(write)
    } else return false
    return true
  }

  /** The scope has a newer owner: older writes that wait are stale, those on their way are told. */
  overtake(name: string, token: Token): void {
    const scope = this.#scopes.get(name)
    if (scope === undefined || token <= scope.newest) return
    scope.newest = token
    for (const write of [...scope.waiting]) {
      write.overtakenBy = token
      this.#stopWaiting(scope, write, 'stale')
    }
    for (const write of scope.sending) scope.older.push(write)
    scope.sending = []
    // Also those that an earlier takeover told already: they learn the newest token.
    for (const write of [...scope.older]) {
      const first = write.overtakenBy === undefined
      write.overtakenBy = token
      if (first) write.onOvertaken?.(token)
    }
  }

  /**
   * Waits for the write's turn: at once where nothing older is in flight or settling. A promise is
   * returned only when there is something to wait for. After any turn but `go` the write has ended.
   */
  turn(write: Write): Turn | Promise<Turn> {
    const place = write.place
    switch (place.at) {
      case 'sending':
        return write.overtakenBy === undefined ? 'go' : this.#refuse(write, 'stale')
      case 'waiting': {
        const scope = this.#scopeOf(write)
        if (write.left) return this.#refuse(write, 'left')
        return new Promise<Turn>((resolve) => {
          place.resolve = resolve
          place.cancel = this.#clock.after(this.#settings.takeoverTimeoutMs, () => {
            this.#stopWaiting(scope, write, 'busy')
            this.#closeIfEmpty(write.scope, scope)
          })
        })
      }
      case 'outside':
        return write.overtakenBy === undefined ? 'left' : 'stale'
      default:
        return place satisfies never
    }
  }

  /** The client of a write left. One that waits is dropped and never sent; others are not touched. */
  leave(write: Write): void {
    write.left = true
    if (write.place.at === 'waiting') this.#refuse(write, 'left')
  }

  /**
   * The exchange of a write that got its turn is over. An unknown outcome keeps newer tokens out
   * of the scope until `settle` has passed.
   */
  end(write: Write, outcome: Outcome): void {
    if (write.place.at !== 'sending') throw new Error('a write ends once, after its turn')
    const scope = this.#scopeOf(write)
    write.place = OUTSIDE
    remove(scope.sending, write)
    remove(scope.older, write)
    if (outcome === 'unknown') {
      this.#settle(scope, write.token, this.#clock.now() + this.#settings.settleMs)
    }
    this.#advance(write.scope, scope)
  }

  /**
   * Keeps tokens above `token` out of the scope until the clock reads `until`: writes of `token` or
   * older may be on their way from before this process began.
   */
  settle(name: string, token: Token, until: number): void {
    if (until <= this.#clock.now()) return
    const scope = this.#scopes.get(name) ?? this.#open(name, token)
    this.#settle(scope, token, until)
    this.#wakeLater(name, scope)
  }

  /** Whether any write of the scope is in flight, or may be because it settles. */
  overlapping(name: string): boolean {
    const scope = this.#scopes.get(name)
    if (scope === undefined) return false
    return scope.sending.length > 0 || scope.older.length > 0 || scope.settling.length > 0
  }

  state(name: string): ScopeState {
    const scope = this.#scopes.get(name)
    if (scope === undefined) return { inFlight: 0, waiting: 0, settlingMs: 0 }
    const now = this.#clock.now()
    return {
      inFlight: scope.sending.length + scope.older.length,
      waiting: scope.waiting.length,
      settlingMs: Math.max(0, ...scope.settling.map(({ until }) => until - now)),
    }
  }

  /** How many scopes are kept from newer owners because an outcome is unknown. */
  get settlingScopes(): number {
    return this.#settlingScopes
  }

  /** Nothing is in flight, waits or settles. */
  get idle(): boolean {
    return this.#scopes.size === 0
  }

  /** Resolves as soon as `idle` holds. */
  whenIdle(): Promise<void> {
    if (this.idle) return Promise.resolve()
    return new Promise((resolve) => this.#onIdle.push(resolve))
  }

  #open(name: string, newest: Token): Scope {
    const scope = new Scope(newest)
    this.#scopes.set(name, scope)
    return scope
  }

  #scopeOf(write: Write): Scope {
    const scope = this.#scopes.get(write.scope)
    if (scope === undefined) throw new Error('a write that entered has a scope')
    return scope
  }

  #mustWait(scope: Scope): boolean {
    return scope.older.length > 0 || scope.settling.some(({ token }) => token < scope.newest)
  }

  #settle(scope: Scope, token: Token, until: number): void {
    if (scope.settling.length === 0) this.#settlingScopes++
    // Drop what the new one covers: it keeps out no more tokens, and not for longer.
    scope.settling = scope.settling.filter((old) => old.token < token || old.until > until)
    scope.settling.push({ token, until })
  }

  /** Something ended: let those waiting through if nothing older is left, and forget an empty scope. */
  #advance(name: string, scope: Scope): void {
    if (scope.settling.length > 0) {
      const now = this.#clock.now()
      scope.settling = scope.settling.filter(({ until }) => until > now)
      if (scope.settling.length === 0) this.#settlingScopes--
    }
    if (!this.#mustWait(scope)) {
      for (const write of [...scope.waiting]) this.#stopWaiting(scope, write, 'go')
    }
    this.#wakeLater(name, scope)
    this.#closeIfEmpty(name, scope)
  }

  #wakeLater(name: string, scope: Scope): void {
    scope.cancelWake?.()
    scope.cancelWake = undefined
    if (scope.settling.length === 0) return
    const next = Math.min(...scope.settling.map(({ until }) => until))
    scope.cancelWake = this.#clock.after(next - this.#clock.now(), () => this.#advance(name, scope))
  }

  #closeIfEmpty(name: string, scope: Scope): void {
    const members = scope.sending.length + scope.older.length + scope.waiting.length
    if (members > 0 || scope.settling.length > 0) return
    this.#scopes.delete(name)
    if (!this.idle) return
    for (const resolve of this.#onIdle.splice(0)) resolve()
  }

  #refuse(write: Write, turn: Turn): Turn {
    const scope = this.#scopeOf(write)
    if (write.place.at === 'waiting') this.#stopWaiting(scope, write, turn)
    else {
      write.place = OUTSIDE
      remove(scope.sending, write)
      remove(scope.older, write)
    }
    this.#advance(write.scope, scope)
    return turn
  }

  #stopWaiting(scope: Scope, write: Write, turn: Turn): void {
    const place = write.place
    if (place.at !== 'waiting') throw new Error('only a write that waits can stop waiting')
    remove(scope.waiting, write)
    place.cancel?.()
    if (turn === 'go') {
      write.place = SENDING
      scope.sending.push(write)
    } else write.place = OUTSIDE
    place.resolve?.(turn)
  }
}

function remove(writes: Write[], write: Write): void {
  const at = writes.indexOf(write)
  if (at !== -1) writes.splice(at, 1)
}
