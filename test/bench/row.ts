import { sendLoad, type Load, type Scripted } from './load.ts'
import type { Server } from './peers.ts'
import { usageOf, type Site } from './site.ts'
import { spreadOf, type Spread } from './spread.ts'

/** What one round of one row came to. Undefined: it has no such thing. */
export interface Round {
  readonly perSecond: number
  /** CPU time of the proxy and its store for each request. */
  readonly cpuUs: number | undefined
  readonly p50Ms: number | undefined
  readonly p99Ms: number | undefined
  readonly residentMiB: number | undefined
  /** The share of requests that were not answered as they should have been. */
  readonly wrong: number
}

/** One thing to measure, again and again, in turn with the others of its group. */
export interface Row {
  readonly name: string
  /** What it is, for people who did not write this. */
  readonly words: string
  /** The row of the same group that it is compared with, round by round. */
  readonly base: string
  open(site: Site, backendPort: number): Promise<Opened>
}

export type Opened =
  { readonly missing: string } | { readonly measure: (seconds: number) => Round | Promise<Round> }

export interface Group {
  readonly name: string
  readonly title: string
  readonly words: string
  readonly rows: readonly Row[]
}

export interface Measured {
  readonly name: string
  readonly words: string
  readonly base: string
  readonly missing: string | undefined
  readonly rounds: readonly Round[]
}

const MIB = 1024 * 1024
/** Of each row, before it is measured: as long as compilers and caches take to come to rest. */
const WARM_UP_ROUNDS = 2

/** The name of the row that others are compared with, where they name no other. */
export const BASE = 'http-proxy'

/** A row that is a server under a load. */
export function underLoad(
  name: string,
  words: string,
  load: Load | Scripted,
  start: (site: Site, backendPort: number) => Promise<Server | { readonly missing: string }>,
  base = BASE,
): Row {
  return {
    name,
    words,
    base,
    async open(site, backendPort) {
      const server = await start(site, backendPort)
      if ('missing' in server) return server
      return { measure: (seconds) => measure(site, server, load, seconds) }
    },
  }
}

export async function measure(
  site: Site,
  { port, pids }: Server,
  load: Load | Scripted,
  seconds: number,
): Promise<Round> {
  const before = usageOf(pids)
  const { requests, perSecond, p50Ms, p99Ms, wrong } = await sendLoad(site, port, load, seconds)
  const after = usageOf(pids)
  const isProxy = pids.length > 0
  return {
    perSecond,
    cpuUs: isProxy ? (after.cpuUs - before.cpuUs) / requests : undefined,
    p50Ms,
    p99Ms,
    residentMiB: isProxy ? after.residentBytes / MIB : undefined,
    wrong: wrong / requests,
  }
}

/** Measures the rows of a group in turn, round by round, so that what disturbs one disturbs all. */
export async function measureGroup(
  group: Group,
  { rounds, seconds }: { readonly rounds: number; readonly seconds: number },
  site: Site,
  backendPort: number,
  told: (words: string) => void,
): Promise<Measured[]> {
  const opened = []
  for (const row of group.rows) opened.push({ row, it: await row.open(site, backendPort) })
  const measured = opened.map(({ row: { name, words, base }, it }) => ({
    name,
    words,
    base,
    missing: 'missing' in it ? it.missing : undefined,
    rounds: [] as Round[],
  }))
  for (let round = 0; round <= rounds; round++) {
    for (const [i, { row, it }] of opened.entries()) {
      if ('missing' in it) {
        told(`${group.name}: ${row.name}: left out, ${it.missing}`)
        continue
      }
      const result = await it.measure(round === 0 ? WARM_UP_ROUNDS * seconds : seconds)
      if (round > 0) measured[i]?.rounds.push(result)
      const which = round === 0 ? 'warm-up' : `round ${round} of ${rounds}`
      told(`${which}, ${group.name}: ${row.name}: ${inShort(result)}`)
    }
  }
  return measured
}

/** How many times a group calls `told`. */
export function stepsOf(group: Group, rounds: number): number {
  return group.rows.length * (rounds + 1)
}

function inShort({ perSecond, cpuUs }: Round): string {
  const cpu = cpuUs === undefined ? '' : `, ${cpuUs.toFixed(0)} µs of CPU each`
  return `${perSecond.toFixed(0)}/s${cpu}`
}

type Figure = 'perSecond' | 'cpuUs' | 'p50Ms' | 'p99Ms' | 'residentMiB'

/** One figure of a row over its rounds; undefined where the row has none. */
export function figure({ rounds }: Measured, name: Figure): Spread | undefined {
  return spreadOf(rounds.map((round) => round[name]))
}

/** How many times the figure of its base it is, each round against the same round of that. */
export function ratio(row: Measured, group: readonly Measured[], name: Figure): Spread | undefined {
  const base = group.find((other) => other.name === row.base)
  return spreadOf(
    row.rounds.map((round, i) => {
      const [own, other] = [round[name], base?.rounds[i]?.[name]]
      return own === undefined || other === undefined ? undefined : own / other
    }),
  )
}
