/**
 * What can be configured. One schema, in the keys and units of the file, gives the types, the
 * defaults, the names of environment variables and the words for mistakes. Only a complete Config
 * runs; parts never look at a source of settings themselves.
 */
import { METHODS } from 'node:http'
import { isIPv4, isIPv6 } from 'node:net'
import { z } from 'zod'
import { formatDuration, parseDuration } from './duration.ts'
import { describeFound, formatPath, nearest, type Mistake } from './mistake.ts'
import { FIELD_NAME, parsePath, parseScope } from './pattern.ts'
import { gather, type Given, type Key, type Sources } from './sources.ts'

export type Config = DeepReadonly<ReturnType<typeof complete>>
export type Route = Config['routes'][number]

/** The same as a Config, in the keys and units of the file, to be printed and used as one. */
export type FileSettings = z.input<typeof Settings>

export type Loaded =
  | { readonly ok: true; readonly config: Config; readonly settings: FileSettings }
  | { readonly ok: false; readonly mistakes: readonly Mistake[] }

/** Reads all sources (flag over environment over file over default), and finds every mistake. */
export function loadConfig(sources: Sources): Loaded {
  const { given, mistakes } = gather(sources, KEYS)
  if (given === undefined) return { ok: false, mistakes }
  const parsed = Settings.safeParse(given.settings)
  if (!parsed.success) {
    const found = parsed.error.issues.flatMap((issue) => explain(issue, given))
    return { ok: false, mistakes: [...mistakes, ...found] }
  }
  if (mistakes.length > 0) return { ok: false, mistakes }
  const routes = parsed.data.routes.map((route) => ({ ...route, scope: scopeOf(route) }))
  const settings = { ...parsed.data, routes }
  return { ok: true, config: complete(settings), settings: z.encode(Settings, settings) }
}

// Kinds of values. Every message completes "<key>: …".

/** A value that the file spells as text. */
function spelled<T>(
  words: string,
  parse: (text: string) => T | undefined,
  print: (value: T) => string,
) {
  // prettier-ignore
  return z.codec(z.string({ error: words }), z.custom<T>(), {
    decode: (text, context) => {
      const value = parse(text)
      if (value !== undefined) return value
      context.issues.push({ code: 'custom', message: words, input: text })
      return z.NEVER
    },
    encode: print,
  })
}

function duration(atLeastMs: number) {
  const words = `must be a duration such as 500ms, 5s, 2m or 1h, from ${formatDuration(atLeastMs)} to 596h` // prettier-ignore
  const parse = (text: string) => {
    const ms = parseDuration(text)
    return ms !== undefined && ms >= atLeastMs ? ms : undefined
  }
  return spelled(words, parse, formatDuration)
}

export interface Address {
  /** A name or an IP address; IPv6 without brackets. */
  readonly host: string
  /** 0 lets the system choose. */
  readonly port: number
}

const address = () =>
  spelled(
    'must be host:port, such as 127.0.0.1:8080, [::1]:8080, or 0.0.0.0:8080 for every address',
    parseAddress,
    ({ host, port }) => `${host.includes(':') ? `[${host}]` : host}:${port}`,
  )

function parseAddress(text: string): Address | undefined {
  const [, ipv6, name = '', digits] =
    /^(?:\[([^\]]+)\]|([A-Za-z0-9._-]+)):(0|[1-9][0-9]{0,4})$/.exec(text) ?? []
  const port = Number(digits)
  if (digits === undefined || port > 65535) return undefined
  if (ipv6 !== undefined) return isIPv6(ipv6) ? { host: ipv6, port } : undefined
  const looksLikeIPv4 = /^[0-9.]+$/.test(name)
  return looksLikeIPv4 && !isIPv4(name) ? undefined : { host: name, port }
}

const origin = () =>
  spelled(
    'must be an origin, http://host:port or https://host:port, without path, query or credentials: targets are forwarded as they come', // prettier-ignore
    parseOrigin,
    (url) => url,
  )

