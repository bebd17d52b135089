import type { IncomingMessage, ServerResponse } from 'node:http'
import { STATUS_CODES } from 'node:http'
import { formatToken, type Token } from './token.ts'

/**
 * Every response that is the proxy's own: one table, one function that writes it, as problem
 * details (RFC 9457). What a client may do next stands in `detail`.
 */

/** What the fence made of a write: the values of the field `Fencing-Result`, and a label in metrics. */
export type Result = 'accepted' | Refusal
export type Refusal = keyof typeof REFUSALS
/** Requests that are refused before the fence, reads and writes alike; they carry no `Fencing-Result`. */
export type Problem = keyof typeof PROBLEMS

interface Entry {
  readonly status: number
  readonly title: string
  /** What happened and the way to go on, where nothing more specific is known. */
  readonly detail: string
  /** Seconds, where waiting is the remedy. */
  readonly retryAfter?: number
  /** The methods that are taken, which a 405 has to name (RFC 9110, 15.5.6). */
  readonly allow?: string
}

const ALLOW = 'GET, HEAD, OPTIONS, POST, PUT, PATCH, DELETE'

export const REFUSALS = {
  stale: {
    status: 409,
    title: 'A newer owner has taken this scope over',
    detail:
      'The token is lower than the highest one recorded for this scope. Nothing was forwarded. Stop working on this scope; it has a newer owner.',
  },
  repeated: {
    status: 409,
    title: 'This token was used already',
    detail: 'This route takes each token once, and a write with this one was already admitted.',
  },
  superseded: {
    status: 409,
    title: 'A newer owner took over before this write was sent whole',
    detail: 'The write was cut off. Stop working on this scope; it has a newer owner.',
  },
  missing: {
    status: 428,
    title: 'A fencing token is required',
    detail: 'Writes to this route carry a fencing token. Nothing was forwarded.',
  },
  malformed: {
    status: 400,
    title: 'Not a fencing token',
    detail:
      'A token is N or G.N: decimal, each part from 0 to 9223372036854775807, without sign, blank or leading zero, in exactly one field. Nothing was forwarded.',
  },
  ambiguous: {
    status: 400,
    title: 'Two servers could read this request differently',
    detail: 'Spell the request so that it can be read in one way only. Nothing was forwarded.',
  },
  unissued: {
    status: 403,
    title: 'This token was never issued',
    detail:
      'The token is higher than every one issued for this scope. Nothing was forwarded. Take a lease of exactly this scope; its token is the one to send.',
  },
  incomplete: {
    status: 408,
    title: 'The request body did not arrive in time',
    detail: 'Nothing was forwarded. Send the request again, without long pauses.',
  },
  unscoped: {
    status: 400,
    title: 'The request does not name its scope',
    detail:
      'The request lacks a value that its scope is made of, or has two. Nothing was forwarded.',
  },
  unmatched: {
    status: 403,
    title: 'No route covers this write',
    detail: 'No configured route covers this write. Nothing was forwarded.',
  },
  busy: {
    status: 503,
    title: 'Older writes of this scope have not ended',
    detail:
      'An older write of this scope has not ended yet, or too many writes wait. Nothing was forwarded. The token is recorded; try again.',
    retryAfter: 1,
  },
  unavailable: {
    status: 503,
    title: 'Tokens cannot be recorded at the moment',
    detail:
      'The token could not be recorded durably, or the proxy is stopping. Nothing was forwarded. Try again.',
    retryAfter: 1,
  },
  unreachable: {
    status: 502,
    title: 'The backend could not be reached',
    detail: 'No connection to the backend. Nothing was sent. Try again.',
  },
  unknown: {
    status: 502,
    title: 'It is unknown whether the backend applied this write',
    detail:
      'The write was sent at least in part and no whole answer came. It may or may not be applied. The same token may try again at once.',
  },
} as const satisfies Record<string, Entry>

