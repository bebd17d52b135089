import { readText } from './body.ts'
import { LeaseHeldError, LeaseRequestError, LeaseUnavailableError, type Problem } from './errors.ts'
import { ANSWER_WITHIN_MS, parseDuration, parseRetryAfterMs, renewalTimeoutMs } from './timing.ts'

/** Who asks for what, as the service takes it. */
export interface Claim {
  readonly scope: string
  readonly ttl: string | undefined
  readonly holder: string | undefined
  readonly wait: string | undefined
}

/** A lease as it was given out. */
export interface Grant {
  readonly id: string
  readonly scope: string
  readonly token: string
  readonly ttlMs: number
  /** By the monotonic clock, counted from before the request was sent: it is not over before. */
  readonly until: number
}

type Fetch = typeof globalThis.fetch

/** The requests that a client makes of its sidecar, and what their answers mean. */
export class Sidecar {
  readonly #base: URL
  readonly #leases: string
  readonly #tokenHeader: string
  readonly #fetch: Fetch

  constructor(base: URL, prefix: string, tokenHeader: string, fetch: Fetch) {
    this.#base = base
    this.#leases = `${base.origin}${prefix}/leases`
    this.#tokenHeader = tokenHeader
    this.#fetch = fetch
  }

  /** Rejects with the signal's reason or a `LeaseError`. */
  async acquire(claim: Claim, signal: AbortSignal | undefined): Promise<Grant> {
    const { scope, wait } = claim
    const sentAt = performance.now()
    const timeoutMs = parseDuration(wait ?? '') ?? 0
    const answer = await this.#ask(scope, 'POST', '', timeoutMs + ANSWER_WITHIN_MS, signal, claim)
    if (answer.status === 409) {
      const { detail = '' } = problemOf(answer.body)
      const retryAfterMs = parseRetryAfterMs(answer.headers.get('Retry-After'))
      throw new LeaseHeldError(scope, detail, retryAfterMs)
    }
    return grantOf(answer, scope, sentAt)
  }

  /** The lease with its whole time again; undefined where it is over. Rejects like `acquire`. */
  async renew(
    { scope, id, ttlMs }: Grant,
    signal: AbortSignal | undefined,
  ): Promise<Grant | undefined> {
    const sentAt = performance.now()
    const path = `/${encodeURIComponent(id)}/renew`
    const answer = await this.#ask(scope, 'POST', path, renewalTimeoutMs(ttlMs), signal)
    if (answer.status === 410) return undefined
    const renewed = grantOf(answer, scope, sentAt)
    if (renewed.id !== id) throw unusable(scope, answer.status)
    return renewed
  }

  /** Also where the lease was over before. Rejects with a `LeaseError`. */
  async release({ scope, id, ttlMs }: Grant): Promise<void> {
    const path = `/${encodeURIComponent(id)}`
    const answer = await this.#ask(scope, 'DELETE', path, renewalTimeoutMs(ttlMs), undefined)
    if (answer.status !== 410 && answer.status !== 204) refuse(answer, scope)
  }

