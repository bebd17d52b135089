import { formatToken, parseToken, type Token } from '../../src/token.ts'
import type { Happening } from './history.ts'

/**
 * Decides from the merged history of a run whether the sidecar kept its promise. Pure; knows
 * nothing of how the sidecar works, and believes nothing that the sidecar says of itself.
 *
 * Nobody outside can see the moment at which an outcome becomes unknown to the sidecar, so the
 * checker works with what is certain. That a newer write began too early is said only where it was
 * before the earliest moment that anything could have been its excuse. That an older write landed
 * too late is the sidecar's fault unless `settle` had passed since it certainly knew nothing.
 */

/** The six things that have to hold, by their numbers. */
export const RULES = {
  1: 'tokens that are applied never go backwards',
  2: 'a newer write begins only when every older one has ended, settling included',
  3: 'what is answered is true: 2xx was applied exactly once, a refusal was never forwarded',
  4: 'a 409 names a mark that a write really raised',
  5: 'a mark never falls below one acknowledged before',
  6: 'every write gets an end, and every scope goes on once the faults are over',
} as const

export type Rule = keyof typeof RULES

export interface Violation {
  readonly rule: Rule
  /** What happened, in words. */
  readonly words: string
  /** When it was complete. */
  readonly at: number
  /** When what led to it began. */
  readonly since: number
  readonly scope: string | undefined
  /** The writes that it is about. */
  readonly writes: readonly string[]
}

/** What the sidecar was configured with. */
export interface Promised {
  readonly settleMs: number
  readonly responseTimeoutMs: number
}

/** The first violation of the promise in a history that may still go on. */
export function check(happenings: readonly Happening[], promised: Promised): Violation | undefined {
  const account = collect(happenings)
  const found = [
    ...account.strays,
    ...findStuck(account, happenings),
    ...findLostMarks(account, happenings),
  ]
  for (const writes of account.scopes.values()) {
    found.push(
      ...findDisorder(account, writes, promised),
      ...writes.flatMap(findUntruth),
      ...findInventedMarks(writes),
      ...findForgottenMarks(writes),
    )
  }
  // Of two that were complete at once, the plainer one.
  return found.sort((a, b) => a.at - b.at || a.rule - b.rule)[0]
}

/** All that the histories say of one write. */
interface WriteStory {
  readonly id: string
  readonly scope: string
  readonly token: Token
  readonly sent: number
  readonly bytes: number
  begun: number[]
  /** Of the connection that it came to the backend on. */
  port: number | undefined
  applied: { readonly at: number; readonly bytes: number }[]
  responded: number | undefined
  answer: Answer | undefined
  left: number | undefined
  broken: number | undefined
}

interface Answer {
  readonly at: number
  readonly status: number
  readonly result: string
  readonly highest: Token | undefined
}

/** The end, between two moments, of a sidecar that left behind nobody knows what. */
interface UncleanEnd {
  readonly from: number
  readonly to: number
  /** When the next one began to start, and when it was seen to run. */
  nextStarts: number
  nextRuns: number
}

interface Account {
  readonly writes: ReadonlyMap<string, WriteStory>
  readonly scopes: ReadonlyMap<string, WriteStory[]>
  readonly cuts: ReadonlyMap<number, number[]>
  readonly closes: ReadonlyMap<number, number[]>
  readonly uncleanEnds: readonly UncleanEnd[]
  /** Writes at the backend that are not what a worker sent. */
  readonly strays: readonly Violation[]
}

