/**
 * JSON Patch (RFC 6902) by the letter, and apart from the code under test: whatever the RFC calls
 * an error throws.
 */
import { isDeepStrictEqual } from 'node:util'

export function applyPatch(document: unknown, patch: readonly unknown[]): unknown {
  let result: unknown = structuredClone(document)
  for (const operation of patch) result = applyOperation(result, operation)
  return result
}

function applyOperation(document: unknown, operation: unknown): unknown {
  if (!isObject(operation)) throw new Error('an operation is an object')
  const { op, path } = operation
  if (typeof path !== 'string') throw new Error('path is missing')
  if (path !== '' && !path.startsWith('/')) throw new Error(`${path} is no pointer`)
  const keys = path.split('/').slice(1).map((key) => {
    if (/~(?![01])/.test(key)) throw new Error(`${path}: ~ escapes 0 and 1 only`)
    return key.replaceAll('~1', '/').replaceAll('~0', '~')
  }) // prettier-ignore
  if (op !== 'remove' && !Object.hasOwn(operation, 'value')) throw new Error('value is missing')
  const value = structuredClone(operation.value)
  const key = keys.pop()
  if (key === undefined) throw new Error('operations on the whole document are not expected here')

  let parent = document
  for (const step of keys) parent = valueAt(parent, step)
  if (!isObject(parent) && !Array.isArray(parent)) throw new Error(`${path}: no such parent`)

  switch (op) {
    case 'test':
      if (!isDeepStrictEqual(valueAt(parent, key), value)) throw new Error(`${path}: test failed`)
      break
    case 'replace':
      valueAt(parent, key)
      if (Array.isArray(parent)) parent[indexOf(parent, key)] = value
      else parent[key] = value
      break
    case 'add':
      if (!Array.isArray(parent)) parent[key] = value
      else parent.splice(key === '-' ? parent.length : indexOf(parent, key, 1), 0, value)
      break
    case 'remove':
      valueAt(parent, key)
      if (Array.isArray(parent)) parent.splice(indexOf(parent, key), 1)
      else Reflect.deleteProperty(parent, key)
      break
    default:
      throw new Error(`${String(op)} is no operation that is expected here`)
  }
  return document
}

function valueAt(parent: unknown, key: string): unknown {
  if (Array.isArray(parent)) return parent[indexOf(parent, key)] as unknown
  if (!isObject(parent) || !Object.hasOwn(parent, key)) throw new Error(`there is no ${key}`)
  return parent[key]
}

function indexOf(list: readonly unknown[], key: string, beyond = 0): number {
  if (!/^(0|[1-9][0-9]*)$/.test(key)) throw new Error(`${key} is no index`)
  const index = Number(key)
  if (index >= list.length + beyond) throw new Error(`${key} is out of range`)
  return index
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}
