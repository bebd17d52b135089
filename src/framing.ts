import type { Fields } from './fields.ts'

/**
 * What Node's HTTP parser lets through and a mediator must not. A request that two servers could
 * cut differently is the classic way to smuggle a second, unfenced one past a proxy; so the head
 * is checked by RFC 9112 to the letter, and the message that goes on is framed anew.
 */

/** How the request's body is framed: not at all, by its length in bytes, or in chunks. */
export type Framing =
  | { readonly kind: 'none' }
  | { readonly kind: 'length'; readonly bytes: number }
  | { readonly kind: 'chunked' }

export type HeadProblem = {
  readonly kind: 'refused'
  readonly problem: 'bad-request' | 'too-many-fields' | 'http-version'
  readonly detail: string
}

/**
 * A request with more fields is refused. The parser is told to keep all of them: by default Node 20
 * drops those beyond about 1000 but frames by them all the same (CVE-2026-58044). Well below
 * what backends take, with room for the fields that are added here.
 */
export const MAX_FIELDS = 256

const NO_BODY: Framing = { kind: 'none' }
const CHUNKED: Framing = { kind: 'chunked' }

/** Checks the head of a request as the parser reported it. Pure. */
export function checkHead(
  httpVersion: string,
  target: string,
  fields: Fields,
): Framing | HeadProblem {
  if (httpVersion !== '1.1' && httpVersion !== '1.0') {
    return {
      kind: 'refused',
      problem: 'http-version',
      detail: 'This port speaks HTTP/1.1 and HTTP/1.0.',
    }
  }
  if (fields.raw.length / 2 > MAX_FIELDS) {
    return {
      kind: 'refused',
      problem: 'too-many-fields',
      detail: `The request has more than ${MAX_FIELDS} header fields.`,
    }
  }
  for (let i = 1; i < fields.raw.length; i += 2) {
    // Obsolete line folding and stray control characters (RFC 9112, 5.2; RFC 9110, 5.5).
    if (CONTROL.test(fields.raw[i] as string)) {
      return bad(`The field ${fields.raw[i - 1]} holds a control character or a folded line.`)
    }
  }
  return checkHost(httpVersion, target, fields) ?? checkFraming(httpVersion, fields)
}

const CONTROL = /[\0-\x08\x0a-\x1f\x7f]/
// A registered name or address and a port (RFC 9110, 7.2); no list, no user, no path.
const HOST = /^(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?$/

function checkHost(httpVersion: string, target: string, fields: Fields): HeadProblem | undefined {
  const authority = authorityOf(target)
  if (authority !== undefined && !HOST.test(authority)) {
    return bad('The request target does not name a host and port.')
  }
  const hosts = fields.all('host')
  if (hosts.length === 0 && httpVersion === '1.0') return undefined
  if (hosts.length !== 1) return bad('A request has exactly one Host field (RFC 9112, 3.2).')
  if (!HOST.test(hosts[0] as string)) return bad('The Host field is not a host name and port.')
  return undefined
}

/** The host and port of a request: those of an absolute-form target go before Host (RFC 9112, 3.2.2). */
export function hostOf(target: string, fields: Fields): string | undefined {
  return authorityOf(target) ?? fields.all('host')[0]
}

function authorityOf(target: string): string | undefined {
  return target.startsWith('/') ? undefined : /^https?:\/\/([^/?#]*)/i.exec(target)?.[1]
}

function checkFraming(httpVersion: string, fields: Fields): Framing | HeadProblem {
  const lengths = fields.all('content-length')
  const codings = fields.all('transfer-encoding')
  if (codings.length > 0) {
    if (httpVersion === '1.0') return bad('HTTP/1.0 has no Transfer-Encoding (RFC 9112, 6.1).')
    if (lengths.length > 0) {
      return bad('A request has Content-Length or Transfer-Encoding, not both (RFC 9112, 6.3).')
    }
    if (codings.length > 1 || codings[0]?.toLowerCase() !== 'chunked') {
      return bad('The only Transfer-Encoding taken is "chunked", once (RFC 9112, 6.1).')
    }
    return CHUNKED
  }
  if (lengths.length === 0) return NO_BODY
  const [length = ''] = lengths
  const bytes = Number(length)
  if (lengths.length > 1 || !/^(?:0|[1-9][0-9]*)$/.test(length) || !Number.isSafeInteger(bytes)) {
    return bad('Content-Length is one decimal number without sign or leading zero (RFC 9112, 6.2).')
  }
  return { kind: 'length', bytes }
}

function bad(detail: string): HeadProblem {
  return { kind: 'refused', problem: 'bad-request', detail }
}