function collect(happenings: readonly Happening[]): Account {
  const writes = new Map<string, WriteStory>()
  const scopes = new Map<string, WriteStory[]>()
  const cuts = new Map<number, number[]>()
  const closes = new Map<number, number[]>()
  const uncleanEnds: UncleanEnd[] = []
  const strays: Violation[] = []
  let ends = 0
  for (const it of happenings) {
    switch (it.kind) {
      case 'sent': {
        const story: WriteStory = {
          id: it.write,
          scope: it.scope,
          token: tokenOf(it.token),
          sent: it.at,
          bytes: it.bytes,
          begun: [],
          port: undefined,
          applied: [],
          responded: undefined,
          answer: undefined,
          left: undefined,
          broken: undefined,
        }
        writes.set(it.write, story)
        append(scopes, it.scope, story)
        break
      }
      case 'begun': {
        const story = writes.get(it.write)
        if (
          story === undefined ||
          story.scope !== it.scope ||
          story.token !== parseToken(it.token)
        ) {
          const words = `the backend received a write that nobody sent: "${it.write}" of ${it.token} in ${it.scope}`
          strays.push({
            rule: 3,
            words,
            at: it.at,
            since: it.at,
            scope: it.scope,
            writes: [it.write],
          })
          break
        }
        story.begun.push(it.at)
        story.port = it.port
        break
      }
      case 'applied':
        writes.get(it.write)?.applied.push(it)
        break
      case 'cut':
        append(cuts, it.port, it.at)
        break
      case 'closed':
        append(closes, it.port, it.at)
        break
      case 'sidecar': {
        if (it.does === 'ends') ends = it.at
        if (it.does === 'killed') {
          uncleanEnds.push({ from: ends, to: it.at, nextStarts: Infinity, nextRuns: Infinity })
        }
        const last = uncleanEnds.at(-1)
        if (last === undefined || last.nextRuns !== Infinity) break
        // The last one that began to start is the one that runs.
        if (it.does === 'starts') last.nextStarts = it.at
        if (it.does === 'runs') last.nextRuns = it.at
        break
      }
      case 'answered': {
        const story = writes.get(it.write)
        const highest = it.highest === undefined ? undefined : tokenOf(it.highest)
        if (story !== undefined) story.answer = { ...it, highest }
        break
      }
      case 'responded':
      case 'left':
      case 'broken': {
        const story = writes.get(it.write)
        if (story !== undefined) story[it.kind] = it.at
        break
      }
      default:
    }
  }
  return { writes, scopes, cuts, closes, uncleanEnds, strays }
}

/** Rules 1 and 2: walks through the writes of a scope from older tokens to newer ones. */
function findDisorder(
  account: Account,
  writes: readonly WriteStory[],
  promised: Promised,
): Violation[] {
  const found: Violation[] = []
  const groups = new Map<Token, WriteStory[]>()
  for (const write of writes.toSorted(byToken)) {
    if (write.begun.length > 0) append(groups, write.token, write)
  }
  const newerSent = firstSentAbove(writes)
  // Of the older writes, the one that ended last, and the one that landed last.
  let lastEnd: { write: WriteStory; at: number } | undefined
  let lastLanding: { write: WriteStory; at: number } | undefined
  for (const group of groups.values()) {
    for (const write of group) {
      const at = write.begun[0] ?? Infinity
      if (lastLanding !== undefined && lastLanding.at > at) {
        found.push(lateLanding(lastLanding.write, write, at))
      } else if (lastEnd !== undefined && lastEnd.at > at + CLOCK_MS) {
        found.push(earlyBegin(lastEnd, write, at))
      }
    }
    for (const write of group) {
      const end = earliestEnd(account, write, newerSent(write), promised)
      if (lastEnd === undefined || end > lastEnd.at) lastEnd = { write, at: end }
      const landing = landsBy(account, write, promised)
      if (lastLanding === undefined || landing > lastLanding.at)
        lastLanding = { write, at: landing }
    }
  }
  return found
}

/** What the sidecar's clock and this one may differ by, being read at different moments. */
const CLOCK_MS = 0.5

function lateLanding(older: WriteStory, newer: WriteStory, newerBegan: number): Violation {
  const landed = older.applied[0]?.at ?? Infinity
  const newerLanded = newer.applied[0]?.at ?? Infinity
  const backwards = landed > newerLanded
  return {
    ...about(older, newer),
    rule: backwards ? 1 : 2,
    words: backwards
      ? `${named(older)} was applied ${ms(landed - newerLanded)} after ${named(newer)}`
      : `${named(older)} was applied ${ms(landed - newerBegan)} after ${named(newer)} began`,
    at: landed,
  }
}

