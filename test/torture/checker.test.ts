import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { check, countBeyondSettle, stretch } from './checker.ts'
import type { Happened, Happening } from './history.ts'

/** Histories made by hand, each with one thing in it that the checker has to see, or to let pass. */

const PROMISED = { settleMs: 600, responseTimeoutMs: 800 }
const SCOPE = '/jobs/1'

type At = (happened: Happened) => Happening
const at =
  (ms: number): At =>
  (happened) => ({ at: ms, ...happened })

/** The moments of a write; what is left out did not happen. */
interface Moments {
  readonly sent: number
  readonly begun?: number
  readonly applied?: number
  readonly responded?: number
  readonly answered?: number
  readonly left?: number
  readonly broken?: number
  readonly status?: number
  readonly result?: string
  readonly highest?: string
  readonly port?: number
  readonly appliedBytes?: number
}

function write(id: string, token: number, moments: Moments): Happening[] {
  const { sent, begun, applied, responded, answered, left, broken } = moments
  const { status = 200, result = 'accepted', highest, port = token, appliedBytes = 10 } = moments
  const scope = SCOPE
  const happenings: (Happening | undefined)[] = [
    at(sent)({ kind: 'sent', write: id, scope, token: `${token}`, bytes: 10, how: '', faults: [] }),
    begun === undefined
      ? undefined
      : at(begun)({ kind: 'begun', write: id, scope, token: `${token}`, port }),
    applied === undefined
      ? undefined
      : at(applied)({ kind: 'applied', write: id, bytes: appliedBytes }),
    responded === undefined ? undefined : at(responded)({ kind: 'responded', write: id }),
    answered === undefined
      ? undefined
      : at(answered)({ kind: 'answered', write: id, status, result, highest }),
    left === undefined ? undefined : at(left)({ kind: 'left', write: id }),
    broken === undefined ? undefined : at(broken)({ kind: 'broken', write: id, why: 'reset' }),
  ]
  return happenings.filter((happening) => happening !== undefined)
}

/** A write that goes as it should, from `start` on, within 50 ms. */
const ordinary = (id: string, token: number, start: number) =>
  write(id, token, {
    sent: start,
    begun: start + 10,
    applied: start + 20,
    responded: start + 30,
    answered: start + 40,
  })

function verdict(...parts: readonly Happening[][]) {
  return check(parts.flat().sort((a, b) => a.at - b.at), PROMISED) // prettier-ignore
}

const ruleOf = (...parts: readonly Happening[][]) => verdict(...parts)?.rule

const crash = (ends: number, killed: number, starts: number, runs: number): Happening[] => [
  at(ends)({ kind: 'sidecar', does: 'ends' }),
  at(killed)({ kind: 'sidecar', does: 'killed' }),
  at(starts)({ kind: 'sidecar', does: 'starts' }),
  at(runs)({ kind: 'sidecar', does: 'runs' }),
]

test('writes in order, with a stale one among them, violate nothing', () => {
  const stale = write('c', 1, { sent: 250, answered: 260, status: 409, result: 'stale', highest: '2' }) // prettier-ignore
  assert.equal(verdict(ordinary('a', 1, 0), ordinary('b', 2, 100), stale), undefined)
})

test('writes of one token may overlap, in any order', () => {
  assert.equal(verdict(ordinary('a', 1, 0), ordinary('b', 1, 5), ordinary('c', 1, 12)), undefined)
})

