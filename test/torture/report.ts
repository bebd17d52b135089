import { RULES, stretch, type Violation } from './checker.ts'
import type { Happening } from './history.ts'
import { parseToken } from '../../src/token.ts'
import type { Options, Outcome } from './run.ts'

/** What a run tried and what came of it, in lines for people. */

interface Tally {
  readonly faults: ReadonlyMap<string, number>
  /** Writes by what their workers were told. */
  readonly results: ReadonlyMap<string, number>
  readonly writes: number
  readonly applied: number
  readonly takeovers: number
  readonly restarts: number
}

export function tally(happenings: readonly Happening[]): Tally {
  const faults = new Map<string, number>()
  const results = new Map<string, number>()
  const newest = new Map<string, bigint>()
  const counts = { writes: 0, applied: 0, takeovers: 0, restarts: 0 }
  for (const it of happenings) {
    switch (it.kind) {
      case 'sent':
        counts.writes++
        for (const fault of it.faults) count(faults, fault)
        break
      case 'fault':
        if (it.does === 'begins') count(faults, it.fault)
        break
      case 'applied':
        counts.applied++
        break
      case 'answered':
        count(results, it.result === 'accepted' ? `accepted (${it.status})` : it.result)
        break
      case 'left':
        count(results, 'no answer: the worker left')
        break
      case 'broken':
        count(results, 'no answer: the connection broke')
        break
      case 'begun': {
        const token = parseToken(it.token) ?? 0n
        const before = newest.get(it.scope)
        if (before !== undefined && token > before) counts.takeovers++
        if (before === undefined || token > before) newest.set(it.scope, token)
        break
      }
      case 'sidecar':
        if (it.does === 'runs') counts.restarts++
        break
      default:
    }
  }
  return { faults, results, ...counts, restarts: counts.restarts - 1 }
}

/** One line while it runs. */
export function progress(happenings: readonly Happening[], elapsedSeconds: number): string {
  const { writes, takeovers, faults, results } = tally(happenings)
  const inflicted = [...faults.values()].reduce((sum, count) => sum + count, 0)
  const [stale, unknown] = [results.get('stale') ?? 0, results.get('unknown') ?? 0]
  return `${elapsedSeconds.toFixed(0).padStart(5)} s: ${writes} writes, ${takeovers} takeovers, ${stale} stale, ${unknown} unknown, ${inflicted} faults; no violation so far`
}

export function report(options: Options, outcome: Outcome): string {
  const { happenings, violation } = outcome
  const { writes, applied, takeovers, restarts, faults, results } = tally(happenings)
  const lines = [
    `Torture: ${options.workers} workers, ${options.scopes} scopes, seed ${options.seed}, ${lasted(happenings)} s`,
    `  ${writes} writes, ${applied} applied, ${takeovers} takeovers, ${restarts} restarts of the sidecar`,
    'Faults:',
    ...table(faults),
    'What workers were told:',
    ...table(results),
  ]
  if (outcome.beyondSettle > 0) {
    lines.push(
      `The machine was too busy: ${outcome.beyondSettle} writes landed later than settle allows, which nothing can prevent.`,
    )
  }
  if (violation === undefined) {
    lines.push('No violation:', ...Object.values(RULES).map((rule, i) => `  ${i + 1}. ${rule}`))
  } else lines.push(...explain(options, outcome, violation))
  return `${lines.join('\n')}\n`
}

function explain(
  options: Options,
  { happenings, folder }: Outcome,
  violation: Violation,
): string[] {
  const start = happenings[0]?.at ?? 0
  const led = stretch(happenings, violation)
  return [
    '',
    `VIOLATION of rule ${violation.rule} (${RULES[violation.rule]}):`,
    `  ${violation.words}`,
    '',
    `What led to it${violation.scope === undefined ? '' : `, in ${violation.scope}`}:`,
    ...led.map((it) => `  ${((it.at - start) / 1000).toFixed(4).padStart(10)} s  ${told(it)}`),
    '',
    `The whole history and the sidecar's log: ${folder ?? 'not kept'}`,
    `Again: ${command(options)}`,
  ]
}

export function command({ seconds, seed, workers, scopes, faults }: Options): string {
  return `npm run torture -- --seconds ${seconds} --seed ${seed} --workers ${workers} --scopes ${scopes} --faults ${faults.join(',') || 'none'}`
}

function told({ at: _at, kind, ...about }: Happening): string {
  const details = Object.entries(about).map(([name, value]) =>
    typeof value === 'string' ? `${name} ${value}` : `${name} ${JSON.stringify(value)}`,
  )
  return `${kind.padEnd(9)} ${details.join(', ')}`
}

function lasted(happenings: readonly Happening[]): string {
  return (((happenings.at(-1)?.at ?? 0) - (happenings[0]?.at ?? 0)) / 1_000).toFixed(0)
}

function table(counts: ReadonlyMap<string, number>): string[] {
  const rows = [...counts].sort(([a], [b]) => (a < b ? -1 : 1))
  return rows.length === 0 ? ['  none'] : rows.map(([name, n]) => `  ${name.padEnd(34)} ${n}`)
}

function count(counts: Map<string, number>, name: string): void {
  counts.set(name, (counts.get(name) ?? 0) + 1)
}
