import { FIRST_ISSUED, nextToken, type Token } from '../token.ts'
import {
  StoreError,
  type LeaseRow,
  type LeaseTerms,
  type MarkRow,
  type Raised,
  type Store,
} from './store.ts'

/** The contract in its plainest form, for tests and for readers. It forgets all when it ends. */
export class MemoryStore implements Store {
  readonly stoppedCleanly = true
  readonly #marks = new Map<string, MarkRow>()
  readonly #leases = new Map<string, LeaseRow>()
  #closing: Promise<void> | undefined

  get scopes(): number {
    return this.#marks.size
  }

  async raise(scope: string, token: Token, overlapping: boolean): Promise<Raised> {
    await this.#open()
    return this.#raise(scope, token, overlapping)
  }

  async grant(scope: string, lease: LeaseTerms, overlapping: boolean): Promise<Raised> {
    await this.#open()
    const before = this.#marks.get(scope)
    const token = before === undefined ? FIRST_ISSUED : nextToken(before.mark)
    if (token === undefined) throw new StoreError(`the scope ${scope} has used up its tokens`)
    this.#leases.set(scope, { ...lease, scope, token, grantedAt: Date.now() })
    return this.#raise(scope, token, overlapping)
  }

  async forget(scope: string, token: Token): Promise<void> {
    await this.#open()
    if (this.#leases.get(scope)?.token === token) this.#leases.delete(scope)
  }

  async leases(after: string | undefined, limit: number): Promise<LeaseRow[]> {
    await this.#open()
    return [...this.#leases.values()]
      .filter(({ scope, token }) => this.#marks.get(scope)?.mark === token)
      .filter(({ scope }) => after === undefined || byBytes(scope, after) > 0)
      .sort((a, b) => byBytes(a.scope, b.scope))
      .slice(0, limit)
  }

  async read(scope: string): Promise<MarkRow | undefined> {
    await this.#open()
    return this.#marks.get(scope)
  }

  async list(prefix: string, after: string | undefined, limit: number): Promise<MarkRow[]> {
    await this.#open()
    return [...this.#marks.values()]
      .filter(({ scope }) => scope.startsWith(prefix))
      .filter(({ scope }) => after === undefined || byBytes(scope, after) > 0)
      .sort((a, b) => byBytes(a.scope, b.scope))
      .slice(0, limit)
  }

  probe(): Promise<void> {
    return this.#open()
  }

  close(_clean: boolean): Promise<void> {
    return (this.#closing ??= Promise.resolve())
  }

  #raise(scope: string, token: Token, overlapping: boolean): Raised {
    const before = this.#marks.get(scope)
    if (before !== undefined && token <= before.mark) {
      return { mark: before.mark, from: before.mark, overlapping: before.overlapping }
    }
    const after = {
      scope,
      mark: token,
      raisedAt: Date.now(),
      overlapping: overlapping && before !== undefined,
    }
    this.#marks.set(scope, after)
    return { mark: token, from: before?.mark, overlapping: after.overlapping }
  }

  #open(): Promise<void> {
    if (this.#closing === undefined) return Promise.resolve()
    return Promise.reject(new StoreError('the store is closed'))
  }
}

/** JavaScript compares UTF-16 units, where U+FFFF comes after every emoji; UTF-8 keeps the order of code points. */
function byBytes(a: string, b: string): number {
  return Buffer.compare(Buffer.from(a), Buffer.from(b))
}
