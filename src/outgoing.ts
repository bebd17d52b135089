import type { IncomingMessage } from 'node:http'
import { encodeScope } from './answer.ts'
import { endToEnd, type Fields } from './fields.ts'
import { hostOf } from './framing.ts'
import { formatToken, type Token } from './token.ts'

/** What the proxy itself says to the backend about a request. */
export interface Said {
  readonly requestId: string
  /** The name of the token field, as configured. */
  readonly tokenHeader: string
  readonly token: Token | undefined
  /** Undefined for reads and writes that no route covers: those pass as they came. */
  readonly scope: string | undefined
}

/**
 * The fields that the backend gets, names and values in turn: those that came, in their order, less
 * what ends at this hop, plus what the proxy says. The token and the scope are those that the
 * proxy decided on; whatever else a client claims about them ends here.
 */
export function backendFields(req: IncomingMessage, fields: Fields, said: Said): string[] {
  const tokenName = said.tokenHeader.toLowerCase()
  const isMediated = said.scope !== undefined
  const kept = endToEnd(fields.raw, fields.names, (name) =>
    name === tokenName ? isMediated : SAID_ANEW.has(name) || claimsFencing(name),
  )
  const host = hostOf(req.url ?? '', fields)
  if (host !== undefined) kept.push('Host', host)
  kept.push('X-Request-Id', said.requestId)
  kept.push('Via', appended(fields.all('via'), `${req.httpVersion} fencing-proxy`))
  const remote = req.socket.remoteAddress ?? 'unknown'
  kept.push('X-Forwarded-For', appended(fields.all('x-forwarded-for'), remote))
  // Said by the first proxy, which alone knows; kept where there was one.
  if (!fields.has('x-forwarded-proto')) kept.push('X-Forwarded-Proto', 'http')
  if (!fields.has('x-forwarded-host') && host !== undefined) kept.push('X-Forwarded-Host', host)
  const [forwards] = fields.all('max-forwards')
  if (forwards !== undefined) kept.push('Max-Forwards', lessOne(req.method, forwards))
  if (said.token !== undefined) kept.push(said.tokenHeader, formatToken(said.token))
  if (said.scope !== undefined) kept.push('Fencing-Scope', encodeScope(said.scope))
  return kept
}

const SAID_ANEW = new Set([
  'content-length',
  'expect',
  'host',
  'max-forwards',
  'via',
  'x-forwarded-for',
  'x-request-id',
])

/** Also as a CGI or WSGI backend would read it: Fencing_Scope, fencing.scope. */
function claimsFencing(name: string): boolean {
  return name.startsWith('fencing') && /^fencing[^a-z0-9]/.test(name)
}

function appended(values: readonly string[], value: string): string {
  return values.length === 0 ? value : [...values, value].join(', ')
}

/** RFC 9110, 7.6.2: only OPTIONS and TRACE count the hops. */
function lessOne(method: string | undefined, forwards: string): string {
  const counts = method === 'OPTIONS' || method === 'TRACE'
  return counts && /^[1-9][0-9]{0,8}$/.test(forwards) ? (Number(forwards) - 1).toString() : forwards
}
