import type { Token } from '../token.ts'

/**
 * The rules of leases: who holds a scope, who waits for it, and when that changes. Pure: what
 * happened comes in with the time, the new state and what is to be done about it go out. Times are
 * milliseconds of one monotonic clock; no other clock decides anything.
 *
 * A lease is for liveness only: it says whose turn it is. What keeps an old holder from writing is
 * the mark, which a grant raises; so nothing here has to be right for a write to be fenced.
 */

/** A request for a scope; the same object stands for it throughout. */
export interface LeaseRequest {
  /** The lease's id, if it comes to one. */
  readonly id: string
  readonly holder: string
  readonly ttlMs: number
  readonly askedAt: number
  /** Until then it waits while another holds the scope; `askedAt`: not at all. */
  readonly waitsUntil: number
  readonly requestId: string
}

export interface Lease {
  readonly id: string
  readonly token: Token
  readonly holder: string
  readonly ttlMs: number
  readonly grantedAt: number
  /** Over from this moment on, unless it is renewed before. */
  readonly until: number
}

/** How it stands with one scope. Without a holder nobody waits. */
export interface ScopeState {
  readonly now: Holding
  /** First come, first served. */
  readonly queue: readonly LeaseRequest[]
}

type Holding =
  | { readonly is: 'free' }
  /**
   * On its way to the disk, and waited for until `until`. `left`: its client is gone or was told
   * that it failed, and nobody else knows its id.
   */
  | {
      readonly is: 'granting'
      readonly to: LeaseRequest
      readonly until: number
      readonly left: boolean
    }
  | { readonly is: 'held'; readonly lease: Lease }

export type Event =
  | { readonly is: 'asked'; readonly by: LeaseRequest }
  /** The grant is on disk; `from` is the scope's mark before it. */
  | { readonly is: 'granted'; readonly token: Token; readonly from: Token | undefined }
  /** The grant could not be made durable. */
  | { readonly is: 'failed' }
  | { readonly is: 'left'; readonly who: LeaseRequest }
  | { readonly is: 'renewed' }
  | { readonly is: 'released' }
  /** Its answer did not reach the client. */
  | { readonly is: 'abandoned' }
  | { readonly is: 'time passed' }

export type Effect =
  | { readonly do: 'grant'; readonly to: LeaseRequest }
  | {
      readonly do: 'begin'
      readonly lease: Lease
      readonly of: LeaseRequest
      readonly from: Token | undefined
    }
  | { readonly do: 'answer'; readonly to: LeaseRequest; readonly answer: Answer }
  | { readonly do: 'end'; readonly lease: Lease; readonly why: End }

export type Answer =
  | { readonly is: 'granted'; readonly lease: Lease }
  /** Another's; `lease` is undefined while its grant is on its way. */
  | { readonly is: 'held'; readonly lease: Lease | undefined }
  /** Too many wait for this scope. */
  | { readonly is: 'full' }
  /** It could not be made durable, or the process is stopping. */
  | { readonly is: 'unavailable' }

/** `abandoned`: its client left before it could learn of it. */
export type End = 'expired' | 'released' | 'abandoned'

export const NOBODY: ScopeState = { now: { is: 'free' }, queue: [] }

/** A lease that was found after a restart has its whole time again: its holder could not renew it. */
export function restored(
  { id, token, holder, ttlMs }: Omit<Lease, 'until' | 'grantedAt'>,
  now: number,
): ScopeState {
  const lease: Lease = { id, token, holder, ttlMs, grantedAt: now, until: now + ttlMs }
  return { now: { is: 'held', lease }, queue: [] }
}

export interface Limits {
  /** Requests that wait for one scope. */
  readonly maxWaiting: number
  /** For a grant to reach the disk. */
  readonly commitTimeoutMs: number
}

/** What `event` makes of a scope at `now`. What is due by then comes first, however late a timer is. */
export function step(
  state: ScopeState,
  event: Event,
  now: number,
  limits: Limits,
): { state: ScopeState; effects: Effect[] } {
  const effects: Effect[] = []
  const due = pass(state, now, limits, effects)
  const after = pass(apply(due, event, now, limits, effects), now, limits, effects)
  return { state: after, effects }
}

