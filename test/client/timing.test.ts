import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import {
  parseDuration,
  renewAfterMs,
  renewalTimeoutMs,
  retryAfterMs,
  waitsOf,
} from '../../src/client/timing.ts'
import { MAX_DURATION_MS, formatDuration } from '../../src/duration.ts'

const ttl = fc.integer({ min: 1, max: MAX_DURATION_MS })
const random = fc.double({ min: 0, max: 1, maxExcluded: true, noNaN: true })

test('renewals come between 4/15 and 1/3 of the TTL, spread over all of that', () => {
  fc.assert(
    fc.property(ttl, random, (ttlMs, x) => {
      const ms = renewAfterMs(ttlMs, x)
      assert.ok(ms <= ttlMs / 3 && ms >= (ttlMs * 4) / 15 - 1e-6)
    }),
  )
  assert.equal(renewAfterMs(15_000, 0), 5_000)
  assert.equal(renewAfterMs(15_000, 1), 4_000)
})

test('a renewal and two more tries fit into the TTL, however each is lost', () => {
  fc.assert(
    fc.property(ttl, random, random, random, (ttlMs, a, b, c) => {
      const lost = renewalTimeoutMs(ttlMs)
      const third = renewAfterMs(ttlMs, a) + lost + retryAfterMs(ttlMs, b) + lost + retryAfterMs(ttlMs, c) // prettier-ignore
      assert.ok(third < ttlMs * 0.95, `${third} of ${ttlMs} ms`)
    }),
  )
})

test('tries follow each other at once neither for short leases nor for long ones', () => {
  fc.assert(
    fc.property(ttl, random, (ttlMs, x) => {
      const ms = retryAfterMs(ttlMs, x)
      assert.ok(ms >= Math.min(ttlMs, 60_000) / 16 && ms <= Math.min(ttlMs, 60_000) / 8)
    }),
  )
})

test('every duration that the service can say is understood', () => {
  fc.assert(
    fc.property(ttl, (ms) => {
      assert.equal(parseDuration(formatDuration(ms)), ms)
    }),
  )
  for (const text of ['', '15', '15 s', '1.5s', '-1s', 's', '15sec', '1d', ' 1s', '1s\n']) {
    assert.equal(parseDuration(text), undefined, text)
  }
  assert.equal(parseDuration('9999999999h'), 2 ** 31 - 1, 'what a timer can hold')
})

test('a long wait is split into parts that add up to it', () => {
  fc.assert(
    fc.property(ttl, (ms) => {
      const parts = waitsOf(formatDuration(ms)).map((part) => parseDuration(part ?? '') ?? 0)
      assert.equal(parts.reduce((sum, part) => sum + part, 0), ms) // prettier-ignore
      assert.ok(parts.every((part) => part > 0 && part <= 240_000))
    }),
  )
  assert.deepEqual(waitsOf(undefined), [undefined])
  assert.deepEqual(waitsOf('0s'), ['0s'])
  assert.deepEqual(waitsOf('soon'), ['soon'])
})
