import { ratio, type Measured } from './row.ts'
import { AS_IT_COMES, ONE_SIDECAR, STALE_SIDECAR, TAKEOVER_SIDECAR } from './rows.ts'
import type { ScopesMeasured } from './scopes.ts'

/** What the project asks of itself. */
export interface Bar {
  readonly words: string
  /** What was measured, in words; undefined where it was not. */
  readonly found: string | undefined
  readonly met: boolean
}

export function barsOf(cost: readonly Measured[], scopes: readonly ScopesMeasured[]): Bar[] {
  const against = (name: string, figure: 'cpuUs' | 'p99Ms', base?: string) => {
    const row = cost.find((one) => one.name === name)
    if (row === undefined) return undefined
    return ratio(base === undefined ? row : { ...row, base }, cost, figure)?.median
  }
  return [
    atMost('same token: CPU at most 0.80 × http-proxy', against(ONE_SIDECAR, 'cpuUs'), 0.8, ' ×'),
    atMost('same token: CPU at most 0.80 × http-proxy as it comes', against(ONE_SIDECAR, 'cpuUs', AS_IT_COMES), 0.8, ' ×'), // prettier-ignore
    atMost('takeovers: CPU at most 0.95 × http-proxy', against(TAKEOVER_SIDECAR, 'cpuUs'), 0.95, ' ×'), // prettier-ignore
    atMost('takeovers: CPU at most 0.95 × http-proxy as it comes', against(TAKEOVER_SIDECAR, 'cpuUs', AS_IT_COMES), 0.95, ' ×'), // prettier-ignore
    atMost('a stale write costs less CPU than one that is admitted', against(STALE_SIDECAR, 'cpuUs', ONE_SIDECAR), 1, ' ×'), // prettier-ignore
    atMost('same token: p99 no worse than http-proxy', against(ONE_SIDECAR, 'p99Ms'), 1, ' ×'),
    atMost('same token: p99 no worse than http-proxy as it comes', against(ONE_SIDECAR, 'p99Ms', AS_IT_COMES), 1, ' ×'), // prettier-ignore
    ...scopeBars(scopes),
  ]
}

function scopeBars(scopes: readonly ScopesMeasured[]): Bar[] {
  const [few, many] = [scopes[0], scopes.at(-1)]
  const added = (of: (one: ScopesMeasured) => number | undefined) => {
    const [least, most] = [few && of(few), many && of(many)]
    return least === undefined || most === undefined ? undefined : most - least
  }
  return [
    atMost('10^6 scopes on disk add less than 64 MiB after the start', added((one) => one.residentMiB.median), 64, ' MiB'), // prettier-ignore
    atMost('and less than 64 MiB after writes to scopes at random', added((one) => one.load.residentMiB), 64, ' MiB'), // prettier-ignore
    atMost('10^6 scopes on disk add less than 1 s to the start', added((one) => one.startMs.median / 1000), 1, ' s'), // prettier-ignore
  ]
}

function atMost(words: string, found: number | undefined, limit: number, unit: string): Bar {
  if (found === undefined) return { words, found: undefined, met: false }
  return { words, found: `${found.toFixed(2)}${unit}`, met: found <= limit }
}
