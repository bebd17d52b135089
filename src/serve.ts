import type { AddressInfo, Server } from 'node:net'
import { createAdmin } from './admin/server.ts'
import { monotonicClock, type Clock } from './clock.ts'
import type { Config } from './config.ts'
import { Fence } from './fence.ts'
import { createForwarder, type Forwarder, type ForwardSettings } from './forward.ts'
import { InFlight, type BarrierSettings } from './inflight.ts'
import type { End } from './lease/lease.ts'
import { Leases, type LeaseEvents } from './lease/leases.ts'
import { createLeaseDoor } from './lease/routes.ts'
import { createListener } from './listener.ts'
import { stdoutLog, type Log } from './log.ts'
import { createMetrics, type Metrics } from './metrics.ts'
import { Proxy } from './proxy.ts'
import { Routes } from './route.ts'
import { openStore } from './store/open.ts'
import { StoreError, type Store, type StoreEvents } from './store/store.ts'
import { formatToken } from './token.ts'
import { createTunnel } from './tunnel.ts'

/** The start failed for a reason that an operator can mend; `message` says which and how. */
export class StartError extends Error {
  override readonly name = 'StartError'
}

export interface Running {
  /** Where the ports really are, as `host:port`. */
  readonly addresses: { readonly data: string; readonly admin: string }
  /** Resolves when the process cannot go on. */
  readonly died: Promise<Error>
  /**
   * Refuses new requests, waits for those under way and for what settles (`shutdownTimeout` at the
   * most), records in the store whether all had ended, and closes. The same call however often.
   */
  close(): Promise<Stopped>
}

/** How a run ended. Not clean: the next start lets settle what this one left behind. */
export type Stopped =
  | { readonly clean: true }
  /** `why` in words for the operator. */
  | { readonly clean: false; readonly why: string }

/** The parts that can be replaced from outside: tests put broken ones in their place. */
export interface Builders {
  log(level: string): Log
  clock: Clock
  store(config: Config['store'], events: StoreEvents): Promise<{ store: Store; created: boolean }>
  inflight(settings: BarrierSettings, clock: Clock): InFlight
  forwarder(settings: ForwardSettings): Forwarder
}

const BUILDERS: Builders = {
  log: (level) => stdoutLog(level).log,
  clock: monotonicClock,
  store: openStore,
  inflight: (settings, clock) => new InFlight(settings, clock),
  forwarder: createForwarder,
}

/** A grant has at least this long to reach the disk, also where takeovers do not wait at all. */
const LEAST_COMMIT_MS = 1_000

/** The composition root: config → store → fence → servers, and the same in reverse at the end. */
export async function serve(config: Config, replaced: Partial<Builders> = {}): Promise<Running> {
  const build = { ...BUILDERS, ...replaced }
  const { clock } = build
  const log = build.log(config.log.level)
  let die: (error: Error) => void = () => undefined
  const died = new Promise<Error>((resolve) => (die = resolve))

  const metrics = createMetrics({
    scopes: () => store.scopes,
    settlingScopes: () => inflight.settlingScopes,
    leases: config.leases && {
      active: () => leases?.active ?? 0,
      oldestMs: () => leases?.oldestMs ?? 0,
    },
  })
  const { store, created } = await openOrExplain(() =>
    build.store(config.store, {
      committed(seconds, calls) {
        metrics.commitSeconds.observe(seconds)
        metrics.commitBatchSize.observe(calls)
      },
      failed(error) {
        metrics.storeErrors.inc()
        log.error(
          { event: 'store_error', err: error },
          'the store failed; writes that need it are refused',
        )
      },
      died: die,
    }),
  )
  if (created) {
    log.warn(
      { event: 'store_created', path: config.store.path },
      'a fresh store was created: it knows no marks. If there was one before, its marks are lost',
    )
  }
  if (!store.stoppedCleanly) {
    log.warn(
      { event: 'unclean_start', settleMs: config.fence.settleMs },
      'the last run did not stop cleanly: takeovers wait until what it left in flight has settled',
    )
  }

  const inflight = build.inflight(config.fence, clock)
  const fenceSettings = { ...config.fence, leases: config.leases !== undefined }
  const fence = new Fence(store, inflight, fenceSettings, clock, {
    takeover({ route, scope, token }, from) {
      metrics.takeovers.inc({ route })
      log.info(
        { event: 'takeover', route, scope, from: formatToken(from), to: formatToken(token) },
        'a newer owner took the scope over',
      )
    },
  })
  const leases =
    config.leases &&
    new Leases(
      fence,
      store,
      {
        ...config.leases,
        commitTimeoutMs: Math.max(config.fence.takeoverTimeoutMs, LEAST_COMMIT_MS),
      },
      clock,
      leaseEvents(metrics, log),
    )
  const leaseDoor = leases && createLeaseDoor(leases, config.clientTimeoutMs, metrics, log)
  const forwarding: ForwardSettings = {
    ...config.upstream,
    clientTimeoutMs: config.clientTimeoutMs,
  }
  const forwarder = build.forwarder(forwarding)
  const tunnel = createTunnel(forwarding)
  const proxy = new Proxy({
    routes: new Routes({
      routes: config.routes,
      tokenHeader: config.token.header.toLowerCase(),
    }),
    unmatchedWrites: config.unmatchedWrites,
    tokenHeader: config.token.header,
    fence,
    inflight,
    forwarder,
    tunnel,
    leaseDoor,
    metrics,
    log,
  })
  let stopping = false
  const listener = createListener(proxy, config.clientTimeoutMs)
  const admin = createAdmin({
    store,
    fence,
    inflight,
    leases,
    metrics,
    log,
    stopping: () => stopping,
  })

  const closeServers = async () => {
    leases?.stop()
    listener.closeAllConnections()
    await Promise.all([
      forwarder.close(),
      tunnel.close(),
      admin.close(),
      leaseDoor?.close(),
      new Promise((resolve) => (listener.listening ? listener.close(resolve) : resolve(undefined))),
    ])
  }
  try {
    await openOrExplain(async () => leases?.restore())
    await leaseDoor?.ready()
    await listen(admin.server, 'admin', config.admin, () => admin.ready())
    // Last: from here on there may be writes in flight, and nothing can fail any more.
    await listen(listener, 'listen', config.listen)
  } catch (error) {
    await closeServers()
    await store.close(store.stoppedCleanly)
    throw error
  }
  const addresses = {
    data: addressOf(listener.address()),
    admin: addressOf(admin.server.address()),
  }
  log.info(
    {
      event: 'started',
      ...addresses,
      upstream: config.upstream.url,
      routes: config.routes.map(({ path, mode }) => `${path} (${mode})`),
      leases: config.leases?.prefix ?? 'off',
    },
    'fencing',
  )

  let closing: Promise<Stopped> | undefined
  const close = async () => {
    stopping = true
    log.info({ event: 'stopping' }, 'stopping: new requests are refused, those under way end')
    listener.close()
    // Upgraded connections would not end by themselves.
    void tunnel.close()
    leases?.stop()
    const inTime = await within(clock, config.shutdownTimeoutMs, proxy.stop())
    await closeServers()
    // What was broken off now leaves nothing behind where it was a read, or a write not sent at all.
    const allEnded = inTime || (inflight.idle && fence.settlingMs === 0)
    const unrecorded = await closeStore(store, allEnded)
    const stopped = endOf(allEnded, unrecorded)
    log.info(
      { event: 'stopped', clean: stopped.clean, err: unrecorded },
      stopped.clean ? 'stopped; nothing is in flight' : 'stopped uncleanly: the next start settles',
    )
    return stopped
  }
  return { addresses, died, close: () => (closing ??= close()) }
}

