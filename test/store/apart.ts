import { fork, type ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { afterEach } from 'node:test'
import type { LeaseRow, LeaseTerms, MarkRow, Raised } from '../../src/store/store.ts'
import type { Token } from '../../src/token.ts'
import type { Ask, Say } from './child.ts'

export interface Circumstances {
  readonly create?: boolean
  readonly env?: NodeJS.ProcessEnv
  /** As which user; root may choose. */
  readonly uid?: number | undefined
}

interface Waiting {
  readonly resolve: (answer: unknown) => void
  readonly reject: (error: Error) => void
}

/**
 * Opens SQLite stores in processes of their own; those that a test leaves behind are killed after
 * it. Rejects with the words of the store where it refuses to open.
 */
export function storesApart(): (path: string, how?: Circumstances) => Promise<StoreApart> {
  const opened: StoreApart[] = []
  afterEach(async () => {
    await Promise.all(opened.splice(0).map((store) => store.kill()))
  })
  return async (path, how = {}) => {
    const store = await StoreApart.open(path, how)
    opened.push(store)
    return store
  }
}

/** An SQLite store in a process of its own, which can be killed, starved and given a bad disk. */
export class StoreApart {
  readonly pid: number | undefined
  readonly stoppedCleanly: boolean
  readonly created: boolean
  readonly scopes: number
  /** How many calls shared each commit so far. */
  readonly commits: number[] = []
  readonly failures: string[] = []
  readonly #child: ChildProcess
  readonly #exit: Promise<unknown>
  readonly #waiting = new Map<number, Waiting>()
  #asked = 0

  static async open(path: string, circumstances: Circumstances): Promise<StoreApart> {
    const { create = true, env = process.env, uid } = circumstances
    const child = fork(new URL('./child.js', import.meta.url), [path, String(create)], {
      serialization: 'advanced',
      env,
      ...(uid === undefined ? {} : { uid }),
    })
    const exit = once(child, 'exit')
    const died = exit.then(() => Promise.reject(new Error('the child died before it opened')))
    const [first] = (await Promise.race([once(child, 'message'), died])) as [Say]
    if (first.say === 'refused') {
      await exit
      throw new Error(first.why)
    }
    if (first.say !== 'opened') throw new Error(`the child began with ${first.say}`)
    return new StoreApart(child, exit, first)
  }

  private constructor(
    child: ChildProcess,
    exit: Promise<unknown>,
    { stoppedCleanly, created, scopes }: Extract<Say, { say: 'opened' }>,
  ) {
    this.pid = child.pid
    this.stoppedCleanly = stoppedCleanly
    this.created = created
    this.scopes = scopes
    this.#child = child
    this.#exit = exit
    child.on('message', (message: Say) => this.#hear(message))
    // What was written before the end is still delivered before 'disconnect'.
    child.once('disconnect', () => {
      for (const { reject } of this.#waiting.values()) reject(new Error('the process has ended'))
    })
  }

  raise(scope: string, token: Token): Promise<Raised> {
    return this.#ask(['raise', scope, token]) as Promise<Raised>
  }

  /** Raises, and counts how often a timer of 5 ms ran in that process meanwhile. */
  raiseTicking(scope: string, token: Token): Promise<{ ticks: number; ms: number }> {
    return this.#ask(['raiseTicking', scope, token]) as Promise<{ ticks: number; ms: number }>
  }

  grant(scope: string, lease: LeaseTerms): Promise<Raised> {
    return this.#ask(['grant', scope, lease]) as Promise<Raised>
  }

  async forget(scope: string, token: Token): Promise<void> {
    await this.#ask(['forget', scope, token])
  }

  leases(): Promise<LeaseRow[]> {
    return this.#ask(['leases']) as Promise<LeaseRow[]>
  }

  read(scope: string): Promise<MarkRow | undefined> {
    return this.#ask(['read', scope]) as Promise<MarkRow | undefined>
  }

  async probe(): Promise<void> {
    await this.#ask(['probe'])
  }

  async close(clean: boolean): Promise<void> {
    try {
      await this.#ask(['close', clean])
    } finally {
      await this.#exit
    }
  }

  /** The process ends itself with process.exit, the store still open. */
  async exit(): Promise<void> {
    this.#ask(['exit']).catch(() => undefined)
    await this.#exit
  }

  async kill(): Promise<void> {
    this.#child.kill('SIGKILL')
    await this.#exit
  }

  #ask(ask: Ask): Promise<unknown> {
    const id = this.#asked++
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject })
      this.#child.send({ id, ask }, (error) => {
        if (error !== null) reject(error)
      })
    })
  }

  #hear(message: Say): void {
    switch (message.say) {
      case 'answered':
        this.#waiting.get(message.id)?.resolve(message.answer)
        this.#waiting.delete(message.id)
        return
      case 'rejected':
        this.#waiting.get(message.id)?.reject(new Error(message.why))
        this.#waiting.delete(message.id)
        return
      case 'committed':
        this.commits.push(message.calls)
        return
      case 'failed':
      case 'died':
        this.failures.push(message.why)
        return
      case 'opened':
      case 'refused':
        throw new Error(`the child said ${message.say} twice`)
      default:
        message satisfies never
    }
  }
}
