/**
 * `npm run torture`: a backend, workers and the real sidecar as processes of their own, to which all
 * goes wrong that can; and a checker that reads their histories. Exit codes: 0 no violation,
 * 1 a violation, 2 a mistake in the options, 3 the run itself failed, so that it says nothing.
 */
import { parseArgs } from 'node:util'
import { noFaultyDisk } from '../faults/disk.ts'
import { progress, report } from './report.ts'
import { run, type Options } from './run.ts'
import { FAULTS, type FaultName } from './settings.ts'

const USAGE = `Usage: npm run torture -- [options]

  --seconds N     how long faults are inflicted (default: 60)
  --seed N        what chance is made of (default: another one each time)
  --workers N     who take leases and write (default: 5)
  --scopes N      what they write to (default: 4)
  --faults LIST   all, none, or some, with commas between (default: all):
                  ${inLines(FAULTS)}
  --help          tells this
`

const MOST = { seconds: 1_000_000, seed: 2 ** 32 - 1, workers: 100, scopes: 1_000 }

function inLines([...names]: readonly string[]): string {
  const lines: string[] = []
  while (names.length > 0) lines.push(names.splice(0, 5).join(', '))
  return lines.join(`,\n${' '.repeat(18)}`)
}

/** Undefined: to be told how to use it. @throws Error, in words, where an option is wrong. */
function readOptions(args: readonly string[]): Options | undefined {
  const { values } = parseArgs({
    args: [...args],
    options: {
      seconds: { type: 'string', default: '60' },
      seed: { type: 'string', default: String(Date.now() % 1_000_000) },
      workers: { type: 'string', default: '5' },
      scopes: { type: 'string', default: '4' },
      faults: { type: 'string', default: 'all' },
      help: { type: 'boolean', default: false },
    },
  })
  if (values.help) return undefined
  const number = (name: keyof typeof MOST, least: number) => {
    const value = values[name]
    const isGood = /^[0-9]{1,10}$/.test(value) && Number(value) >= least
    if (isGood && Number(value) <= MOST[name]) return Number(value)
    throw new Error(
      `--${name} must be a whole number from ${least} to ${MOST[name]}, not "${value}"`,
    )
  }
  return {
    seconds: number('seconds', 1),
    seed: number('seed', 0),
    workers: number('workers', 1),
    scopes: number('scopes', 1),
    faults: readFaults(values.faults),
    checkEverySeconds: 10,
  }
}

function readFaults(list: string): FaultName[] {
  if (list === 'all') return FAULTS.filter((name) => !isOfDisk(name) || noFaultyDisk === false)
  if (list === 'none') return []
  return list.split(',').map((name) => {
    const fault = FAULTS.find((known) => known === name)
    if (fault === undefined) {
      throw new Error(`--faults: there is no fault "${name}"; there are ${FAULTS.join(', ')}`)
    }
    if (isOfDisk(fault) && noFaultyDisk !== false) {
      throw new Error(`--faults: ${fault} cannot be had here: ${noFaultyDisk}`)
    }
    return fault
  })
}

function isOfDisk(name: FaultName): boolean {
  return name.endsWith('-disk')
}

function say(text: string): void {
  process.stderr.write(`${text}\n`)
}

async function torture(args: readonly string[]): Promise<number> {
  let options: Options | undefined
  try {
    options = readOptions(args)
  } catch (error) {
    say(`torture: ${messageOf(error)}\n\n${USAGE}`)
    return 2
  }
  if (options === undefined) {
    process.stdout.write(USAGE)
    return 0
  }
  const { seconds, seed, faults } = options
  say(`Torture for ${seconds} s, seed ${seed}; faults: ${faults.join(', ') || 'none'}`)
  if (noFaultyDisk !== false) say(`Without faults of the disk: ${noFaultyDisk}`)
  const start = performance.now()
  try {
    const outcome = await run(options, (happenings) =>
      say(progress(happenings, (performance.now() - start) / 1_000)),
    )
    process.stdout.write(report(options, outcome))
    return outcome.violation === undefined ? 0 : 1
  } catch (error) {
    say(`torture: the run could not be carried through, and says nothing: ${messageOf(error)}`)
    return 3
  }
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}

/** Resolves with the exit code by which shells know a signal. What was started ends with this process. */
function interrupted(): Promise<number> {
  return new Promise((resolve) => {
    const on = (signal: 'SIGHUP' | 'SIGINT' | 'SIGTERM', code: number) =>
      process.once(signal, () => {
        say('torture: interrupted')
        resolve(code)
      })
    on('SIGHUP', 129)
    on('SIGINT', 130)
    on('SIGTERM', 143)
  })
}

process.exit(await Promise.race([torture(process.argv.slice(2)), interrupted()]))
