import { parentPort, workerData, type MessagePort } from 'node:worker_threads'
import type { Database } from 'better-sqlite3'
import { FIRST_ISSUED, joinToken, nextToken, splitToken, type Token } from '../token.ts'
import { checkpoint, explain, openFile, type OpenedFile } from './sqlite-file.ts'
import { StoreError, type LeaseRow, type LeaseTerms, type MarkRow } from './store.ts'

/**
 * The thread in which SQLite lives, so that the event loop never waits for the disk.
 *
 * A batch is answered in three steps. Its raises (a grant is one, to the next token, with a lease)
 * are compared, in order, with the marks on disk and with what those before them will write. What has to be written is written in one transaction,
 * with one fsync. Reads come last: they see what is on disk, whether or not the commit succeeded.
 * Comparing stays outside of the transaction, because a page that cannot be read takes down the
 * transaction in which it is read, and here only the call that asked for it.
 */

/** What crosses to the thread and back: tuples, which are cheaper to clone than objects. */
export type Raise = readonly [
  scope: string,
  /** `LeaseTerms` stand for the next token, which is granted with them. */
  to: Token | LeaseTerms,
  overlapping: boolean,
]
export type RaisedTuple = readonly [mark: Token, from: Token | undefined, overlapping: boolean]
export type Forget = readonly [scope: string, token: Token]
export type List = readonly [prefix: string, after: string | undefined, limit: number]
export type LeaseList = readonly [after: string | undefined, limit: number]

export interface Batch {
  readonly raises: readonly Raise[]
  readonly forgets: readonly Forget[]
  readonly probes: number
  readonly reads: readonly string[]
  readonly lists: readonly List[]
  readonly leases: readonly LeaseList[]
}

/** Why a call failed, in words. */
export interface Failure {
  readonly why: string
}

/** What became of a batch, call by call. */
export interface Outcomes {
  readonly raises: readonly (RaisedTuple | Failure)[]
  /** The same for every call of its kind in the batch, as with `probes`. */
  readonly forgets: Failure | undefined
  readonly probes: Failure | undefined
  readonly reads: readonly (MarkRow | Failure | undefined)[]
  readonly lists: readonly (MarkRow[] | Failure)[]
  readonly leases: readonly (LeaseRow[] | Failure)[]
  readonly scopes: number
  /** Undefined where nothing had to be written, or where it could not be. */
  readonly committed: Commit | undefined
}

export interface Commit {
  readonly seconds: number
  readonly calls: number
}

export type ToThread =
  | { readonly ask: 'answer'; readonly batch: Batch }
  | { readonly ask: 'close'; readonly clean: boolean }

export type FromThread =
  | {
      readonly say: 'opened'
      readonly created: boolean
      readonly stoppedCleanly: boolean
      readonly scopes: number
    }
  | { readonly say: 'refused'; readonly why: string }
  | { readonly say: 'answered'; readonly outcomes: Outcomes }
  /** The log could not be moved into the main file. No call is affected; it is tried again. */
  | { readonly say: 'troubled'; readonly why: string }
  | { readonly say: 'closed'; readonly failure: Failure | undefined }

export interface ThreadData {
  readonly path: string
  readonly create: boolean
}

/** Rows written between two checkpoints; a few pages of 4 KiB each at worst, so the `-wal` stays small. */
const CHECKPOINT_AFTER = 4000

interface Mark {
  readonly token: Token
  readonly overlapping: boolean
  /** The scope has no mark on disk yet. */
  readonly isNew: boolean
  /** What the token was issued for, where it was. */
  readonly lease?: LeaseTerms | undefined
}

class Marks {
  readonly #db: Database
  readonly #path: string
  readonly #sql: ReturnType<typeof prepare>
  #scopes: number
  #writtenSinceCheckpoint = 0
  /**
   * Scopes whose marks a commit that failed at its end (fsync) was to raise, since the last commit that succeeded, with why
   * it failed. What it wrote may be whole in the `-wal`, and a crash would then bring it back: a
   * mark that claims to have been raised over nothing. So nothing is said of these scopes before
   * another commit has written over it.
   */
  readonly #doubtful = new Map<string, Failure>()