function parseOrigin(text: string): string | undefined {
  if (!/^https?:\/\//i.test(text) || !URL.canParse(text)) return undefined
  const url = new URL(text)
  // Also false for an empty query, a fragment, a user.
  const nothingElse = url.href === `${url.origin}/`
  return nothingElse && url.port !== '0' ? url.origin : undefined
}

function count(atLeast: number) {
  const error = `must be a whole number from ${atLeast} to 1000000`
  return z.int({ error }).min(atLeast, { error }).max(1_000_000, { error })
}

function choice<const T extends readonly string[]>(...values: T) {
  return z.enum(values, { error: `must be ${values.join(' or ')}` })
}

const yesOrNo = () => z.boolean({ error: 'must be true or false' })

function mapping<T extends z.core.$ZodLooseShape>(shape: T) {
  return z.strictObject(shape, { error: `must have keys: ${Object.keys(shape).join(', ')}` })
}

function list<T extends z.core.SomeType>(items: T, error: string) {
  return z.array(items, { error }).min(1, { error })
}

// Routes

const pathPattern = z
  .string({ error: 'must be a path pattern such as /jobs/{job}/**' })
  .superRefine((path, context) => {
    const pattern = parsePath(path)
    if ('mistake' in pattern) context.addIssue(pattern.mistake)
  })

const scopeTemplate = z
  .string({ error: 'must be a scope such as /jobs/{job}' })
  .superRefine((scope, context) => {
    const parts = parseScope(scope)
    if ('mistake' in parts) context.addIssue(parts.mistake)
  })

const READS = ['GET', 'HEAD', 'OPTIONS', 'TRACE']
const WRITES = METHODS.filter((method) => method !== 'CONNECT' && !READS.includes(method))
const WRITE_METHOD = `must be a method that writes, such as PUT, DELETE or MKCOL: reads (${READS.join(', ')}) are never fenced, CONNECT is always refused` // prettier-ignore
const writeMethod = z
  .string({ error: WRITE_METHOD })
  .toUpperCase()
  .refine((method) => WRITES.includes(method), { error: WRITE_METHOD })

/** What a target may hold in more readings than one, and what RFC 3986 has encoded in a path. */
const ALLOWABLE = Array.from('/\\;?#%"<>[]^`{|}')

/** Those that a target cannot hold even if they are encoded. */
const REFUSED: readonly (typeof ALLOWABLE)[number][] = ['\\', ';', '?', '#']

const route = mapping({
  path: pathPattern,
  methods: list(writeMethod, 'must be a list of methods; without it, every write').optional(),
  scope: scopeTemplate.optional(),
  missingToken: choice('reject', 'pass').default('reject'),
  repeat: choice('many', 'once').default('many'),
  mode: choice('enforce', 'observe').default('enforce'),
  caseInsensitive: yesOrNo().default(false),
  allow: z
    .array(z.enum(ALLOWABLE, { error: `must be one of ${ALLOWABLE.join(' ')}` }), {
      error: `must be a list of single characters out of ${ALLOWABLE.join(' ')}`,
    })
    .default([]),
})

/** What the checks of a route as a whole look at; they run even where other keys are mistaken. */
const Patterns = z.object({
  path: z.string(),
  scope: z.string().optional(),
  allow: z.array(z.string()),
})

const checkedRoute = route.superRefine(
  ({ path, scope, allow }, context) => {
    const pattern = parsePath(path)
    if ('mistake' in pattern) return
    const names = new Set<string>()
    for (const segment of pattern.segments) {
      if (segment.kind === 'name') names.add(segment.name)
      if (segment.kind !== 'literal') continue
      for (const character of REFUSED) {
        if (!segment.text.includes(character) || allow.includes(character)) continue
        const message = `never matches: a target with ${character} is refused, unless allow has it`
        context.addIssue({ code: 'custom', path: ['path'], message })
      }
    }

    if (scope === undefined) {
      if (!pattern.segments.some(({ kind }) => kind === 'any')) return
      const message = 'must be given, because the path has a *, which has no name for a scope to use' // prettier-ignore
      context.addIssue({ code: 'custom', path: ['scope'], message })
      return
    }
    const parts = parseScope(scope)
    if ('mistake' in parts) return
    for (const part of parts) {
      if (part.kind !== 'path' || names.has(part.name)) continue
      const known = names.size === 0 ? 'has none' : `has {${[...names].join('}, {')}}`
      const message = `{${part.name}} is no name of the path, which ${known}`
      context.addIssue({ code: 'custom', path: ['scope'], message })
    }
  },
  { when: ({ value }) => Patterns.safeParse(value).success },
)

type RouteSettings = z.output<typeof route>

/** The scope of a route that gives none: its path, without a final `/**`. */
function scopeOf({ path, scope }: RouteSettings): string {
  return scope ?? (path.replace(/\/\*\*$/, '') || '/')
}

/** Whether `earlier` matches whatever `later` does. Said of equal paths only, where it is certain. */
function covers(earlier: RouteSettings, later: RouteSettings): boolean {
  const shape = ({ path }: RouteSettings) => path.replace(/\{[^}]*\}/g, '*')
  return (
    shape(earlier) === shape(later) &&
    earlier.caseInsensitive === later.caseInsensitive &&
    (earlier.methods === undefined ||
      (later.methods?.every((method) => earlier.methods?.includes(method)) ?? false))
  )
}

