import { randomBytes } from 'node:crypto'
import type { Clock } from '../clock.ts'
import type { Fence } from '../fence.ts'
import { StoreError, type Store } from '../store/store.ts'
import type { Token } from '../token.ts'
import {
  NOBODY,
  dueAt,
  restored,
  step,
  type Answer,
  type LeaseRequest,
  type Effect,
  type End,
  type Event,
  type Lease,
  type ScopeState,
} from './lease.ts'

export interface LeaseSettings {
  /** For a grant to reach the disk. */
  readonly commitTimeoutMs: number
  /** The path under which the service lies, such as `/_fencing`. */
  readonly prefix: string
  readonly minTtlMs: number
  readonly maxTtlMs: number
  readonly defaultTtlMs: number
  /** Per scope. */
  readonly maxWaiting: number
}

export interface LeaseEvents {
  /** `from` is the scope's mark before the grant. */
  granted(scope: string, lease: Lease, request: LeaseRequest, from: Token | undefined): void
  ended(scope: string, lease: Lease, why: End, heldMs: number): void
}

export interface Acquiring {
  /** Never rejects. */
  readonly answer: Promise<Answer>
  /** The client left: its place in the queue is gone, and so is a lease that it could not learn of. */
  leave(): void
}

/** Leases read from the store in one go. */
const RESTORED_AT_ONCE = 1000

/** A scope that is held, or about to be. */
interface Entry {
  state: ScopeState
  /** When the timer fires; it may be early, for renewals do not move it. */
  wakesAt: number
  cancelWake: (() => void) | undefined
}

/**
 * The leases that live, in memory; a grant is on disk before anybody hears of it, and a release
 * before it is confirmed. A renewal is not written: after a restart each lease has its whole time
 * again. Expiry is written when it has happened already: a crash in between brings the lease back
 * once more, for one TTL, which delays others and allows nothing.
 */
export class Leases {
  readonly #fence: Fence
  readonly #store: Store
  readonly settings: LeaseSettings
  readonly #clock: Clock
  readonly #events: LeaseEvents
  readonly #scopes = new Map<string, Entry>()
  /** The scope of each live lease, by the lease's id. */
  readonly #byId = new Map<string, string>()
  readonly #answers = new Map<LeaseRequest, (answer: Answer) => void>()
  #stopped = false

  constructor(
    fence: Fence,
    store: Store,
    settings: LeaseSettings,
    clock: Clock,
    events: LeaseEvents,
  ) {
    this.#fence = fence
    this.#store = store
    this.settings = settings
    this.#clock = clock
    this.#events = events
  }

