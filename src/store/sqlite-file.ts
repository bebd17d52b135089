import { randomUUID } from 'node:crypto'
import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  fsyncSync,
  linkSync,
  mkdirSync,
  openSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  statSync,
} from 'node:fs'
import { dirname, resolve } from 'node:path'
import Database from 'better-sqlite3'
import { StoreError } from './store.ts'

/**
 * The file that holds the marks: how it is made, what is looked at before it is trusted, and how
 * its main part and its `-wal` stay one store. Everything here blocks; it runs in the thread.
 *
 * A store of which a part is missing looks whole to SQLite: without its `-wal` it has merely
 * forgotten its latest marks. So the main file says whether it can stand alone (`run.complete`):
 * 0 is written before each checkpoint, and so reaches the main file; 1 is written after it, and so
 * stands in the `-wal` only, until SQLite itself moves everything over at an orderly end. A main
 * file that says 0 needs a `-wal` and does not open without. Copies made through SQLite (`.backup`,
 * `VACUUM INTO`) say 1; a bare copy of the file of a running or crashed store says 0.
 *
 * This file is never opened other than through SQLite: closing any descriptor of it would drop the
 * locks of the whole process (fcntl(2), "Record locking").
 */

/** "fenc" */
const APPLICATION_ID = 0x66656e63
const SCHEMA = 2

const LEASES = `
  CREATE TABLE leases (
    scope TEXT NOT NULL PRIMARY KEY,
    id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    number INTEGER NOT NULL,
    holder TEXT NOT NULL,
    ttl_ms INTEGER NOT NULL,
    granted_at INTEGER NOT NULL
  ) STRICT, WITHOUT ROWID;
`

/** What brings a store of an older schema to the next one. */
const MIGRATIONS: Readonly<Record<number, string>> = { 1: LEASES }

const NEW_STORE = `
  BEGIN;
  CREATE TABLE marks (
    scope TEXT NOT NULL PRIMARY KEY,
    generation INTEGER NOT NULL,
    number INTEGER NOT NULL,
    raised_at INTEGER NOT NULL,
    overlapping INTEGER NOT NULL
  ) STRICT, WITHOUT ROWID;
  ${LEASES}
  CREATE TABLE run (clean INTEGER NOT NULL, complete INTEGER NOT NULL, probes INTEGER NOT NULL) STRICT;
  INSERT INTO run (clean, complete, probes) VALUES (1, 1, 0);
  PRAGMA application_id = ${APPLICATION_ID};
  PRAGMA user_version = ${SCHEMA};
  COMMIT;
  PRAGMA journal_mode = WAL;
`

export interface OpenedFile {
  readonly db: Database.Database
  /** Where the file really is, links followed. */
  readonly path: string
  readonly created: boolean
  readonly stoppedCleanly: boolean
}

/**
 * Opens the file, alone: no other process can until it is closed. When this returns, the disk says
 * that a run is under way. Throws a `StoreError`, and leaves what it found as it was.
 */
export function openFile(path: string, create: boolean): OpenedFile {
  try {
    const created = createIfMissing(resolve(path), create)
    return { created, ...openExisting(realpathSync(path)) }
  } catch (error) {
    throw error instanceof StoreError ? error : new StoreError(explain(error, path))
  }
}

function createIfMissing(path: string, create: boolean): boolean {
  const found = statSync(path, { throwIfNoEntry: false })
  if (found === undefined) {
    // SQLite would play the old `-wal` into the new file.
    if (existsSync(walOf(path))) {
      throw new StoreError(
        `the store ${path} is missing, but ${walOf(path)} is there and may hold marks; put the missing file back, or move the other away to start without marks`,
      )
    }
    if (!create) {
      throw new StoreError(
        `there is no store ${path}; put it back, or set store.create to true to start without marks`,
      )
    }
    return createFile(path)
  }
  if (found.isDirectory()) {
    throw new StoreError(`the store ${path} is a folder; store.path must name a file in it`)
  }
  if (!found.isFile()) throw new StoreError(`the store ${path} is not a regular file`)
  if (found.size === 0) {
    throw new StoreError(
      `the store ${path} is empty: its marks are lost; restore a backup, or remove the file to start without marks`,
    )
  }
  return false
}

