/**
 * The spelling of request targets: to the one thing that every server reads in them, or to why
 * there is no such thing. Pure; targets are given as they came, one character per byte.
 *
 * The fence is by resource, a target is bytes, and servers do not agree on how to read them: some
 * take `/a;x/b` for `/a/b`, decode `%2f` before they cut the path, decode twice, resolve `..`
 * after they decode, or open a file whose name loses its trailing dots. An owner who can write to
 * a resource under two scopes is not fenced. So whatever is known to be read in two ways is refused,
 * and the rest is decoded once.
 *
 * Text is brought into Unicode's form NFC: file systems that compose (or decompose) names see one
 * file where the bytes differ. Where they are two resources after all, they share a scope, and that
 * costs them some independence, not their safety. Delimiters are looked for in the compatibility
 * form NFKC, because servers that convert to a Windows code page turn a full-width `／` into `/`.
 */

/** Why a request has no scope, in words for its client: what is wrong, and the remedy. */
export interface Flaw {
  readonly result: 'ambiguous' | 'unscoped'
  readonly detail: string
}

export function ambiguous(detail: string): Flaw {
  return { result: 'ambiguous', detail }
}

export function unscoped(detail: string): Flaw {
  return { result: 'unscoped', detail }
}

export interface Target {
  /** Origin-form, the bytes that came: what is forwarded. */
  readonly path: string
  /** The authority of an absolute-form target. */
  readonly authority: string | undefined
}