const ROUTES = 'must be a list of at least one route, each with a path such as /jobs/{job}/**'
const routes = list(checkedRoute, ROUTES).superRefine((all, context) => {
  for (const [i, later] of all.entries()) {
    const first = all.findIndex((earlier) => covers(earlier, later))
    if (first === i) continue
    const message = `never matches: routes[${first}] takes every write that this route could`
    context.addIssue({ code: 'custom', path: [i, 'path'], message })
  }
})

// Leases

const PREFIX = 'must be a path such as /_fencing: segments of letters, digits, . _ ~ and -'

const leases = mapping({
  prefix: z
    .string({ error: PREFIX })
    .regex(/^(\/(?!\.{1,2}(\/|$))[A-Za-z0-9._~-]+)+$/, { error: PREFIX })
    .default('/_fencing'),
  minTtl: duration(1).prefault('100ms'),
  maxTtl: duration(1).prefault('24h'),
  defaultTtl: duration(1).prefault('15s'),
  maxWaiting: count(0).default(1024),
}).superRefine(({ minTtl, maxTtl, defaultTtl }, context) => {
  const wrong = (key: string, message: string) =>
    context.addIssue({ code: 'custom', path: [key], message })
  if (minTtl > maxTtl)
    wrong('minTtl', `must not be above maxTtl, which is ${formatDuration(maxTtl)}`)
  else if (defaultTtl < minTtl || defaultTtl > maxTtl) {
    const range = `from minTtl to maxTtl: ${formatDuration(minTtl)} to ${formatDuration(maxTtl)}`
    wrong('defaultTtl', `must lie ${range}`)
  }
})

// The whole

/** Fields with which a message is framed, routed or described: no place for a token. */
const TAKEN = [
  ...['authorization', 'connection', 'content-.*', 'cookie', 'destination', 'expect'],
  ...['fencing-(result|scope)', 'host', 'keep-alive', 'max-forwards', 'proxy-.*', 'te', 'trailer'],
  ...['transfer-encoding', 'upgrade', 'via', 'x-forwarded-.*', 'x-request-id'],
]
const IS_TAKEN = new RegExp(`^(${TAKEN.join('|')})$`, 'i')
const FIELD = 'must be the name of a header field with no other meaning, such as Fencing-Token'

const STORE_PATH = 'must be the path of a file'

const Settings = mapping({
  listen: address().prefault('0.0.0.0:8080'),
  admin: address().prefault('127.0.0.1:9901'),
  clientTimeout: duration(1).prefault('30s'),
  shutdownTimeout: duration(0).prefault('30s'),
  upstream: mapping({
    url: origin(),
    responseTimeout: duration(1).prefault('60s'),
    maxConnections: count(1).default(256),
  }).prefault({} as { url: string }),
  token: mapping({
    header: z
      .string({ error: FIELD })
      .refine((name) => FIELD_NAME.test(name) && !IS_TAKEN.test(name), { error: FIELD })
      .default('Fencing-Token'),
  }).prefault({}),
  store: mapping({
    type: choice('sqlite').default('sqlite'),
    path: z
      .string({ error: STORE_PATH })
      // SQLite takes these for databases that end with the process.
      .refine((path) => path.trim() !== '' && path !== ':memory:', { error: STORE_PATH })
      .default('data/fence.db'),
    create: yesOrNo().default(true),
  }).prefault({}),
  fence: mapping({
    takeoverTimeout: duration(0).prefault('30s'),
    settle: duration(0).prefault('5s'),
    maxWaiting: count(0).default(1024),
  }).prefault({}),
  leases: leases.optional(),
  routes,
  unmatchedWrites: choice('reject', 'pass').default('reject'),
  log: mapping({
    level: choice('trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent').default('info'),
  }).prefault({}),
}).superRefine((settings, context) => {
  const { listen, admin, token } = settings
  if (listen.port !== 0 && listen.port === admin.port && listen.host === admin.host) {
    const message = 'must differ from listen'
    context.addIssue({ code: 'custom', path: ['admin'], message })
  }
  for (const [i, { scope = '' }] of settings.routes.entries()) {
    const parts = parseScope(scope)
    const header = token.header.toLowerCase()
    if ('mistake' in parts) continue
    if (!parts.some((part) => part.kind === 'header' && part.name === header)) continue
    const message = 'must not be made of the token: every token would have a scope of its own'
    context.addIssue({ code: 'custom', path: ['routes', i, 'scope'], message })
  }
})

