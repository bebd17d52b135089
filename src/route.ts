import type { Route } from './config.ts'
import { listItems, type Fields } from './fields.ts'
import { parsePath, parseScope, type Part } from './pattern.ts'
import {
  ambiguous,
  disputed,
  fieldText,
  hostName,
  queryValue,
  readPath,
  splitTarget,
  unscoped,
  type Flaw,
  type Path,
  type Target,
} from './target.ts'

/**
 * From a request to its scope, or to why it has none. Pure.
 *
 * A scope has to be the same for every spelling of a resource. The other way round, two resources
 * that come to share a scope (because a case is folded, or because `{a}-{b}` can be filled in two
 * ways) are fenced together: that costs them some independence, not their safety.
 */
export type Resolution = Read | Place

/** Passes, unfenced. */
export interface Read {
  readonly kind: 'read'
  /** The bytes that came, in origin-form: what is forwarded. Also below. */
  readonly path: string
}

/** What a write is about. */
export type Place = Covered | Unmatched | Refused

export interface Covered {
  readonly kind: 'write'
  readonly path: string
  readonly route: CompiledRoute
  readonly scope: string
}

/** No route covers the write. */
export interface Unmatched {
  readonly kind: 'unmatched'
  readonly path: string
  readonly detail: string
}

export interface Refused extends Flaw {
  readonly kind: 'refused'
  /** Undefined where the target names nothing that could be forwarded. */
  readonly path: string | undefined
  /** The route that matched; where several may have, one that enforces if there is any. */
  readonly route: CompiledRoute | undefined
}

export interface CompiledRoute {
  readonly config: Route
  /** In metrics and logs: the path pattern. */
  readonly label: string
  /** Segment by segment what the path has to be; undefined where it may be anything. */
  readonly literals: readonly (string | undefined)[]
  /** Whether further segments may follow. */
  readonly rest: boolean
  /** Undefined: every write. */
  readonly methods: ReadonlySet<string> | undefined
  readonly allow: ReadonlySet<string>
  readonly scope: readonly ScopePart[]
}

type ScopePart =
  | Exclude<Part, { kind: 'path' }>
  /** The segment at `place`. */
  | { readonly kind: 'segment'; readonly place: number }

const READS: ReadonlySet<string> = new Set(['GET', 'HEAD', 'OPTIONS', 'TRACE'])

/** In UTF-8. Scopes are keys on disk and travel in fields. */
export const MAX_SCOPE_BYTES = 1024

export class Routes {
  /** In the order of the configuration: the first that matches counts. */
  readonly all: readonly CompiledRoute[]
  readonly #tokenHeader: string

  /** `tokenHeader` in lower case. */
  constructor({ routes, tokenHeader }: { routes: readonly Route[]; tokenHeader: string }) {
    this.all = routes.map(compile)
    this.#tokenHeader = tokenHeader
  }

  /** `target` as it came, one character per byte. */
  resolve(method: string, target: string, fields: Fields): Resolution {
    const split = splitTarget(target)
    const named = overrideOf(fields)
    if (typeof named === 'object') return refused(named, split?.path)
    // An override that names a read does not turn a write into one.
    const override = named === undefined || READS.has(named) ? undefined : named
    if (READS.has(method) && override === undefined) {
      if (split !== undefined) return { kind: 'read', path: split.path }
      if (method === 'OPTIONS' && target === '*') return { kind: 'read', path: target }
      return refused(NO_PATH, undefined)
    }
    if (split === undefined) return refused(NO_PATH, undefined)
    if (override === undefined) return this.#write(method, split, fields)
    const place = this.#write(override, split, fields)
    if (READS.has(method)) return place
    // Which of the two methods the backend goes by must make no difference.
    const plain = this.#write(method, split, fields)
    if (samePlace(plain, place)) return plain
    const flaw = [plain, place].find((one) => one.kind === 'refused') ?? TWO_METHODS
    return refused(flaw, split.path, strictest(routesOf([plain, place])))
  }

  /** An upgrade is a write whatever its method: any route of its path covers it. */
  resolveUpgrade(target: string, fields: Fields): Place {
    const split = splitTarget(target)
    return split === undefined ? refused(NO_PATH, undefined) : this.#write(undefined, split, fields)
  }

