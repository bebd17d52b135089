import { Worker } from 'node:worker_threads'
import type { Token } from '../token.ts'
import type {
  Batch,
  Failure,
  Forget,
  FromThread,
  LeaseList,
  List,
  Outcomes,
  Raise,
  RaisedTuple,
  ThreadData,
  ToThread,
} from './sqlite-worker.ts'
import {
  StoreError,
  type LeaseRow,
  type LeaseTerms,
  type MarkRow,
  type Raised,
  type Store,
  type StoreEvents,
} from './store.ts'

/** A call that waits for its outcome. */
interface Asked<Call, Answer> {
  readonly call: Call
  readonly resolve: (answer: Answer) => void
  readonly reject: (error: StoreError) => void
}

/** Calls that share a batch. */
interface Calls {
  readonly raises: Asked<Raise, RaisedTuple>[]
  readonly forgets: Asked<Forget, undefined>[]
  readonly probes: Asked<undefined, undefined>[]
  readonly reads: Asked<string, MarkRow | undefined>[]
  readonly lists: Asked<List, MarkRow[]>[]
  readonly leases: Asked<LeaseList, LeaseRow[]>[]
}

type Opened = Extract<FromThread, { say: 'opened' }>

/**
 * The store in an SQLite file, which a thread of its own keeps (sqlite-worker.ts).
 *
 * Group commit: while one batch is with the thread, calls gather here and become the next one, with
 * one commit for all. A lone call waits for nobody, and a slow disk makes batches larger, not queues
 * longer.
 */
export class SqliteStore implements Store {
  readonly stoppedCleanly: boolean
  /** There was none at that path before; this one knows no marks. */
  readonly created: boolean
  readonly #thread: Worker
  readonly #events: StoreEvents
  #scopes: number
  #gathering = noCalls()
  #underway: Calls | undefined
  #isSendDue = false
  /** Why later calls fail; undefined while the store is open. */
  #ended: StoreError | undefined
  #closing: Promise<void> | undefined
  #closer: { clean: boolean; resolve: () => void; reject: (error: StoreError) => void } | undefined
  /** What the thread said last, in an orderly end. */
  #farewell: Extract<FromThread, { say: 'closed' }> | undefined

  /** Rejects with a `StoreError` that says what is wrong with the file and what to do about it. */
  static open({ path, create }: ThreadData, events: StoreEvents): Promise<SqliteStore> {
    // The compiler rewrites import specifiers, not this string: it names the compiled file.
    const thread = new Worker(new URL('./sqlite-worker.js', import.meta.url), {
      workerData: { path, create } satisfies ThreadData,
    })
    return new Promise((resolve, reject) => {
      const fail = (error: unknown) => reject(deathOf(error))
      thread.once('error', fail)
      thread.once('exit', fail)
      thread.once('message', (first: FromThread) => {
        thread.off('error', fail).off('exit', fail)
        if (first.say === 'opened') resolve(new SqliteStore(thread, first, events))
        else reject(first.say === 'refused' ? new StoreError(first.why) : deathOf(first.say))
      })
    })
  }

  private constructor(thread: Worker, opened: Opened, events: StoreEvents) {
    this.stoppedCleanly = opened.stoppedCleanly
    this.created = opened.created
    this.#scopes = opened.scopes
    this.#thread = thread
    this.#events = events
    let cause: unknown
    thread.on('message', (message: FromThread) => this.#hear(message))
    thread.on('error', (error) => (cause = error))
    thread.on('exit', (code) => this.#exited(cause ?? code))
  }

  get scopes(): number {
    return this.#scopes
  }

  raise(scope: string, token: Token, overlapping: boolean): Promise<Raised> {
    return this.#raise([scope, token, overlapping])
  }

  grant(scope: string, lease: LeaseTerms, overlapping: boolean): Promise<Raised> {
    return this.#raise([scope, lease, overlapping])
  }

  async #raise(raise: Raise): Promise<Raised> {
    const [mark, from, overlapping] = await this.#ask(this.#gathering.raises, raise)
    return { mark, from, overlapping }
  }

  forget(scope: string, token: Token): Promise<void> {
    return this.#ask(this.#gathering.forgets, [scope, token])
  }

  leases(after: string | undefined, limit: number): Promise<LeaseRow[]> {
    return this.#ask(this.#gathering.leases, [after, limit])
  }

  read(scope: string): Promise<MarkRow | undefined> {
    return this.#ask(this.#gathering.reads, scope)
  }

  list(prefix: string, after: string | undefined, limit: number): Promise<MarkRow[]> {
    return this.#ask(this.#gathering.lists, [prefix, after, limit])
  }

  probe(): Promise<void> {
    return this.#ask(this.#gathering.probes, undefined)
  }

  close(clean: boolean): Promise<void> {
    return (this.#closing ??= new Promise((resolve, reject) => {
      if (this.#ended !== undefined) {
        reject(this.#ended)
        return
      }
      this.#ended = new StoreError('the store is closed')
      this.#closer = { clean, resolve, reject }
      this.#sendNext()
    }))
  }

