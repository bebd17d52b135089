import type { Token } from '../token.ts'

/**
 * The durable memory of the fence: for each scope its mark, the highest token recorded for it; and
 * of the lease service: for each scope the lease granted last, until it is over.
 *
 * Order: raises and grants of one scope take effect in the order of the calls. Raises that are waiting at the
 * same time may share one commit, but each has its own result or its own failure.
 *
 * Durability: when `raise` resolves, the mark that it names is on disk and survives a crash and a
 * loss of power. No call ever answers with a mark that a crash could take back.
 *
 * Failure: `raise` rejects with a `StoreError` when the mark could not be made durable. The mark is
 * then unchanged for every later call in this process, and the caller must treat the write as
 * refused. A crash may still bring the higher mark to the disk, until a later commit has succeeded:
 * up to then every `raise`, `grant` and `read` of the scope rejects, so that nothing is admitted
 * under a mark that may not be the one that the next run finds. The store goes on: once the fault is
 * gone (space is free again, the disk answers), later calls succeed without a restart.
 *
 * Scopes are well-formed Unicode. A lone surrogate has no UTF-8 form: scopes that differ only in
 * such units may share a mark.
 */
export interface Store {
  /**
   * Whether the last run on this store ended with `close(true)`; true for a store just created.
   * False means that nobody knows which writes were in flight when it ended.
   */
  readonly stoppedCleanly: boolean

  /** How many scopes have a mark on disk. */
  readonly scopes: number

  /**
   * Raises the mark of `scope` to `token` if that is higher (or if there is no mark), and answers
   * with the mark that results: `token` itself, or a higher one, over which nothing was changed.
   *
   * `overlapping` says that older writes of the scope are, or may be, still under way. It is kept
   * with the mark, because a crash forgets them: see `Raised.overlapping`.
   */
  raise(scope: string, token: Token, overlapping: boolean): Promise<Raised>

  /**
   * Gives `scope` a new owner: raises its mark to the next token (the smallest one above every token
   * ever recorded for it; 1 where there is none) and keeps the lease in place of an earlier one, in
   * one commit. `mark` of the answer is the token of the lease. Order, durability, failure and
   * `overlapping` are those of `raise`.
   */
  grant(scope: string, lease: LeaseTerms, overlapping: boolean): Promise<Raised>

  /**
   * Forgets the lease that `token` was issued for, if `scope` still has it; its mark stays. Durable
   * when it resolves. Rejects with a `StoreError`: the lease is then kept.
   */
  forget(scope: string, token: Token): Promise<void>

  /**
   * Leases that were granted and not forgotten, without those whose scope has a mark from elsewhere
   * by now; paged as in `list`. Rejects with a `StoreError`.
   */
  leases(after: string | undefined, limit: number): Promise<LeaseRow[]>

  /**
   * The mark of one scope as it is on disk, or undefined: no older than what the calls before this
   * one made of it, perhaps newer. Rejects with a `StoreError`.
   */
  read(scope: string): Promise<MarkRow | undefined>

  /**
   * Marks in the order of their scopes' UTF-8 bytes: those whose scope begins with `prefix` and
   * comes after `after` (exclusive; undefined: from the start), `limit` at most. Rejects with a
   * `StoreError`.
   */
  list(prefix: string, after: string | undefined, limit: number): Promise<MarkRow[]>

  /** Resolves when a commit has just reached the disk; rejects with a `StoreError` when it cannot. */
  probe(): Promise<void>

  /**
   * Ends the store after what was already asked of it. `clean` records that nothing was in flight
   * and nothing settling. Later calls reject. Calling it again is the same call. Rejects with a
   * `StoreError` where the end could not be recorded: the store is ended all the same, and the next
   * start as a rule finds that it was not clean.
   */
  close(clean: boolean): Promise<void>
}

export interface Raised {
  /** The scope's mark after the call. */
  readonly mark: Token
  /** The scope's mark before the call; undefined where it had none. */
  readonly from: Token | undefined
  /**
   * Whether `mark` was raised over writes that had perhaps not ended. While true, a crash leaves
   * even writes of `mark` itself to wait: an older one may still be on its way. False for a
   * scope's first mark.
   */
  readonly overlapping: boolean
}

export interface MarkRow {
  readonly scope: string
  readonly mark: Token
  /** Wall-clock time of the raise, in ms since 1970. For people to read; decides nothing. */
  readonly raisedAt: number
  /** As in `Raised`. */
  readonly overlapping: boolean
}

/** What was agreed on with the holder of a lease. */
export interface LeaseTerms {
  /** Unguessable: who knows it may renew and release the lease. */
  readonly id: string
  /** Who asked for it, in its own words. For people to read. */
  readonly holder: string
  readonly ttlMs: number
}

export interface LeaseRow extends LeaseTerms {
  readonly scope: string
  readonly token: Token
  /** Wall-clock time of the grant, in ms since 1970. For people to read; decides nothing. */
  readonly grantedAt: number
}

/** What the store tells of itself while it works; for metrics and logs. */
export interface StoreEvents {
  /** A commit reached the disk: how long it took, in seconds, and how many calls shared it. */
  committed(seconds: number, calls: number): void
  /** A commit or a read failed; one event for all calls that failed together for the same reason. */
  failed(error: StoreError): void
  /** The store's thread died; no later call can succeed. */
  died(error: StoreError): void
}

/** The store could not do what was asked. `message` says so in words that an operator can act on. */
export class StoreError extends Error {
  override readonly name = 'StoreError'
}