  #write(method: string | undefined, target: Target, fields: Fields): Place {
    const flaw = flawOf(target, fields)
    if (flaw !== undefined) return refused(flaw, target.path)
    const place = this.#locate(method, target, fields)
    if (place.kind === 'refused') return place
    const hidden = hiddenFrom(fields, this.#tokenHeader)
    if (hidden !== undefined) {
      return refused(hidden, target.path, place.kind === 'write' ? place.route : undefined)
    }
    const hasDestination = method === 'MOVE' || method === 'COPY'
    return hasDestination ? this.#withDestination(method, place, target, fields) : place
  }

  /** Where a write leads to, by its target alone. Without a method: of any. */
  #locate(method: string | undefined, target: Target, fields: Fields): Place {
    const path = readPath(target.path)
    if ('detail' in path) return refused(path, target.path)
    if (path.disputes.length > 0) return this.#locateDisputed(method, path, target, fields)
    const route = this.all.find((one) => takes(one, method) && matches(one, path.segments))
    if (route !== undefined) return placeIn(route, path, target, fields)
    const detail = `No configured route covers ${method ?? 'a write'} here. Nothing was forwarded.`
    return { kind: 'unmatched', path: target.path, detail }
  }

  /**
   * A route that allows a character says that its backend takes it as part of the segment. But
   * whether the path is one of that route may depend on the character: with `;` as the beginning
   * of a parameter, `/logs;x/17` is `/logs/17`. So every route that comes first in some reading
   * has to allow it.
   */
  #locateDisputed(method: string | undefined, path: Path, target: Target, fields: Fields): Place {
    const firsts: CompiledRoute[] = []
    for (const route of this.all) {
      const readings = takes(route, method) ? readingsIn(route, path) : 'none'
      if (readings !== 'none') firsts.push(route)
      if (readings === 'all') break
    }
    const characters = path.disputes.flatMap((dispute) => dispute.characters)
    const allowed = firsts.every(({ allow }) => characters.every((c) => allow.has(c)))
    const route = firsts.find((one) => matches(one, path.segments))
    if (route !== undefined && allowed) return placeIn(route, path, target, fields)
    return refused(disputed(characters), target.path, strictest(firsts))
  }

  /** MOVE and COPY write their Destination (RFC 4918, 9.8 and 9.9); it must be in the same scope. */
  #withDestination(
    method: string,
    source: Covered | Unmatched,
    target: Target,
    fields: Fields,
  ): Place {
    const values = fields.all('destination')
    const [value] = values
    // A backend refuses a MOVE without one.
    if (value === undefined) return source
    const split = values.length === 1 ? splitTarget(value) : undefined
    if (split === undefined || !namesHost(split)) return refused(NO_DESTINATION, target.path)
    const there = { path: split.path, authority: split.authority ?? target.authority }
    let destination = this.#locate(method, there, fields)
    // What is fenced for other methods only is not to be written by this one either.
    if (destination.kind === 'unmatched') destination = this.#locate(undefined, there, fields)
    let flaw = ELSEWHERE
    if (destination.kind === 'refused') flaw = ambiguous(`Destination: ${destination.detail}`)
    else if (sameScope(source, destination)) return source
    return refused(flaw, target.path, strictest(routesOf([source, destination])))
  }
}

function compile(config: Route): CompiledRoute {
  const pattern = parsePath(config.path)
  const parts = parseScope(config.scope)
  if ('mistake' in pattern) throw new Error(`path ${config.path}: ${pattern.mistake}`)
  if ('mistake' in parts) throw new Error(`scope ${config.scope}: ${parts.mistake}`)
  const { segments, rest } = pattern
  return {
    config,
    label: config.path,
    literals: segments.map((segment) =>
      segment.kind === 'literal' ? fold(config, segment.text.normalize('NFC')) : undefined,
    ),
    rest,
    methods: config.methods && new Set(config.methods),
    allow: new Set(config.allow),
    scope: parts.map((part) => {
      if (part.kind !== 'path') return part
      const place = segments.findIndex((one) => one.kind === 'name' && one.name === part.name)
      if (place === -1) throw new Error(`scope ${config.scope}: {${part.name}} is not in its path`)
      return { kind: 'segment', place }
    }),
  }
}

function takes({ methods }: CompiledRoute, method: string | undefined): boolean {
  return methods === undefined || method === undefined || methods.has(method)
}

