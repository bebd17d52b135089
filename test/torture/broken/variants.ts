import type { Clock } from '../../../src/clock.ts'
import {
  createForwarder,
  type Ending,
  type Exchange,
  type Forwarder,
  type Outgoing,
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

/** Compares, answers, forwards; and commits the mark when the exchange is over. */
function committingAfterForward(): Partial<Builders> {
  const marks = new Map<string, Token>()
  const owed = new Map<string, () => void>()
  return {
    ...withStore((store) =>
      withRaise(store, async (scope, token, overlapping): Promise<Raised> => {
        const from = marks.get(scope) ?? (await store.read(scope))?.mark
        if (from !== undefined && from >= token) return { mark: from, from, overlapping: false }
        marks.set(scope, token)
        owed.set(scope, () => void store.raise(scope, token, overlapping).catch(() => undefined))
        return { mark: token, from, overlapping }
      }),
    ),
    ...withSend((forwarder, outgoing) => {
      const exchange = forwarder.send(outgoing)
      const scope = outgoing.path.replace(/\/[^/]*$/, '')
      const commit = owed.get(scope)
      owed.delete(scope)
      void exchange.ended.then(() => commit?.())
      return exchange
    }),
  }
}

/** Keeps marks as floating-point numbers, as everything does that reads JSON numbers. */
export function keepingFloats(store: Store): Store {
  return withRaise(store, async (scope, token, overlapping): Promise<Raised> => {
    const rounded = BigInt(Number(token)) as Token
    const { mark, from, ...raised } = await store.raise(scope, rounded, overlapping)
    if (mark !== rounded) return { mark, from, ...raised }
    return { ...raised, mark: token, from: from === rounded ? token : from }
  })
}

/** Takes a write for ended when its client has gone. */
const endingWithClient = withSend((forwarder, outgoing) => {
  const exchange = forwarder.send(outgoing)
  const gone = new Promise<Ending>((resolve) =>
    outgoing.res.once('close', () => resolve({ kind: 'answered', status: 0 })),
  )
  return { ended: Promise.race([exchange.ended, gone]), overtake: () => exchange.overtake() }
})

function withStore(change: (store: Store) => Store): Partial<Builders> {
  return {
    async store(config, events) {
      const { store, created } = await openStore(config, events)
      return { store: change(store), created }
    },
  }
}

function withSend(send: (real: Forwarder, outgoing: Outgoing) => Exchange): Partial<Builders> {
  return {
    forwarder(settings) {
      const real = createForwarder(settings)
      return { send: (outgoing) => send(real, outgoing), close: () => real.close() }
    },
  }
}

const withInFlight = (
  build: (settings: BarrierSettings, clock: Clock) => InFlight,
): Partial<Builders> => ({ inflight: build })

export const BROKEN = {
  'barrier off': withInFlight((settings, clock) => new WithoutBarrier(settings, clock)),
  'commit after the forward': committingAfterForward(),
  'settling off': withInFlight((settings, clock) => new WithoutSettling(settings, clock)),
  'slot released when the client leaves': endingWithClient,
  'float tokens': withStore(keepingFloats),
  'http-proxy as forwarder': { forwarder: createKnownBad },
} as const satisfies Record<string, Partial<Builders>>

export type BrokenName = keyof typeof BROKEN
