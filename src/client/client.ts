/// <reference lib="esnext.disposable" preserve="true" />
import { LeaseHeldError, LeaseLostError, LeaseUnavailableError, type LossReason } from './errors.ts'
import { Sidecar, explanationOf, refusalOf, type Grant } from './sidecar.ts'
import { renewAfterMs, retryAfterMs, waitsOf } from './timing.ts'

export {
  LeaseError,
  LeaseHeldError,
  LeaseLostError,
  LeaseRequestError,
  LeaseUnavailableError,
} from './errors.ts'
export type { LossReason, Problem } from './errors.ts'

/**
 * A client of the lease service, for Node and browsers. A lease that it holds is renewed in the
 * background until it is released or lost; once it is lost, nothing starts under it any more.
 *
 * None of this makes a write safe: between a look at the clock and the write's arrival a process
 * can be paused for any time. The token does that, at the sidecar. What the client adds is that a
 * worker notices early, and stops.
 */

export interface ClientOptions {
  /** The path under which the service lies: `leases.prefix` of the sidecar. Default: `/_fencing`. */
  readonly prefix?: string | undefined
  /** The field of the token: `token.header` of the sidecar. Default: `Fencing-Token`. */
  readonly tokenHeader?: string | undefined
  /** Sends all requests. Default: the global `fetch`. */
  readonly fetch?: typeof globalThis.fetch | undefined
}

/** Durations are text, as the service takes them: `500ms`, `15s`, `2m`, `1h`. */
export interface LeaseTerms {
  /** What is to be held, such as `/jobs/17`: a scope as the sidecar's routes make them. */
  readonly scope: string
  /** How long the lease lives without a renewal. Default: the service's `defaultTtl`. */
  readonly ttl?: string | undefined
  /** Who asks, for others to read. Default: the address from which the request comes. */
  readonly holder?: string | undefined
  /** How long to queue while another holds the scope. Default: not at all. */
  readonly wait?: string | undefined
  /** Ends the asking; it has no effect on a lease once that is held. */
  readonly signal?: AbortSignal | undefined
}

/** A lease that is, or was, this process's. */
export interface Lease {
  readonly scope: string
  /** Goes with each write; never to be read as a number. */
  readonly token: string
  /**
   * Aborted when the lease is lost; its reason is a `LeaseLostError`. Reading this property looks
   * at the clock first: after a pause it finds out before any timer has run. So read it anew before
   * each step of the work, in place of keeping it.
   *
   * The clock is `performance.now()`. It may stand still while the whole machine sleeps; then the
   * first renewal or write tells.
   */
  readonly signal: AbortSignal
  /**
   * The global `fetch`, with the token. Relative targets are resolved against the client's URL.
   * Nothing is sent once the lease is lost, and what is under way then is aborted: its outcome is
   * unknown. So read an answer's body before the release. Redirects are not followed; they are the
   * answer.
   *
   * @throws LeaseLostError where the lease is lost before the answer came, also by this very write
   *   (409 `stale` or `superseded` for the lease's own scope; for another it is the answer);
   *   TypeError for another origin than the client's.
   */
  fetch(input: string | URL | Request, init?: RequestInit): Promise<Response>
  /**
   * Aborts what is under way and gives the lease back. May be called again, with no effect.
   *
   * @throws LeaseUnavailableError where the service could not be told within some seconds. The
   *   lease then ends by itself, after its TTL.
   */
  release(): Promise<void>
  /** For `await using`. Unlike `release` it does not fail. */
  [Symbol.asyncDispose](): Promise<void>
}

export class FencingClient {
  readonly #sidecar: Sidecar

  /**
   * `baseUrl`: the data port of the sidecar, such as `http://127.0.0.1:8080`. It is an origin.
   *
   * @throws TypeError where it has a path.
   */
  constructor(baseUrl: string | URL, options: ClientOptions = {}) {
    const { prefix = '/_fencing', tokenHeader = 'Fencing-Token', fetch } = options
    const base = new URL(baseUrl)
    if (base.href !== `${base.origin}/`) {
      throw new TypeError(
        `The URL of a sidecar is scheme, host and port only, such as http://127.0.0.1:8080; ` +
          `this one goes on: ${base.origin}${base.pathname}${base.search}${base.hash}`,
      )
    }
    // Browsers do not let `fetch` be called as another object's method.
    const send: typeof fetch = (...args) => (fetch ?? globalThis.fetch)(...args)
    this.#sidecar = new Sidecar(base, prefix, tokenHeader, send)
  }