const ABSOLUTE_FORM = /^https?:\/\/([^/?#]*)(.*)$/is

/** Takes origin-form and absolute-form with http or https (RFC 9112, 3.2); of others, undefined. */
export function splitTarget(target: string): Target | undefined {
  if (target.startsWith('/')) return { path: target, authority: undefined }
  const [, authority, path] = ABSOLUTE_FORM.exec(target) ?? []
  if (path === undefined) return undefined
  return { path: path.startsWith('/') ? path : `/${path}`, authority }
}

const AUTHORITY = /^(\[[0-9a-f:.]+\]|[a-z0-9_~-]+(?:\.[a-z0-9_~-]+)*)\.?(?::[0-9]*)?$/

/** The host in lower case, without port and trailing dot; undefined where it is none, or has a user. */
export function hostName(authority: string): string | undefined {
  return AUTHORITY.exec(authority.toLowerCase())?.[1]
}

export interface Path {
  /** Decoded, in NFC; those of `/` are none, and those of `/a/` are those of `/a`. */
  readonly segments: readonly string[]
  /** Without its `?`; undefined where there is no `?`. */
  readonly query: string | undefined
  /** In the order of the segments; nearly always empty. */
  readonly disputes: readonly Dispute[]
}

/** A segment that may be read in another way, because of characters that a route can allow. */
export interface Dispute {
  /** The segment's place in the path. */
  readonly place: number
  /** What the segment begins with in every reading; in compatibility form. */
  readonly prefix: string
  readonly characters: readonly string[]
  /** Whether the path ends here, or has more segments, in another reading. */
  readonly shifts: boolean
}

const NO_DISPUTES: readonly Dispute[] = []

// Most paths: nothing to decode, nothing to dispute. No segment ends in a dot, so none is . or ..
const PLAIN_PATH = /^(?:\/[\w.~!$&'()*+,=:@-]*[\w~!$&'()*+,=:@-])+\/?$/

/** Reads an origin-form target. */
export function readPath(target: string): Path | Flaw {
  if (target.includes('#')) return FRAGMENT
  const mark = target.indexOf('?')
  const path = mark === -1 ? target : target.slice(0, mark)
  const query = mark === -1 ? undefined : target.slice(mark + 1)
  if (path === '/') return { segments: [], query, disputes: NO_DISPUTES }

  const spelled = path.slice(1).split('/')
  if (spelled.at(-1) === '') spelled.pop()
  if (PLAIN_PATH.test(path)) return { segments: spelled, query, disputes: NO_DISPUTES }

  const segments: string[] = []
  const disputes: Dispute[] = []
  for (const [place, text] of spelled.entries()) {
    const segment = readSegment(text)
    if (typeof segment === 'object') return segment
    const dispute = disputeIn(segment, text, place)
    if (dispute !== undefined) {
      if ('result' in dispute) return dispute
      disputes.push(dispute)
    }
    segments.push(segment)
  }
  return { segments, query, disputes }
}

const FRAGMENT = ambiguous('The target has a fragment (#), which is no part of a request target. Leave it out.') // prettier-ignore
const EMPTY = ambiguous('The path has a segment that is empty, or that some servers read as empty. Leave it out.') // prettier-ignore
const DOTS = ambiguous('The path has a segment that some servers read as "." or "..". Write the path that is meant.') // prettier-ignore
const ENDS_BADLY = ambiguous('A segment of the path ends in a dot or a blank, which some servers cut off. Choose another name.') // prettier-ignore
const RAW = ambiguous('The path has blanks, control or 8-bit characters. Percent-encode its text as UTF-8.') // prettier-ignore
const NOT_TEXT = ambiguous('The path has a % without two hex digits, or bytes that are not UTF-8. Percent-encode its text as UTF-8.') // prettier-ignore
const CONTROLS = ambiguous('The path has an encoded control character, at which some servers end it. Leave it out.') // prettier-ignore
const ENCODED_TWICE = ambiguous('The path is percent-encoded twice. Encode it once.')

const NOT_VISIBLE_ASCII = /[^\x21-\x7e]/
/** C0, DEL and C1. */
const CONTROL = /[\u0000-\u001f\u007f-\u009f]/
const ONLY_DOTS = /^[. ]+$/

/** One segment, decoded. */
function readSegment(text: string): string | Flaw {
  if (text === '') return EMPTY
  if (NOT_VISIBLE_ASCII.test(text)) return RAW
  const segment = decode(text)
  if (segment === undefined) return NOT_TEXT
  const shape = compatibilityForm(segment)
  if (CONTROL.test(shape)) return CONTROLS
  if (ONLY_DOTS.test(shape)) return DOTS
  return /[. ]$/.test(shape) ? ENDS_BADLY : segment
}

const DELIMITER = /[/\\;?#]/
// What a server that decodes twice, or knows %uXXXX (IIS), goes on to decode. A lone % is no such
// thing: who decodes `100%` once more finds nothing to decode.
const ENCODING = /%(?:[0-9a-f]{2}|u[0-9a-f]{4})/i
// Of these, what is no printable ASCII: overlong dots, NUL.
const NEVER_DECODED = /%(?:[0189a-f][0-9a-f]|7f|u[0-9a-f]{4})/i
const DISPUTED = /[/\\;?#]|%(?=[0-9a-f]{2}|u[0-9a-f]{4})/gi
// What RFC 3986 does not have in a path: some parsers encode it, others refuse it or cut there.
const NO_PCHAR = /["<>[\]^`{|}]/g
const SHIFTING = /[/\\?#%]/

/** What may be read differently in `segment`, which came as `text`. */
function disputeIn(segment: string, text: string, place: number): Dispute | Flaw | undefined {
  const shape = compatibilityForm(segment)
  const characters = [...(shape.match(DISPUTED) ?? []), ...(text.match(NO_PCHAR) ?? [])]
  if (characters.length === 0) return undefined

  // Whatever a route allows: no reading may take segments away, or go on decoding.
  if (NEVER_DECODED.test(shape)) return ENCODED_TWICE
  const again = shape.replace(/%([0-9a-f]{2})/gi, (_, hex: string) =>
    String.fromCharCode(parseInt(hex, 16)),
  )
  if (ENCODING.test(again)) return ENCODED_TWICE
  const pieces = again.split(DELIMITER)
  if (pieces[0] === '') return EMPTY
  if (pieces.some((piece) => ONLY_DOTS.test(piece))) return DOTS

  const start = Math.min(...characters.map((character) => shape.indexOf(character)))
  return {
    place,
    // Composition can hide a character: `<` and U+0338 are one in NFC.
    prefix: shape.slice(0, Math.max(0, start)),
    characters,
    shifts: characters.some((character) => SHIFTING.test(character)),
  }
}

/** The refusal of a path for characters that no route allows. */
export function disputed(characters: readonly string[]): Flaw {
  const list = [...new Set(characters)]
  const remedy = list.every((character) => character.match(NO_PCHAR))
    ? 'Percent-encode it.'
    : 'Leave it out, encoded too, or have the route allow it.'
  return ambiguous(`The path has ${list.join(' ')}, which servers read differently. ${remedy}`)
}

/**
 * The value of the one parameter `name` (in NFC) of a query on which a scope depends. Servers know
 * names in other spellings, too: PHP reads `a.b` and `a[]` as `a_b` and `a`, ASP.NET ignores case.
 */
export function queryValue(query: string | undefined, name: string): string | Flaw {
  if (query !== undefined && (NOT_VISIBLE_ASCII.test(query) || /[+;]/.test(query))) return QUERY_RAW
  const folded = foldName(name)
  let found: string | undefined
  for (const pair of query?.split('&') ?? []) {
    const equals = pair.indexOf('=')
    const key = decode(equals === -1 ? pair : pair.slice(0, equals))
    const value = decode(equals === -1 ? '' : pair.slice(equals + 1))
    if (key === undefined || value === undefined) return QUERY_NOT_TEXT
    if (NOT_PLAINLY_DECODED.test(key)) return QUERY_NOT_TEXT
    if (foldName(key) !== folded) continue
    if (NOT_PLAINLY_DECODED.test(value)) return QUERY_NOT_TEXT
    if (found !== undefined || key !== name) {
      return unscoped(`The scope is made of the query's "${name}": give it once, and spelt so.`)
    }
    found = value
  }
  if (found !== undefined && found !== '') return found
  return unscoped(`The scope is made of the query's "${name}": give it a value.`)
}

const QUERY_RAW = ambiguous('The scope depends on the query, which has a + or ;, blanks, control or 8-bit characters. Percent-encode them.') // prettier-ignore
const QUERY_NOT_TEXT = ambiguous('The scope depends on the query, which is not plain text in UTF-8, percent-encoded once. Encode it so.') // prettier-ignore
const NOT_PLAINLY_DECODED = new RegExp(`${CONTROL.source}|${ENCODING.source}`, 'i')

function foldName(name: string): string {
  return name
    .normalize('NFKC')
    .toLowerCase()
    .trim()
    .replace(/\[.*/s, '')
    .replace(/[^\p{L}\p{N}]/gu, '_')
}

const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/** The text of a field value, which came as one character per byte; undefined where it is not plain. */
export function fieldText(value: string): string | undefined {
  if (/^[\x21-\x7e]*$/.test(value)) return value
  if (!/^[\x21-\x7e\x80-\xff]*$/.test(value)) return undefined
  try {
    const text = UTF8.decode(Buffer.from(value, 'latin1')).normalize('NFC')
    return CONTROL.test(text) ? undefined : text
  } catch {
    return undefined
  }
}

/** Strict: neither invalid encodings nor invalid UTF-8 (overlong forms, surrogates) are text. */
function decode(text: string): string | undefined {
  try {
    return decodeURIComponent(text).normalize('NFC')
  } catch {
    return undefined
  }
}

const ASCII = /^[\0-\x7f]*$/

/** As a server reads text that it converts to a Windows code page. */
export function compatibilityForm(text: string): string {
  if (ASCII.test(text)) return text
  // Slashes that NFKC leaves; yen and won signs have the place of \ in code pages 932 and 949.
  return text
    .replace(/[\u2044\u2215]/g, '/')
    .replace(/[\u2216¥₩]/g, '\\')
    .normalize('NFKC')
}