function matches(route: CompiledRoute, segments: readonly string[]): boolean {
  const { literals, rest, config } = route
  if (rest ? segments.length < literals.length : segments.length !== literals.length) return false
  return literals.every(
    (literal, i) => literal === undefined || literal === fold(config, segments[i] as string),
  )
}

/** In which readings of the path the route matches; in doubt, in some. */
function readingsIn(route: CompiledRoute, { segments, disputes }: Path): 'all' | 'some' | 'none' {
  const { literals, rest, config } = route
  let readings: 'all' | 'some' = 'all'
  for (const [i, segment] of segments.entries()) {
    if (i >= literals.length) return rest ? readings : 'none'
    const literal = literals[i]
    const dispute = disputes.find(({ place }) => place === i)
    if (literal !== undefined) {
      const may =
        dispute === undefined
          ? literal === fold(config, segment)
          : literal.normalize('NFKC').startsWith(fold(config, dispute.prefix))
      if (!may) return 'none'
      if (dispute !== undefined) readings = 'some'
    }
    // From here on, nothing is known of how many segments follow, or which.
    if (dispute?.shifts) return rest && i === literals.length - 1 ? readings : 'some'
  }
  return segments.length === literals.length ? readings : 'none'
}

/** For backends that fold case. They are the same that read compatible characters as one. */
function fold({ caseInsensitive }: Route, text: string): string {
  return caseInsensitive ? foldCase(text) : text
}

/** Text in one case. All that Unicode pairs falls together, and more: ß and ss, k and the kelvin sign. */
export function foldCase(text: string): string {
  // Upper case alone keeps İ and ẞ apart from their like, and takes composed letters apart.
  const folded = text.normalize('NFKC').toLowerCase().toUpperCase().toLowerCase()
  return folded.normalize('NFKC')
}

function placeIn(route: CompiledRoute, path: Path, target: Target, fields: Fields): Place {
  let scope = ''
  for (const part of route.scope) {
    const value = valueOf(part, path, target, fields)
    if (typeof value === 'object') return refused(value, target.path, route)
    scope += value
  }
  scope = fold(route.config, scope)
  if (scope.length > MAX_SCOPE_BYTES / 3 && Buffer.byteLength(scope) > MAX_SCOPE_BYTES) {
    return refused(TOO_LONG, target.path, route)
  }
  return { kind: 'write', path: target.path, route, scope }
}

function valueOf(part: ScopePart, path: Path, target: Target, fields: Fields): string | Flaw {
  switch (part.kind) {
    case 'text':
      return part.text
    case 'segment':
      return path.segments[part.place] as string
    case 'header':
      return headerValue(part.name, fields)
    case 'query':
      return queryValue(path.query, part.name.normalize('NFC'))
    case 'host':
      return hostValue(target, fields)
    default:
      return part satisfies never
  }
}

function headerValue(name: string, fields: Fields): string | Flaw {
  const hidden = hiddenFrom(fields, name)
  if (hidden !== undefined) return hidden
  const values = fields.all(name)
  const [value = ''] = values
  // A comma makes two of one, for whoever reads a list (RFC 9110, 5.3).
  if (values.length > 1 || value === '' || value.includes(',')) {
    return unscoped(`The scope is made of the field ${name}: send one, with one value.`)
  }
  return (
    fieldText(value) ??
    ambiguous(`The scope is made of the field ${name}: its value is visible ASCII or UTF-8.`)
  )
}

function hostValue({ authority }: Target, fields: Fields): string | Flaw {
  const hosts = authority === undefined ? fields.all('host') : [authority]
  const [host = ''] = hosts
  if (hosts.length > 1 || host === '') return unscoped('The scope is made of the host: name one.')
  const name = hostName(host)
  // Backends that trust their proxy may take the host from these (Rails does).
  const claims = [...fields.all('x-forwarded-host')]
  for (const forwarded of fields.all('forwarded')) {
    for (const [, claim = ''] of forwarded.matchAll(/host\s*=\s*"?([^",;]*)/gi)) claims.push(claim)
  }
  const others = listItems(claims).filter((claim) => hostName(claim) !== name)
  const twin = fields.twinOf('x-forwarded-host')
  return name === undefined || others.length > 0 || twin !== undefined ? TWO_HOSTS : name
}