const PROBLEMS = {
  'bad-request': { status: 400, title: 'The request is not well formed', detail: 'See RFC 9112.' },
  'too-many-fields': {
    status: 431,
    title: 'The request has too many header fields',
    detail: 'Send fewer or shorter header fields.',
  },
  'http-version': {
    status: 505,
    title: 'This version of HTTP is not spoken here',
    detail: 'Use HTTP/1.1.',
  },
  'expectation-failed': {
    status: 417,
    title: 'This expectation cannot be met',
    detail: 'Only "100-continue" can be expected.',
  },
  'connect-refused': {
    status: 405,
    title: 'This is no tunnel',
    detail: 'CONNECT is refused: the backend is fixed.',
    allow: ALLOW,
  },
  'trace-refused': {
    status: 405,
    title: 'TRACE is not answered here',
    detail: 'TRACE ends at the backend or not at all.',
    allow: ALLOW,
  },
  'client-timeout': {
    status: 408,
    title: 'The request body did not arrive in time',
    detail: 'Send the request again, without long pauses.',
  },
  'read-unreachable': {
    status: 502,
    title: 'The backend could not be reached',
    detail: 'No connection to the backend. Try again.',
  },
  'read-failed': {
    status: 502,
    title: 'The backend did not answer properly',
    detail: 'Its answer was cut short or not HTTP. This was a read; it can be tried again.',
  },
  'read-timeout': {
    status: 504,
    title: 'The backend did not answer in time',
    detail: 'This was a read; it can be tried again.',
  },
  'lease-request': {
    status: 400,
    title: 'This is no request that the lease service understands',
    detail: 'See the section on leases of the manual.',
  },
  'lease-held': {
    status: 409,
    title: 'Another holds this scope',
    detail: 'Try again later, or ask with a wait.',
    retryAfter: 1,
  },
  'lease-over': {
    status: 410,
    title: 'This lease is over',
    detail:
      'It has expired or was released, or it never was. Stop working on its scope, and take a new lease.',
  },
  'lease-none': { status: 404, title: 'Nobody holds this scope', detail: 'It can be taken.' },
  'lease-full': {
    status: 503,
    title: 'Too many wait for this scope',
    detail: 'Try again later.',
    retryAfter: 1,
  },
  'lease-unavailable': {
    status: 503,
    title: 'Leases cannot be recorded at the moment',
    detail: 'What was asked could not be made durable, or the proxy is stopping. Try again.',
    retryAfter: 1,
  },
  stopping: {
    status: 503,
    title: 'The proxy is stopping',
    detail: 'Nothing was forwarded. Try again.',
    retryAfter: 1,
  },
} as const satisfies Record<string, Entry>

export interface AnswerDetails {
  readonly requestId: string
  /** In the place of the table's. */
  readonly detail?: string | undefined
  /** Overrides the table's, where one result has several (`unknown`: 502 or 504). */
  readonly status?: number | undefined
  readonly scope?: string | undefined
  readonly token?: Token | undefined
  /** The scope's mark. */
  readonly highest?: Token | undefined
  /** Seconds; overrides the table's. */
  readonly retryAfter?: number | undefined
}

/** Answers with a refusal of the fence. Does nothing where an answer has already begun. */
export function refuse(
  req: IncomingMessage,
  res: ServerResponse,
  result: Refusal,
  details: AnswerDetails,
): void {
  write(req, res, result, REFUSALS[result], details, fencingFields(result, details.scope))
}

/** Answers a request that never came to the fence. */
export function fail(
  req: IncomingMessage,
  res: ServerResponse,
  problem: Problem,
  details: AnswerDetails,
): void {
  write(req, res, problem, PROBLEMS[problem], details, [])
}

/** The same for a connection on which no request could be read: a whole response, as text. */
export function rawFailure(problem: Problem, detail: string): string {
  const { status, title } = PROBLEMS[problem]
  const body = JSON.stringify({ type: typeOf(problem), title, status, detail })
  return [
    `HTTP/1.1 ${status} ${STATUS_CODES[status] ?? ''}`,
    'Content-Type: application/problem+json',
    `Content-Length: ${Buffer.byteLength(body)}`,
    'Connection: close',
    '',
    body,
  ].join('\r\n')
}

