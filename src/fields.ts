/**
 * The header fields of one request, as they came. Node's own `headers` object joins, drops and
 * overwrites repeated fields; a mediator has to see each.
 */
export class Fields {
  /** Names and values in turn: the shape of `IncomingMessage.rawHeaders`. */
  readonly raw: readonly string[]
  readonly #values = new Map<string, string[]>()
  /** Names with a character that is neither letter, digit nor hyphen: rare, and the twins among them. */
  readonly #oddNames: string[] = []
  #connectionOptions: ReadonlySet<string> | undefined

  constructor(raw: readonly string[]) {
    this.raw = raw
    for (let i = 0; i + 1 < raw.length; i += 2) {
      const name = (raw[i] as string).toLowerCase()
      const value = raw[i + 1] as string
      const values = this.#values.get(name)
      if (values === undefined) {
        this.#values.set(name, [value])
        if (!PLAIN_NAME.test(name)) this.#oddNames.push(name)
      } else values.push(value)
    }
  }

  /** Every value of the field `name` (lower case), in order; empty where the request has none. */
  all(name: string): readonly string[] {
    return this.#values.get(name) ?? NONE
  }

  has(name: string): boolean {
    return this.#values.has(name)
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
    return (this.#connectionOptions ??= new Set(listItems(this.all('connection'))))
  }
}

const NONE: readonly string[] = []
const PLAIN_NAME = /^[a-z0-9-]+$/

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
 * ones kept apart: without hop-by-hop fields, those that `Connection` names, and what `drops`
 * (given the name in lower case) says.
 */
export function endToEnd(raw: readonly string[], drops: (name: string) => boolean): string[] {
  const kept: string[] = []
  let named: string[] | undefined
  for (let i = 0; i + 1 < raw.length; i += 2) {
    const name = raw[i] as string
    const value = raw[i + 1] as string
    const lower = name.toLowerCase()
    if (lower === 'connection' && !USUAL_CONNECTION.has(value)) {
      named = [...(named ?? []), ...listItems([value])]
    }
    if (HOP_BY_HOP.has(lower) || drops(lower)) continue
    kept.push(name, value)
  }
  if (named === undefined) return kept
  return kept.filter((_, i) => !named.includes((kept[i - (i % 2)] as string).toLowerCase()))
}

/** Nearly every message has one of these, which names no field. */
const USUAL_CONNECTION = new Set(['keep-alive', 'Keep-Alive', 'close'])