  #ask<Call, Answer>(waiting: Asked<Call, Answer>[], call: Call): Promise<Answer> {
    return new Promise((resolve, reject) => {
      if (this.#ended !== undefined) {
        reject(this.#ended)
        return
      }
      waiting.push({ call, resolve, reject })
      if (this.#isSendDue || this.#underway !== undefined) return
      // Calls made in the same turn of the event loop go together.
      this.#isSendDue = true
      queueMicrotask(() => {
        this.#isSendDue = false
        this.#sendNext()
      })
    })
  }

  #sendNext(): void {
    if (this.#underway !== undefined) return
    const calls = this.#gathering
    if (!isEmpty(calls)) {
      this.#underway = calls
      this.#gathering = noCalls()
      this.#tell({ ask: 'answer', batch: batchOf(calls) })
    } else if (this.#closer !== undefined) {
      this.#tell({ ask: 'close', clean: this.#closer.clean })
    }
  }

  #tell(message: ToThread): void {
    this.#thread.postMessage(message)
  }

  #hear(message: FromThread): void {
    switch (message.say) {
      case 'answered':
        this.#settle(message.outcomes)
        this.#sendNext()
        return
      case 'troubled':
        this.#events.failed(new StoreError(message.why))
        return
      case 'closed':
        this.#farewell = message
        return
      case 'opened':
      case 'refused':
        throw new Error(`the store's thread said '${message.say}' twice`)
      default:
        message satisfies never
    }
  }

  #settle(outcomes: Outcomes): void {
    const { scopes, committed } = outcomes
    const calls = this.#underway
    if (calls === undefined) throw new Error("the store's thread answered what nobody asked")
    this.#underway = undefined
    this.#scopes = scopes
    if (committed !== undefined) this.#events.committed(committed.seconds, committed.calls)

    const errors = new Map<string, StoreError>()
    const errorOf = ({ why }: Failure) => {
      const error = errors.get(why) ?? new StoreError(why)
      errors.set(why, error)
      return error
    }
    settleEach(calls.raises, outcomes.raises, errorOf)
    settleEach(calls.reads, outcomes.reads, errorOf)
    settleEach(calls.lists, outcomes.lists, errorOf)
    settleEach(calls.leases, outcomes.leases, errorOf)
    settleAll(calls.forgets, outcomes.forgets, errorOf)
    settleAll(calls.probes, outcomes.probes, errorOf)
    for (const error of errors.values()) this.#events.failed(error)
  }

  #exited(cause: unknown): void {
    const closer = this.#closer
    if (this.#farewell !== undefined && closer !== undefined) {
      const { failure } = this.#farewell
      if (failure === undefined) closer.resolve()
      else closer.reject(new StoreError(failure.why))
      return
    }
    const death = deathOf(cause)
    this.#ended = death
    rejectAll(this.#underway, death)
    rejectAll(this.#gathering, death)
    closer?.reject(death)
    this.#events.died(death)
  }
}

function noCalls(): Calls {
  return { raises: [], forgets: [], probes: [], reads: [], lists: [], leases: [] }
}

function isEmpty(calls: Calls): boolean {
  return Object.values(calls).every(({ length }) => length === 0)
}

function batchOf({ raises, forgets, probes, reads, lists, leases }: Calls): Batch {
  return {
    raises: raises.map(({ call }) => call),
    forgets: forgets.map(({ call }) => call),
    probes: probes.length,
    reads: reads.map(({ call }) => call),
    lists: lists.map(({ call }) => call),
    leases: leases.map(({ call }) => call),
  }
}

function settleEach<Call, Answer>(
  calls: readonly Asked<Call, Answer>[],
  outcomes: readonly (Answer | Failure)[],
  errorOf: (failure: Failure) => StoreError,
): void {
  calls.forEach(({ resolve, reject }, i) => {
    const outcome = outcomes[i] as Answer | Failure
    if (isFailure(outcome)) reject(errorOf(outcome))
    else resolve(outcome)
  })
}

/** The same outcome for all of them. */
function settleAll<Call, Answer>(
  calls: readonly Asked<Call, Answer>[],
  outcome: Answer | Failure,
  errorOf: (failure: Failure) => StoreError,
): void {
  for (const { resolve, reject } of calls) {
    if (isFailure(outcome)) reject(errorOf(outcome))
    else resolve(outcome)
  }
}

function isFailure(outcome: unknown): outcome is Failure {
  return typeof outcome === 'object' && outcome !== null && 'why' in outcome
}

function rejectAll(calls: Calls | undefined, error: StoreError): void {
  if (calls === undefined) return
  for (const kind of Object.values(calls) as { reject: (error: StoreError) => void }[][]) {
    for (const { reject } of kind) reject(error)
  }
}

function deathOf(cause: unknown): StoreError {
  const why = cause instanceof Error ? cause.message : String(cause)
  return new StoreError(`the thread of the store died, restart the process (${why})`)
}