function complete(
  settings: Omit<z.output<typeof Settings>, 'routes'> & {
    routes: (RouteSettings & { scope: string })[]
  },
) {
  // prettier-ignore
  const { listen, admin, upstream, token, store, fence, leases, unmatchedWrites, log } = settings
  return {
    /** The data port. */
    listen,
    admin,
    /** For a request head to arrive, and between two reads of a body. */
    clientTimeoutMs: settings.clientTimeout,
    shutdownTimeoutMs: settings.shutdownTimeout,
    upstream: {
      /** An origin, such as `http://127.0.0.1:9000`. */
      url: upstream.url,
      responseTimeoutMs: upstream.responseTimeout,
      maxConnections: upstream.maxConnections,
    },
    token,
    store,
    fence: {
      takeoverTimeoutMs: fence.takeoverTimeout,
      settleMs: fence.settle,
      /** Per scope. */
      maxWaiting: fence.maxWaiting,
    },
    /** Undefined: no lease service, tokens come from elsewhere. */
    leases: leases && {
      /** The path under which the service lies, without a slash at its end. */
      prefix: leases.prefix,
      minTtlMs: leases.minTtl,
      maxTtlMs: leases.maxTtl,
      defaultTtlMs: leases.defaultTtl,
      /** Per scope. */
      maxWaiting: leases.maxWaiting,
    },
    /** The first match counts. */
    routes: settings.routes.map((route) => ({
      ...route,
      /** In upper case; undefined: every write. */
      methods: route.methods,
    })),
    unmatchedWrites,
    log,
  }
}

type DeepReadonly<T> = T extends object ? { readonly [K in keyof T]: DeepReadonly<T[K]> } : T

// From the schema to names and words

/** The schema of a value that is there. */
function bare(schema: z.core.$ZodType): z.core.$ZodType {
  const optional =
    schema instanceof z.ZodDefault ||
    schema instanceof z.ZodPrefault ||
    schema instanceof z.ZodOptional
  return optional ? bare(schema.unwrap()) : schema
}

function shapeOf(schema: z.core.$ZodType): Readonly<Record<string, z.core.$ZodType>> | undefined {
  return schema instanceof z.core.$ZodObject ? schema._zod.def.shape : undefined
}

/** Every setting of its own below `schema`; items of a list are none. */
function keysOf(schema: z.core.$ZodType, path: readonly string[] = []): Key[] {
  const inner = bare(schema)
  const shape = shapeOf(inner)
  if (shape !== undefined) {
    return Object.entries(shape).flatMap(([key, value]) => keysOf(value, [...path, key]))
  }
  if (inner instanceof z.ZodArray) return []
  const fromText = (text: string) => {
    if (inner instanceof z.ZodNumber && /^[0-9]+$/.test(text)) return Number(text)
    if (inner instanceof z.ZodBoolean && /^(true|false)$/.test(text)) return text === 'true'
    return text
  }
  return [{ path, fromText }]
}

const KEYS = keysOf(Settings)

function schemaBelow(schema: z.core.$ZodType, key: PropertyKey): z.core.$ZodType | undefined {
  if (schema instanceof z.core.$ZodArray) return schema._zod.def.element
  return shapeOf(schema)?.[String(key)]
}

/** The keys of the mapping at `path`. */
function namesAt(path: readonly PropertyKey[]): string[] {
  let schema: z.core.$ZodType | undefined = Settings
  for (const key of path) schema = schema && schemaBelow(bare(schema), key)
  return Object.keys((schema && shapeOf(bare(schema))) ?? {})
}

function explain(issue: z.core.$ZodIssue, given: Given): Mistake[] {
  if (issue.code === 'unrecognized_keys') {
    return issue.keys.map((key) => unknownKey([...issue.path, key], given))
  }
  const value = valueAt(given.settings, issue.path)
  return [
    {
      path: formatPath(issue.path),
      from: value === undefined ? '' : given.from(issue.path),
      found: describeFound(value),
      allowed: issue.message,
    },
  ]
}

function unknownKey(path: readonly PropertyKey[], given: Given): Mistake {
  const names = namesAt(path.slice(0, -1))
  const key = String(path.at(-1))
  const elsewhere = KEYS.map((known) => formatPath(known.path))
  const near = nearest(key, names) ?? nearest(key, elsewhere)
  const hint = near === undefined ? '' : `did you mean ${near}? `
  const allowed = `unknown key; ${hint}known here are ${names.join(', ')}`
  return { path: formatPath(path), from: given.from(path), found: '', allowed }
}

function valueAt(settings: unknown, path: readonly PropertyKey[]): unknown {
  let value = settings
  for (const key of path) value = isIndexable(value) ? value[key] : undefined
  return value
}

function isIndexable(value: unknown): value is Record<PropertyKey, unknown> {
  return typeof value === 'object' && value !== null
}
