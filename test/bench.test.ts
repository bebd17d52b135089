import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, readdirSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import path from 'node:path'
import { test, type TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'
import { barsOf } from './bench/bars.ts'
import { chart } from './bench/chart.ts'
import { explainMissing, NEEDED } from './bench/packages.ts'
import { markdown, type Results } from './bench/report.ts'
import { ratio, type Measured, type Round } from './bench/row.ts'
import { spreadOf } from './bench/spread.ts'
import { temporaryFolder } from './harness.ts'

const BENCH = fileURLToPath(new URL('bench/bench.js', import.meta.url))
const FILES = fileURLToPath(new URL('../bench', import.meta.url))

async function runBench(t: TestContext, ...args: string[]) {
  const child = spawn(process.execPath, [BENCH, ...args], {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { PATH: process.env['PATH'], FENCING_PROXY_LISTEN: 'mistaken' },
  })
  t.after(() => child.kill('SIGKILL'))
  let [out, err] = ['', '']
  child.stdout.on('data', (chunk: Buffer) => (out += chunk.toString()))
  child.stderr.on('data', (chunk: Buffer) => (err += chunk.toString()))
  const [code] = (await once(child, 'close')) as [number | null]
  return { code, out, err }
}

/** The cells of a row of a table in Markdown. */
function cells(report: string, name: string): string[] {
  const line = report.split('\n').find((one) => one.startsWith(`| ${name} |`))
  assert.ok(line, `${name} has a row in:\n${report}`)
  return line.split('|').map((cell) => cell.trim())
}

test(
  'a short bench writes a table and a picture that hold numbers, and leaves nothing else',
  { skip: explainMissing(NEEDED) ?? false },
  async (t) => {
    const folder = await temporaryFolder(t)
    const pattern = 'cost: (direct|sidecar, same token)|the disk alone|streams'
    const { code, out, err } = await runBench(
      t,
      ...['--seconds', '1', '--rounds', '1', '--rows', pattern, '--out', folder],
    )
    assert.equal(code, 0, err)
    assert.match(err, /\[1\/\d+\] warm-up, cost: direct: .* left/)

    const report = await readFile(path.join(folder, 'results.md'), 'utf8')
    assert.equal(out, `${report}\n`)
    assert.match(report, new RegExp(`Node ${process.version}`))
    assert.doesNotMatch(report, /NaN|undefined|Infinity|were not answered/)
    for (const name of ['direct', 'http-proxy', 'sidecar, same token', 'the disk alone']) {
      const [, , perSecond = ''] = cells(report, name)
      assert.match(perSecond, /^[1-9][0-9,]*$/, name)
    }
    // The row was not asked for; what was is compared with it.
    assert.match(cells(report, 'http-proxy')[4] ?? '', /^1\.00 /)
    const [, , , cpu = '', times = '', p50 = '', p99 = '', memory = ''] = cells(report, 'sidecar, same token') // prettier-ignore
    assert.match(cpu, /^[0-9,]+ \([0-9,]+–[0-9,]+\)$/)
    assert.match(times, /^[0-9.]+ \(/)
    assert.ok(Number(p50) > 0 && Number(p99) >= Number(p50))
    assert.ok(Number(memory) > 10, 'a Node process takes more than 10 MiB')
    assert.ok(Number(cells(report, '1 GiB up')[2]?.replace(',', '')) > 0)
    assert.match(report, /same token: CPU at most 0\.80 × http-proxy \| [0-9.]+ × \| (met|\*\*missed)/)

    const picture = await readFile(path.join(folder, 'results.svg'), 'utf8')
    assert.match(picture, /^<svg [^]*<\/svg>\n$/)
    assert.match(picture, />[0-9]+ µs, [0-9.]+ ×</)
    assert.doesNotMatch(picture, /NaN|undefined|Infinity/)

    const left = existsSync(FILES) ? readdirSync(FILES) : []
    assert.deepEqual(left.filter((name) => name.startsWith('run-')), [])
  },
) // prettier-ignore

test('options that cannot be meant end with 2 and say what is possible', async (t) => {
  for (const args of [['--seconds', '0'], ['--rounds', 'many'], ['--rows', '('], ['--what']]) {
    const { code, err } = await runBench(t, ...args)
    assert.equal(code, 2, args.join(' '))
    assert.match(err, /--rows PATTERN/)
  }
})

function measured(name: string, cpuUs: readonly number[], changes: Partial<Round> = {}): Measured {
  const rounds = cpuUs.map((us) => {
    return { perSecond: 1, cpuUs: us, p50Ms: 1, p99Ms: 2, residentMiB: 60, wrong: 0, ...changes }
  })
  return { name, words: '', base: 'http-proxy', missing: undefined, rounds }
}

test('a spread is the median with the lowest and the highest, and nothing where a round lacks', () => {
  assert.deepEqual(spreadOf([3, 1, 10]), { median: 3, min: 1, max: 10 })
  assert.deepEqual(spreadOf([4, 1, 10, 2]), { median: 3, min: 1, max: 10 })
  assert.equal(spreadOf([1, undefined]), undefined)
  assert.equal(spreadOf([]), undefined)
})

test('rows are compared round by round, so that a disturbed round disturbs both', () => {
  const base = measured('http-proxy', [100, 1000, 100])
  const row = measured('sidecar, same token', [70, 700, 70])
  assert.deepEqual(ratio(row, [base, row], 'cpuUs'), { median: 0.7, min: 0.7, max: 0.7 })
  assert.equal(ratio(row, [row], 'cpuUs'), undefined)
})

test('each bar says what was measured and whether it was met', () => {
  const scope = (scopes: number, startMs: number, memory: number) => ({
    scopes,
    startMs: { median: startMs, min: startMs, max: startMs },
    residentMiB: { median: memory, min: memory, max: memory },
    load: { ...measured('', [1]).rounds[0], residentMiB: memory + 70 } as Round,
  })
  const cost = [
    measured('http-proxy', [100]),
    measured('http-proxy, as it comes', [300]),
    measured('sidecar, same token', [81], { p99Ms: 1.9 }),
    measured('sidecar, takeovers', [94]),
    measured('sidecar, stale writes', [82]),
  ]
  const found = (scopes: ReturnType<typeof scope>[]) =>
    barsOf(cost, scopes).map((bar) => [bar.found, bar.met])
  assert.deepEqual(found([scope(1, 100, 50), scope(1_000_000, 1200, 110)]), [
    ['0.81 ×', false],
    ['0.27 ×', true],
    ['0.94 ×', true],
    ['0.31 ×', true],
    ['1.01 ×', false],
    ['0.95 ×', true],
    ['0.95 ×', true],
    ['60.00 MiB', true],
    ['60.00 MiB', true],
    ['1.10 s', false],
  ])
  assert.deepEqual(found([]).slice(7), [
    [undefined, false],
    [undefined, false],
    [undefined, false],
  ])
})

test('the report names what was missing and what was answered wrongly', () => {
  const rows = [
    measured('sidecar, stale writes', [50, 50], { wrong: 0.25 }),
    { ...measured('Express', []), missing: 'not installed: redis-server' },
  ]
  const results: Results = {
    date: '2026-01-01',
    rounds: 2,
    seconds: 1,
    loadBefore: 3.21,
    groups: [{ group: { name: 'cost', title: 'Cost', words: '', rows: [] }, measured: rows }],
    scopes: [],
    streams: [],
    bars: barsOf(rows, []),
  }
  const report = markdown(results)
  assert.match(report, /- Express: not installed: redis-server\./)
  assert.match(report, /stale writes: up to 25\.00 % of a round/)
  assert.match(report, /not measured/)
  assert.match(report, /start: 3\.2, so \*\*the machine was busy/)
  assert.doesNotMatch(chart(rows, 'a <machine>', '2026-01-01'), /NaN|Infinity|<machine>/)
})
