import { readFileSync } from 'node:fs'
import { cpus, release, totalmem } from 'node:os'
import type { Bar } from './bars.ts'
import { figure, ratio, type Group, type Measured } from './row.ts'
import type { ScopesMeasured } from './scopes.ts'
import { describeCores } from './site.ts'
import type { Spread } from './spread.ts'
import type { StreamMeasured } from './streams.ts'

/** Everything that a run has found out. */
export interface Results {
  readonly date: string
  readonly rounds: number
  readonly seconds: number
  /** How busy the machine was with other things: its load average before the start. */
  readonly loadBefore: number
  readonly groups: readonly { readonly group: Group; readonly measured: readonly Measured[] }[]
  readonly scopes: readonly ScopesMeasured[]
  readonly streams: readonly StreamMeasured[]
  readonly bars: readonly Bar[]
}

/** The machine, in a line. */
export function describeMachine(): string {
  const model = cpus()[0]?.model ?? 'an unknown processor'
  const gib = (totalmem() / 1024 ** 3).toFixed(0)
  return `${model}, ${cpus().length} cores, ${gib} GiB, ${systemName()}, kernel ${release()}, Node ${process.version}` // prettier-ignore
}

function systemName(): string {
  const [, name] = /^PRETTY_NAME="(.*)"$/m.exec(readFileSync('/etc/os-release', 'utf8')) ?? []
  return name ?? 'Linux'
}

/** From here on, other work on the machine shows in the numbers. */
const QUIET = 1

/** The whole report, in Markdown. */
export function markdown(results: Results): string {
  const { date, rounds, seconds, loadBefore, groups, scopes, streams, bars } = results
  return [
    '# Benchmark',
    '',
    `Made by \`npm run bench\` on ${date}.`,
    '',
    `- Machine: ${describeMachine()}; ${describeCores()}. Load average before the start: ${loadBefore.toFixed(1)}${loadBefore < QUIET ? '' : ', so **the machine was busy with other things: take no number here as a fact**'}.`, // prettier-ignore
    `- Method: each row is measured ${rounds} × ${seconds} s, the rows of a table in turn, after a round that does not count. Shown is the median, in brackets the lowest and the highest round.`, // prettier-ignore
    '- CPU is that of the proxy, its threads and its store (or Redis) together, user and system, from `/proc/PID/stat`, for each request. It is what a sidecar takes from its neighbours, and depends on the load less than a rate does.', // prettier-ignore
    '- "× http-proxy" compares CPU with that of http-proxy in the same round.',
    '- Latencies are those of a closed loop at full load: each connection sends as soon as it has its answer. They rank the rows; they are not what a service with room to spare sees.', // prettier-ignore
    '',
    '## What was asked for',
    '',
    ...table(['', 'measured', ''], bars.map(barRow)),
    '',
    ...groups.flatMap(({ group, measured }) => groupSection(group, measured)),
    ...(scopes.length > 0 ? scopesSection(scopes) : []),
    ...(streams.length > 0 ? streamsSection(streams) : []),
  ].join('\n')
}

function barRow({ words, found, met }: Bar): string[] {
  return [words, found ?? '–', found === undefined ? 'not measured' : met ? 'met' : '**missed**']
}

const HEAD = ['', 'requests/s', 'CPU µs each', '× http-proxy', 'p50 ms', 'p99 ms', 'memory MiB', ''] // prettier-ignore

function groupSection({ title, words }: Group, measured: readonly Measured[]): string[] {
  const present = measured.filter(({ missing }) => missing === undefined)
  const remarks = measured.flatMap(({ name, missing, rounds }) => {
    if (missing !== undefined) return [`- ${name}: ${missing}.`]
    const wrong = Math.max(...rounds.map((round) => round.wrong))
    if (wrong === 0) return []
    return [`- ${name}: up to ${(wrong * 100).toFixed(2)} % of a round were not answered as they should have been.`] // prettier-ignore
  })
  const rows = present.map((row) => [
    row.name,
    number(figure(row, 'perSecond')?.median, 0),
    spread(figure(row, 'cpuUs'), 0),
    spread(ratio(row, measured, 'cpuUs'), 2),
    number(figure(row, 'p50Ms')?.median, 2),
    number(figure(row, 'p99Ms')?.median, 2),
    number(figure(row, 'residentMiB')?.max, 0),
    row.words,
  ])
  const behind = remarks.length > 0 ? ['', ...remarks] : []
  return [`## ${title}`, '', words, '', ...table(HEAD, rows), ...behind, '']
}

function scopesSection(scopes: readonly ScopesMeasured[]): string[] {
  const head = ['scopes on disk', 'start ms', 'memory MiB', 'after the load', 'requests/s', 'CPU µs each'] // prettier-ignore
  const rows = scopes.map((one) => [
    number(one.scopes, 0),
    spread(one.startMs, 0),
    spread(one.residentMiB, 0),
    number(one.load.residentMiB, 0),
    number(one.load.perSecond, 0),
    number(one.load.cpuUs, 0),
  ])
  return [
    '## More scopes',
    '',
    'A store that was filled and closed before: from the start of the process until it takes connections, memory right then, and both memory and cost under writes by the owners of scopes picked at random. The file is in the cache of the system.', // prettier-ignore
    '',
    ...table(head, rows),
    '',
  ]
}

function streamsSection(streams: readonly StreamMeasured[]): string[] {
  const rows = streams.map(({ direction, mibPerSecond, beforeMiB, highestMiB }) => [
    `1 GiB ${direction}`,
    number(mibPerSecond, 0),
    number(beforeMiB, 0),
    number(highestMiB, 0),
  ])
  return [
    '## A large stream',
    '',
    'One body of 1 GiB through the sidecar; memory must stay flat.',
    '',
    ...table(['', 'MiB/s', 'memory before, MiB', 'at its highest'], rows),
    '',
  ]
}

/** The first column and a last one without a title are text, the others numbers. */
function table(head: readonly string[], rows: readonly (readonly string[])[]): string[] {
  const align = head.map((title, i) => (i === 0 || title === '' ? '---' : '---:'))
  return [head, align, ...rows].map((cells) => `| ${cells.join(' | ')} |`)
}

function spread(value: Spread | undefined, digits: number): string {
  if (value === undefined) return '–'
  const { median, min, max } = value
  return `${number(median, digits)} (${number(min, digits)}–${number(max, digits)})`
}

function number(value: number | undefined, digits: number): string {
  if (value === undefined) return '–'
  return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits }) // prettier-ignore
}