/** When something becomes due without an event; undefined: never. */
export function dueAt({ now, queue }: ScopeState): number | undefined {
  const times = queue.map(({ waitsUntil }) => waitsUntil)
  if (now.is === 'held') times.push(now.lease.until)
  if (now.is === 'granting' && !now.left) times.push(now.until)
  return times.length === 0 ? undefined : Math.min(...times)
}

function apply(
  state: ScopeState,
  event: Event,
  now: number,
  limits: Limits,
  effects: Effect[],
): ScopeState {
  const { now: holding, queue } = state
  switch (event.is) {
    case 'asked': {
      const { by } = event
      if (holding.is === 'free' || by.waitsUntil > now) {
        // A free scope has no queue: whoever is alone in it gets the scope below.
        if (queue.length < Math.max(limits.maxWaiting, holding.is === 'free' ? 1 : 0)) {
          return { now: holding, queue: [...queue, by] }
        }
        effects.push({ do: 'answer', to: by, answer: { is: 'full' } })
      } else {
        effects.push({ do: 'answer', to: by, answer: { is: 'held', lease: leaseOf(holding) } })
      }
      return state
    }
    case 'granted': {
      if (holding.is !== 'granting') throw new Error('what is granted was being granted')
      const { id, holder, ttlMs } = holding.to
      const lease: Lease = {
        ...{ id, holder, ttlMs, token: event.token },
        ...{ grantedAt: now, until: now + ttlMs },
      }
      effects.push({ do: 'begin', lease, of: holding.to, from: event.from })
      if (holding.left) {
        effects.push({ do: 'end', lease, why: 'abandoned' })
        return { now: { is: 'free' }, queue }
      }
      effects.push({ do: 'answer', to: holding.to, answer: { is: 'granted', lease } })
      return { now: { is: 'held', lease }, queue }
    }
    case 'failed':
      if (holding.is !== 'granting') throw new Error('what failed was being granted')
      if (!holding.left) {
        effects.push({ do: 'answer', to: holding.to, answer: { is: 'unavailable' } })
      }
      return { now: { is: 'free' }, queue }
    case 'left':
      if (holding.is === 'granting' && holding.to === event.who) {
        return { now: { ...holding, left: true }, queue }
      }
      return { now: holding, queue: queue.filter((request) => request !== event.who) }
    case 'renewed': {
      if (holding.is !== 'held') throw new Error('only a lease that is held can be renewed')
      const lease = { ...holding.lease, until: now + holding.lease.ttlMs }
      return { now: { is: 'held', lease }, queue }
    }
    case 'released':
    case 'abandoned':
      if (holding.is !== 'held') throw new Error('only a lease that is held can be given up')
      effects.push({ do: 'end', lease: holding.lease, why: event.is })
      return { now: { is: 'free' }, queue }
    case 'time passed':
      return state
    default:
      return event satisfies never
  }
}

/** What is due: a lease's end, the next in the queue, and the end of others' patience. */
function pass(state: ScopeState, now: number, limits: Limits, effects: Effect[]): ScopeState {
  let { now: holding, queue } = state
  if (holding.is === 'held' && holding.lease.until <= now) {
    effects.push({ do: 'end', lease: holding.lease, why: 'expired' })
    holding = { is: 'free' }
  }
  if (holding.is === 'granting' && !holding.left && holding.until <= now) {
    // It may still come to be; then it is ended at once.
    effects.push({ do: 'answer', to: holding.to, answer: { is: 'unavailable' } })
    holding = { ...holding, left: true }
  }
  const [next, ...rest] = queue
  if (holding.is === 'free' && next !== undefined) {
    effects.push({ do: 'grant', to: next })
    const until = now + limits.commitTimeoutMs
    holding = { is: 'granting', to: next, until, left: false }
    queue = rest
  }
  if (queue.some(({ waitsUntil }) => waitsUntil <= now)) {
    for (const to of queue.filter(({ waitsUntil }) => waitsUntil <= now)) {
      effects.push({ do: 'answer', to, answer: { is: 'held', lease: leaseOf(holding) } })
    }
    queue = queue.filter(({ waitsUntil }) => waitsUntil > now)
  }
  return { now: holding, queue }
}

function leaseOf(holding: Holding): Lease | undefined {
  return holding.is === 'held' ? holding.lease : undefined
}
