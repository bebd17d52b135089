/**
 * What is asked for: by the Pod, in its annotations, and of the injector, when it is started.
 */
import { z } from 'zod'
import { loadConfig } from '../config.ts'
import { formatMistake, nearest } from '../mistake.ts'
import { parseQuantity } from './quantity.ts'

/** What holds for every Pod. */
export interface Injector {
  /** The image of the sidecar, unless a Pod names another. */
  readonly image: string
  /** An image with iptables and a shell, for `steering: redirect`; undefined: that is refused. */
  readonly redirectImage?: string | undefined
  /** Of annotations and labels. */
  readonly prefix: string
  /**
   * The minor version of Kubernetes 1.x: of the server, or of the oldest kubelet where that is
   * older. Undefined where nobody said; native sidecars are then used on a Pod's own word only.
   */
  readonly kubernetesMinor?: number | undefined
}

export const DEFAULT_PREFIX = 'fencing-proxy.io'

/** Written by the injector, so not unknown, and not read either: anyone can write them. */
export const WRITTEN = ['status', 'fenced']

const valid = (words: string) => ({ error: `valid: ${words}` })

function choice<const T extends readonly string[]>(...values: T) {
  return z.enum(values, valid(values.map((value) => `"${value}"`).join(', ')))
}

const UP_TO_5_DIGITS = /^[1-9][0-9]{0,4}$/

function number(from: number, to: number) {
  const words = valid(`a number from ${from} to ${to}`)
  return z
    .string()
    .regex(UP_TO_5_DIGITS, words)
    .transform(Number)
    .refine((n) => n >= from && n <= to, words)
}

const quantity = (example: string) =>
  z
    .string()
    .refine(
      (text) => (parseQuantity(text) ?? 0) > 0,
      valid(`a quantity above 0, such as ${example}`),
    )

/** A name of a Kubernetes object (RFC 1123 subdomain); most are shorter, the server knows how much. */
const objectName = (what: string) =>
  z
    .string()
    .max(253, valid(what))
    .regex(/^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$/, valid(what))

const PORT = 'the name or the number of a port that a container declares'