describe('rules 1 and 2', () => {
  test('an older write that is applied after a newer one breaks rule 1', () => {
    const late = write('a', 1, { sent: 0, begun: 5, applied: 200, responded: 210, answered: 220 })
    const found = verdict(late, ordinary('b', 2, 50))
    assert.equal(found?.rule, 1)
    assert.equal(found.at, 200)
    assert.deepEqual(found.writes, ['a', 'b'])
    assert.match(found.words, /^a \(token 1\) was applied 130\.0 ms after b \(token 2\)$/)
  })

  test('a newer write that begins before the older one is answered breaks rule 2, though nothing went backwards', () => {
    const slow = write('a', 1, { sent: 0, begun: 5, applied: 6, responded: 100, answered: 110 })
    assert.equal(ruleOf(slow, ordinary('b', 2, 50)), 2)
    assert.equal(ruleOf(slow, ordinary('b', 2, 91)), undefined)
  })

  test('an older write that begins after a newer one breaks rule 2 at the latest when it is answered', () => {
    assert.equal(ruleOf(ordinary('b', 2, 0), write('a', 1, { sent: 0, begun: 45, applied: 46, responded: 47, answered: 48 })), 1) // prettier-ignore
  })

  const cutOff = { sent: 0, begun: 10, applied: 12, answered: 102, status: 502, result: 'unknown' }
  const cut = [at(100)({ kind: 'cut', port: 1 })]

  test('after an unknown outcome, a newer write must not begin before settle has passed since the connection broke', () => {
    assert.equal(ruleOf(write('a', 1, cutOff), cut, ordinary('b', 2, 680)), 2)
    assert.equal(ruleOf(write('a', 1, cutOff), cut, ordinary('b', 2, 690)), undefined)
  })

  test('that the backend had answered, which was lost, shortens nothing', () => {
    const answeredInVain = write('a', 1, { ...cutOff, responded: 20 })
    assert.equal(ruleOf(answeredInVain, cut, ordinary('b', 2, 300)), 2)
  })

  test('a cut of an earlier connection from the same port is not taken for its end', () => {
    const earlier = [at(-50)({ kind: 'cut', port: 1 })]
    assert.equal(ruleOf(earlier, write('a', 1, cutOff), cut, ordinary('b', 2, 600)), 2)
  })

  test('a write cut off by a newer owner settles from the moment at which the newer one was sent, at the earliest', () => {
    const superseded = write('a', 1, { sent: 0, begun: 10, answered: 60, status: 409, result: 'superseded', highest: '2' }) // prettier-ignore
    const newer = (begun: number) => write('b', 2, { sent: 50, begun })
    assert.equal(ruleOf(superseded, newer(640)), 2)
    assert.equal(ruleOf(superseded, newer(651)), undefined)
  })

  test('silence of the backend settles from the response timeout on', () => {
    const timedOut = write('a', 1, { sent: 0, begun: 10, answered: 805, status: 504, result: 'unknown' }) // prettier-ignore
    assert.equal(ruleOf(timedOut, ordinary('b', 2, 1_380)), 2)
    assert.equal(ruleOf(timedOut, ordinary('b', 2, 1_395)), undefined)
  })

  test('a client that leaves ends nothing: newer writes begin when the exchange is over', () => {
    const left = write('a', 1, { sent: 0, begun: 10, applied: 12, left: 20, responded: 300 })
    assert.equal(ruleOf(left, ordinary('b', 2, 100)), 2)
    assert.equal(ruleOf(left, ordinary('b', 2, 300)), undefined)
  })

  test('after a crash, settle counts from the next start', () => {
    const inFlight = write('a', 1, { sent: 0, begun: 10, applied: 12, broken: 51 })
    const restart = crash(50, 52, 60, 300)
    assert.equal(ruleOf(inFlight, restart, ordinary('b', 2, 640)), 2)
    assert.equal(ruleOf(inFlight, restart, ordinary('b', 2, 651)), undefined)
    assert.equal(ruleOf(inFlight, restart, ordinary('b', 1, 310)), undefined, 'the same token')
  })

  test('what lands after settle has passed is not the fault of the sidecar, and is counted', () => {
    const landsLate = write('a', 1, { ...cutOff, applied: 900 })
    const newer = ordinary('b', 2, 705)
    assert.equal(verdict(landsLate, cut, newer), undefined)
    const all = [landsLate, cut, newer].flat().sort((a, b) => a.at - b.at)
    assert.equal(countBeyondSettle(all, PROMISED), 1)
    assert.equal(ruleOf(landsLate, cut, ordinary('b', 2, 600)), 1, 'but beginning early is')
  })

  test('other scopes are no concern', () => {
    const slow = write('a', 1, { sent: 0, begun: 5, applied: 6, responded: 100, answered: 110 })
    const elsewhere = ordinary('b', 2, 50).map((it) => ('scope' in it ? { ...it, scope: '/x' } : it)) // prettier-ignore
    assert.equal(verdict(slow, elsewhere), undefined)
  })
})

