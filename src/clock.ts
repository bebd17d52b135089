/**
 * The time by which rules are decided: monotonic, so that no step of the wall clock can end a
 * settling early. Passed in wherever a rule depends on it, so that tests and models own time.
 */
export interface Clock {
  /** Milliseconds since some fixed moment. Never goes back. */
  now(): number
  /** Calls `then` once, no earlier than `ms` from now, unless the returned function is called before. */
  after(ms: number, then: () => void): () => void
}

export const monotonicClock: Clock = {
  now: () => performance.now(),
  after(ms, then) {
    // setTimeout counts from the loop's cached time and may fire up to a millisecond early.
    const timer = setTimeout(then, Math.min(Math.ceil(ms) + 1, MAX_TIMEOUT_MS))
    return () => clearTimeout(timer)
  },
}

/** What setTimeout can hold (24.8 days); beyond it would fire at once. */
const MAX_TIMEOUT_MS = 2 ** 31 - 1