/**
 * Builds the store under another name, so that a crash on the way leaves none rather than half of
 * one. False: another process was faster, and its store stays.
 */
function createFile(path: string): boolean {
  const folder = dirname(path)
  const topmost = mkdirSync(folder, { recursive: true })
  const draft = `${path}.new-${randomUUID()}`
  try {
    const db = new Database(draft)
    try {
      db.exec(NEW_STORE)
    } finally {
      db.close()
    }
    fsyncPath(draft)
    if (!nameDraft(draft, path)) return false
  } finally {
    for (const suffix of ['', '-journal', '-wal']) rmSync(draft + suffix, { force: true })
  }
  fsyncPath(folder)
  if (topmost !== undefined) {
    for (let made = folder; made !== dirname(topmost); made = dirname(made)) {
      fsyncPath(dirname(made))
    }
  }
  return true
}

/** A link, because a rename would replace the store of a process that started at the same time. */
function nameDraft(draft: string, path: string): boolean {
  try {
    linkSync(draft, path)
  } catch (error) {
    const code = codeOf(error)
    if (code === 'EEXIST') return false
    if (code !== 'EPERM' && code !== 'ENOTSUP' && code !== 'ENOSYS') throw error
    renameSync(draft, path) // a file system without hard links
  }
  return true
}

function fsyncPath(path: string): void {
  const fd = openSync(path, 'r')
  try {
    fsyncSync(fd)
  } finally {
    closeSync(fd)
  }
}

function openExisting(path: string): Omit<OpenedFile, 'created'> {
  // SQLite would open it for reading, and call the lock that it then cannot take a disk failure.
  accessSync(path, constants.R_OK | constants.W_OK)
  // Looked at before SQLite opens the file, because then there always is one, perhaps empty.
  const hasWal = (statSync(walOf(path), { throwIfNoEntry: false })?.size ?? 0) > 0
  const db = new Database(path, { fileMustExist: true, timeout: 0 })
  try {
    db.pragma('locking_mode = EXCLUSIVE')
    checkOwner(db, path)
    db.pragma('journal_mode = WAL')
    db.pragma('synchronous = FULL')
    // Only `checkpoint` below may move pages to the main file.
    db.pragma('wal_autocheckpoint = 0')
    db.pragma('cache_size = -16384')
    checkWhole(db, path)
    const { clean, complete } = readRun(db)
    if (!complete && !hasWal) {
      throw new StoreError(
        `the store ${path} has lost ${walOf(path)}, and with it its latest marks; put both files back as they were, or restore a backup made with SQLite's .backup. If you know that no mark is missing, run: echo complete > '${walOf(path)}'`,
      )
    }
    migrate(db)
    db.prepare('UPDATE run SET clean = 0').run()
    checkpoint(db)
    return { db, path, stoppedCleanly: clean }
  } catch (error) {
    db.close()
    throw error
  }
}

function checkOwner(db: Database.Database, path: string): void {
  if (db.pragma('application_id', { simple: true }) !== APPLICATION_ID) {
    throw new StoreError(
      `the file ${path} is no store of fencing-proxy, and is left as it is; store.path must name a store, or a file that does not exist yet`,
    )
  }
  const schema = db.pragma('user_version', { simple: true })
  if (schema === SCHEMA || MIGRATIONS[Number(schema)] !== undefined) return
  throw new StoreError(
    `the store ${path} has schema ${String(schema)}, and this program knows schema ${SCHEMA}; run the version of fencing-proxy that wrote it, or a newer one`,
  )
}