  /**
   * Takes a lease. It is renewed until it is released or lost, so release it: `withLease` and
   * `await using` do so by themselves. In Node a lease does not keep the process alive.
   *
   * A `wait` of more than four minutes is made of several requests, each of which queues anew.
   *
   * @throws LeaseHeldError, LeaseRequestError, LeaseUnavailableError; LeaseLostError where the
   *   lease was over before its answer came; the reason of `signal` where that is aborted.
   */
  async acquire(terms: LeaseTerms): Promise<Lease> {
    const { signal } = terms
    const grant = await this.#queue(terms, waitsOf(terms.wait))
    try {
      const fresh = await this.#refresh(grant, signal)
      signal?.throwIfAborted()
      return new HeldLease(this.#sidecar, fresh)
    } catch (error) {
      // Nobody will release it.
      this.#sidecar.release(grant).catch(leaveToExpiry)
      throw error
    }
  }

  /**
   * Runs `work` under a lease, and releases the lease when it has ended, in whatever way. What
   * `work` returns or throws is returned or thrown.
   *
   * `work` is not stopped from outside: it has to look at `lease.signal` where it does more than
   * call `lease.fetch`.
   *
   * @throws what `acquire` throws, and what `work` throws.
   */
  async withLease<T>(terms: LeaseTerms, work: (lease: Lease) => T | PromiseLike<T>): Promise<T> {
    const lease = await this.acquire(terms)
    try {
      return await work(lease)
    } finally {
      // What the work has come to is not lost over this.
      await lease.release().catch(leaveToExpiry)
    }
  }

  async #queue(terms: LeaseTerms, [wait, ...more]: ReturnType<typeof waitsOf>): Promise<Grant> {
    const { scope, ttl, holder, signal } = terms
    try {
      return await this.#sidecar.acquire({ scope, ttl, holder, wait }, signal)
    } catch (error) {
      if (!(error instanceof LeaseHeldError) || more.length === 0) throw error
      return this.#queue(terms, more)
    }
  }

  /** With a wait the time counts from before it, and may be over: it begins again with a renewal. */
  async #refresh(grant: Grant, signal: AbortSignal | undefined): Promise<Grant> {
    const { ttlMs, until } = grant
    if (until - performance.now() > (ttlMs * 2) / 3) return grant
    const renewed = await insist(ttlMs, ttlMs, signal, () => this.#sidecar.renew(grant, signal))
    if (renewed === undefined) throw new LeaseLostError(grant, 'over')
    return renewed
  }
}

/** How long a release is tried again where the service does not answer. */
const RELEASE_WITHIN_MS = 3_000

class HeldLease implements Lease {
  readonly #sidecar: Sidecar
  readonly #lost = new AbortController()
  /** Of each request whose answer has not begun. */
  readonly #unanswered = new Set<AbortController>()
  /** For the bodies of answers that have begun. */
  readonly #bodies = new AbortController()
  #grant: Grant
  #renewal: Timer
  #end: Timer
  /** Why the last renewal failed, if it did. */
  #failure: unknown
  #released: Promise<void> | undefined

  constructor(sidecar: Sidecar, grant: Grant) {
    this.#sidecar = sidecar
    this.#grant = grant
    this.#end = this.#watchTime()
    this.#renewal = this.#renewLater(renewAfterMs(grant.ttlMs, Math.random()))
  }

  get scope(): string {
    return this.#grant.scope
  }

  get token(): string {
    return this.#grant.token
  }

