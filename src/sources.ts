/**
 * Where settings come from: a file, the environment, flags; each goes over the one before. What
 * they may be is not known here, only where each of them was given.
 */
import { readFileSync } from 'node:fs'
import { join, resolve } from 'node:path'
import { LineCounter, isNode, parseDocument, type Document } from 'yaml'
import { describeFound, formatPath, nearest, type Mistake } from './mistake.ts'
import { slipOf, tellable } from './slip.ts'

export interface Sources {
  /** A YAML or JSON file; without it the file that FENCING_PROXY_CONFIG names, or none. */
  readonly file?: string | undefined
  readonly env: Readonly<Record<string, string | undefined>>
  readonly flags: Flags
  /** What `file` is relative to; default: the working directory. */
  readonly cwd?: string | undefined
}

export interface Flags {
  readonly upstream?: string | undefined
  /** Path patterns; they take the place of every route of the file. */
  readonly scope?: readonly string[] | undefined
  readonly listen?: string | undefined
  readonly admin?: string | undefined
  /** The directory of the store. */
  readonly data?: string | undefined
  /** Turns the lease service on; what else is said of it stays. */
  readonly leases?: boolean | undefined
}

/** A setting that an environment variable can give. */
export interface Key {
  readonly path: readonly string[]
  /** Text as the value that a file would hold; text that is none is left as it is. */
  readonly fromText: (text: string) => unknown
}

export interface Given {
  /** All sources as one tree, in the shape of the file; not checked in any way. */
  readonly settings: unknown
  /** Where the setting at `path` was given, or what it is part of. */
  from(path: readonly PropertyKey[]): string
}

/** `given` is undefined where the file could not be read: nothing can be said about its content. */
export function gather(
  sources: Sources,
  keys: readonly Key[],
): { given: Given | undefined; mistakes: Mistake[] } {
  const environment = fromEnvironment(sources.env, keys)
  const name = sources.file ?? sources.env[CONFIG]
  const file = name === undefined ? NO_FILE : readFile(name, sources.cwd ?? '')
  if ('mistakes' in file) {
    return { given: undefined, mistakes: [...file.mistakes, ...environment.mistakes] }
  }
  const settings = file.settings ?? {}
  const origins = new Map<string, string>()
  const flags = fromFlags(sources.flags)
  // Where a flag turns leases on, what the file says of them stays, though the environment has them off.
  const isOver = (path: string) => flags.some((flag) => formatPath(flag.path) === path)
  const environmentAlone = environment.settings.filter(({ path }) => !isOver(formatPath(path)))
  for (const { path, value, from } of [...environmentAlone, ...flags]) {
    put(settings, path, value)
    origins.set(formatPath(path), from)
  }
  const from = (path: readonly PropertyKey[]) => {
    for (let length = path.length; length > 0; length--) {
      const origin = origins.get(formatPath(path.slice(0, length)))
      if (origin !== undefined) return origin
    }
    return file.from(path)
  }
  return { given: { settings, from }, mistakes: environment.mistakes }
}

interface Setting {
  readonly path: readonly string[]
  readonly value: unknown
  readonly from: string
}

function put(settings: unknown, path: readonly string[], value: unknown): void {
  let mapping = settings
  for (const key of path.slice(0, -1)) {
    if (!isMapping(mapping)) return
    mapping = mapping[key] === undefined ? (mapping[key] = {}) : mapping[key]
  }
  // What the file has in place of a mapping stays, to be reported.
  if (!isMapping(mapping)) return
  const key = path.at(-1) ?? ''
  // An empty mapping turns a part on; it takes nothing away.
  if (!(isMapping(value) && isMapping(mapping[key]))) mapping[key] = value
}

function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

const routesOf = (patterns: readonly string[]) => patterns.map((path) => ({ path }))

function fromFlags(flags: Flags): Setting[] {
  const settings: Setting[] = []
  const { upstream, scope, listen, admin, data, leases } = flags
  const add = (flag: string, path: string[], value: unknown) =>
    settings.push({ path, value, from: `--${flag}` })
  if (upstream !== undefined) add('upstream', ['upstream', 'url'], upstream)
  if (scope !== undefined) add('scope', ['routes'], routesOf(scope))
  if (listen !== undefined) add('listen', ['listen'], listen)
  if (admin !== undefined) add('admin', ['admin'], admin)
  if (leases === true) add('leases', ['leases'], {})
  if (data !== undefined) add('data', ['store', 'path'], join(data, 'fence.db'))
  return settings
}

const PREFIX = 'FENCING_PROXY_'
const CONFIG = `${PREFIX}CONFIG`
const SCOPE = `${PREFIX}SCOPE`
const LEASES = `${PREFIX}LEASES`

/**
 * Kubernetes sets these in every pod beside a Service called fencing-proxy or fencing-proxy-…:
 * FENCING_PROXY_SERVICE_HOST, FENCING_PROXY_PORT=tcp://…, FENCING_PROXY_PORT_80_TCP_ADDR and so on.
 */