/** Brings the store to today's schema, in one commit, once it is known to be whole. */
function migrate(db: Database.Database): void {
  const schema = Number(db.pragma('user_version', { simple: true }))
  if (schema === SCHEMA) return
  db.transaction(() => {
    for (let next = schema; next < SCHEMA; next++) db.exec(MIGRATIONS[next] ?? '')
    db.pragma(`user_version = ${SCHEMA}`)
  })()
}

/** Reads every page (about 0.2 s for 10^6 scopes): a store must not turn out to be damaged mid-run. */
function checkWhole(db: Database.Database, path: string): void {
  const found: unknown = db.pragma('quick_check(1)', { simple: true })
  if (found !== 'ok') throw new StoreError(damaged(path, String(found)))
}

function readRun(db: Database.Database): { clean: boolean; complete: boolean } {
  const row = db.prepare<[], [number, number]>('SELECT clean, complete FROM run').raw().get()
  return { clean: row?.[0] === 1, complete: row?.[1] === 1 }
}

/** Moves the pages of the `-wal` to the main file, on disk. The `-wal` keeps its length and is written over. */
export function checkpoint(db: Database.Database): void {
  db.prepare('UPDATE run SET complete = 0').run()
  try {
    db.pragma('wal_checkpoint(PASSIVE)')
  } finally {
    db.prepare('UPDATE run SET complete = 1').run()
  }
}

/** What happened to the store at `path`, in words, with what to do about it. */
export function explain(error: unknown, path: string): string {
  const code = codeOf(error)
  const message = error instanceof Error ? error.message : String(error)
  const prefix = `${code ?? 'unexpected'}: `
  const cause = message.startsWith(prefix) ? message : prefix + message
  switch (code?.replace(/^(SQLITE_[A-Z]+)_.*$/, '$1')) {
    case 'SQLITE_BUSY':
      return `the store ${path} is in use by another process${holderOf(path)}; stop that one, or choose another store.path`
    case 'SQLITE_NOTADB':
    case 'SQLITE_CORRUPT':
      return damaged(path, cause)
    case 'SQLITE_FULL':
    case 'ENOSPC':
    case 'EDQUOT':
      return `the disk of the store ${path} is full; free some space (${cause})`
    case 'SQLITE_IOERR':
    case 'EIO':
      return `the disk of the store ${path} failed; look at the disk and at the kernel log (${cause})`
    case 'SQLITE_READONLY':
    case 'SQLITE_CANTOPEN':
    case 'SQLITE_PERM':
    case 'EACCES':
    case 'EPERM':
    case 'EROFS':
      return `the store ${path} cannot be written${asUser()}; the file, its -wal and its folder must be writable (${cause})`
    case 'ENOTDIR':
    case 'EEXIST':
      return `the store ${path} cannot be made, because ${blockerOf(path)} is a file and no folder; choose another folder (--data, store.path)`
    default:
      return `the store ${path} cannot be used (${cause})`
  }
}

function damaged(path: string, cause: string): string {
  return `the store ${path} is damaged or no store at all, and is left as it is; restore a backup, or move it and its -wal away to start without marks (${cause})`
}

function codeOf(error: unknown): string | undefined {
  return error instanceof Error && 'code' in error ? String(error.code) : undefined
}

/** What stands where `path` needs a folder. */
function blockerOf(path: string): string {
  const above = dirname(path)
  return above === dirname(above) || existsSync(above) ? above : blockerOf(above)
}

function asUser(): string {
  const uid = process.getuid?.()
  return uid === undefined ? '' : ` by user ${uid}`
}

/** Linux tells which process has locked a file (proc(5), /proc/locks); elsewhere none is named. */
function holderOf(path: string): string {
  try {
    const { ino } = statSync(path)
    const pid = new RegExp(`WRITE (\\d+) \\S+:${ino} `).exec(
      readFileSync('/proc/locks', 'utf8'),
    )?.[1]
    return pid === undefined || pid === '0' ? '' : ` (process ${pid})`
  } catch {
    return ''
  }
}

function walOf(path: string): string {
  return `${path}-wal`
}
