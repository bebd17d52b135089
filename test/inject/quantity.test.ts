import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { parseQuantity } from '../../src/inject/quantity.ts'

test('quantities are read as Kubernetes reads them', () => {
  const same = [
    ['1', '1000m', '1e0', '1.0', '1.', '1000000u', '1E0'],
    ['64Mi', '65536Ki', '67108864'],
    ['1k', '1e3', '1E3', '1000'],
    ['.5', '500m', '0.5'],
    ['1Ei', '1152921504606846976'],
    ['1E', '1e18'],
  ]
  for (const spellings of same) {
    const amounts = new Set(spellings.map(parseQuantity))
    assert.equal(amounts.size, 1, spellings.join(' '))
    assert.notEqual([...amounts][0], undefined)
  }
})

test('what is no quantity is none', () => {
  for (const text of ['', '.', 'm', '1 Gi', '1gi', '1KB', '1K', '-1', '0x10', '1e', '1e400', 'NaN', '１']) {
    assert.equal(parseQuantity(text), undefined, text)
  }
}) // prettier-ignore

test('a larger number of the same unit is a larger quantity', () => {
  fc.assert(
    fc.property(fc.nat(10_000), fc.nat(10_000), fc.constantFrom('', 'm', 'k', 'Mi'), (a, b, unit) => {
      const [left, right] = [parseQuantity(`${a}${unit}`), parseQuantity(`${b}${unit}`)]
      assert.ok(left !== undefined && right !== undefined)
      assert.equal(Math.sign(left - right), Math.sign(a - b))
    }),
  )
}) // prettier-ignore