function isFromKubernetes(name: string, value: string): boolean {
  return (
    /_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$/.test(name) ||
    /_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$/.test(name) ||
    // A plain number is a person's, who means FENCING_PROXY_LISTEN.
    (name.endsWith('_PORT') && /^(tcp|udp|sctp):\/\//.test(value))
  )
}

function fromEnvironment(
  env: Sources['env'],
  keys: readonly Key[],
): { settings: Setting[]; mistakes: Mistake[] } {
  const known = new Map(keys.map((key) => [variableOf(key.path), key]))
  const settings: Setting[] = []
  // Last: variables have no order, and it goes over those that say what leases are like.
  const turnedOff: Setting[] = []
  const mistakes: Mistake[] = []
  for (const [name, text] of Object.entries(env)) {
    if (!name.startsWith(PREFIX) || name === CONFIG || text === undefined) continue
    const from = `environment variable ${name}`
    const key = known.get(name)
    if (key !== undefined) {
      settings.push({ path: key.path, value: key.fromText(text), from })
    } else if (name === SCOPE) {
      const patterns = text.split(',').map((pattern) => pattern.trim())
      settings.push({ path: ['routes'], value: routesOf(patterns), from })
    } else if (name === LEASES) {
      if (text === 'true') settings.push({ path: ['leases'], value: {}, from })
      else if (text === 'false') turnedOff.push({ path: ['leases'], value: undefined, from })
      else
        mistakes.push({
          path: 'leases',
          from,
          found: describeFound(text),
          allowed: 'must be true or false',
        })
    } else if (!isFromKubernetes(name, text)) {
      mistakes.push(unknownVariable(name, [...known.keys(), SCOPE, LEASES, CONFIG]))
    }
  }
  return { settings: [...settings, ...turnedOff], mistakes }
}

/** `clientTimeout` → FENCING_PROXY_CLIENT_TIMEOUT; `fence.settle` → FENCING_PROXY_FENCE_SETTLE. */
function variableOf(path: readonly string[]): string {
  const words = path.map((key) => key.replace(/[A-Z]/g, '_$&').toUpperCase())
  return PREFIX + words.join('_')
}

function unknownVariable(name: string, names: readonly string[]): Mistake {
  // The prefix is common to all, and would make all of them near.
  const near = nearest(
    name.slice(PREFIX.length),
    names.map((known) => known.slice(PREFIX.length)),
  )
  const all = `known are ${names.join(', ')}`
  const hint = near === undefined ? all : `did you mean ${PREFIX}${near}?`
  return { path: name, from: '', found: '', allowed: `unknown environment variable; ${hint}` }
}

interface SettingsFile {
  readonly settings: unknown
  from(path: readonly PropertyKey[]): string
}

const NO_FILE: SettingsFile = { settings: undefined, from: () => '' }

function readFile(name: string, cwd: string): SettingsFile | { mistakes: Mistake[] } {
  const wrong = (from: string, allowed: string): Mistake => ({ path: '', from, found: '', allowed })
  let text: string
  try {
    text = readFileSync(resolve(cwd, name), 'utf8')
  } catch (error) {
    return { mistakes: [wrong('', `the configuration file ${name} ${reasonOf(error)}`)] }
  }

  const lines = new LineCounter()
  const at = (offset: number) => {
    const { line, col } = lines.linePos(offset)
    return `${name}:${line}:${col}`
  }
  // Merge keys (<<) are left out: they stand in the tree as unknown keys.
  const document = parseDocument(text, {
    lineCounter: lines,
    prettyErrors: false,
    merge: false,
    logLevel: 'error',
  })
  // A warning is a tag that YAML's core schema does not know.
  const problems = tellable([...document.errors, ...document.warnings])
  if (problems.length > 0) {
    const mistakes = problems.map(({ code, message, pos }) => {
      const { line, col, words } = slipOf(text, { code, message, ...lines.linePos(pos[0]) })
      return wrong(`${name}:${line}:${col}`, words)
    })
    return { mistakes }
  }
  try {
    // The bound on aliases keeps a few lines from unfolding into gigabytes.
    const settings: unknown = document.toJS({ maxAliasCount: 100 })
    return { settings, from: (path) => locate(document, path, at) ?? name }
  } catch (error) {
    return { mistakes: [wrong(name, error instanceof Error ? error.message : String(error))] }
  }
}

/** Where the node at `path`, or the innermost that holds it, begins. */
function locate(
  document: Document.Parsed,
  path: readonly PropertyKey[],
  at: (offset: number) => string,
): string | undefined {
  for (let length = path.length; length > 0; length--) {
    const node = document.getIn(path.slice(0, length), true)
    if (isNode(node) && node.range) return at(node.range[0])
  }
  return undefined
}

function reasonOf(error: unknown): string {
  const code = error instanceof Error && 'code' in error ? error.code : undefined
  switch (code) {
    case 'ENOENT':
    case 'ENOTDIR':
      return 'does not exist'
    case 'EACCES':
      return 'may not be read by this user'
    case 'EISDIR':
      return 'is a directory'
    default:
      return `cannot be read: ${error instanceof Error ? error.message : String(error)}`
  }
}
