import { syncsPerSecond } from './disk.ts'
import { leases } from './leases.ts'
import { SAME_TOKEN, type Load } from './load.ts'
import { explainMissing, installExpressRedis, type Package } from './packages.ts'
import {
  startBareHttpProxy,
  startBareUndici,
  startExpressWithRedis,
  startHttpProxyAsItComes,
  startNginxWithRedis,
  startPlainNginx,
  type Server,
} from './peers.ts'
import { BASE, underLoad, type Group, type Row } from './row.ts'
import { startSidecar } from './sidecar.ts'
import type { Site } from './site.ts'

/** Everything that is measured in rounds. */

const SCOPES = 1000

const TAKEOVERS: Load = {
  ...SAME_TOKEN,
  token: { kind: 'rising' },
  scopes: { count: SCOPES, order: 'in turn' },
}

export const AS_IT_COMES = 'http-proxy, as it comes'
export const ONE_SIDECAR = 'sidecar, same token'
export const TAKEOVER_SIDECAR = 'sidecar, takeovers'
export const STALE_SIDECAR = 'sidecar, stale writes'
export const DISK = 'the disk alone'

type Say = (words: string) => void

/** `base`: where what has to be installed from npm is kept. */
export function allGroups(base: string, say: Say): readonly Group[] {
  return [cost(base, say), takeovers(), connections(), bodies(), leases()]
}

function cost(base: string, say: Say): Group {
  return {
    name: 'cost',
    title: 'What a request costs',
    words: 'POSTs of 128 bytes over 50 connections, each as fast as its answers come.',
    rows: [
      underLoad(
        'direct',
        'the load straight to the backend: what the other core can do at most',
        SAME_TOKEN,
        (_site, port) => Promise.resolve({ port, pids: [] }),
      ),
      underLoad(
        'nginx, plain',
        'forwards and fences nothing: the limit of a proxy in C',
        SAME_TOKEN,
        startPlainNginx,
      ),
      underLoad(
        BASE,
        'http-proxy 1.18.1 by itself, with an agent that keeps connections; fences nothing',
        SAME_TOKEN,
        startBareHttpProxy,
      ),
      underLoad(
        AS_IT_COMES,
        'the same without an agent, which is its default: a new connection for each request',
        SAME_TOKEN,
        startHttpProxyAsItComes,
      ),
      underLoad(
        'undici under node:http',
        'the floor of the way the sidecar is built: the same parts, no fence and no checks',
        SAME_TOKEN,
        startBareUndici,
      ),
      underLoad(
        ONE_SIDECAR,
        'the owner of a scope writes again and again',
        SAME_TOKEN,
        startSidecar,
      ),
      underLoad(
        TAKEOVER_SIDECAR,
        `every write is a takeover, on disk before it is forwarded; ${SCOPES} scopes in turn`,
        TAKEOVERS,
        startSidecar,
      ),
      underLoad(
        STALE_SIDECAR,
        'an old owner goes on writing: each write is refused and logged',
        { ...SAME_TOKEN, token: { kind: 'same', from: 6 }, answer: 'refusal' },
        startStaleSidecar,
      ),
      underLoad(
        'nginx + Lua + Redis, same token',
        'compares in Redis, then forwards; has no barrier',
        SAME_TOKEN,
        withPackages(['redis-server', 'lua-nginx-redis'], startNginxWithRedis),
      ),
      underLoad(
        'nginx + Lua + Redis, takeovers',
        'the same, with a Redis that writes each takeover to disk before it answers',
        TAKEOVERS,
        withPackages(['redis-server', 'lua-nginx-redis'], startNginxWithRedis),
      ),
      underLoad(
        'Express + Redis, same token',
        'the home-made script: Express, http-proxy-middleware, compare in Redis; has no barrier',
        SAME_TOKEN,
        withPackages(['redis-server'], async (site, port) => {
          const installed = installExpressRedis(base, say)
          if ('missing' in installed) return installed
          return startExpressWithRedis(site, port, installed.script)
        }),
      ),
    ],
  }
}

function takeovers(): Group {
  const oneConnection = { ...SAME_TOKEN, connections: 1 }
  return {
    name: 'takeovers',
    title: 'Takeovers, and what the disk can do',
    words:
      'How often per second the disk makes a page durable (write, fdatasync), and how many takeovers per second come out of it.', // prettier-ignore
    rows: [
      {
        name: DISK,
        base: BASE,
        words: 'one page of 4 KiB after the other',
        open: (site) =>
          Promise.resolve({
            measure: (seconds) => ({
              perSecond: syncsPerSecond(site, seconds),
              cpuUs: undefined,
              p50Ms: undefined,
              p99Ms: undefined,
              residentMiB: undefined,
              wrong: 0,
            }),
          }),
      },
      underLoad(BASE, 'for comparison: 1 connection, nothing durable', oneConnection, startBareHttpProxy), // prettier-ignore
      underLoad(
        'sidecar, one scope',
        '1 connection: the next owner takes over as soon as the last write was answered',
        { ...TAKEOVERS, connections: 1, scopes: { count: 1, order: 'in turn' } },
        startSidecar,
      ),
      ...[50, 500].map((count) =>
        underLoad(
          `sidecar, ${SCOPES} scopes, ${count} connections`,
          'takeovers that wait at the same time share a commit',
          { ...TAKEOVERS, connections: count },
          startSidecar,
        ),
      ),
    ],
  }
}

function connections(): Group {
  return {
    name: 'connections',
    title: 'More connections',
    words: 'The owner of a scope writes, over 1, 50 and 500 connections.',
    rows: [1, 50, 500].flatMap((count) => {
      const load = { ...SAME_TOKEN, connections: count }
      return besideHttpProxy(`${count} connection${count === 1 ? '' : 's'}`, load)
    }),
  }
}

function bodies(): Group {
  const sizes = { 'no body': 0, '1 KiB': 1024, '1 MiB': 1024 * 1024 }
  return {
    name: 'bodies',
    title: 'Larger bodies',
    words: 'The owner of a scope writes bodies of several sizes, over 50 connections.',
    rows: Object.entries(sizes).flatMap(([words, bodyBytes]) =>
      besideHttpProxy(words, { ...SAME_TOKEN, bodyBytes }),
    ),
  }
}

function besideHttpProxy(words: string, load: Load): Row[] {
  const base = `${BASE}, ${words}`
  return [
    underLoad(base, 'for comparison', load, startBareHttpProxy, base),
    underLoad(`sidecar, ${words}`, '', load, startSidecar, base),
  ]
}

function withPackages(
  packages: readonly Package[],
  start: (site: Site, backendPort: number) => Promise<Server | { readonly missing: string }>,
): typeof start {
  return (site, backendPort) => {
    const missing = explainMissing(packages)
    return missing === undefined ? start(site, backendPort) : Promise.resolve({ missing })
  }
}

/** A sidecar whose scope has an owner with token 7. */
async function startStaleSidecar(site: Site, backendPort: number): Promise<Server> {
  const sidecar = await startSidecar(site, backendPort)
  const { ok } = await fetch(`http://127.0.0.1:${sidecar.port}/jobs/0/state`, {
    method: 'POST',
    headers: { 'Fencing-Token': '7' },
  })
  if (!ok) throw new Error('the first owner was refused')
  return sidecar
}
