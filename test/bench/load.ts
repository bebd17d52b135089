import { writeFileSync } from 'node:fs'
import path from 'node:path'
import type { Site } from './site.ts'

/** What wrk sends: POSTs to /jobs/{n}/state with a token and a body. */
export interface Load {
  readonly connections: number
  readonly bodyBytes: number
  /** `same`: every write carries token `from`. `rising`: each the next one, from the time of day on. */
  readonly token: { readonly kind: 'same'; readonly from: number } | { readonly kind: 'rising' }
  /** How many scopes take turns; `random` picks one for each write. */
  readonly scopes: { readonly count: number; readonly order: 'in turn' | 'random' }
  /** What each write is to be answered with. */
  readonly answer: 'success' | 'refusal'
}

/** The usual one: 50 connections, a small body, the owner of one scope. */
export const SAME_TOKEN: Load = {
  connections: 50,
  bodyBytes: 128,
  token: { kind: 'same', from: 7 },
  scopes: { count: 1, order: 'in turn' },
  answer: 'success',
}

/** Requests made by a script of their own, in Lua for wrk: over 50 connections, each to be answered with success. */
export type Scripted = (port: number) => Promise<string>

/** What came of a load. */
export interface Answered {
  readonly requests: number
  readonly perSecond: number
  readonly p50Ms: number
  readonly p99Ms: number
  /** Requests that were not answered as they should have been. */
  readonly wrong: number
}

/** One request after the other on each connection, as fast as the answers come. */
export async function sendLoad(
  site: Site,
  port: number,
  load: Load | Scripted,
  seconds: number,
): Promise<Answered> {
  const { connections, answer } = typeof load === 'function' ? SAME_TOKEN : load
  const script = typeof load === 'function' ? await load(port) : scriptFor(load)
  const file = path.join(site.newFolder(), 'load.lua')
  writeFileSync(file, script + DONE)
  const output = await site.run('load', 'wrk', [
    ...['-t', '1', '-c', String(connections), '-d', `${seconds}s`, '--timeout', '30s'],
    ...['-s', file, `http://127.0.0.1:${port}/jobs/0/state`],
  ])
  const said = JSON.parse(output.slice(output.lastIndexOf('{'))) as Said
  const { requests, refused, broken } = said
  const wrong = broken + (answer === 'success' ? refused : requests - refused)
  return {
    requests,
    wrong,
    perSecond: requests / (said.us / 1e6),
    p50Ms: said.p50 / 1000,
    p99Ms: said.p99 / 1000,
  }
}

/** What the script prints at its end; times in µs. */
interface Said {
  readonly requests: number
  readonly us: number
  readonly p50: number
  readonly p99: number
  /** Answered with a status of 400 or more. */
  readonly refused: number
  readonly broken: number
}

/** A script in Lua for wrk. Requests that never change are written down once: the load must stay cheap. */
function scriptFor({ bodyBytes, token, scopes }: Load): string {
  const first = token.kind === 'same' ? token.from : Date.now() * 1000
  const next = token.kind === 'same' ? 0 : 1
  const scope = scopes.order === 'random' ? `math.random(${scopes.count})` : `n % ${scopes.count}`
  const changing = `
local n, token = 0, ${first}
request = function()
  n = n + 1
  token = token + ${next}
  wrk.headers['Fencing-Token'] = string.format('%.0f', token)
  return wrk.format(nil, '/jobs/' .. ${scope} .. '/state')
end`
  return `
wrk.method = 'POST'
wrk.body = string.rep('x', ${bodyBytes})
wrk.headers['Content-Type'] = 'application/octet-stream'
wrk.headers['Fencing-Token'] = '${first}'
${token.kind === 'same' && scopes.count === 1 ? '' : changing}
`
}

const DONE = `
done = function(summary, latency)
  local errors = summary.errors
  print(string.format(
    '{"requests":%d,"us":%d,"p50":%d,"p99":%d,"refused":%d,"broken":%d}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
`
