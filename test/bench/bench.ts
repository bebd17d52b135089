/**
 * `npm run bench`: the sidecar beside what people would use instead, in one run. Writes a report and
 * a picture; progress goes to stderr. Whether a bar is met never decides the exit code.
 */
import { mkdirSync, writeFileSync } from 'node:fs'
import { loadavg } from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { barsOf } from './bars.ts'
import { chart } from './chart.ts'
import { explainMissing, NEEDED } from './packages.ts'
import { startBackend } from './peers.ts'
import { describeMachine, markdown, type Results } from './report.ts'
import { measureGroup, stepsOf, type Group } from './row.ts'
import { allGroups } from './rows.ts'
import { measureScopes, SCOPE_COUNTS } from './scopes.ts'
import { pinThisProcess, Site } from './site.ts'
import { measureStreams } from './streams.ts'

const USAGE = `npm run bench -- [--seconds N] [--rounds N] [--rows PATTERN] [--out DIR]
  --seconds N     how long each row is measured in each round (3)
  --rounds N      how many rounds (5)
  --rows PATTERN  only rows whose "table: row" matches this regular expression, such as
                  "^cost", "takeovers", "^scopes", "^streams" (all)
  --out DIR       where results.md and results.svg go (test/bench/results)
`

interface Options {
  readonly seconds: number
  readonly rounds: number
  readonly rows: RegExp
  readonly out: string
}

function readOptions(): Options | string {
  try {
    const { values } = parseArgs({
      options: {
        seconds: { type: 'string', default: '3' },
        rounds: { type: 'string', default: '5' },
        rows: { type: 'string', default: '' },
        out: { type: 'string', default: 'test/bench/results' },
      },
    })
    const { seconds, rounds, rows, out } = values
    for (const [name, value] of Object.entries({ seconds, rounds })) {
      if (!/^[1-9][0-9]{0,3}$/.test(value)) return `--${name} takes a whole number from 1 on, not ${value}` // prettier-ignore
    }
    return { seconds: Number(seconds), rounds: Number(rounds), rows: new RegExp(rows), out }
  } catch (error) {
    return error instanceof Error ? error.message : String(error)
  }
}

/** The rows that were asked for, with those that they are compared with. */
function selected(groups: readonly Group[], pattern: RegExp): Group[] {
  return groups.flatMap((group) => {
    const wanted = group.rows.filter(({ name }) => pattern.test(`${group.name}: ${name}`))
    const bases = new Set(wanted.map(({ base }) => base))
    const rows = group.rows.filter((row) => wanted.includes(row) || bases.has(row.name))
    return wanted.length > 0 ? [{ ...group, rows }] : []
  })
}

/** Says what was done, and about how long the rest will take. */
class Progress {
  readonly #steps: number
  readonly #begun = performance.now()
  #done = 0

  constructor(steps: number) {
    this.#steps = steps
  }

  readonly told = (words: string): void => {
    this.#done++
    const each = (performance.now() - this.#begun) / this.#done
    const left = (each * (this.#steps - this.#done)) / 60_000
    const rest = left < 1 ? 'less than a minute left' : `about ${Math.ceil(left)} minutes left`
    say(`[${this.#done}/${this.#steps}] ${words}; ${rest}`)
  }
}

function say(words: string): void {
  process.stderr.write(`${words}\n`)
}

async function bench({ seconds, rounds, rows, out }: Options): Promise<number> {
  const missing = explainMissing(NEEDED)
  if (missing !== undefined) {
    say(`The benchmark cannot run: ${missing}.`)
    return 1
  }
  // Before the benchmark adds to it.
  const [loadBefore = 0] = loadavg()
  pinThisProcess()
  // Beside the compiled tests, and so on the disk of the checkout.
  const base = fileURLToPath(new URL('../../bench', import.meta.url))
  const groups = selected(allGroups(base, say), rows)
  const [withScopes, withStreams] = [rows.test('scopes'), rows.test('streams')]
  const steps = groups.reduce((sum, group) => sum + stepsOf(group, rounds), 0)
  const others = (withScopes ? SCOPE_COUNTS.length : 0) + (withStreams ? 2 : 0)
  const { told } = new Progress(steps + others)

  const ground = new Site(base)
  const onSite = async <T>(act: (site: Site) => Promise<T>): Promise<T> => {
    const site = new Site(base)
    try {
      return await act(site)
    } finally {
      await site.close()
    }
  }
  try {
    const backend = await startBackend(ground)
    const measured = []
    for (const group of groups) {
      const settings = { rounds, seconds }
      const rowsOfGroup = await onSite((site) => measureGroup(group, settings, site, backend.port, told)) // prettier-ignore
      measured.push({ group, measured: rowsOfGroup })
    }
    const scopes = withScopes ? await onSite((site) => measureScopes(site, backend.port, told)) : []
    const streams = withStreams ? await onSite((site) => measureStreams(site, told)) : []
    const cost = measured.find(({ group }) => group.name === 'cost')?.measured ?? []
    const date = new Date().toISOString().slice(0, 10)
    const bars = barsOf(cost, scopes)
    const findings = { groups: measured, scopes, streams, bars }
    const results: Results = { date, rounds, seconds, loadBefore, ...findings }
    mkdirSync(out, { recursive: true })
    const report = markdown(results)
    writeFileSync(path.join(out, 'results.md'), report)
    writeFileSync(path.join(out, 'results.svg'), chart(cost, describeMachine(), date))
    process.stdout.write(`${report}\n`)
    say(`Written to ${path.join(out, 'results.md')} and ${path.join(out, 'results.svg')}.`)
    return 0
  } finally {
    await ground.close()
  }
}

// Whatever ends it, the exit handler of each site runs.
for (const [signal, code] of [
  ['SIGINT', 130],
  ['SIGTERM', 143],
  ['SIGHUP', 129],
] as const) {
  // prettier-ignore
  process.once(signal, () => process.exit(code))
}
const options = readOptions()
if (typeof options === 'string') {
  process.stderr.write(`${options}\n${USAGE}`)
  process.exitCode = 2
} else process.exitCode = await bench(options)
