import assert from 'node:assert/strict'
import {
  chmodSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs'
import { join } from 'node:path'
import { afterEach, describe, test } from 'node:test'
import Database from 'better-sqlite3'
import { openStore } from '../../src/store/open.ts'
import { StoreError, type Store } from '../../src/store/store.ts'
import { storesApart } from './apart.ts'
import { token } from './contract.ts'
import { temporaryFolder } from './folder.ts'

const folder = temporaryFolder()
const openApart = storesApart()
let files = 0
function newPath(): string {
  const inside = join(folder, `${files++}`)
  mkdirSync(inside)
  return join(inside, 'fence.db')
}

/** What a test opened and, failing, did not close would keep the process alive. */
const opened: Store[] = []
afterEach(async () => {
  await Promise.allSettled(opened.splice(0).map((store) => store.close(false)))
})
async function open(path: string, create = true): Promise<{ store: Store; created: boolean }> {
  const result = await openStore(
    { type: 'sqlite', path, create },
    { committed: () => undefined, failed: () => undefined, died: () => undefined },
  )
  opened.push(result.store)
  return result
}

/** The store at `path` does not open: the message has all of `words`, and the file stays as it is. */
async function refuses(path: string, words: RegExp[], create = true): Promise<void> {
  const isFile = existsSync(path) && statSync(path).isFile()
  const before = isFile ? readFileSync(path) : undefined
  await assert.rejects(open(path, create), (error) => {
    assert.ok(error instanceof StoreError)
    for (const word of [/store/, ...words]) assert.match(error.message, word)
    assert.ok(error.message.includes(path), `names ${path}: ${error.message}`)
    return true
  })
  if (isFile) assert.deepEqual(readFileSync(path), before)
  else if (!existsSync(path)) assert.equal(existsSync(`${path}-wal`), before !== undefined)
}

/** A store with `scopes` marks that was closed in order. */
async function makeStore(path: string, scopes = 1): Promise<void> {
  const { store } = await open(path)
  await Promise.all(
    Array.from({ length: scopes }, (_, i) => store.raise(`/jobs/${i}`, token('1'), false)),
  )
  await store.close(true)
}

/** A store whose process was killed; its latest marks stand in its `-wal`. */
async function makeKilledStore(path: string): Promise<void> {
  const store = await openApart(path)
  await store.raise('/jobs/1', token('7'))
  await store.kill()
}

function withDatabase(path: string, use: (db: Database.Database) => void): void {
  const db = new Database(path)
  use(db)
  db.close()
}

describe('an SQLite store does not open, and says why', () => {
  test('if another process uses it, which is named', async () => {
    const path = newPath()
    const other = await openApart(path)
    await other.raise('a', token('1'))
    await assert.rejects(open(path), ({ message }: Error) => {
      assert.ok(message.includes(`the store ${path} is in use by another process`))
      if (process.platform === 'linux') assert.ok(message.includes(`process ${String(other.pid)}`))
      return true
    })
    assert.equal((await other.raise('a', token('2'))).mark, token('2'))
    await other.close(true)
    const { store } = await open(path)
    assert.equal((await store.read('a'))?.mark, token('2'))
    await store.close(true)
  })

  test('if another store of the same process uses it', async () => {
    const path = newPath()
    const { store } = await open(path)
    await assert.rejects(open(path), /in use/)
    await assert.rejects(openApart(path), /in use/)
    await store.close(true)
  })

  test('of several processes that create it at the same time, one has it', async () => {
    const path = newPath()
    const outcomes = await Promise.allSettled(Array.from({ length: 4 }, () => openApart(path)))
    const opened = outcomes.flatMap((each) => (each.status === 'fulfilled' ? [each.value] : []))
    const refused = outcomes.flatMap((each) =>
      each.status === 'rejected' ? [String(each.reason)] : [],
    )
    assert.equal(opened.length, 1)
    for (const reason of refused) assert.match(reason, /in use/)
    await opened[0]?.close(true)
  })

  test('if it is missing and must not be created', async () => {
    const path = newPath()
    await refuses(path, [/there is no store/, /store\.create/], false)
    assert.equal(existsSync(path), false)
  })

  test('if its main file is missing and its -wal is not', async () => {
    const path = newPath()
    await makeKilledStore(path)
    rmSync(path)
    await assert.rejects(open(path), /is missing, but .*-wal is there/)
    assert.equal(existsSync(path), false)
  })

  test('if it is empty, a folder, or no regular file', async () => {
    const empty = newPath()
    writeFileSync(empty, '')
    await refuses(empty, [/is empty: its marks are lost/, /restore a backup/])
    const inFolder = newPath()
    mkdirSync(inFolder)
    await refuses(inFolder, [/is a folder/])
    const device = newPath()
    symlinkSync('/dev/null', device)
    await refuses(device, [/not a regular file/])
  })

  test('if a folder above it is a file, which is named once, with a remedy', async () => {
    const file = newPath()
    writeFileSync(file, 'not a folder')
    for (const path of [join(file, 'fence.db'), join(file, 'deep', 'er', 'fence.db')]) {
      const words = `because ${file} is a file and no folder; choose another folder (--data, store.path)`
      await assert.rejects(open(path), ({ message }: Error) => {
        assert.equal(message, `the store ${path} cannot be made, ${words}`)
        return true
      })
      await refuses(path, [/is a file and no folder/], false)
    }
    assert.equal(readFileSync(file, 'utf8'), 'not a folder')
  })

  test('if it is no database', async () => {
    for (const content of ['x', 'not a database\n'.repeat(1000)]) {
      const path = newPath()
      writeFileSync(path, content)
      await refuses(path, [/no store/, /is left as it is/])
    }
  })

  test('if its header is damaged', async () => {
    const path = newPath()
    await makeStore(path)
    overwrite(path, 0, 'SQLite of another world')
    await refuses(path, [/damaged/])
  })

  test('if a page in the middle is damaged, or its end is missing', async () => {
    const path = newPath()
    await makeStore(path, 5000)
    const whole = readFileSync(path)
    overwrite(path, Math.floor(whole.length / 4096 / 2) * 4096, '\xff'.repeat(512))
    await refuses(path, [/damaged/])
    writeFileSync(path, whole)
    truncateSync(path, whole.length - 4096)
    await refuses(path, [/damaged/])
  })

  test('if it is a database of another program, which stays untouched', async () => {
    for (const mode of ['delete', 'wal']) {
      const path = newPath()
      withDatabase(path, (db) => {
        db.exec('CREATE TABLE t (x)')
        db.pragma(`journal_mode = ${mode}`)
      })
      await refuses(path, [/is no store of fencing-proxy, and is left as it is/])
    }
  })

  test('if its schema is newer, or none that ever was', async () => {
    for (const schema of [3, 0]) {
      const path = newPath()
      await makeStore(path)
      withDatabase(path, (db) => db.pragma(`user_version = ${schema}`))
      await refuses(path, [
        new RegExp(`has schema ${schema}, and this program knows schema 2`),
        /run the version of fencing-proxy/,
      ])
    }
  })

  test('if it, or its folder, may not be written', async () => {
    const uid = process.getuid?.() === 0 ? 65534 : undefined
    chmodSync(folder, 0o755)
    const fileLocked = newPath()
    await makeStore(fileLocked)
    chmodSync(fileLocked, 0o444)
    const folderLocked = newPath()
    await makeStore(folderLocked)
    chmodSync(folderLocked, 0o666)
    chmodSync(join(folderLocked, '..'), 0o555)
    const nothingThere = newPath()
    chmodSync(join(nothingThere, '..'), 0o555)
    for (const path of [fileLocked, folderLocked, nothingThere]) {
      await assert.rejects(
        openApart(path, { uid }),
        /cannot be written by user \d+; the file, its -wal and its folder must be writable/,
      )
    }
    assert.equal(existsSync(nothingThere), false)
    chmodSync(join(folderLocked, '..'), 0o755)
    chmodSync(join(nothingThere, '..'), 0o755)
  })
})

describe('an SQLite store that was killed', () => {
  test('does not open without its -wal, and does once both are back', async () => {
    const path = newPath()
    await makeKilledStore(path)
    renameSync(`${path}-wal`, `${path}-kept`)
    await refuses(path, [/has lost .*-wal, and with it its latest marks/, /put both files back/])
    await refuses(path, [/has lost/])
    writeFileSync(`${path}-wal`, '')
    await assert.rejects(open(path), /has lost/)
    renameSync(`${path}-kept`, `${path}-wal`)
    const { store } = await open(path)
    assert.equal((await store.read('/jobs/1'))?.mark, token('7'))
    await store.close(true)
  })

  test('opens without its -wal for somebody who says that no mark is missing', async () => {
    const path = newPath()
    await makeKilledStore(path)
    rmSync(`${path}-wal`)
    const error: unknown = await open(path).catch((reason: unknown) => reason)
    assert.ok(error instanceof StoreError)
    const remedy = /run: echo complete > '(.*)'$/.exec(error.message)
    assert.equal(remedy?.[1], `${path}-wal`)
    writeFileSync(`${path}-wal`, 'complete\n')
    const { store } = await open(path)
    assert.equal(store.stoppedCleanly, false)
    assert.deepEqual(await store.list('', undefined, 5), [])
    await store.raise('/jobs/1', token('1'), false)
    await store.close(true)
  })

  test('opens as it is after SQLite tools looked at it, and from a backup made with them', async () => {
    const path = newPath()
    await makeKilledStore(path)
    const backup = newPath()
    withDatabase(path, (db) => {
      db.prepare('SELECT * FROM marks').all()
      db.exec(`VACUUM INTO '${backup}'`)
    })
    assert.equal(existsSync(`${path}-wal`), false)
    for (const each of [path, backup]) {
      const { store } = await open(each)
      assert.equal((await store.read('/jobs/1'))?.mark, token('7'))
      assert.equal(store.stoppedCleanly, false)
      await store.close(true)
    }
  })

  test('does not open from a bare copy of its main file', async () => {
    const path = newPath()
    await makeKilledStore(path)
    const copy = newPath()
    copyFileSync(path, copy)
    await refuses(copy, [/has lost/, /\.backup/])
  })
})

function overwrite(path: string, at: number, text: string): void {
  const bytes = readFileSync(path)
  bytes.write(text, at, 'latin1')
  writeFileSync(path, bytes)
}
