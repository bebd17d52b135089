import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { readdir } from 'node:fs/promises'
import { describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { noFaultyDisk } from './faults/disk.ts'
import { temporaryFolder, until } from './harness.ts'
import type { BrokenName } from './torture/broken/variants.ts'
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
  readonly scopes?: number
  readonly skip?: string | false
}

const CONTROLS: Record<BrokenName, Control> = {
  'barrier off': { faults: [], rules: [1, 2] },
  'commit after the forward': {
    faults: ['slow-disk', 'kill-sidecar'],
    rules: [1, 2, 5],
    skip: noFaultyDisk,
  },
  'settling off': { faults: ['leave', 'reset-backend'], rules: [1, 2] },
  'slot released when the client leaves': { faults: ['leave'], rules: [1, 2] },
  // It is in its store that it compares so: it takes a first write of a scope after a restart.
  'float tokens': { faults: ['kill-sidecar', 'old-token'], scopes: 6, rules: [1, 2, 5] },
  'http-proxy as forwarder': { faults: ['leave', 'reset-backend'], rules: [1, 2, 3, 6] },
}

const LOAD = { workers: 4, seconds: 20, checkEverySeconds: 1 }

describe('the checker finds the violation with', { concurrency: 2 }, () => {
  for (const [name, { faults, rules, scopes = 2, skip = false }] of Object.entries(CONTROLS)) {
    test(name, { skip }, async () => {
      const violations = []
      for (const seed of [1, 2, 3]) {
        const options: Options = { ...LOAD, seed, scopes, faults, broken: name as BrokenName }
        const { violation } = await run(options)
        if (violation !== undefined && rules.includes(violation.rule)) return
        violations.push(violation)
      }
      assert.fail(`not found; instead: ${JSON.stringify(violations)}`)
    })
  }
})

test('the sidecar keeps its promise under every fault', async () => {
  const faults = FAULTS.filter((name) => noFaultyDisk === false || !name.endsWith('-disk'))
  const options: Options = {
    workers: 4,
    scopes: 3,
    seconds: 20,
    seed: 7,
    faults,
    checkEverySeconds: 5,
  }
  const outcome = await run(options)
  assert.equal(outcome.violation, undefined, report(options, outcome))
})

const TORTURE = fileURLToPath(new URL('torture/torture.js', import.meta.url))

test(
  'Ctrl-C ends all that the torture started',
  { skip: !existsSync('/proc/self/stat') },
  async (t) => {
    const temporary = await temporaryFolder(t)
    const child = spawn(process.execPath, [TORTURE, '--seconds', '60', '--workers', '2'], {
      detached: true,
      stdio: ['ignore', 'ignore', 'pipe'],
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
    let said = ''
    child.stderr.on('data', (chunk: Buffer) => (said += chunk.toString()))
    await until(() => said.includes('no violation so far'), 'it is under way', 40_000)
    process.kill(-group, 'SIGINT')
    const [code] = (await once(child, 'exit')) as [number | null]
    assert.equal(code, 130)
    await until(() => !isRunning(), 'every process has ended', 2_000)
    assert.deepEqual(await readdir(temporary), [])
  },
)

test('a mistake in the options is named, with exit code 2', async () => {
  for (const args of [
    ['--faults', 'earthquake'],
    ['--seconds', '0'],
    ['--sed', '1'],
  ]) {
    const child = spawn(process.execPath, [TORTURE, ...args], {
      stdio: ['ignore', 'ignore', 'pipe'],
    })
    let said = ''
    child.stderr.on('data', (chunk: Buffer) => (said += chunk.toString()))
    const [code] = (await once(child, 'close')) as [number | null]
    assert.equal(code, 2)
    assert.match(said, new RegExp(`^torture: .*(${args[1]}|sed)`))
  }
})
