import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { readdir, readFile } from 'node:fs/promises'
import path from 'node:path'
import { describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { noFaultyDisk } from './faults/disk.ts'
import { temporaryFolder, until } from './harness.ts'
import { BROKEN, type BrokenName } from './torture/broken/variants.ts'
import type { Rule } from './torture/checker.ts'
import { report } from './torture/report.ts'
import { run, type Options } from './torture/run.ts'
import { FAULTS, type FaultName } from './torture/settings.ts'

/** A short torture, and the controls: sidecars with one mistake, with which a violation must be found. */

interface Control {
  /** What provokes the mistake. */
  readonly faults: readonly FaultName[]
  /** The rules of which it may break one. */
  readonly rules: readonly Rule[]
}

const CONTROLS: Record<BrokenName, Control> = {
  'barrier off': { faults: [], rules: [1, 2] },
  'commit after the forward': { faults: ['kill-sidecar', 'stall-network'], rules: [1, 2, 5] },
  'settling off': { faults: ['leave', 'reset-backend'], rules: [1, 2] },
  'slot released when the client leaves': { faults: ['leave'], rules: [1, 2] },
  'float tokens': { faults: ['kill-sidecar'], rules: [1, 2, 5] },
  'http-proxy as forwarder': { faults: ['leave', 'reset-backend'], rules: [1, 2, 3, 6] },
}

/** A run ends with its violation, which comes within seconds; on a busy machine later. */
const LOAD = { workers: 4, scopes: 3, seconds: 60, checkEverySeconds: 0.5 }

describe('a short torture', { concurrency: 2 }, () => {
  test('the sidecar keeps its promise under every fault', async () => {
    const faults = FAULTS.filter((name) => noFaultyDisk === false || !name.endsWith('-disk'))
    const options: Options = { ...LOAD, seconds: 15, seed: 7, faults, checkEverySeconds: 5 }
    const outcome = await run(options)
    assert.equal(outcome.violation, undefined, report(options, outcome))
  })

  for (const name of Object.keys(BROKEN) as BrokenName[]) {
    test(`the checker finds the violation with ${name}`, async () => {
      const { faults, rules } = CONTROLS[name]
      const options: Options = { ...LOAD, seed: 1, faults, broken: name }
      const outcome = await run(options)
      const { violation } = outcome
      const told = report(options, outcome)
      assert.ok(violation !== undefined, `not found:\n${told}`)
      assert.ok(rules.includes(violation.rule), told)
      assert.match(
        told,
        /VIOLATION of rule [^]*What led to it[^]*Again: npm run torture -- .*--seed 1 /,
      )
    })
  }
})

const TORTURE = fileURLToPath(new URL('torture/torture.js', import.meta.url))

test(
  'Ctrl-C ends all that the torture started',
  { skip: !existsSync('/proc/self/stat') },
  async (t) => {
    const temporary = await temporaryFolder(t)
    const child = spawn(process.execPath, [TORTURE, '--seconds', '60', '--workers', '2'], {
      detached: true,
      stdio: 'ignore',
      env: { PATH: process.env['PATH'], TMPDIR: temporary },
    })
    const group = -(child.pid ?? assert.fail('it did not start'))
    const isRunning = () => {
      try {
        return process.kill(group, 0)
      } catch {
        return false
      }
    }
    t.after(() => isRunning() && process.kill(group, 'SIGKILL'))
    const isUnderWay = async () => (await historyIn(temporary)).includes('"applied"')
    await until(isUnderWay, 'it is under way', 40_000)
    process.kill(-group, 'SIGINT')
    const [code] = (await once(child, 'exit')) as [number | null]
    assert.equal(code, 130)
    await until(() => !isRunning(), 'every process has ended', 2_000)
    assert.deepEqual(await readdir(temporary), [])
  },
)

/** What a torture that keeps its files in the folder has noted so far. */
async function historyIn(temporary: string): Promise<string> {
  const folder = (await readdir(temporary)).find((name) => name.startsWith('fencing-torture-'))
  if (folder === undefined) return ''
  return readFile(path.join(temporary, folder, 'history.jsonl'), 'utf8').catch(() => '')
}

async function told(...args: readonly string[]) {
  const child = spawn(process.execPath, [TORTURE, ...args], { stdio: ['ignore', 'pipe', 'pipe'] })
  let said = ''
  child.stdout.on('data', (chunk: Buffer) => (said += chunk.toString()))
  child.stderr.on('data', (chunk: Buffer) => (said += chunk.toString()))
  const [code] = (await once(child, 'close')) as [number | null]
  return { code, said }
}

test('a mistake in the options is named, with exit code 2 and what is allowed', async () => {
  const mistakes: [string[], RegExp][] = [
    [['--faults', 'earthquake'], /no fault "earthquake"; there are .*pause-worker.*kill-backend/],
    [['--seconds', '0'], /--seconds must be a whole number from 1 to [0-9]+, not "0"/],
    [['--scopes', 'many'], /--scopes must be a whole number from 1 to 1000, not "many"/],
    [['--sed', '1'], /'--sed'/],
    [['10'], /'10'/],
  ]
  const all = mistakes.map(async ([args, named]) => {
    const { code, said } = await told(...args)
    assert.equal(code, 2, args.join(' '))
    assert.match(said, /^torture: /)
    assert.match(said, named)
    assert.match(said, /Usage: /)
  })
  await Promise.all(all)
})

test('--help tells the options', async () => {
  const { code, said } = await told('--help')
  assert.equal(code, 0)
  for (const word of ['--seconds', '--seed', '--workers', '--scopes', ...FAULTS]) {
    assert.ok(said.includes(word), word)
  }
})
