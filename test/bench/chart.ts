import { BASE, figure, ratio, type Measured } from './row.ts'

/** The picture: what a request costs, one line for each row, readable on light and dark pages. */

const WIDTH = 880
const LEFT = 270
const RIGHT = 150
const ROW = 34
const TOP = 78
const BOTTOM = 50

export function chart(cost: readonly Measured[], machine: string, date: string): string {
  const rows = cost.flatMap((row) => {
    const cpu = figure(row, 'cpuUs')
    return cpu === undefined ? [] : [{ row, cpu }]
  })
  const longest = Math.max(1, ...rows.map(({ cpu }) => cpu.max))
  const x = (us: number) => round(LEFT + (us / longest) * (WIDTH - LEFT - RIGHT))
  const height = TOP + rows.length * ROW + BOTTOM
  const base = rows.find(({ row }) => row.name === BASE)
  const bottom = TOP + rows.length * ROW

  const lines = rows.flatMap(({ row, cpu }, i) => {
    const y = TOP + i * ROW
    const middle = y + ROW / 2
    const kind = row.name.startsWith('sidecar') ? 'ours' : 'other'
    const times = ratio(row, cost, 'cpuUs')?.median
    const words = times === undefined ? '' : `, ${times.toFixed(2)} ×`
    return [
      `<text class="name" x="${LEFT - 12}" y="${middle + 5}">${escape(row.name)}</text>`,
      `<rect class="${kind}" x="${LEFT}" y="${y + 6}" width="${round(x(cpu.median) - LEFT)}" height="${ROW - 12}" rx="3"/>`,
      `<path class="spread" d="M${x(cpu.min)} ${middle}H${x(cpu.max)}M${x(cpu.min)} ${middle - 4}v8M${x(cpu.max)} ${middle - 4}v8"/>`,
      `<text class="value" x="${round(x(cpu.max) + 8)}" y="${middle + 5}">${cpu.median.toFixed(0)} µs${words}</text>`,
    ]
  })
  const mark =
    base === undefined
      ? []
      : [`<path class="base" d="M${x(base.cpu.median)} ${TOP - 4}V${bottom + 4}"/>`]
  return `${[
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" role="img" aria-label="CPU time per proxied request">`,
    '<style>',
    'text { font: 14px system-ui, sans-serif; fill: #1f2328 }',
    '.title { font-size: 18px; font-weight: 600 }',
    '.small { font-size: 12px; fill: #59636e }',
    '.name { text-anchor: end }',
    '.value { font-variant-numeric: tabular-nums }',
    '.ours { fill: #1a7f37 }',
    '.other { fill: #afb8c1 }',
    '.spread { stroke: #1f2328; fill: none }',
    '.base { stroke: #cf222e; stroke-dasharray: 4 4; fill: none }',
    '@media (prefers-color-scheme: dark) {',
    'text { fill: #e6edf3 } .small { fill: #9198a1 } .ours { fill: #3fb950 } .other { fill: #59636e }',
    '.spread { stroke: #e6edf3 } .base { stroke: #ff7b72 }',
    '}',
    '</style>',
    `<text class="title" x="16" y="30">CPU time per proxied request</text>`,
    `<text class="small" x="16" y="52">proxy and its store together; median, and lowest to highest round; × is against http-proxy in the same round</text>`,
    ...mark,
    ...lines,
    `<text class="small" x="16" y="${bottom + 32}">${escape(`${date}. ${machine}`)}</text>`,
    '</svg>',
  ].join('\n')}\n`
}

function round(value: number): number {
  return Math.round(value * 10) / 10
}

function escape(text: string): string {
  return text.replace(/&/g, '&amp;').replace(/</g, '&lt;')
}