  /** A request with the token, which any of `signals` ends. Throws a `TypeError` where it would go elsewhere. */
  send(
    input: string | URL | Request,
    init: RequestInit,
    token: string,
    signals: readonly AbortSignal[],
  ): Promise<Response> {
    const [target, given]: [URL | Request, Partial<Request>] =
      typeof input === 'string' || input instanceof URL
        ? [new URL(input, this.#base), {}]
        : [input, input]
    const { origin } = target instanceof URL ? target : new URL(target.url)
    if (origin !== this.#base.origin) {
      throw new TypeError(`The token is for ${this.#base.origin} and is not sent to ${origin}.`)
    }
    const headers = new Headers(init.headers ?? given.headers)
    headers.set(this.#tokenHeader, token)
    const own = init.signal ?? given.signal
    return this.#fetch(target, {
      ...init,
      headers,
      // Followed, a redirect could take the token elsewhere: fetch keeps such fields on its way.
      redirect: init.redirect === 'error' ? 'error' : 'manual',
      // A new one each time also since `fetch` leaves a listener on what it is given, until garbage
      // is collected: on a signal that lives as long as the lease thousands would gather.
      signal: AbortSignal.any(own ? [...signals, own] : [...signals]),
    })
  }

  /** An answer that is not to be tried again (5xx). Rejects like `acquire`. */
  async #ask(
    scope: string,
    method: string,
    path: string,
    timeoutMs: number,
    signal: AbortSignal | undefined,
    body?: object,
  ): Promise<Answer> {
    // One controller, held by the timer and the caller's signal: `AbortSignal.any` and
    // `AbortSignal.timeout` hold theirs weakly.
    const ending = new AbortController()
    const leave = () => ending.abort(signal?.reason)
    const giveUp = () => ending.abort(new Error(`no answer within ${Math.round(timeoutMs)} ms`))
    const timer = setTimeout(giveUp, timeoutMs)
    signal?.addEventListener('abort', leave)
    try {
      signal?.throwIfAborted()
      const response = await this.#fetch(`${this.#leases}${path}`, {
        ...(body && {
          body: JSON.stringify(body),
          headers: { 'Content-Type': 'application/json' },
        }),
        method,
        redirect: 'error',
        signal: ending.signal,
      })
      const { status, headers } = response
      const answer: Answer = {
        status,
        headers,
        body: parse(await readText(response, ending.signal)),
      }
      if (status < 500) return answer
      const { detail = '' } = problemOf(answer.body)
      throw new LeaseUnavailableError(scope, `Answered with ${status}. ${detail}`.trimEnd(), status)
    } catch (error) {
      signal?.throwIfAborted()
      if (error instanceof LeaseUnavailableError) throw error
      const cause = ending.signal.aborted ? (ending.signal.reason as unknown) : error
      const message = `No answer of the lease service at ${this.#leases}.`
      throw new LeaseUnavailableError(scope, message, undefined, { cause })
    } finally {
      clearTimeout(timer)
      signal?.removeEventListener('abort', leave)
    }
  }
}

interface Answer {
  readonly status: number
  readonly headers: Headers
  /** Undefined where it is no JSON. */
  readonly body: unknown
}

const TOKEN = /^\d+(\.\d+)?$/

function grantOf(answer: Answer, scope: string, sentAt: number): Grant {
  const { status, body } = answer
  if (status >= 400) refuse(answer, scope)
  const said: Partial<Record<string, unknown>> = isObject(body) ? body : {}
  const { lease: id, token, scope: granted, ttl } = said
  const ttlMs = typeof ttl === 'string' ? parseDuration(ttl) : undefined
  if (
    typeof id !== 'string' ||
    typeof token !== 'string' ||
    !TOKEN.test(token) ||
    typeof granted !== 'string' ||
    ttlMs === undefined
  ) {
    throw unusable(scope, status)
  }
  return { id, token, scope: granted, ttlMs, until: sentAt + ttlMs }
}

function refuse({ status, body }: Answer, scope: string): never {
  throw new LeaseRequestError(scope, status, problemOf(body))
}

/** Someone else answers at this place. */
function unusable(scope: string, status: number): LeaseUnavailableError {
  return new LeaseUnavailableError(
    scope,
    `Answered with ${status}, but not as a lease service does.`,
    status,
  )
}

/**
 * What an answer says of a newer owner of `scope`, if it does. The scope counts, for a lease can be
 * used for a write elsewhere, too, and then says nothing of the lease's own scope.
 */
export function refusalOf(
  { status, headers }: Response,
  scope: string,
): 'stale' | 'superseded' | undefined {
  const result = headers.get('Fencing-Result')
  if (status !== 409 || (result !== 'stale' && result !== 'superseded')) return undefined
  return decode(headers.get('Fencing-Scope') ?? '') === scope ? result : undefined
}

/** How long an explanation is waited for. */
const EXPLAINED_WITHIN_MS = 1_000

/** What a refusal says of itself; undefined where that does not come soon. */
export async function explanationOf(response: Response): Promise<Problem | undefined> {
  const late = new AbortController()
  const timer = setTimeout(() => late.abort(), EXPLAINED_WITHIN_MS)
  try {
    return problemOf(parse(await readText(response, late.signal)))
  } catch {
    return undefined
  } finally {
    clearTimeout(timer)
  }
}

function problemOf(body: unknown): Problem {
  return isObject(body) ? body : {}
}

/** Undefined where `text` is not percent-encoded UTF-8. */
function decode(text: string): string | undefined {
  try {
    return decodeURIComponent(text)
  } catch {
    return undefined
  }
}

/** Undefined where `text` is no JSON. */
function parse(text: string): unknown {
  try {
    return JSON.parse(text) as unknown
  } catch {
    return undefined
  }
}

function isObject(value: unknown): value is object {
  return typeof value === 'object' && value !== null
}
