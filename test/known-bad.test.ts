import assert from 'node:assert/strict'
import { fork } from 'node:child_process'
import { once } from 'node:events'
import { describe, test } from 'node:test'
import type { Running } from '../src/serve.ts'
import { endings, framing, type Start } from './exchange-cases.ts'
import { configFor, portOf, startProxy, temporaryFolder, type TestProxy } from './harness.ts'
import { createKnownBad } from './known-bad.ts'

/**
 * http-proxy in the forwarder's place. Cases that hold with the real forwarder are run with it, word
 * for word, and have to fail here: so the hazards are real, and these tests would notice them.
 */

const knownBad: Start = (t, url, overrides) =>
  startProxy(t, url, { ...overrides, shutdownTimeoutMs: 100 }, { forwarder: createKnownBad })

/** Which case fails, and by which assertion: any other failure would be an accident. */
const CAUGHT: Record<string, RegExp> = {}

// Most of them fail by waiting in vain, which they can do side by side.
describe('with http-proxy in its place, this does not hold:', { concurrency: true }, () => {
  for (const [name, failure] of Object.entries(CAUGHT)) {
    test(name, async (t) => {
      const check = endings[name] ?? framing[name]
      assert.ok(check, 'the case exists')
      await assert.rejects(check(t, knownBad), { name: 'AssertionError', message: failure })
    })
  }
})
