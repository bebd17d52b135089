/** The three commands, with what they are given as plain values. Each tells what became of it. */
import type { Log } from '../log.ts'
import { checkManifests } from './check.ts'
import { injectManifests } from './manifest.ts'
import { DEFAULT_PREFIX, type Injector } from './settings.ts'
import { startWebhook, WebhookStartError, type RunningWebhook } from './webhook.ts'

export interface InjectorFlags {
  readonly image: string
  readonly redirectImage?: string | undefined
  readonly prefix?: string | undefined
  /** As `kubectl version` says it, such as 1.33. */
  readonly kubernetesVersion?: string | undefined
}

export interface ServeFlags extends InjectorFlags {
  /** `HOST:PORT`. */
  readonly listen: string
  readonly tlsCert: string
  readonly tlsKey: string
}

/** What a command wrote, and the exit code that it ends with. */
export interface Outcome {
  readonly code: 0 | 1 | 2
  /** For standard output. */
  readonly output: string
  /** For standard error, a line each. */
  readonly messages: readonly string[]
}

/** Runs until it is closed. Rejects with a WebhookStartError where a flag or a file is wrong. */
export async function runInjectServe(flags: ServeFlags, log: Log): Promise<RunningWebhook> {
  const injector = readFlags(flags)
  if ('mistakes' in injector) throw new WebhookStartError(injector.mistakes.join('; '))
  const [, host, digits] = /^(.+):([0-9]{1,5})$/.exec(flags.listen) ?? []
  const port = Number(digits)
  if (host === undefined || port > 65535) {
    throw new WebhookStartError(`--listen ${flags.listen}: must be HOST:PORT, such as 0.0.0.0:8443`)
  }
  const listen = { host: host.replace(/^\[(.*)\]$/, '$1'), port }
  const certificate = { cert: flags.tlsCert, key: flags.tlsKey }
  return startWebhook({ listen, certificate, injector }, log)
}

/**
 * Code 1: an object is refused, and nothing is written. Code 2: the flags or the text are wrong.
 * `file` is where the text came from.
 */
export function runInject(text: string, flags: InjectorFlags, file = '-'): Outcome {
  const injector = readFlags(flags)
  if ('mistakes' in injector) return { code: 2, output: '', messages: injector.mistakes }
  const result = injectManifests(text, injector)
  switch (result.kind) {
    case 'injected':
      return { code: 0, output: result.yaml, messages: result.warnings }
    case 'refused':
      return { code: 1, output: '', messages: result.reasons }
    case 'unreadable':
      return unreadable(file, result.mistakes)
  }
}

/** Code 1: there is a way around the fence. Code 2: the flags or the text are wrong. */
export function runInjectCheck(text: string, flags: InjectorFlags, file = '-'): Outcome {
  const injector = readFlags(flags)
  if ('mistakes' in injector) return { code: 2, output: '', messages: injector.mistakes }
  const checked = checkManifests(text, injector)
  if (checked.kind === 'unreadable') return unreadable(file, checked.mistakes)
  const { findings, fenced, asking } = checked
  const output = findings.map(({ way, object, words }) => `${way}: ${object}: ${words}\n`).join('')
  if (findings.length > 0) return { code: 1, output, messages: [] }
  // Silence could be taken for safety where nothing was looked at.
  const messages: string[] = []
  if (fenced === 1) messages.push('1 Pod or template is fenced, and no way around shows')
  if (fenced > 1) messages.push(`${fenced} Pods and templates are fenced, and no way around shows`)
  const then = 'fenced where the injector is installed, and no way around shows then'
  if (asking === 1) messages.push(`1 Pod or template asks for a fence: it is ${then}`)
  if (asking > 1) messages.push(`${asking} Pods and templates ask for a fence: they are ${then}`)
  if (messages.length === 0) messages.push('nothing here asks for a fence')
  return { code: 0, output: '', messages }
}

function unreadable(file: string, mistakes: readonly string[]): Outcome {
  const name = file === '-' ? 'standard input' : file
  return { code: 2, output: '', messages: mistakes.map((mistake) => `${name}: ${mistake}`) }
}

function readFlags(flags: InjectorFlags): Injector | { readonly mistakes: readonly string[] } {
  const { image, redirectImage, prefix = DEFAULT_PREFIX, kubernetesVersion } = flags
  const mistakes: string[] = []
  const minor = /^v?1\.([0-9]{1,3})(?![0-9])/.exec(kubernetesVersion ?? '')?.[1]
  if (kubernetesVersion !== undefined && minor === undefined) {
    mistakes.push(`--kubernetes-version ${kubernetesVersion}: must be a version such as 1.33`)
  }
  if (!/^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$/.test(prefix)) {
    mistakes.push(`--prefix ${prefix}: must be a domain name such as ${DEFAULT_PREFIX}`)
  }
  for (const [flag, value] of Object.entries({ image, 'redirect-image': redirectImage })) {
    if (value !== undefined && !/^[a-z0-9]\S*$/i.test(value)) {
      mistakes.push(`--${flag} ${JSON.stringify(value)}: must be an image reference`)
    }
  }
  if (mistakes.length > 0) return { mistakes }
  const kubernetesMinor = minor === undefined ? undefined : Number(minor)
  return { image, redirectImage, prefix, kubernetesMinor }
}