function earlyBegin(
  { write: older, at: earliest }: { write: WriteStory; at: number },
  newer: WriteStory,
  began: number,
): Violation {
  const olderBegan = older.begun[0] ?? Infinity
  const isAfter = olderBegan > began
  return {
    ...about(older, newer),
    rule: 2,
    words: isAfter
      ? `${named(older)} began ${ms(olderBegan - began)} after ${named(newer)}`
      : `${named(newer)} began while ${named(older)} ${howFar(earliest - began)}`,
    at: Math.max(began, olderBegan),
  }
}

function howFar(duration: number): string {
  return duration === Infinity ? 'had no end' : `could not have ended for another ${ms(duration)}`
}

/** The earliest moment at which a write that began may have ended, so that newer ones may begin. */
function earliestEnd(
  { cuts, uncleanEnds }: Account,
  write: WriteStory,
  newerSent: number,
  { settleMs, responseTimeoutMs }: Promised,
): number {
  const { answer, sent, responded = Infinity } = write
  const cut = firstAfter(cuts, write) ?? Infinity
  // No answer for so long, or no body.
  const timeout = sent + responseTimeoutMs
  const settled = (...unknownFrom: number[]) => Math.max(sent, Math.min(...unknownFrom)) + settleMs
  if (answer?.result === 'accepted') return responded
  if (answer?.result === 'superseded') return settled(newerSent)
  // Without a cut it was an idle connection that had ended before, as the sidecar came to know later.
  if (answer?.status === 502) return settled(cut === Infinity ? sent : cut)
  if (answer !== undefined) return settled(timeout)
  // Nobody was told how it ended.
  const crashes = uncleanEnds
    .filter(({ from, to }) => to > sent && from < (write.broken ?? Infinity))
    .map(({ nextStarts }) => nextStarts)
  const left = write.left ?? Infinity
  return Math.min(responded, settled(cut, timeout, newerSent, left, ...crashes))
}

/** When a write was applied; but no later than the promise is good for. */
function landsBy(account: Account, write: WriteStory, { settleMs }: Promised): number {
  const applied = Math.max(...write.applied.map(({ at }) => at))
  if (write.answer?.result === 'accepted') return applied
  return Math.min(applied, certainlyUnknownAt(account, write) + settleMs)
}

/** How many writes landed later than `settle` allows: more than the sidecar can be asked to wait for. */
export function countBeyondSettle(happenings: readonly Happening[], promised: Promised): number {
  const account = collect(happenings)
  const isBeyond = (write: WriteStory) =>
    write.applied.some(({ at }) => at > landsBy(account, write, promised))
  return [...account.writes.values()].filter(isBeyond).length
}

function certainlyUnknownAt({ closes, uncleanEnds }: Account, write: WriteStory): number {
  const { answer, broken = Infinity } = write
  const known = Math.min(answer?.at ?? Infinity, broken, firstAfter(closes, write) ?? Infinity)
  const crash = uncleanEnds.find(({ from, to }) => to > write.sent && from <= known)
  return crash === undefined ? known : crash.nextRuns
}

function firstAfter(
  times: ReadonlyMap<number, number[]>,
  { port, sent }: WriteStory,
): number | undefined {
  // Ports are used again; this connection was open when the write was sent.
  return port === undefined ? undefined : times.get(port)?.find((at) => at >= sent)
}

/** For a write, when the first one of a newer token was sent. */
function firstSentAbove(writes: readonly WriteStory[]): (write: WriteStory) => number {
  const first = new Map<Token, number>()
  let newer = Infinity
  let same = Infinity
  let token: Token | undefined
  for (const write of writes.toSorted(byToken).reverse()) {
    if (write.token !== token) {
      newer = Math.min(newer, same)
      token = write.token
    }
    same = Math.min(same, write.sent)
    first.set(write.token, newer)
  }
  return (write) => first.get(write.token) ?? Infinity
}

