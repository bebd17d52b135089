import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import type { Store } from '../src/store/store.ts'
import type { Token } from '../src/token.ts'
import {
  keepingFloats,
  WithoutBarrier,
  WithoutSettling,
  withRaise,
} from './torture/broken/variants.ts'
import { World, type Parts } from './world.ts'

/**
 * The barrier and the store's contract as a model: every order of raises, commits, failures,
 * crashes, begins, ends, unknown outcomes and settling may come, and the world judges each step.
 *
 * Why fast-check and not a model checker such as spin: what it explores is the code that runs, not
 * a description of it in another language, which would have to be kept true by hand and in which
 * the mistakes that matter here (a promise that resolves one turn of the event loop too late, an
 * entry made after the comparison instead of with it) do not exist. What is lost is the proof that
 * nothing was left out. For that, every short history is tried one after the other (below, with a
 * vocabulary cut down to what can interact), and the long ones by chance, shrunk to the shortest
 * that still fails. The broken variants show that either way finds what it should.
 */

type Step =
  | { do: 'arrive'; scope: string; token: bigint; once: boolean }
  | { do: 'commit'; ok: boolean }
  | { do: 'end'; index: number; unknown: boolean }
  | { do: 'leave'; index: number }
  | { do: 'advance'; ms: number }
  | { do: 'crash'; kept: number }
  | { do: 'restart' }

const SCOPES = ['/a', '/b', '/c']

/** Tokens that a floating-point number cannot tell apart, as they are when sources count for long. */
const beyondFloats = (n: bigint) => 2n ** 60n + n

const step: fc.Arbitrary<Step> = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant('arrive' as const), scope: fc.constantFrom(...SCOPES.slice(0, 2), '/a'), token: fc.bigInt(0n, 4n).map(beyondFloats), once: fc.boolean() }) },
  { weight: 5, arbitrary: fc.record({ do: fc.constant('commit' as const), ok: fc.oneof({ weight: 4, arbitrary: fc.constant(true) }, fc.constant(false)) }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant('end' as const), index: fc.nat(3), unknown: fc.boolean() }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('leave' as const), index: fc.nat(5) }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('advance' as const), ms: fc.constantFrom(1, 25, 50, 101) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('crash' as const), kept: fc.nat(2) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('restart' as const) }) },
) // prettier-ignore

async function play(world: World, steps: readonly Step[]): Promise<void> {
  for (const step of steps) {
    switch (step.do) {
      case 'arrive':
        world.arrive(step.scope, step.token as Token, step.once)
        break
      case 'commit':
        world.store.commit(step.ok)
        break
      case 'end':
        world.end(step.index, step.unknown ? 'unknown' : 'known')
        break
      case 'leave':
        world.leave(step.index)
        break
      case 'advance':
        world.clock.advance(step.ms)
        break
      case 'crash':
        world.crash(step.kept)
        break
      case 'restart':
        world.restartCleanly()
        break
      default:
        step satisfies never
    }
    await world.calm()
  }
}

async function run(world: World, steps: readonly Step[]): Promise<void> {
  await play(world, steps)
  await world.checkProgress(SCOPES)
}

/** Searches for a history that breaks the promise; undefined where none was found. */
async function search(parts: Parts, numRuns: number): Promise<string | undefined> {
  const histories = fc.array(step, { maxLength: 40, size: 'max' })
  const property = fc.asyncProperty(histories, (steps) => run(new World(parts), steps))
  const result = await fc.check(property, { numRuns })
  return result.failed ? fc.stringify(result.counterexample) : undefined
}

/**
 * The smallest steps that can interact in one scope: two owners, a disk that commits or fails, an
 * end that is known or not, time to settle, a crash before or after the commit.
 */
const ARRIVALS: readonly Step[] = [
  { do: 'arrive', scope: '/a', token: beyondFloats(1n), once: false },
  { do: 'arrive', scope: '/a', token: beyondFloats(2n), once: false },
]
const SMALL: readonly Step[] = [
  ...ARRIVALS,
  { do: 'commit', ok: true },
  { do: 'commit', ok: false },
  { do: 'end', index: 0, unknown: false },
  { do: 'end', index: 0, unknown: true },
  { do: 'leave', index: 0 },
  { do: 'advance', ms: 50 },
  { do: 'crash', kept: 0 },
  { do: 'crash', kept: 1 },
]

/** Whether the step does anything here; where not, the history is a shorter one. */
function matters(world: World, step: Step): boolean {
  switch (step.do) {
    case 'commit':
      return world.store.pending > 0
    case 'end':
      return world.sending.length > 0
    case 'leave':
      return world.sending.length + world.waiting.size > 0
    case 'crash':
      return step.kept <= world.store.pending
    default:
      return true
  }
}

/** Goes on from a history in every way, for `depth` steps. The first way to break the promise, or undefined. */
async function searchAll(
  parts: Parts,
  depth: number,
  before: readonly Step[] = [],
): Promise<string | undefined> {
  for (const step of before.length === 0 ? ARRIVALS : SMALL) {
    const world = new World(parts)
    await play(world, before)
    if (!matters(world, step)) continue
    const steps = [...before, step]
    try {
      await play(world, [step])
      if (depth === 1) await world.checkProgress(['/a'])
    } catch (violation) {
      return `${fc.stringify(steps)}: ${String(violation)}`
    }
    const found = depth === 1 ? undefined : await searchAll(parts, depth - 1, steps)
    if (found !== undefined) return found
  }
  return undefined
}

test('no history of up to 6 steps of two owners in one scope breaks the promise', async () => {
  assert.equal(await searchAll({}, 6), undefined)
})

test('no history of 4 steps after a takeover that failed on the disk breaks the promise', async () => {
  const failed: readonly Step[] = [
    { do: 'arrive', scope: '/a', token: beyondFloats(1n), once: false },
    { do: 'commit', ok: true },
    { do: 'end', index: 0, unknown: false },
    { do: 'arrive', scope: '/a', token: beyondFloats(2n), once: false },
    { do: 'commit', ok: false },
  ]
  assert.equal(await searchAll({}, 4, failed), undefined)
})

test('no history of arrivals, commits, ends, leavings, crashes and restarts breaks the promise', async () => {
  assert.equal(await search({}, 3_000), undefined)
})

/** Says that a mark was raised before it is on disk. */
function early(store: Store): Store {
  const raise: Store['raise'] = (scope, token, overlapping) => {
    void store.raise(scope, token, overlapping).catch(() => undefined)
    return Promise.resolve({ mark: token, from: undefined, overlapping: false })
  }
  return withRaise(store, raise)
}

/** Forgets that a mark was raised over writes that had not ended. */
function forgetful(store: Store): Store {
  const raise: Store['raise'] = (scope, token) => store.raise(scope, token, false)
  return withRaise(store, raise)
}

const BROKEN: Record<string, Parts> = {
  'the barrier off': { inflight: (settings, clock) => new WithoutBarrier(settings, clock) },
  'settling off': { inflight: (settings, clock) => new WithoutSettling(settings, clock) },
  'the commit after the decision': { store: early },
  'tokens kept as floats': { store: keepingFloats },
  'overlapping takeovers forgotten by a crash': { store: forgetful },
  'the place given up when the client leaves': {
    onLeave: (inflight, write) => inflight.end(write, 'known'),
  },
}

for (const [name, parts] of Object.entries(BROKEN)) {
  test(`one of all short histories is the violation with ${name}`, async () => {
    assert.notEqual(await searchAll(parts, 6), undefined)
  })

  test(`the search finds the violation with ${name}`, async () => {
    assert.notEqual(await search(parts, 20_000), undefined)
  })
}