describe('rule 3', () => {
  const good = { sent: 0, begun: 10, applied: 20, responded: 30, answered: 40 }
  const notApplied = { sent: 0, begun: 10, responded: 30, answered: 40 }
  const notResponded = { sent: 0, begun: 10, applied: 20, answered: 40 }
  const cases: [string, Happening[]][] = [
    ['2xx without being applied', write('a', 1, notApplied)],
    ['2xx that the backend never gave', write('a', 1, notResponded)],
    ['2xx before it was applied', write('a', 1, { ...good, applied: 50 })],
    ['2xx with a part of its body applied', write('a', 1, { ...good, appliedBytes: 9 })],
    ['applied twice', [...write('a', 1, good), at(60)({ kind: 'applied', write: 'a', bytes: 10 })]],
    ['sent to the backend twice', [...write('a', 1, good), at(60)({ kind: 'begun', write: 'a', scope: SCOPE, token: '1', port: 9 })]],
    ['sent with another token', write('a', 1, good).map((it) => (it.kind === 'begun' ? { ...it, token: '2' } : it))],
    ['sent by nobody', [at(5)({ kind: 'begun', write: 'x', scope: SCOPE, token: '1', port: 9 })]],
    ['busy, but forwarded', write('a', 1, { ...good, status: 503, result: 'busy' })],
    ['unreachable, but forwarded', write('a', 1, { ...good, status: 502, result: 'unreachable' })],
    ['superseded, but applied', [...write('a', 1, { sent: 0, begun: 10, applied: 20, answered: 40, status: 409, result: 'superseded', highest: '2' }), ...write('b', 2, { sent: 5 })]],
  ] // prettier-ignore
  for (const [name, happenings] of cases) {
    test(name, () => assert.equal(ruleOf(happenings), 3))
  }

  test('an unknown outcome may have been applied or not; an answer of the backend that is not 2xx, too', () => {
    const unknown = { sent: 0, begun: 10, answered: 40, status: 502, result: 'unknown' }
    assert.equal(verdict(write('a', 1, unknown)), undefined)
    assert.equal(verdict(write('a', 1, { ...unknown, applied: 20 })), undefined)
    assert.equal(verdict(write('a', 1, { ...notApplied, status: 413 })), undefined)
  })
})

describe('rule 4', () => {
  const stale = (highest?: string) =>
    write('a', 1, {
      sent: 100,
      answered: 110,
      status: 409,
      result: 'stale',
      ...(highest === undefined ? {} : { highest }),
    })

  test('a 409 that names a mark of which no write was sent, or not yet', () => {
    assert.equal(ruleOf(stale('2')), 4)
    assert.equal(ruleOf(stale('2'), write('b', 2, { sent: 120 })), 4)
    assert.equal(ruleOf(stale('2'), write('b', 2, { sent: 90 })), undefined)
  })

  test('a 409 that names no mark, or none above its own', () => {
    assert.equal(ruleOf(stale()), 4)
    assert.equal(ruleOf(stale('1')), 4)
  })
})