  get signal(): AbortSignal {
    if (performance.now() >= this.#grant.until) this.#lose('expired', this.#failure)
    return this.#lost.signal
  }

  async fetch(input: string | URL | Request, init: RequestInit = {}): Promise<Response> {
    this.signal.throwIfAborted()
    const response = await this.#send(input, init)
    this.#lost.signal.throwIfAborted()
    const refusal = refusalOf(response, this.scope)
    if (refusal !== undefined) throw await this.#refused(refusal, response)
    return response
  }

  release(): Promise<void> {
    return (this.#released ??= this.#release())
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.release().catch(leaveToExpiry)
  }

  async #release(): Promise<void> {
    this.#lose('released')
    const { ttlMs } = this.#grant
    await insist(ttlMs, RELEASE_WITHIN_MS, undefined, () => this.#sidecar.release(this.#grant))
  }

  async #send(input: string | URL | Request, init: RequestInit): Promise<Response> {
    const unanswered = new AbortController()
    this.#unanswered.add(unanswered)
    try {
      const signals = [unanswered.signal, this.#bodies.signal]
      return await this.#sidecar.send(input, init, this.token, signals)
    } catch (error) {
      this.#lost.signal.throwIfAborted()
      throw error
    } finally {
      this.#unanswered.delete(unanswered)
    }
  }

  /** The head says that the lease is lost; the body, which may be long in coming, only says more. */
  async #refused(why: LossReason, response: Response): Promise<LeaseLostError> {
    this.#stop(why)
    const problem = await explanationOf(response)
    this.#bodies.abort(this.#lost.signal.reason)
    return new LeaseLostError(this.#grant, why, { problem })
  }

  /** The first loss counts. */
  #lose(why: LossReason, cause?: unknown): void {
    if (this.#lost.signal.aborted) return
    this.#stop(why, cause)
    this.#bodies.abort(this.#lost.signal.reason)
  }

  #stop(why: LossReason, cause?: unknown): void {
    clearTimeout(this.#renewal)
    clearTimeout(this.#end)
    const loss = new LeaseLostError(this.#grant, why, { cause })
    this.#lost.abort(loss)
    for (const request of this.#unanswered) request.abort(loss)
  }

  #renewLater(ms: number): Timer {
    return background(ms, () => void this.#renew())
  }

  async #renew(): Promise<void> {
    const { ttlMs } = this.#grant
    try {
      const renewed = await this.#sidecar.renew(this.#grant, this.#lost.signal)
      // An answer that comes after the end does not bring the lease back.
      if (this.signal.aborted) return
      if (renewed === undefined) {
        this.#lose('over')
        return
      }
      this.#grant = renewed
      this.#failure = undefined
      clearTimeout(this.#end)
      this.#end = this.#watchTime()
      this.#renewal = this.#renewLater(renewAfterMs(renewed.ttlMs, Math.random()))
    } catch (error) {
      if (this.signal.aborted) return
      this.#failure = error
      this.#renewal = this.#renewLater(retryAfterMs(ttlMs, Math.random()))
    }
  }

  #watchTime(): Timer {
    return background(this.#grant.until - performance.now(), () => {
      // Timers may fire a little early.
      if (!this.signal.aborted) this.#end = this.#watchTime()
    })
  }
}

type Timer = ReturnType<typeof setTimeout>

/** A timer that does not keep a process of Node alive. */
function background(ms: number, then: () => void): Timer {
  const timer = setTimeout(then, ms)
  // Browsers have numbers for timers.
  ;(timer as { unref?: () => void }).unref?.()
  return timer
}

/** Tries again while no answer comes; `withinMs` after the beginning for the last time. */
async function insist<T>(
  ttlMs: number,
  withinMs: number,
  signal: AbortSignal | undefined,
  attempt: () => Promise<T>,
): Promise<T> {
  const lastAt = performance.now() + withinMs
  for (;;) {
    try {
      return await attempt()
    } catch (error) {
      if (!(error instanceof LeaseUnavailableError) || performance.now() >= lastAt) throw error
    }
    const leftMs = lastAt - performance.now()
    await pause(Math.min(retryAfterMs(ttlMs, Math.random()), leftMs), signal)
  }
}

/** Ends early where `signal` is aborted. */
function pause(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer)
      signal?.removeEventListener('abort', end)
      resolve()
    }
    const timer = setTimeout(end, ms)
    signal?.addEventListener('abort', end)
  })
}

/** A lease that could not be released ends by itself, after its TTL. */
function leaveToExpiry(): void {
  return
}
