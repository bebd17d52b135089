/** How long things take in the life of a lease, in ms. Pure. */

const UNITS: Readonly<Record<string, number>> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 }

/** What `setTimeout` can hold (24.8 days); beyond it would fire at once. */
const MAX_TIMEOUT_MS = 2 ** 31 - 1

/** How long an answer may take. Beyond that it counts as lost. */
export const ANSWER_WITHIN_MS = 10_000

/** Milliseconds of a duration such as `500ms`, `15s`, `2m`, `1h`; undefined where it is none. */
export function parseDuration(text: string): number | undefined {
  const [, amount, unit = ''] = /^(\d{1,10})(ms|s|m|h)$/.exec(text) ?? []
  const size = UNITS[unit]
  if (amount === undefined || size === undefined) return undefined
  return Math.min(Number(amount) * size, MAX_TIMEOUT_MS)
}

/** `Retry-After` in seconds; a second where there is none, or a date, which needs a clock that agrees. */
export function parseRetryAfterMs(field: string | null): number {
  return field !== null && /^\d{1,9}$/.test(field) ? Number(field) * 1000 : 1000
}

/**
 * From one renewal to the next: a third of the TTL, or up to a fifth of that less, so that leases
 * that began together do not stay together. `random` is from 0 to 1.
 */
export function renewAfterMs(ttlMs: number, random: number): number {
  return (ttlMs / 3) * (1 - random / 5)
}

/** From a request that failed to the next try: an eighth to a sixteenth of the TTL, or of a minute. */
export function retryAfterMs(ttlMs: number, random: number): number {
  return (Math.min(ttlMs, 60_000) / 8) * (1 - random / 2)
}

/** How long a renewal waits for its answer, so that one that is lost leaves time for two more. */
export function renewalTimeoutMs(ttlMs: number): number {
  return Math.min(ttlMs / 6, ANSWER_WITHIN_MS)
}

/** Node's `fetch` gives up after 300 s without an answer. */
const LONGEST_WAIT_MS = 240_000

/** A long wait as those of several requests, one after the other. What is no duration stays what it is. */
export function waitsOf(wait: string | undefined): readonly (string | undefined)[] {
  let restMs = wait === undefined ? undefined : parseDuration(wait)
  if (restMs === undefined || restMs <= LONGEST_WAIT_MS) return [wait]
  const waits: string[] = []
  for (; restMs > 0; restMs -= LONGEST_WAIT_MS) {
    waits.push(`${Math.min(restMs, LONGEST_WAIT_MS)}ms`)
  }
  return waits
}
