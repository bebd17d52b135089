import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import {
  FIRST_ISSUED,
  formatToken,
  joinToken,
  MAX_PART,
  nextToken,
  parseToken,
  splitToken,
  type Token,
} from '../src/token.ts'

/** What `text` spells; fails where that is no token. */
function token(text: string): Token {
  const parsed = parseToken(text)
  assert.ok(parsed !== undefined, `${text} is a token`)
  return parsed
}

for (const text of [
  '0',
  '1',
  '10',
  '9007199254740993',
  `${MAX_PART}`,
  '1.0',
  `${MAX_PART}.${MAX_PART}`,
]) {
  test(`${text} is a token and is written as it came`, () => {
    assert.equal(formatToken(token(text)), text)
  })
}

test('a number alone belongs to generation 0, however that is spelt', () => {
  assert.equal(token('0.7'), token('7'))
  assert.equal(formatToken(token('0.7')), '7')
})

const NO_TOKENS = {
  'no digits at all': ['', '.', '1.', '.1', '5.', '0.', 'abc', 'NaN', 'Infinity', 'null'],
  'a sign': ['-1', '+5', '-0', '1.-1', '-2147483648', '1.+1'],
  'a leading zero': ['00', '01', '000000000000002', '1.01', '01.1', '00.1'],
  'more than two parts': ['1.2.3', '1..2'],
  'a blank or a line end': [' 1', '1 ', '1. 2', '1\n', '1\r', '\t1', '1\u00a0', '1 2', '\n1'],
  'another notation': ['0x100000003', '1e3', '1_000', '1,000', '0b1', '0o7', '1n', '1.5e1'],
  'a list or parameters': ['7, 8', '7,8', '5;x', '"7"'],
  'digits that are not ASCII': ['７', '１２', '٣', '1.٣', '²', '1\u0000'],
  'more than 63 bits': ['9223372036854775808', '16053482842036918036', '1.9223372036854775808', '9223372036854775808.1', '18446744073709551615', '1'.padEnd(10_000, '0')],
} // prettier-ignore

for (const [what, texts] of Object.entries(NO_TOKENS)) {
  for (const text of texts) {
    test(`${JSON.stringify(text.slice(0, 30))} is no token: it has ${what}`, () => {
      assert.equal(parseToken(text), undefined)
    })
  }
}

test('numbers beyond the precision of a float are ordered exactly', () => {
  assert.ok(token('9007199254740993') > token('9007199254740992'))
  assert.ok(token('9007199254740992') < token('9007199254740993'))
  assert.notEqual(token('9007199254740992'), token('9007199254740993'))
})

test('numbers are ordered as numbers, not as text', () => {
  assert.ok(token('10') > token('9'))
  assert.ok(token('10.0') > token('9.5'))
})

test('a higher generation is newer than every number of a lower one', () => {
  assert.ok(token('1.4100') > token('5000'))
  assert.ok(token('1.0') > token(`${MAX_PART}`))
  assert.ok(token('2.0') > token(`1.${MAX_PART}`))
})

const part = fc.oneof(
  fc.bigInt(0n, MAX_PART),
  fc.bigInt(0n, 3n),
  fc.constantFrom(MAX_PART, MAX_PART - 1n, 2n ** 53n, 2n ** 53n + 1n, 2n ** 62n),
)
const pair = fc.tuple(part, part)

test('tokens are ordered as the pairs that they spell', () => {
  const order = (a: bigint, b: bigint) => (a < b ? -1 : a > b ? 1 : 0)
  fc.assert(
    fc.property(pair, pair, ([generation, number], [otherGeneration, otherNumber]) => {
      const expected = order(generation, otherGeneration) || order(number, otherNumber)
      const one = token(`${generation}.${number}`)
      const other = token(`${otherGeneration}.${otherNumber}`)
      assert.equal(order(one, other), expected)
    }),
  )
})

test('every token survives being taken apart, put together, written and read', () => {
  fc.assert(
    fc.property(pair, ([generation, number]) => {
      const one = token(`${generation}.${number}`)
      assert.deepEqual(splitToken(one), { generation, number })
      assert.equal(joinToken(generation, number), one)
      assert.equal(parseToken(formatToken(one)), one)
    }),
  )
})

test('a text is a token exactly when its parts, written canonically, are the text again', () => {
  /** The grammar once more, by other means. */
  const canonical = (text: string) => {
    const parts = text.split('.')
    const written = parts.map((digits) => {
      const value = /^[0-9]+$/.test(digits) ? BigInt(digits) : MAX_PART + 1n
      return value <= MAX_PART ? value.toString() : undefined
    })
    return parts.length <= 2 && written.join('.') === text && !written.includes(undefined)
  }
  const alphabet = fc.constantFrom(
    '0',
    '1',
    '5',
    '9',
    '.',
    '-',
    '+',
    ' ',
    'e',
    '9223372036854775807',
  )
  const text = fc.oneof(
    fc.array(alphabet, { maxLength: 6 }).map((texts) => texts.join('')),
    pair.map(([generation, number]) => `${generation}.${number + 1n}`),
    fc.string({ unit: 'binary' }),
  )
  fc.assert(
    fc.property(text, (text) => assert.equal(parseToken(text) !== undefined, canonical(text))),
    { numRuns: 2_000 },
  )
})

test('the first token that is issued is 1', () => {
  assert.equal(FIRST_ISSUED, token('1'))
})

for (const [one, next] of [
  ['0', '1'],
  ['41', '42'],
  ['9007199254740992', '9007199254740993'],
  [`${MAX_PART}`, '1.0'],
  ['7.41', '7.42'],
  [`7.${MAX_PART}`, '8.0'],
  [`${MAX_PART}.${MAX_PART - 1n}`, `${MAX_PART}.${MAX_PART}`],
] as const) {
  test(`after ${one} comes ${next}`, () => {
    const following = nextToken(token(one))
    assert.equal(following && formatToken(following), next)
  })
}

test('nothing comes after the last token', () => {
  assert.equal(nextToken(joinToken(MAX_PART, MAX_PART)), undefined)
})

test('the next token is higher, is a token, and none lies between', () => {
  fc.assert(
    fc.property(pair, ([generation, number]) => {
      const one = joinToken(generation, number)
      const next = nextToken(one)
      if (next === undefined) return generation === MAX_PART && number === MAX_PART
      assert.equal(token(formatToken(next)), next)
      assert.equal(next - one, 1n)
      return true
    }),
  )
})
