/** Injection into manifests before they reach a cluster. Pure. */
import { parseDocuments, printObject } from './objects.ts'
import { decide } from './patch.ts'
import type { Injector } from './settings.ts'
import {
  isMapping,
  itemsOf,
  nameOf,
  readManifest,
  readTemplate,
  templatePath,
  findWarnings,
} from './workload.ts'

export type Result =
  | {
      readonly kind: 'injected'
      /** Every document; those without a Pod that asks for a fence as they came. */
      readonly yaml: string
      readonly warnings: readonly string[]
    }
  /** Nothing is written where one object is refused: the rest must not go on without it. */
  | { readonly kind: 'refused'; readonly reasons: readonly string[] }
  | { readonly kind: 'unreadable'; readonly mistakes: readonly string[] }

export function injectManifests(text: string, injector: Injector): Result {
  const parsed = parseDocuments(text)
  if ('mistakes' in parsed) return { kind: 'unreadable', mistakes: parsed.mistakes }
  const report: Report = { warnings: [], reasons: [], mistakes: [] }
  const texts = parsed.documents.map((document) => {
    const object: unknown = document.toJS()
    const injected = injectObject(object, injector, report)
    if (injected !== object) return printObject(injected)
    document.directives.docStart = null
    return document.toString({ lineWidth: 0 })
  })
  if (report.mistakes.length > 0) return { kind: 'unreadable', mistakes: report.mistakes }
  if (report.reasons.length > 0) return { kind: 'refused', reasons: report.reasons }
  return { kind: 'injected', yaml: texts.join('---\n'), warnings: report.warnings }
}

interface Report {
  readonly warnings: string[]
  readonly reasons: string[]
  readonly mistakes: string[]
}

/** The object with its Pods fenced; `value` itself where there is nothing to change. */
function injectObject(value: unknown, injector: Injector, report: Report): unknown {
  const read = readManifest(value)
  if ('mistake' in read) {
    report.mistakes.push(read.mistake)
    return value
  }
  const { object } = read
  const items = itemsOf(object)
  if (items !== undefined) {
    const injected = items.map((item) => injectObject(item, injector, report))
    return injected.some((item, i) => item !== items[i]) ? { ...object, items: injected } : value
  }
  const name = nameOf(object)
  const template = readTemplate(object)
  if (template.kind === 'none') return value
  if (template.kind === 'mistaken') {
    report.mistakes.push(`${name}: ${template.mistake}`)
    return value
  }
  const decision = decide(template.pod, injector, template.claimTemplates)
  if (decision.kind === 'denied') {
    report.reasons.push(`${name}: ${decision.reason}`)
    return value
  }
  const told = decision.warning === undefined ? [] : [decision.warning]
  // What is fenced here depends on no label.
  const words = findWarnings(object, injector)
    .filter(({ about }) => about !== 'missing-label')
    .map((warning) => warning.words)
  for (const warning of [...told, ...words]) {
    report.warnings.push(`${name}: ${warning}`)
  }
  if (decision.kind === 'ignored' || decision.patch.length === 0) return value
  return replaceAt(object, templatePath(object.kind) ?? [], decision.pod)
}

function replaceAt(object: unknown, [key, ...rest]: readonly string[], value: unknown): unknown {
  if (key === undefined || !isMapping(object)) return value
  return { ...object, [key]: replaceAt(object[key], rest, value) }
}