  constructor({ db, path }: OpenedFile) {
    this.#db = db
    this.#path = path
    this.#sql = prepare(db)
    this.#scopes = this.#sql.count.get() ?? 0
  }

  get scopes(): number {
    return this.#scopes
  }

  answer(batch: Batch): Outcomes {
    return {
      ...this.#write(batch),
      reads: batch.reads.map(
        (scope) => this.#doubtful.get(scope) ?? this.#attempt(() => this.#read(scope)),
      ),
      lists: batch.lists.map((list) => this.#attempt(() => this.#list(list))),
      leases: batch.leases.map((list) => this.#attempt(() => this.#leases(list))),
      scopes: this.#scopes,
    }
  }

  get isCheckpointDue(): boolean {
    return this.#writtenSinceCheckpoint >= CHECKPOINT_AFTER
  }

  checkpoint(): Failure | undefined {
    this.#writtenSinceCheckpoint = 0
    return this.#failureOf(() => checkpoint(this.#db))
  }

  close(clean: boolean): Failure | undefined {
    const failure = this.#failureOf(() => this.#sql.recordStop.run(clean ? 1 : 0))
    this.#db.close()
    return failure
  }

  #write(batch: Batch): Pick<Outcomes, 'raises' | 'forgets' | 'probes' | 'committed'> {
    const { raises, forgets, probes } = batch
    const rising = new Map<string, Mark>()
    const compared = raises.map((raise) => this.#attempt(() => this.#compare(raise, rising)))
    const probe = probes > 0 || this.#asksInDoubt(batch)
    if (rising.size === 0 && forgets.length === 0 && !probe) {
      return { raises: compared, forgets: undefined, probes: undefined, committed: undefined }
    }
    const started = performance.now()
    const unwritten = new Map<string, Failure>()
    let failure: Failure | undefined
    try {
      this.#commit(rising, forgets, probe, unwritten)
    } catch (error) {
      failure = this.#failure(error)
      if (mayHaveLanded(error))
        for (const scope of rising.keys()) this.#doubtful.set(scope, failure)
    }
    if (this.#db.inTransaction) this.#sql.rollback.run()
    const outcomes = compared.map((outcome, i) => {
      const raise = raises[i] as Raise
      const why = failure ?? unwritten.get(raise[0])
      return why === undefined ? outcome : this.#attempt(() => this.#compareOnly(raise, why))
    })
    if (failure !== undefined) {
      return { raises: outcomes, forgets: failure, probes: failure, committed: undefined }
    }
    const calls = probes + forgets.length + outcomes.filter(hasRisen).length
    const seconds = (performance.now() - started) / 1000
    const committed = { seconds, calls }
    return { raises: outcomes, forgets: undefined, probes: undefined, committed }
  }

  #asksInDoubt({ raises, reads }: Batch): boolean {
    if (this.#doubtful.size === 0) return false
    const isDoubtful = (scope: string) => this.#doubtful.has(scope)
    return raises.some(([scope]) => isDoubtful(scope)) || reads.some(isDoubtful)
  }

  /** Compares with the mark as it will be once `rising` is written; adds to that what has to be. */
  #compare([scope, to, overlapping]: Raise, rising: Map<string, Mark>): RaisedTuple {
    const before = rising.get(scope) ?? this.#find(scope)
    const lease = typeof to === 'bigint' ? undefined : to
    const token = typeof to === 'bigint' ? to : issue(scope, before?.token)
    if (before !== undefined && token <= before.token) {
      return [before.token, before.token, before.overlapping]
    }
    const after: Mark = {
      token,
      overlapping: overlapping && before !== undefined,
      isNew: before?.isNew ?? true,
      lease,
    }
    rising.set(scope, after)
    return [token, before?.token, after.overlapping]
  }

  /** The outcome where nothing can be written: tokens up to the mark on disk need no commit. */
  #compareOnly(raise: Raise, why: Failure): RaisedTuple | Failure {
    if (this.#doubtful.has(raise[0])) return why
    const raised = this.#compare(raise, new Map())
    return hasRisen(raised) ? why : raised
  }

  /** Writes all of `rising` but what SQLite refuses row by row, which goes to `unwritten`. */
  #commit(
    rising: ReadonlyMap<string, Mark>,
    forgets: readonly Forget[],
    probe: boolean,
    unwritten: Map<string, Failure>,
  ): void {
    const raisedAt = Date.now()
    let added = 0
    let rows = 0
    this.#sql.begin.run()
    for (const [scope, { token, overlapping, isNew, lease }] of rising) {
      try {
        const { generation, number } = splitToken(token)
        // Before the mark: a lease without its mark is none.
        if (lease !== undefined) {
          const { id, holder, ttlMs } = lease
          this.#sql.keep.run(scope, id, generation, number, holder, ttlMs, raisedAt)
          rows += 1
        }
        this.#sql.write.run(scope, generation, number, raisedAt, overlapping ? 1 : 0)
        rows += 1
        if (isNew) added += 1
      } catch (error) {
        // Full disks and failing ones take the whole transaction with them.
        if (!this.#db.inTransaction) throw error
        unwritten.set(scope, this.#failure(error))
      }
    }
    for (const [scope, token] of forgets) {
      const { generation, number } = splitToken(token)
      this.#sql.forget.run(scope, generation, number)
    }
    if (probe) this.#sql.probe.run()
    this.#sql.commit.run()
    this.#scopes += added
    this.#doubtful.clear()
    this.#writtenSinceCheckpoint += rows + forgets.length + (probe ? 1 : 0)
  }

  #find(scope: string): Mark | undefined {
    const row = this.#sql.find.get(scope)
    if (row === undefined) return undefined
    return { token: joinToken(row[0], row[1]), overlapping: row[2] === 1n, isNew: false }
  }

  #read(scope: string): MarkRow | undefined {
    const row = this.#sql.read.get(scope)
    return row === undefined ? undefined : markRow(row)
  }

  #list([prefix, after, limit]: List): MarkRow[] {
    return this.#sql.list
      .all({ prefix, after: after ?? null, limit })
      .map(markRow)
      .filter(({ scope }) => scope.startsWith(prefix))
  }

