import { Counter, Gauge, Histogram, Registry, collectDefaultMetrics } from 'prom-client'

/**
 * Every metric, declared once. Names are public. A scope is never a label: there are millions, and
 * they may be confidential.
 */
export type Metrics = ReturnType<typeof createMetrics>

/** What is measured when somebody looks, not when it changes. */
export interface Sources {
  settlingScopes(): number
  scopes(): number
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

  return {
    registry,
    requests: new Counter({
      name: 'fencing_requests_total',
      help: 'Requests by route and by what became of them.',
      labelNames: ['route', 'result'],
      registers,
    }),
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
    inFlight: new Gauge({
      name: 'fencing_in_flight',
      help: 'Writes that were let through to the backend and whose end is not known yet.',
      labelNames: ['route'],
      registers,
    }),
    waiting: new Gauge({
      name: 'fencing_waiting',
      help: 'Writes that wait for a commit or for older writes to end.',
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
    storeErrors: new Counter({
      name: 'fencing_store_errors_total',
      help: 'Commits and reads that the store could not do.',
      registers,
    }),
    upstreamSeconds: new Histogram({
      name: 'fencing_upstream_seconds',
      help: 'How long exchanges with the backend took, from their turn to their end.',
      labelNames: ['route', 'code'],
      buckets: [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60],
      registers,
    }),
  }
}
