/** What can go wrong with a lease, as errors that a program can tell apart. */

/** What the sidecar says of a refusal (RFC 9457). Fields that it does not know are left out. */
export interface Problem {
  readonly type?: string
  readonly title?: string
  readonly status?: number
  /** In words, with what to do next. */
  readonly detail?: string
  readonly requestId?: string
  readonly scope?: string
  readonly token?: string
  /** The scope's mark: the highest token recorded for it. */
  readonly highest?: string
}

export abstract class LeaseError extends Error {
  readonly scope: string

  constructor(scope: string, message: string, options?: ErrorOptions) {
    super(message, options)
    this.scope = scope
  }
}

/** Another holds the scope, and held it for as long as the request was to wait. */
export class LeaseHeldError extends LeaseError {
  override readonly name = 'LeaseHeldError'
  /** Who holds it and for how long, in words. */
  readonly detail: string
  /** After this long, in ms, the lease that is in the way is over, unless it is renewed. */
  readonly retryAfterMs: number

  constructor(scope: string, detail: string, retryAfterMs: number) {
    super(scope, `${scope} is taken. ${detail}`)
    this.detail = detail
    this.retryAfterMs = retryAfterMs
  }
}

/**
 * - `expired`: its time was up, by the clock of this process, before a renewal succeeded.
 * - `over`: the service says so (410): it has expired there, or someone released it.
 * - `stale`: a write was refused, since the scope has a newer owner.
 * - `superseded`: a write was cut off by a newer owner before it was sent whole.
 * - `released`: by `release()`, or because `withLease` was left.
 */
export type LossReason = 'expired' | 'over' | 'stale' | 'superseded' | 'released'

const LOSSES: Readonly<Record<LossReason, string>> = {
  expired: 'its time was up before a renewal succeeded',
  over: 'the service says that it is over',
  stale: 'a write was refused, since the scope has a newer owner',
  superseded: 'a write was cut off by a newer owner',
  released: 'it was released',
}

/** The lease is no longer this process's: stop working on its scope. The reason of `lease.signal`. */
export class LeaseLostError extends LeaseError {
  override readonly name = 'LeaseLostError'
  readonly token: string
  readonly why: LossReason
  /** The sidecar's answer, in what the refused write itself throws. */
  readonly problem: Problem | undefined

  constructor(
    { scope, token }: { readonly scope: string; readonly token: string },
    why: LossReason,
    { problem, cause }: { readonly problem?: Problem | undefined; readonly cause?: unknown } = {},
  ) {
    const message = `The lease of ${scope} with token ${token} is lost: ${LOSSES[why]}.`
    super(scope, message, cause === undefined ? {} : { cause })
    this.token = token
    this.why = why
    this.problem = problem
  }
}

/** The request itself is refused (4xx): a duration out of range, no lease service at this place. */
export class LeaseRequestError extends LeaseError {
  override readonly name = 'LeaseRequestError'
  readonly status: number
  readonly problem: Problem

  constructor(scope: string, status: number, problem: Problem) {
    super(scope, `Refused with ${status}. ${problem.detail ?? ''}`.trimEnd())
    this.status = status
    this.problem = problem
  }
}

/** No answer, or one that says to try again (5xx). Whether the request took effect is unknown. */
export class LeaseUnavailableError extends LeaseError {
  override readonly name = 'LeaseUnavailableError'
  /** Undefined where no answer came. */
  readonly status: number | undefined

  constructor(scope: string, message: string, status?: number, options?: ErrorOptions) {
    super(scope, message, options)
    this.status = status
  }
}
