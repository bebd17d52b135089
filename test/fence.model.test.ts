import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { InFlight, type Write } from '../src/inflight.ts'
import type { Store } from '../src/store/store.ts'
import type { Token } from '../src/token.ts'
import { World, type Parts } from './world.ts'

type Step =
  | { do: 'arrive'; scope: string; token: bigint; once: boolean }
  | { do: 'commit'; ok: boolean }
  | { do: 'end'; index: number; unknown: boolean }
  | { do: 'leave'; index: number }
  | { do: 'advance'; ms: number }
  | { do: 'crash'; kept: number }
  | { do: 'restart' }

const SCOPES = ['/a', '/b', '/c']

const step: fc.Arbitrary<Step> = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant('arrive' as const), scope: fc.constantFrom(...SCOPES.slice(0, 2), '/a'), token: fc.bigInt(0n, 4n), once: fc.boolean() }) },
  { weight: 5, arbitrary: fc.record({ do: fc.constant('commit' as const), ok: fc.oneof({ weight: 4, arbitrary: fc.constant(true) }, fc.constant(false)) }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant('end' as const), index: fc.nat(3), unknown: fc.boolean() }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('leave' as const), index: fc.nat(5) }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant('advance' as const), ms: fc.constantFrom(1, 25, 50, 101) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('crash' as const), kept: fc.nat(2) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant('restart' as const) }) },
) // prettier-ignore

async function run(world: World, steps: readonly Step[]): Promise<void> {
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
  await world.checkProgress(SCOPES)
}

/** Searches for a history that breaks the promise; undefined where none was found. */
async function search(parts: Parts, numRuns: number): Promise<string | undefined> {
  const histories = fc.array(step, { maxLength: 40, size: 'max' })
  const property = fc.asyncProperty(histories, (steps) => run(new World(parts), steps))
  const result = await fc.check(property, { numRuns })
  return result.failed ? fc.stringify(result.counterexample) : undefined
}

test('no history of arrivals, commits, ends, leavings, crashes and restarts breaks the promise', async () => {
  assert.equal(await search({}, 3_000), undefined)
})

/** Lets every write through at once. */
class WithoutBarrier extends InFlight {
  override enter(write: Write): boolean {
    write.place = { at: 'sending' }
    return true
  }
  override turn(): 'go' {
    return 'go'
  }
  override end(write: Write): void {
    write.place = { at: 'outside' }
  }
}

/** Takes an unknown outcome for a known end. */
class WithoutSettling extends InFlight {
  override end(write: Write): void {
    super.end(write, 'known')
  }
  override settle(): void {
    // What a crash left behind is forgotten as well.
  }
}

function withRaise(store: Store, raise: Store['raise']): Store {
  const get = (target: Store, key: keyof Store) => (key === 'raise' ? raise : target[key])
  return new Proxy(store, { get: (target, key) => get(target, key as keyof Store) })
}

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
  'overlapping takeovers forgotten by a crash': { store: forgetful },
  'the place given up when the client leaves': {
    onLeave: (inflight, write) => inflight.end(write, 'known'),
  },
}

for (const [name, parts] of Object.entries(BROKEN)) {
  test(`the search finds the violation with ${name}`, async () => {
    assert.notEqual(await search(parts, 20_000), undefined)
  })
}
