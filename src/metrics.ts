import { Counter, Gauge, Histogram, Registry, collectDefaultMetrics } from 'prom-client'

/**
 * Every metric, declared once. Names are public. A scope is never a label: there are millions, and
 * they may be confidential.
 */
export type Metrics = ReturnType<typeof createMetrics>

/**
 * What every request of a route adds to. Plain numbers, handed to the library when somebody looks:
 * its lookups by label would cost more than the fence.
 */
export class RouteMeter {
  readonly route: string
  inFlight = 0
  waiting = 0
  #results = new Map<string, number>()
  /** Durations not handed over yet, by code: plain arrays of numbers, which leave no garbage. */
  readonly #exchanges = new Map<string, { readonly seconds: Float64Array; length: number }>()
  readonly #observe: (code: string, seconds: number) => void

  constructor(route: string, observe: (code: string, seconds: number) => void) {
    this.route = route
    this.#observe = observe
  }

  count(result: string): void {
    this.#results.set(result, (this.#results.get(result) ?? 0) + 1)
  }

  exchanged(code: string, seconds: number): void {
    let exchanges = this.#exchanges.get(code)
    if (exchanges === undefined) {
      exchanges = { seconds: new Float64Array(512), length: 0 }
      this.#exchanges.set(code, exchanges)
    }
    exchanges.seconds[exchanges.length++] = seconds
    if (exchanges.length === exchanges.seconds.length) this.drainExchanges()
  }

  drainExchanges(): void {
    for (const [code, exchanges] of this.#exchanges) {
      for (let i = 0; i < exchanges.length; i++) this.#observe(code, exchanges.seconds[i] ?? 0)
      exchanges.length = 0
    }
  }

  /** What was counted since the last call. */
  takeResults(): ReadonlyMap<string, number> {
    const results = this.#results
    this.#results = new Map()
    return results
  }
}

/** What is measured when somebody looks, not when it changes. */
export interface Sources {
  readonly settlingScopes: () => number
  readonly scopes: () => number
  /** Undefined where leases are off; their metrics are then not there. */
  readonly leases: { readonly active: () => number; readonly oldestMs: () => number } | undefined
}

export function createMetrics(sources: Sources) {
  const registry = new Registry()
  const registers = [registry]
  collectDefaultMetrics({ register: registry })

  const gauge = (name: string, help: string, read: () => number) =>
    new Gauge({
      name,
      help,
      registers,
      collect() {
        this.set(read())
      },
    })
  gauge('fencing_settling_scopes', 'Scopes kept from newer owners because an outcome is unknown.', sources.settlingScopes) // prettier-ignore
  gauge('fencing_scopes', 'Scopes that have a mark on disk.', sources.scopes)

  const meters = new Map<string, RouteMeter>()
  const upstreamSeconds = new Histogram({
    name: 'fencing_upstream_seconds',
    help: 'How long exchanges with the backend took, from their turn to their end.',
    labelNames: ['route', 'code'],
    buckets: [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60],
    registers,
    collect() {
      for (const meter of meters.values()) meter.drainExchanges()
    },
  })
  new Counter({
    name: 'fencing_requests_total',
    help: 'Requests by route and by what became of them.',
    labelNames: ['route', 'result'],
    registers,
    collect() {
      for (const meter of meters.values()) {
        const { route } = meter
        for (const [result, count] of meter.takeResults()) this.inc({ route, result }, count)
      }
    },
  })
  const routeGauge = (name: string, help: string, read: (meter: RouteMeter) => number) =>
    new Gauge({
      name,
      help,
      labelNames: ['route'],
      registers,
      collect() {
        for (const meter of meters.values()) this.set({ route: meter.route }, read(meter))
      },
    })
  routeGauge('fencing_in_flight', 'Writes that were let through and whose end is not known yet.', ({ inFlight }) => inFlight) // prettier-ignore
  routeGauge('fencing_waiting', 'Writes that wait for a commit or for older writes to end.', ({ waiting }) => waiting) // prettier-ignore

  const { leases } = sources
  if (leases !== undefined) {
    gauge('fencing_leases_active', 'Leases that live.', leases.active)
    gauge('fencing_lease_age_seconds', 'How long the oldest lease that lives has been held.', () => leases.oldestMs() / 1000) // prettier-ignore
  }
  const leaseRegisters = leases === undefined ? [] : registers
  const leaseCounter = (name: string, help: string) =>
    new Counter({ name, help, registers: leaseRegisters })

  return {
    registry,
    /** The meter of a route, by its label. */
    of(route: string): RouteMeter {
      const known = meters.get(route)
      if (known !== undefined) return known
      const observe = (code: string, seconds: number) => {
        upstreamSeconds.observe({ route, code }, seconds)
      }
      const meter = new RouteMeter(route, observe)
      meters.set(route, meter)
      return meter
    },
    staleWrites: new Counter({
      name: 'fencing_stale_writes_total',
      help: 'Writes with a token below the mark; in mode observe they were forwarded all the same.',
      labelNames: ['route', 'mode'],
      registers,
    }),
    takeovers: new Counter({
      name: 'fencing_takeovers_total',
      help: 'Marks that rose over an earlier one.',
      labelNames: ['route'],
      registers,
    }),
    barrierWait: new Histogram({
      name: 'fencing_barrier_wait_seconds',
      help: 'How long writes waited for older ones to end; those that need not wait are left out.',
      buckets: [0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 30],
      registers,
    }),
    unknownOutcomes: new Counter({
      name: 'fencing_unknown_outcomes_total',
      help: 'Writes of which nobody knows whether the backend applied them.',
      labelNames: ['route', 'reason'],
      registers,
    }),
    commitSeconds: new Histogram({
      name: 'fencing_commit_seconds',
      help: 'How long a commit took to reach the disk.',
      buckets: [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5],
      registers,
    }),
    commitBatchSize: new Histogram({
      name: 'fencing_commit_batch_size',
      help: 'How many calls shared a commit.',
      buckets: [1, 2, 5, 10, 25, 50, 100, 250, 1000],
      registers,
    }),
    leasesAcquired: leaseCounter('fencing_leases_acquired_total', 'Leases granted.'),
    leaseRenewals: new Counter({
      name: 'fencing_lease_renewals_total',
      help: 'Renewals asked for: renewed, or over because the lease had ended.',
      labelNames: ['result'],
      registers: leaseRegisters,
    }),
    leaseTakeovers: leaseCounter('fencing_lease_takeovers_total', 'Leases granted in scopes that had an owner before.'), // prettier-ignore
    tokensIssued: leaseCounter('fencing_tokens_issued_total', 'Tokens issued, each for one lease.'),
    storeErrors: new Counter({
      name: 'fencing_store_errors_total',
      help: 'Commits and reads that the store could not do.',
      registers,
    }),
  }
}