  #leases([after, limit]: LeaseList): LeaseRow[] {
    return this.#sql.leases.all({ after: after ?? null, limit }).map(leaseRow)
  }

  #attempt<T>(act: () => T): T | Failure {
    try {
      return act()
    } catch (error) {
      return this.#failure(error)
    }
  }

  #failureOf(act: () => void): Failure | undefined {
    try {
      act()
      return undefined
    } catch (error) {
      return this.#failure(error)
    }
  }

  #failure(error: unknown): Failure {
    return { why: error instanceof StoreError ? error.message : explain(error, this.#path) }
  }
}

/** Whether a commit that failed may be whole in the `-wal`: not where its last page was not written. */
function mayHaveLanded(error: unknown): boolean {
  const code = error instanceof Error && 'code' in error ? error.code : undefined
  return code !== 'SQLITE_FULL' && code !== 'SQLITE_IOERR_WRITE'
}

type MarkColumns = [generation: bigint, number: bigint, overlapping: bigint]
type RowColumns = [
  scope: string,
  generation: bigint,
  number: bigint,
  raisedAt: bigint,
  overlapping: bigint,
]
type LeaseColumns = [
  scope: string,
  id: string,
  generation: bigint,
  number: bigint,
  holder: string,
  ttlMs: bigint,
  grantedAt: bigint,
]

