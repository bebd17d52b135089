/**
 * The part of JSON Patch (RFC 6902) that injection speaks, and a draft that writes it down: a
 * change is made to the draft's Pod and recorded in the same step, so that each operation's path
 * fits the Pod as the earlier operations left it.
 */
import { isDeepStrictEqual } from 'node:util'
import type { Pod } from './pod.ts'

export type Operation =
  | { readonly op: 'add' | 'replace' | 'test'; readonly path: string; readonly value: unknown }
  | { readonly op: 'remove'; readonly path: string }

/** Keys and indices, from the Pod down; `-` is the end of a list. */
export type Path = readonly (string | number)[]

export class Draft {
  readonly operations: Operation[] = []
  /** The Pod with every change so far. */
  readonly pod: Pod

  constructor(pod: Pod) {
    this.pod = structuredClone(pod)
  }

  /** Sets a member of a mapping that is there. */
  set(path: Path, value: unknown): void {
    const { parent, key } = this.#find(path)
    if (isDeepStrictEqual(parent[key], value)) return
    this.#record(Object.hasOwn(parent, key) ? 'replace' : 'add', path, value)
    parent[key] = structuredClone(value)
  }

  /** Replaces a member only if nobody changed it between our reading and our writing. */
  swap(path: Path, from: unknown, to: unknown): void {
    this.test(path, from)
    this.set(path, to)
  }

  test(path: Path, value: unknown): void {
    this.#record('test', path, value)
  }

  /** Makes the member an empty mapping or list where there is none: a patch cannot add below nothing. */
  ensure(path: Path, empty: Record<string, never> | readonly never[]): void {
    const { parent, key } = this.#find(path)
    if (parent[key] === undefined || parent[key] === null) this.set(path, empty)
  }

  /** Inserts into a list that is there, before what stands at `index`; at its end where that is less. */
  insert(list: Path, index: number, value: unknown): void {
    const items = this.#list(list)
    this.#record('add', [...list, Math.min(index, items.length)], value)
    items.splice(index, 0, structuredClone(value))
  }

  append(list: Path, value: unknown): void {
    this.#record('add', [...list, '-'], value)
    this.#list(list).push(structuredClone(value))
  }

  remove(list: Path, index: number): void {
    this.operations.push({ op: 'remove', path: pointer([...list, index]) })
    this.#list(list).splice(index, 1)
  }

  #record(op: 'add' | 'replace' | 'test', path: Path, value: unknown): void {
    this.operations.push({ op, path: pointer(path), value: structuredClone(value) })
  }

  #list(path: Path): unknown[] {
    const { parent, key } = this.#find(path)
    const list = parent[key]
    if (!Array.isArray(list)) throw new Error(`${pointer(path)} is no list`)
    return list as unknown[]
  }

  #find(path: Path): { parent: Record<string | number, unknown>; key: string | number } {
    const key = path.at(-1)
    if (key === undefined) throw new Error('the whole Pod is not replaced')
    let parent: unknown = this.pod
    for (const step of path.slice(0, -1)) parent = isMapping(parent) ? parent[step] : undefined
    if (!isMapping(parent)) throw new Error(`${pointer(path)} has no parent`)
    return { parent, key }
  }
}

function isMapping(value: unknown): value is Record<string | number, unknown> {
  return typeof value === 'object' && value !== null
}

/** A JSON pointer (RFC 6901): annotation keys hold slashes. */
function pointer(path: Path): string {
  return path.map((key) => `/${String(key).replaceAll('~', '~0').replaceAll('/', '~1')}`).join('')
}