describe('rule 5', () => {
  const marks = (ms: number, found: Record<string, string>) => [
    at(ms + 5)({ kind: 'marks', since: ms, marks: found }),
  ]

  test('a mark that is lower after a restart than an answer, a 409 or a write at the backend showed before', () => {
    const restart = crash(50, 52, 60, 300)
    assert.equal(ruleOf(ordinary('a', 2, 0), restart, marks(310, { [SCOPE]: '1' })), 5)
    assert.equal(ruleOf(ordinary('a', 2, 0), restart, marks(310, {})), 5)
    assert.equal(ruleOf(ordinary('a', 2, 0), restart, marks(310, { [SCOPE]: '2' })), undefined)
    assert.equal(ruleOf(ordinary('a', 2, 0), restart, marks(310, { [SCOPE]: '7' })), undefined)
    const onlyBegun = write('a', 2, { sent: 0, begun: 10 })
    assert.equal(ruleOf(onlyBegun, restart, marks(310, { [SCOPE]: '1' })), 5)
    const named = [
      ...write('a', 2, { sent: 0 }),
      ...write('b', 1, { sent: 1, answered: 9, status: 409, result: 'stale', highest: '2' }),
    ]
    assert.equal(ruleOf(named, restart, marks(310, { [SCOPE]: '1' })), 5)
  })

  test('a mark that was not acknowledged may be lost', () => {
    const unanswered = write('a', 2, { sent: 0, broken: 51 })
    assert.equal(ruleOf(unanswered, crash(50, 52, 60, 300), marks(310, {})), undefined)
  })

  test('an old token that is forwarded although a newer one was acknowledged before it was sent', () => {
    const named = [
      ...write('b', 2, { sent: 0 }),
      ...write('c', 1, { sent: 1, answered: 9, status: 409, result: 'stale', highest: '2' }),
    ]
    assert.equal(ruleOf(named, write('a', 1, { sent: 10, begun: 15 })), 5)
    assert.equal(ruleOf(named, write('a', 1, { sent: 8, begun: 15 })), undefined)
    const raced = write('a', 1, { sent: 5, answered: 60, status: 409, result: 'stale', highest: '2' }) // prettier-ignore
    assert.equal(ruleOf(ordinary('b', 2, 0), raced), undefined)
  })
})

test('tokens are compared exactly, and by their generation first', () => {
  const of = (token: string, happenings: Happening[]) =>
    happenings.map((it) => ('token' in it ? { ...it, token } : it))
  const newer = of('9007199254740993', ordinary('b', 2, 0))
  const older = of('9007199254740992', write('a', 1, { sent: 45, begun: 50 }))
  assert.equal(ruleOf(newer, older), 2)
  assert.equal(ruleOf(newer, of('1.7', ordinary('c', 3, 45))), undefined)
})

test('rule 6: silence, and what is stuck', () => {
  const silent = [...write('a', 1, { sent: 0 }), at(20_000)({ kind: 'silent', write: 'a' })]
  assert.equal(ruleOf(silent), 6)
  assert.equal(ruleOf([at(5)({ kind: 'stuck', why: 'the sidecar does not stop' })]), 6)
  const { at: end, words } = verdict([at(5)({ kind: 'stuck', scope: SCOPE, why: 'no way' })]) ?? {}
  assert.deepEqual([end, words], [5, 'no way'])
  const late = write('a', 1, { sent: 0, begun: 10, answered: 11_000, status: 504, result: 'unknown' }) // prettier-ignore
  assert.equal(ruleOf(late, [at(12_000)({ kind: 'calm' })], ordinary('b', 2, 12_100)), undefined)
})

test('of several violations the first is told, and the history that leads to it', () => {
  const late = write('a', 1, { sent: 0, begun: 5, applied: 200, responded: 210, answered: 220 })
  const lost = [at(300)({ kind: 'marks', since: 299, marks: {} })]
  const elsewhere = ordinary('z', 1, 0).map((it) => ('scope' in it ? { ...it, scope: '/x' } : it))
  const all =
    [late, ordinary('b', 2, 50), lost, elsewhere, ordinary('d', 3, 400), crash(52, 53, 54, 55)] // prettier-ignore
      .flat()
      .sort((x, y) => x.at - y.at)
  const found = check(all, PROMISED)
  assert.equal(found?.rule, 1)
  const led = stretch(all, found)
  assert.deepEqual([led[0]?.at, led.at(-1)?.at], [0, 200])
  assert.ok(
    led.some(({ kind }) => kind === 'sidecar'),
    'what concerns all is in it',
  )
  assert.ok(!led.some((it) => 'write' in it && it.write === 'z'), 'other scopes are not')
})
