import assert from 'node:assert/strict'
import { parseAllDocuments } from 'yaml'

/** An object of Kubernetes as it stands in a manifest. */
export interface KubernetesObject {
  readonly apiVersion: string
  readonly kind: string
  readonly metadata: {
    readonly name: string
    readonly namespace?: string
    readonly labels?: Readonly<Record<string, string>>
    readonly annotations?: Readonly<Record<string, string>>
  }
  readonly [field: string]: unknown
}

/** Reads YAML as Kubernetes does: 0440 is octal. */
export function readObjects(text: string): KubernetesObject[] {
  return parseAllDocuments(text, { version: '1.1' })
    .map((document) => {
      assert.deepEqual(document.errors, [])
      return document.toJS() as KubernetesObject | null
    })
    .filter((object) => object !== null)
}

/** The only object of its kind. */
export function ofKind(objects: readonly KubernetesObject[], kind: string): KubernetesObject {
  const found = objects.filter((object) => object.kind === kind)
  assert.equal(found.length, 1, `one ${kind}`)
  return found[0] ?? assert.fail()
}

/** What stands at the path, such as `spec.template.spec.containers.0.name`. */
export function at(object: unknown, where: string): unknown {
  return where.split('.').reduce<unknown>((value, key) => {
    assert.ok(typeof value === 'object' && value !== null, `nothing at ${where}: no ${key}`)
    return Object.entries(value).find(([name]) => name === key)?.[1]
  }, object)
}