const ENDED: Readonly<Record<End, string>> = {
  expired: 'a lease was not renewed in time',
  released: 'a holder released its lease',
  abandoned: 'a client left before it could learn of its lease',
}

/** Who held what, and when. A lease's id is a key, and stays out of the log. */
function leaseEvents(metrics: Metrics, log: Log): LeaseEvents {
  return {
    granted(scope, { token, holder, ttlMs, grantedAt }, { requestId, askedAt }, from) {
      metrics.leasesAcquired.inc()
      metrics.tokensIssued.inc()
      if (from !== undefined) metrics.leaseTakeovers.inc()
      log.info(
        {
          event: 'lease_granted',
          scope,
          token: formatToken(token),
          from: from === undefined ? undefined : formatToken(from),
          holder,
          ttlMs,
          waitedMs: Math.round(grantedAt - askedAt),
          requestId,
        },
        'a lease was granted; older owners of the scope are stale from now on',
      )
    },
    ended(scope, { token, holder }, why, heldMs) {
      log.info(
        {
          event: `lease_${why}`,
          scope,
          token: formatToken(token),
          holder,
          heldMs: Math.round(heldMs),
        },
        ENDED[why],
      )
    },
  }
}

/** The error where the disk does not take the record of the end. */
async function closeStore(store: Store, clean: boolean): Promise<StoreError | undefined> {
  try {
    await store.close(clean)
    return undefined
  } catch (error) {
    if (error instanceof StoreError) return error
    throw error
  }
}

function endOf(allEnded: boolean, unrecorded: StoreError | undefined): Stopped {
  if (unrecorded !== undefined) {
    return { clean: false, why: `the stop could not be recorded: ${unrecorded.message}` }
  }
  if (allEnded) return { clean: true }
  const why =
    'stopped before every write had ended (shutdownTimeout): after the next start, newer owners wait until these writes have settled' // prettier-ignore
  return { clean: false, why }
}

async function openOrExplain<T>(open: () => Promise<T>): Promise<T> {
  try {
    return await open()
  } catch (error) {
    if (error instanceof StoreError) throw new StartError(error.message)
    throw error
  }
}

async function listen(
  server: Server,
  key: 'listen' | 'admin',
  { host, port }: Config['listen'],
  prepare?: () => PromiseLike<unknown>,
): Promise<void> {
  await prepare?.()
  await new Promise<void>((resolve, reject) => {
    server.once('error', (error: NodeJS.ErrnoException) => {
      reject(new StartError(`${key}: ${host}:${port} ${reasonOf(error)}`))
    })
    server.listen(port, host, resolve)
  })
}

function reasonOf(error: NodeJS.ErrnoException): string {
  switch (error.code) {
    case 'EADDRINUSE':
      return 'is in use by another process; stop that one or choose another port'
    case 'EACCES':
      return 'may not be used by this user; choose a port above 1023'
    case 'EADDRNOTAVAIL':
    case 'ENOTFOUND':
      return 'is no address of this machine'
    default:
      return `cannot be listened on: ${error.message}`
  }
}

function addressOf(address: AddressInfo | string | null): string {
  if (address === null || typeof address === 'string') return String(address)
  const host = address.family === 'IPv6' ? `[${address.address}]` : address.address
  return `${host}:${address.port}`
}

/** Whether `done` comes within `ms`. */
function within(clock: Clock, ms: number, done: Promise<void>): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const cancel = clock.after(ms, () => resolve(false))
    done.then(() => {
      cancel()
      resolve(true)
    }, reject)
  })
}
