/** Durations as people write them: `500ms`, `5s`, `2m`, `1h`. Pure. */

const UNITS = { h: 3_600_000, m: 60_000, s: 1000, ms: 1 } as const

/** Node's timers hold 2^31 − 1 ms; a longer delay would end at once. */
export const MAX_DURATION_MS = 596 * UNITS.h

/** Milliseconds, or undefined where `text` spells no duration or a longer one than a timer holds. */
export function parseDuration(text: string): number | undefined {
  const [, amount, unit] = /^(0|[1-9][0-9]{0,9})(h|m|s|ms)$/.exec(text) ?? []
  if (amount === undefined || unit === undefined) return undefined
  const ms = Number(amount) * UNITS[unit as keyof typeof UNITS]
  return ms <= MAX_DURATION_MS ? ms : undefined
}

/** In the largest unit that spells `ms` exactly. */
export function formatDuration(ms: number): string {
  if (ms === 0) return '0s'
  for (const [unit, size] of Object.entries(UNITS)) {
    if (ms % size === 0) return `${ms / size}${unit}`
  }
  return `${ms}ms`
}