  /** Takes over what an earlier run granted. Before anything else. Rejects with a `StoreError`. */
  async restore(): Promise<void> {
    let after: string | undefined
    for (;;) {
      const page = await this.#store.leases(after, RESTORED_AT_ONCE)
      for (const { scope, ...lease } of page) {
        this.#byId.set(lease.id, scope)
        const state = restored(lease, this.#clock.now())
        const entry: Entry = { state, wakesAt: Infinity, cancelWake: undefined }
        this.#scopes.set(scope, entry)
        this.#wakeInTime(scope, entry)
      }
      if (page.length < RESTORED_AT_ONCE) return
      after = page.at(-1)?.scope
    }
  }

  /** Asks for `scope`; the answer may take as long as `waitMs` and a commit. */
  acquire(
    scope: string,
    terms: { holder: string; ttlMs: number; waitMs: number; requestId: string },
  ): Acquiring {
    const { holder, ttlMs, waitMs, requestId } = terms
    const askedAt = this.#clock.now()
    const id = randomBytes(18).toString('base64url')
    const by: LeaseRequest = { id, holder, ttlMs, askedAt, waitsUntil: askedAt + waitMs, requestId }
    const answer = new Promise<Answer>((resolve) => this.#answers.set(by, resolve))
    if (this.#stopped) this.#answer(by, { is: 'unavailable' })
    else this.#take(scope, { is: 'asked', by })
    return {
      answer,
      leave: () => {
        if (this.#answers.has(by)) this.#take(scope, { is: 'left', who: by })
        this.#answers.delete(by)
      },
    }
  }

  /** The lease with its whole time again; undefined where it is over or never was. */
  renew(id: string): { scope: string; lease: Lease } | undefined {
    const now = this.#clock.now()
    const scope = this.#scopeOf(id, now)
    if (scope === undefined) return undefined
    this.#take(scope, { is: 'renewed' }, now)
    const lease = this.#look(scope, now)
    return lease && { scope, lease }
  }

  /** True once it is on disk that the lease is over; false where it was before. Rejects with a `StoreError`. */
  async release(id: string): Promise<boolean> {
    const asked = this.#clock.now()
    const scope = this.#scopeOf(id, asked)
    const lease = scope === undefined ? undefined : this.#look(scope, asked)
    if (scope === undefined || lease === undefined) return false
    await this.#store.forget(scope, lease.token)
    const now = this.#clock.now()
    if (this.#scopeOf(id, now) === undefined) return false
    this.#take(scope, { is: 'released' }, now)
    return true
  }

  /** The lease is over at once: its answer reached nobody. */
  abandon(id: string): void {
    const now = this.#clock.now()
    const scope = this.#scopeOf(id, now)
    if (scope !== undefined) this.#take(scope, { is: 'abandoned' }, now)
  }

  /** The lease by which `scope` is held now. */
  find(scope: string): Lease | undefined {
    return this.#look(scope, this.#clock.now())
  }

  #look(scope: string, now: number): Lease | undefined {
    if (!this.#scopes.has(scope)) return undefined
    this.#take(scope, { is: 'time passed' }, now)
    const holding = this.#scopes.get(scope)?.state.now
    return holding?.is === 'held' ? holding.lease : undefined
  }

  /** How long a lease has left, in ms. */
  remainingMs({ until }: Lease): number {
    return Math.max(0, until - this.#clock.now())
  }

  get active(): number {
    return this.#byId.size
  }

  /** How long ago the oldest lease that lives was granted, in ms; since the start, if before that. */
  get oldestMs(): number {
    const now = this.#clock.now()
    let oldest = now
    for (const { state } of this.#scopes.values()) {
      if (state.now.is === 'held') oldest = Math.min(oldest, state.now.lease.grantedAt)
    }
    return now - oldest
  }

  /** Refuses whoever waits, and whoever comes; watches no time from then on. */
  stop(): void {
    this.#stopped = true
    for (const entry of this.#scopes.values()) {
      entry.cancelWake?.()
      const waiting = entry.state.queue
      entry.state = { ...entry.state, queue: [] }
      for (const request of waiting) this.#answer(request, { is: 'unavailable' })
    }
  }

  /** The scope of a lease that lives at `now`. */
  #scopeOf(id: string, now: number): string | undefined {
    const scope = this.#byId.get(id)
    // A look at the time: its end may be due.
    return scope !== undefined && this.#look(scope, now)?.id === id ? scope : undefined
  }

  /** Where an event depends on what was found before, both are of one `now`: it moves on meanwhile. */
  #take(scope: string, event: Event, now = this.#clock.now()): void {
    const entry = this.#scopes.get(scope) ?? {
      state: NOBODY,
      wakesAt: Infinity,
      cancelWake: undefined,
    }
    const { state, effects } = step(entry.state, event, now, this.settings)
    entry.state = state
    if (state.now.is === 'free') {
      entry.cancelWake?.()
      this.#scopes.delete(scope)
    } else {
      this.#scopes.set(scope, entry)
      this.#wakeInTime(scope, entry)
    }
    for (const effect of effects) this.#do(scope, effect)
  }

  #do(scope: string, effect: Effect): void {
    switch (effect.do) {
      case 'grant':
        void this.#grant(scope, effect.to)
        return
      case 'begin': {
        const { lease, of, from } = effect
        this.#byId.set(lease.id, scope)
        this.#events.granted(scope, lease, of, from)
        return
      }
      case 'answer':
        this.#answer(effect.to, effect.answer)
        return
      case 'end': {
        const { lease, why } = effect
        this.#byId.delete(lease.id)
        this.#events.ended(scope, lease, why, this.#clock.now() - lease.grantedAt)
        // What fails here is told by the store, and made good by the scope's next grant.
        if (why !== 'released') this.#store.forget(scope, lease.token).catch(ignoreFailure)
        return
      }
      default:
        effect satisfies never
    }
  }

  async #grant(scope: string, to: LeaseRequest): Promise<void> {
    const { id, holder, ttlMs } = to
    try {
      const { mark, from } = await this.#fence.grant(scope, { id, holder, ttlMs })
      this.#take(scope, { is: 'granted', token: mark, from })
    } catch (error) {
      ignoreFailure(error)
      this.#take(scope, { is: 'failed' })
    }
  }

  #answer(to: LeaseRequest, answer: Answer): void {
    this.#answers.get(to)?.(answer)
    this.#answers.delete(to)
  }

  #wakeInTime(scope: string, entry: Entry): void {
    const due = dueAt(entry.state) ?? Infinity
    if (due >= entry.wakesAt || this.#stopped) return
    entry.cancelWake?.()
    entry.wakesAt = due
    entry.cancelWake = this.#clock.after(due - this.#clock.now(), () => {
      entry.wakesAt = Infinity
      this.#take(scope, { is: 'time passed' })
    })
  }
}

function ignoreFailure(error: unknown): void {
  if (!(error instanceof StoreError)) throw error
}