/** Results after which nothing of a write may have been forwarded. */
const REFUSED = ['stale', 'repeated', 'busy', 'unavailable', 'unreachable', 'missing', 'malformed']

/** Rule 3. */
function findUntruth(write: WriteStory): Violation[] {
  const { answer, begun, applied, responded } = write
  const violation = (words: string, at: number): Violation[] => [
    { ...about(write), rule: 3, words: `${named(write)} ${words}`, at },
  ]
  const [, secondBegin] = begun
  if (secondBegin !== undefined) return violation('began twice at the backend', secondBegin)
  const [first, second] = applied
  if (second !== undefined) return violation('was applied twice', second.at)
  if (answer === undefined) return []
  const last = Math.max(answer.at, begun[0] ?? 0)
  const said = `was answered ${answer.status} ${answer.result}`
  if (REFUSED.includes(answer.result) && begun.length > 0) {
    return violation(`${said}, but was forwarded`, last)
  }
  if (answer.result === 'superseded' && first !== undefined) {
    return violation(`${said}, but was applied`, Math.max(answer.at, first.at))
  }
  if (answer.result !== 'accepted') return []
  if (responded === undefined) return violation(`${said}, but not by the backend`, answer.at)
  if (answer.status >= 300) return []
  if (first === undefined) return violation(`${said}, but was not applied`, answer.at)
  if (first.bytes !== write.bytes) {
    return violation(
      `${said}, but ${first.bytes} of its ${write.bytes} bytes were applied`,
      answer.at,
    )
  }
  return first.at > answer.at ? violation(`${said} before it was applied`, first.at) : []
}

/** Rule 4. */
function findInventedMarks(writes: readonly WriteStory[]): Violation[] {
  const firstSent = new Map<Token, number>()
  for (const { token, sent } of writes) {
    firstSent.set(token, Math.min(sent, firstSent.get(token) ?? Infinity))
  }
  return writes.flatMap((write) => {
    const { answer } = write
    if (answer?.status !== 409 || answer.result === 'accepted') return []
    const { highest, at } = answer
    const isReal = highest !== undefined && (firstSent.get(highest) ?? Infinity) <= at
    if (isReal && highest > write.token) return []
    const words = `${named(write)} was answered ${answer.result}, naming ${highest === undefined ? 'no mark' : formatToken(highest)}, which nobody had raised over it`
    return [{ ...about(write), rule: 4 as const, words, at }]
  })
}

/** That the scope's mark was at least `token`, as somebody could see at that moment. */
interface Acknowledged {
  readonly at: number
  readonly token: Token
  readonly write: WriteStory
}

/** What was acknowledged in a scope: in the order of time, and each time the highest so far. */
function acknowledged(writes: readonly WriteStory[]): Acknowledged[] {
  const all = writes.flatMap((write): Acknowledged[] => {
    const { token, answer, begun } = write
    const begins = begun.map((at) => ({ at, token, write }))
    if (answer?.result === 'accepted') return [...begins, { at: answer.at, token, write }]
    if (answer?.highest === undefined) return begins
    return [...begins, { at: answer.at, token: answer.highest, write }]
  })
  const rising: Acknowledged[] = []
  for (const next of all.sort((a, b) => a.at - b.at)) {
    const last = rising.at(-1)
    if (last === undefined || next.token > last.token) rising.push(next)
  }
  return rising
}

/** Rule 5, as a worker sees it: an old token passes although a newer one was acknowledged before. */
function findForgottenMarks(writes: readonly WriteStory[]): Violation[] {
  const marks = acknowledged(writes)
  return writes.flatMap((write) => {
    const [at] = write.begun
    if (at === undefined) return []
    const mark = lastBefore(marks, write.sent)
    if (mark === undefined || mark.token <= write.token) return []
    const words = `${named(write)} was sent ${ms(write.sent - mark.at)} after ${formatToken(mark.token)} was acknowledged, and was forwarded`
    return [{ ...about(mark.write, write), rule: 5 as const, words, at }]
  })
}

