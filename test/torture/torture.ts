/**
 * `npm run torture`: a backend, workers and the real sidecar as processes of their own, to which all
 * goes wrong that can; and a checker that reads their histories. Exit codes: 0 no violation,
 * 1 a violation, 2 a mistake in the options.
 */
import { parseArgs } from 'node:util'
import { noFaultyDisk } from '../faults/disk.ts'
import { progress, report } from './report.ts'
import { run, type Options } from './run.ts'
import { FAULTS, type FaultName } from './settings.ts'

const USAGE = `
Options:
  --seconds N     how long faults are inflicted (default: 60)
  --seed N        what chance is made of (default: another one each time)
  --workers N     (default: 5)
  --scopes N      (default: 4)
  --faults LIST   all, none, or some of:
                  ${FAULTS.join(', ')}
`

/** @throws Error, in words, where an option is wrong. */
function readOptions(args: readonly string[]): Options {
  const { values } = parseArgs({
    args: [...args],
    options: {
      seconds: { type: 'string', default: '60' },
      seed: { type: 'string', default: String(Date.now() % 1_000_000) },
      workers: { type: 'string', default: '5' },
      scopes: { type: 'string', default: '4' },
      faults: { type: 'string', default: 'all' },
    },
  })
  const number = (name: 'seconds' | 'seed' | 'workers' | 'scopes', least: number) => {
    const value = values[name]
    if (/^[0-9]{1,9}$/.test(value) && Number(value) >= least) return Number(value)
    throw new Error(`--${name} must be a whole number from ${least}, not "${value}"`)
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
    if (fault === undefined) throw new Error(`--faults: there is no fault "${name}"`)
    if (isOfDisk(fault) && noFaultyDisk !== false) throw new Error(`${fault}: ${noFaultyDisk}`)
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
  let options: Options
  try {
    options = readOptions(args)
  } catch (error) {
    say(`torture: ${error instanceof Error ? error.message : String(error)}\n${USAGE}`)
    return 2
  }
  say(`Torture for ${options.seconds} s, seed ${options.seed}: ${options.faults.join(', ')}`)
  if (noFaultyDisk !== false) say(`Without faults of the disk: ${noFaultyDisk}`)
  const start = performance.now()
  const outcome = await run(options, (happenings) =>
    say(progress(happenings, (performance.now() - start) / 1_000)),
  )
  process.stdout.write(report(options, outcome))
  return outcome.violation === undefined ? 0 : 1
}

/** Resolves with the exit code by which shells know a signal. */
function interrupted(): Promise<number> {
  return new Promise((resolve) => {
    process.once('SIGHUP', () => resolve(129))
    process.once('SIGINT', () => resolve(130))
    process.once('SIGTERM', () => resolve(143))
  })
}

process.exit(await Promise.race([torture(process.argv.slice(2)), interrupted()]))