/** `Fencing-Result` and, where the scope is known, `Fencing-Scope`: names and values in turn. */
export function fencingFields(result: Result, scope: string | undefined): string[] {
  if (scope === undefined) return ['Fencing-Result', result]
  return ['Fencing-Result', result, 'Fencing-Scope', encodeScope(scope)]
}

/** A scope as a field value: visible ASCII of a path as it is, all else and `%` percent-encoded as UTF-8. */
export function encodeScope(scope: string): string {
  return PLAIN.test(scope)
    ? scope
    : scope.replace(/[^A-Za-z0-9/._~!$&'()*+,;=:@-]+/g, encodeURIComponent)
}

/** Most scopes; looking costs less than replacing nothing. */
const PLAIN = /^[A-Za-z0-9/._~!$&'()*+,;=:@-]*$/

function typeOf(name: string): string {
  return `urn:fencing-proxy:problem:${name}`
}

/** A problem as plain values, for the parts that write their answers through a framework. */
export function problemOf(
  problem: Problem,
  details: AnswerDetails,
): { status: number; fields: string[]; body: string } {
  return document(problem, PROBLEMS[problem], details)
}

function document(
  name: string,
  entry: Entry,
  { requestId, detail, status, scope, token, highest, retryAfter }: AnswerDetails,
): { status: number; fields: string[]; body: string } {
  const body = JSON.stringify({
    type: typeOf(name),
    title: entry.title,
    status: status ?? entry.status,
    detail: detail ?? entry.detail,
    requestId,
    scope,
    token: token === undefined ? undefined : formatToken(token),
    highest: highest === undefined ? undefined : formatToken(highest),
  })
  const fields = [
    'Content-Type', 'application/problem+json',
    'Cache-Control', 'no-store',
    'X-Request-Id', requestId,
  ] // prettier-ignore
  const seconds = retryAfter ?? entry.retryAfter
  if (seconds !== undefined) fields.push('Retry-After', seconds.toString())
  if (entry.allow !== undefined) fields.push('Allow', entry.allow)
  return { status: status ?? entry.status, fields, body }
}

function write(
  req: IncomingMessage,
  res: ServerResponse,
  name: string,
  entry: Entry,
  details: AnswerDetails,
  fencing: readonly string[],
): void {
  if (res.headersSent || res.destroyed) return
  const { status, fields, body } = document(name, entry, details)
  fields.push('Content-Length', Buffer.byteLength(body).toString(), ...fencing)
  dismissBody(req, res)
  res.writeHead(status, STATUS_CODES[status] ?? '', fields)
  res.end(body)
}

/** Up to this much of an unread body is read and dropped, so that its connection can be kept. */
const WORTH_READING = 64 * 1024
/** How long a client may go on sending into a connection that was answered. */
const LINGER_MS = 2_000

/**
 * Deals with a body that an early answer leaves unread. A small one is read and dropped. Otherwise
 * the connection ends with this answer, but not at once: a connection that is closed while the
 * client still sends is reset, and the reset can overtake the answer (RFC 9112, 9.6).
 */
export function dismissBody(req: IncomingMessage, res: ServerResponse): void {
  const length = Number(req.headers['content-length'] ?? 0)
  const chunked = req.headers['transfer-encoding'] !== undefined
  if (req.complete || (length === 0 && !chunked)) return
  const { socket } = req
  const keep = !chunked && length <= WORTH_READING && req.headers.expect === undefined
  if (!keep) {
    res.shouldKeepAlive = false
    // Node calls this once the last answer of a connection is written.
    socket.destroySoon = () => socket.end()
  }
  res.once('finish', () => {
    req.resume()
    if (req.complete && keep) return
    const timer = setTimeout(() => socket.destroy(), LINGER_MS)
    req.once('close', () => {
      clearTimeout(timer)
      if (!keep) socket.destroy()
    })
  })
}