/** Rule 5, as the admin port says it after a restart. */
function findLostMarks({ scopes }: Account, happenings: readonly Happening[]): Violation[] {
  const readings = happenings.filter((it) => it.kind === 'marks')
  if (readings.length === 0) return []
  return [...scopes].flatMap(([scope, writes]) => {
    const marks = acknowledged(writes)
    return readings.flatMap((reading) => {
      const mark = lastBefore(marks, reading.since)
      const found = reading.marks[scope]
      if (mark === undefined || (found !== undefined && tokenOf(found) >= mark.token)) return []
      const words = `the mark of ${scope} was ${found ?? 'gone'} after a restart; ${formatToken(mark.token)} was acknowledged ${ms(reading.since - mark.at)} before`
      return [{ ...about(mark.write), rule: 5 as const, words, at: reading.at }]
    })
  })
}

/** Rule 6. */
function findStuck({ writes }: Account, happenings: readonly Happening[]): Violation[] {
  return happenings.flatMap((it): Violation[] => {
    if (it.kind === 'stuck') {
      return [
        { rule: 6, words: it.why, at: it.at, since: it.at - 5_000, scope: it.scope, writes: [] },
      ]
    }
    const write = it.kind === 'silent' ? writes.get(it.write) : undefined
    if (write === undefined) return []
    return [{ ...about(write), rule: 6, words: `${named(write)} never got an answer`, at: it.at }]
  })
}

/** The happenings that lead to a violation: from its beginning to its end, what concerns its scope. */
export function stretch(
  happenings: readonly Happening[],
  { since, at, scope, writes }: Violation,
): Happening[] {
  const account = collect(happenings)
  const ports = new Set(writes.map((write) => account.writes.get(write)?.port))
  const concerns = (it: Happening): boolean => {
    if ('write' in it) {
      return writes.includes(it.write) || account.writes.get(it.write)?.scope === scope
    }
    if ('port' in it) return ports.has(it.port)
    if ('scope' in it && it.scope !== undefined) return it.scope === scope
    return true
  }
  const all = happenings.filter((it) => it.at >= since && it.at <= at && concerns(it))
  if (all.length <= STRETCH_LINES) return all
  // Too much went on: the writes themselves, and what happened to everybody.
  return all.filter((it) => !('write' in it) || writes.includes(it.write))
}

const STRETCH_LINES = 60

function about(...writes: readonly [WriteStory, ...WriteStory[]]) {
  return {
    since: Math.min(...writes.map(({ sent }) => sent)),
    scope: writes[0].scope,
    writes: writes.map(({ id }) => id),
  }
}

function named({ id, token }: WriteStory): string {
  return `${id} (token ${formatToken(token)})`
}

function ms(duration: number): string {
  return `${duration.toFixed(1)} ms`
}

function byToken(a: WriteStory, b: WriteStory): number {
  return a.token < b.token ? -1 : a.token > b.token ? 1 : 0
}

function tokenOf(text: string): Token {
  const token = parseToken(text)
  if (token === undefined) throw new Error(`no token: ${text}`)
  return token
}

/** The last of those in the order of time that was before `at`. */
function lastBefore<T extends { readonly at: number }>(
  sorted: readonly T[],
  at: number,
): T | undefined {
  let low = 0
  let high = sorted.length
  while (low < high) {
    const middle = (low + high) >> 1
    if ((sorted[middle]?.at ?? Infinity) < at) low = middle + 1
    else high = middle
  }
  return sorted[low - 1]
}

function append<K, V>(lists: Map<K, V[]>, key: K, value: V): void {
  const list = lists.get(key)
  if (list === undefined) lists.set(key, [value])
  else list.push(value)
}