const METHOD_OVERRIDES = ['x-http-method-override', 'x-http-method', 'x-method-override']
const METHOD = /^[A-Za-z0-9!#$%&'*+.^_`|~-]+$/

/** The method, in upper case, that the request asks a backend to take in the place of its own. */
function overrideOf(fields: Fields): string | Flaw | undefined {
  let override: string | undefined
  for (const name of METHOD_OVERRIDES) {
    const values = fields.twinOf(name) === undefined ? fields.all(name) : twins(name, fields)
    const [value] = values
    if (value === undefined) continue
    const method = value.toUpperCase()
    const agrees = values.length === 1 && (override ?? method) === method
    if (!agrees || !METHOD.test(value)) return TWO_OVERRIDES
    override = method
  }
  return override
}

/** The values of every field that CGI and the like call by the same name. */
function twins(name: string, { raw }: Fields): string[] {
  const wanted = cgiName(name)
  return raw.filter((_, i) => i % 2 === 1 && cgiName(raw[i - 1] as string) === wanted)
}

function cgiName(name: string): string {
  return name.toLowerCase().replace(/[^a-z0-9]/g, '_')
}

/** X-Original-URL, X-Rewrite-URL: IIS, Symfony, Laminas. SCRIPT_NAME: gunicorn cuts it off the path. */
const PATH_OVERRIDES = ['x-original-url', 'x-rewrite-url', 'script-name']

/** What keeps a write from having a scope, whatever the routes are. */
function flawOf(target: Target, fields: Fields): Flaw | undefined {
  if (!namesHost(target)) return NO_HOST
  const override = PATH_OVERRIDES.find(
    (name) => fields.has(name) || fields.twinOf(name) !== undefined,
  )
  if (override === undefined) return undefined
  return ambiguous(`The field ${override} names another path. Leave it out.`)
}

function namesHost({ authority }: Target): boolean {
  return authority === undefined || hostName(authority) !== undefined
}

/** A field that the backend would not see, or would see twice. */
function hiddenFrom(fields: Fields, name: string): Flaw | undefined {
  const twin = fields.twinOf(name)
  if (twin !== undefined) return ambiguous(`Field ${twin} can pass for ${name}. Leave it out.`)
  if (!fields.has('connection') || !fields.connectionOptions.has(name)) return undefined
  return ambiguous(`Connection names ${name}, which would be dropped here. Do not name it there.`)
}

// prettier-ignore
const NO_PATH = ambiguous('The request target is no path, nor a URL with http or https. Send the path.')
// prettier-ignore
const NO_HOST = ambiguous('The request target does not name a host and port alone. Send the path, and the host in Host.')
// prettier-ignore
const TWO_METHODS = ambiguous('The request names a second method, for which another scope holds. Name one.')
// prettier-ignore
const TWO_OVERRIDES = ambiguous('The request does not name one method in one method override field. Name one.')
// prettier-ignore
const TWO_HOSTS = ambiguous('The scope is made of the host, and Host, X-Forwarded-Host and Forwarded do not name one. Send Host alone.')
// prettier-ignore
const NO_DESTINATION = ambiguous('Destination is not one path, nor one URL with http or https.')
// prettier-ignore
const ELSEWHERE = ambiguous('Destination lies in another scope than the target, and one token covers one scope.')
// prettier-ignore
const TOO_LONG = unscoped(`The scope of this request is longer than ${MAX_SCOPE_BYTES} bytes. Use shorter names.`)

function refused(flaw: Flaw, path: string | undefined, route?: CompiledRoute): Refused {
  return { kind: 'refused', result: flaw.result, detail: flaw.detail, path, route }
}

function samePlace(one: Place, other: Place): boolean {
  if (one.kind === 'refused' || other.kind === 'refused') return false
  return routesOf([one])[0] === routesOf([other])[0] && sameScope(one, other)
}

function sameScope(one: Covered | Unmatched, other: Covered | Unmatched): boolean {
  if (one.kind === 'unmatched' || other.kind === 'unmatched') return one.kind === other.kind
  return one.scope === other.scope
}

function routesOf(places: readonly Place[]): (CompiledRoute | undefined)[] {
  return places.flatMap((place) => (place.kind === 'unmatched' ? [] : [place.route]))
}

/** A refusal is let through where its route only observes: so it goes to one that does not. */
function strictest(routes: readonly (CompiledRoute | undefined)[]): CompiledRoute | undefined {
  const observe = routes.every((route) => route?.config.mode === 'observe')
  return observe ? routes[0] : routes.find((route) => route?.config.mode !== 'observe')
}