function prepare(db: Database) {
  return {
    begin: db.prepare('BEGIN IMMEDIATE'),
    commit: db.prepare('COMMIT'),
    rollback: db.prepare('ROLLBACK'),
    count: db.prepare<[], number>('SELECT count(*) FROM marks').pluck(),
    find: db
      .prepare<[string], MarkColumns>(
        'SELECT generation, number, overlapping FROM marks WHERE scope = ?',
      )
      .raw()
      .safeIntegers(),
    write: db.prepare<[string, bigint, bigint, number, number]>(
      `INSERT INTO marks (scope, generation, number, raised_at, overlapping) VALUES (?, ?, ?, ?, ?)
       ON CONFLICT (scope) DO UPDATE SET generation = excluded.generation,
         number = excluded.number, raised_at = excluded.raised_at, overlapping = excluded.overlapping`,
    ),
    // The value has to change: SQLite writes no page that stays as it is.
    probe: db.prepare('UPDATE run SET probes = probes + 1'),
    read: db
      .prepare<[string], RowColumns>(
        'SELECT scope, generation, number, raised_at, overlapping FROM marks WHERE scope = ?',
      )
      .raw()
      .safeIntegers(),
    // Scopes that share a prefix lie together, so the first ones from `prefix` on are those, if any.
    list: db
      .prepare<[{ prefix: string; after: string | null; limit: number }], RowColumns>(
        `SELECT scope, generation, number, raised_at, overlapping FROM marks
         WHERE scope >= max($prefix, ifnull($after, $prefix)) AND scope IS NOT $after
         ORDER BY scope LIMIT $limit`,
      )
      .raw()
      .safeIntegers(),
    keep: db.prepare<[string, string, bigint, bigint, string, number, number]>(
      `INSERT OR REPLACE INTO leases (scope, id, generation, number, holder, ttl_ms, granted_at)
       VALUES (?, ?, ?, ?, ?, ?, ?)`,
    ),
    forget: db.prepare<[string, bigint, bigint]>(
      'DELETE FROM leases WHERE scope = ? AND generation = ? AND number = ?',
    ),
    leases: db
      .prepare<[{ after: string | null; limit: number }], LeaseColumns>(
        `SELECT scope, id, generation, number, holder, ttl_ms, granted_at
         FROM leases JOIN marks USING (scope, generation, number)
         WHERE scope >= ifnull($after, '') AND scope IS NOT $after
         ORDER BY scope LIMIT $limit`,
      )
      .raw()
      .safeIntegers(),
    recordStop: db.prepare<[number]>('UPDATE run SET clean = ?, complete = 1'),
  }
}

function markRow([scope, generation, number, raisedAt, overlapping]: RowColumns): MarkRow {
  return {
    scope,
    mark: joinToken(generation, number),
    raisedAt: Number(raisedAt),
    overlapping: overlapping === 1n,
  }
}

function leaseRow(columns: LeaseColumns): LeaseRow {
  const [scope, id, generation, number, holder, ttlMs, grantedAt] = columns
  return {
    scope,
    id,
    token: joinToken(generation, number),
    holder,
    ttlMs: Number(ttlMs),
    grantedAt: Number(grantedAt),
  }
}

function issue(scope: string, highest: Token | undefined): Token {
  const token = highest === undefined ? FIRST_ISSUED : nextToken(highest)
  if (token === undefined) throw new StoreError(`the scope ${scope} has used up its tokens`)
  return token
}

function hasRisen(outcome: RaisedTuple | Failure): boolean {
  return !('why' in outcome) && outcome[0] !== outcome[1]
}

function run(port: MessagePort, { path, create }: ThreadData): void {
  const tell = (message: FromThread) => port.postMessage(message)
  let opened: OpenedFile
  try {
    opened = openFile(path, create)
  } catch (error) {
    if (!(error instanceof StoreError)) throw error
    tell({ say: 'refused', why: error.message })
    return
  }
  const marks = new Marks(opened)
  const { created, stoppedCleanly } = opened
  port.on('message', (message: ToThread) => {
    if (message.ask === 'close') {
      tell({ say: 'closed', failure: marks.close(message.clean) })
      port.close()
      return
    }
    tell({ say: 'answered', outcomes: marks.answer(message.batch) })
    // After the answer: its callers need not wait for it.
    if (!marks.isCheckpointDue) return
    const failure = marks.checkpoint()
    if (failure !== undefined) tell({ say: 'troubled', why: failure.why })
  })
  tell({ say: 'opened', created, stoppedCleanly, scopes: marks.scopes })
}

if (parentPort !== null) run(parentPort, workerData as ThreadData)