/** Up to 15 letters, digits and single hyphens, at least one letter (RFC 6335). */
const PORT_NAME = /^(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$/

const appPort = z
  .string()
  .refine((text) => UP_TO_5_DIGITS.test(text) || PORT_NAME.test(text), valid(PORT))
  .transform((text) => (UP_TO_5_DIGITS.test(text) ? Number(text) : text))

const scopes = z
  .string()
  .transform((text) => text.split(',').map((pattern) => pattern.trim()))
  .superRefine((patterns, context) => {
    // The sidecar's own judgement: what it would refuse at its start is refused here.
    const loaded = loadConfig({ env: {}, flags: { upstream: 'http://app', scope: patterns } })
    if (!loaded.ok) {
      const mistakes = loaded.mistakes.map(formatMistake).join('; ')
      context.addIssue(`valid: path patterns such as /jobs/{job}/**, comma-separated; ${mistakes}`)
    }
  })

const Annotations = z
  .strictObject({
    inject: choice('true', 'false'),
    'app-port': appPort.optional(),
    container: objectName('the name of a container').optional(),
    steering: choice('named-port', 'redirect', 'none').default('named-port'),
    // Below 1024 an ordinary user may not listen.
    'proxy-port': number(1024, 65535).default(15080),
    'admin-port': number(1024, 65535).default(15081),
    store: z
      .literal('sqlite', valid('"sqlite", with one replica; no other store yet'))
      .default('sqlite'),
    'store-volume': objectName('the name of a volume of the Pod').optional(),
    'store-claim': objectName('the name of a PersistentVolumeClaim').optional(),
    'allow-ephemeral-store': choice('true').optional(),
    config: objectName('the name of a ConfigMap').optional(),
    scope: scopes.optional(),
    'native-sidecar': choice('auto', 'true', 'false').default('auto'),
    // Measured on Node 20: 114 MB when idle; 229 MB and half a core at 3400 writes a second.
    'cpu-request': quantity('100m').default('100m'),
    'cpu-limit': quantity('500m').default('1'),
    'memory-request': quantity('64Mi').default('128Mi'),
    'memory-limit': quantity('128Mi').default('512Mi'),
    image: z
      .string()
      .regex(/^[a-z0-9][\w./:@-]*$/i, valid('an image reference'))
      .optional(),
    'log-level': choice('trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent').optional(),
    'shutdown-grace-seconds': number(1, 3600).optional(),
  })
  .superRefine((given, context) => {
    const refuse = (key: keyof typeof given, words: string) =>
      context.addIssue({ code: 'custom', path: [key], message: words })
    if (given['admin-port'] === given['proxy-port']) {
      refuse('admin-port', 'valid: another port than proxy-port')
    }
    for (const kind of ['cpu', 'memory'] as const) {
      const [request, limit] = [given[`${kind}-request`], given[`${kind}-limit`]]
      if ((parseQuantity(request) ?? 0) > (parseQuantity(limit) ?? 0)) {
        refuse(`${kind}-request`, `valid: at most ${kind}-limit, which is ${limit}`)
      }
    }
    if (given['store-volume'] !== undefined && given['store-claim'] !== undefined) {
      refuse('store-claim', 'there is a store-volume too; keep one of them')
    }
    if (given.config !== undefined && given.scope !== undefined) {
      refuse('scope', 'the routes are in the ConfigMap that config names; keep one of them')
    }
    if (given.config === undefined && given.scope === undefined) {
      refuse(
        'scope',
        'what is to be fenced is not said; give path patterns such as /jobs/{job}/**, or in config the name of a ConfigMap with config.yaml',
      )
    }
  })

export type Wanted = z.output<typeof Annotations>

/** Every annotation that is read, without the prefix. */
export const KEYS = Object.keys(Annotations.shape)

export type Asked =
  /** Nobody asked for a fence, or somebody asked for none. */
  | { readonly kind: 'no' }
  | { readonly kind: 'yes'; readonly wanted: Wanted }
  | { readonly kind: 'mistaken'; readonly mistakes: readonly string[] }

/** Which fence a Pod asks for. Each mistake names the key, the value and what is valid there. */
export function readAnnotations(all: Readonly<Record<string, string>>, prefix: string): Asked {
  const given: Record<string, string> = {}
  for (const [key, value] of Object.entries(all)) {
    const name = key.slice(prefix.length + 1)
    if (key.startsWith(`${prefix}/`) && !WRITTEN.includes(name)) given[name] = value
  }
  if (given.inject === 'false') return { kind: 'no' }
  // Keys that are all known but for `inject` ask for nothing; an unknown one may be a misspelt `inject`.
  if (given.inject === undefined && Object.keys(given).every((key) => KEYS.includes(key))) {
    return { kind: 'no' }
  }
  const parsed = Annotations.safeParse(given)
  if (parsed.success) return { kind: 'yes', wanted: parsed.data }
  const mistakes = parsed.error.issues.flatMap((issue) => {
    if (issue.code === 'unrecognized_keys') return issue.keys.map((key) => unknown(key, prefix))
    const key = String(issue.path[0])
    const value = given[key]
    return [`${prefix}/${key}${value === undefined ? '' : `: ${quote(value)}`}: ${issue.message}`]
  })
  return { kind: 'mistaken', mistakes }
}

function unknown(key: string, prefix: string): string {
  const near = nearest(key, KEYS)
  const hint = near === undefined ? '' : ` (did you mean ${near}?)`
  return `${prefix}/${key}: unknown key${hint}; valid: ${KEYS.join(', ')}`
}

function quote(value: string): string {
  return JSON.stringify(value.length > 80 ? `${value.slice(0, 80)}…` : value)
}
