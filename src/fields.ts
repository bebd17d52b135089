/**
 * The header fields of one request, as they came. Node's own `headers` object joins, drops and
 * overwrites repeated fields; a mediator has to see each.
 */
export class Fields {
  /** Names and values in turn: the shape of `IncomingMessage.rawHeaders`. */
  readonly raw: readonly string[]
  /** The names in lower case, in order. A list: to look through a dozen costs less than to make a map. */
  readonly names: readonly string[]
  /** Names with a character that is neither letter, digit nor hyphen: rare, and the twins among them. */
  readonly #oddNames: readonly string[]
  #connectionOptions: ReadonlySet<string> | undefined

  constructor(raw: readonly string[]) {
    this.raw = raw
    const names = namesOf(raw)
    this.names = names
    this.#oddNames = names.every(isPlainName) ? NONE : names.filter((name) => !isPlainName(name))
  }

  /** Every value of the field `name` (lower case), in order; empty where the request has none. */
  all(name: string): readonly string[] {
    let at = this.names.indexOf(name)
    if (at === -1) return NONE
    const values: string[] = []
    for (; at !== -1; at = this.names.indexOf(name, at + 1))
      values.push(this.raw[2 * at + 1] as string)
    return values
  }

  has(name: string): boolean {
    return this.names.includes(name)
  }

  /**
   * Another field of this request that a CGI, WSGI or Rack backend cannot tell from `name` (lower
   * case): those turn every character that is neither letter nor digit into `_`.
   */
  twinOf(name: string): string | undefined {
    if (this.#oddNames.length === 0) return undefined
    const folded = foldName(name)
    return this.#oddNames.find((odd) => odd !== name && foldName(odd) === folded)
  }

  /** What `Connection` names, in lower case: fields that end at this hop (RFC 9110, 7.6.1). */
  get connectionOptions(): ReadonlySet<string> {
    return (this.#connectionOptions ??= connectionOptions(this.all('connection')))
  }
}

const NONE: readonly string[] = []

/** The names of a message's fields in lower case, in order. */
export function namesOf(raw: readonly string[]): string[] {
  const names: string[] = []
  for (let i = 0; i + 1 < raw.length; i += 2) names.push((raw[i] as string).toLowerCase())
  return names
}

function isPlainName(name: string): boolean {
  return /^[a-z0-9-]+$/.test(name)
}

function foldName(name: string): string {
  return name.replace(/[^a-z0-9]/g, '_')
}

/** The items of a comma-separated field (RFC 9110, 5.6.1), in lower case, empty ones left out. */
export function listItems(values: readonly string[]): string[] {
  return values
    .flatMap((value) => value.split(','))
    .map((item) => item.trim().toLowerCase())
    .filter((item) => item !== '')
}

/** Fields that concern one hop only (RFC 9110, 7.6.1), with framing, which each hop makes anew. */
const HOP_BY_HOP = new Set([
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authentication-info',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade',
])

/**
 * The fields of a message that go on to the next hop, names and values in turn, in order, repeated
 * ones kept apart: without hop-by-hop fields, those that `Connection` names, and what `drops` says.
 * `names` are those of `raw` in lower case; so is the name that `drops` is given.
 */
export function endToEnd(
  raw: readonly string[],
  names: readonly string[],
  drops: (name: string) => boolean,
): string[] {
  const kept: string[] = []
  let named: string[] | undefined
  for (const [i, name] of names.entries()) {
    const value = raw[2 * i + 1] as string
    if (name === 'connection' && !USUAL_CONNECTION.has(value)) {
      named = [...(named ?? []), ...listItems([value])]
    }
    if (!HOP_BY_HOP.has(name) && !drops(name)) kept.push(raw[2 * i] as string, value)
  }
  if (named === undefined) return kept
  return kept.filter((_, i) => !named.includes((kept[i - (i % 2)] as string).toLowerCase()))
}

/** Nearly every message has one of these, which names no field. */
const USUAL_CONNECTION = new Set(['keep-alive', 'Keep-Alive', 'close'])
const NO_OPTIONS: ReadonlySet<string> = new Set()

function connectionOptions(values: readonly string[]): ReadonlySet<string> {
  return values.every((value) => USUAL_CONNECTION.has(value))
    ? NO_OPTIONS
    : new Set(listItems(values))
}
