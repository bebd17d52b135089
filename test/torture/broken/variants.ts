import type { Clock } from '../../../src/clock.ts'
import {
  createForwarder,
  type Ending,
  type Forwarder,
  type ForwardSettings,
} from '../../../src/forward.ts'
import { InFlight, type BarrierSettings, type Write } from '../../../src/inflight.ts'
import type { Builders } from '../../../src/serve.ts'
import { openStore } from '../../../src/store/open.ts'
import type { Raised, Store } from '../../../src/store/store.ts'
import type { Token } from '../../../src/token.ts'
import { createKnownBad } from '../../known-bad.ts'

/**
 * Sidecars as careful people have built them, each with one mistake. They are here to be caught: a
 * checker, or a model, that finds nothing wrong with them proves nothing about the real one.
 */

/** Lets every write through at once. */
export class WithoutBarrier extends InFlight {
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
export class WithoutSettling extends InFlight {
  override end(write: Write): void {
    super.end(write, 'known')
  }
  override settle(): void {
    // What a crash left behind is forgotten as well.
  }
}

/** Another store in front of a store, which does all but `raise` itself. */
export function withRaise(store: Store, raise: Store['raise']): Store {
  const get = (target: Store, key: keyof Store): unknown => {
    if (key === 'raise') return raise
    const value: unknown = target[key]
    return typeof value === 'function' ? (value.bind(target) as unknown) : value
  }
  return new Proxy(store, { get: (target, key) => get(target, key as keyof Store) })
}

/** Compares with what is on disk, and answers; the commit comes after that, and so after the forward. */
export function committingLater(store: Store): Store {
  const marks = new Map<string, Token>()
  return withRaise(store, async (scope, token, overlapping): Promise<Raised> => {
    const from = marks.get(scope) ?? (await store.read(scope))?.mark
    if (from !== undefined && from >= token) return { mark: from, from, overlapping: false }
    marks.set(scope, token)
    void store.raise(scope, token, overlapping).catch(() => undefined)
    return { mark: token, from, overlapping }
  })
}

/** Compares tokens as floating-point numbers, as everything does that reads JSON numbers. */
export function comparingFloats(store: Store): Store {
  return withRaise(store, async (scope, token, overlapping): Promise<Raised> => {
    const raised = await store.raise(scope, token, overlapping)
    const isSame = raised.mark !== token && Number(raised.mark) === Number(token)
    return isSame ? { ...raised, mark: token, from: token } : raised
  })
}

/** Takes a write for ended when its client has gone. */
function endingWithClient(settings: ForwardSettings): Forwarder {
  const forwarder = createForwarder(settings)
  return {
    close: () => forwarder.close(),
    send(outgoing) {
      const exchange = forwarder.send(outgoing)
      const gone = new Promise<Ending>((resolve) =>
        outgoing.res.once('close', () => resolve({ kind: 'answered', status: 0 })),
      )
      return { ended: Promise.race([exchange.ended, gone]), overtake: () => exchange.overtake() }
    },
  }
}

function withStore(change: (store: Store) => Store): Partial<Builders> {
  return {
    async store(config, events) {
      const { store, created } = await openStore(config, events)
      return { store: change(store), created }
    },
  }
}

const withInFlight = (
  build: (settings: BarrierSettings, clock: Clock) => InFlight,
): Partial<Builders> => ({ inflight: build })

export const BROKEN = {
  'barrier off': withInFlight((settings, clock) => new WithoutBarrier(settings, clock)),
  'commit after the forward': withStore(committingLater),
  'settling off': withInFlight((settings, clock) => new WithoutSettling(settings, clock)),
  'slot released when the client leaves': { forwarder: endingWithClient },
  'float tokens': withStore(comparingFloats),
  'http-proxy as forwarder': { forwarder: createKnownBad },
} as const satisfies Record<string, Partial<Builders>>

export type BrokenName = keyof typeof BROKEN
