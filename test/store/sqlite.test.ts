import assert from 'node:assert/strict'
import { once } from 'node:events'
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, statSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { afterEach, describe, test } from 'node:test'
import type { Worker } from 'node:worker_threads'
import Database from 'better-sqlite3'
import { openStore } from '../../src/store/open.ts'
import { StoreError, type Store, type StoreEvents } from '../../src/store/store.ts'
import { joinToken } from '../../src/token.ts'
import { storesApart } from './apart.ts'
import { storeContract, terms, token } from './contract.ts'
import { temporaryFolder } from './folder.ts'

const folder = temporaryFolder()
const openApart = storesApart()
let files = 0
const newPath = () => join(folder, `${files++}`, 'fence.db')

const quiet: StoreEvents = {
  committed: () => undefined,
  failed: () => undefined,
  died: () => undefined,
}
/** What a test opened and, failing, did not close would keep the process alive. */
const opened: Store[] = []
afterEach(async () => {
  await Promise.allSettled(opened.splice(0).map((store) => store.close(false)))
})
async function open(path: string, events = quiet): Promise<{ store: Store; created: boolean }> {
  const result = await openStore({ type: 'sqlite', path, create: true }, events)
  opened.push(result.store)
  return result
}

storeContract('SQLite', async () => (await open(newPath())).store)

describe('an SQLite store over several runs', () => {
  test('marks outlive the run that raised them, with their overlap and their count', async () => {
    const path = newPath()
    const first = await open(path)
    await first.store.raise('a', token('1'), false)
    await first.store.raise('a', token('9007199254740993.9223372036854775807'), true)
    await first.store.raise('b\0\u{1f512}', token('0'), false)
    const rows = await first.store.list('', undefined, 10)
    await first.store.close(true)

    const second = await open(path)
    assert.deepEqual([first.created, second.created], [true, false])
    assert.equal(second.store.scopes, 2)
    assert.deepEqual(await second.store.list('', undefined, 10), rows)
    const stale = await second.store.raise('a', token('9007199254740993.1'), false)
    assert.equal(stale.mark, token('9007199254740993.9223372036854775807'))
    assert.equal(stale.overlapping, true)
    await second.store.close(true)
  })

  test('leases outlive the run that granted them, whole, and those that were forgotten do not', async () => {
    const path = newPath()
    const first = await openApart(path)
    await first.grant('a', terms('one'))
    await first.grant('b\0\u{1f512}', terms("two'\0"))
    await first.grant('c', terms('three'))
    await first.forget('c', token('1'))
    const rows = await first.leases()
    assert.equal(rows.length, 2)
    await first.kill()
    const second = await openApart(path)
    assert.deepEqual(await second.leases(), rows)
    assert.equal((await second.grant('c', terms('four'))).mark, token('2'))
    await second.close(true)
    const third = await openApart(path)
    assert.equal((await third.leases()).length, 3)
    await third.close(true)
  })

  test(
    'the -wal of a store that is only probed stays small',
    { skip: !existsSync('/dev/shm') },
    async () => {
      // Where a sync costs nothing: it takes thousands of them.
      const memory = mkdtempSync('/dev/shm/fencing-')
      try {
        const path = join(memory, 'fence.db')
        const { store } = await open(path)
        for (let i = 0; i < 9_000; i++) await store.probe()
        const { size } = statSync(`${path}-wal`)
        assert.ok(size < 20_000_000, `${size} bytes`)
        await store.close(true)
      } finally {
        rmSync(memory, { recursive: true })
      }
    },
  )

  test('grants, forgets and raises that come together share a commit, and each is counted', async () => {
    const commits: number[] = []
    const { store } = await open(newPath(), {
      ...quiet,
      committed: (_seconds, calls) => commits.push(calls),
    })
    await store.grant('a', terms('a'), false)
    await Promise.all([
      store.grant('b', terms('b'), false),
      store.grant('c', terms('c'), false),
      store.forget('a', token('1')),
      store.raise('d', token('1'), false),
      store.raise('d', token('1'), false),
      store.leases(undefined, 10_000),
    ])
    assert.deepEqual(commits, [1, 4])
    await store.close(true)
  })

  test('a store of schema 1 is brought to the present one, with all its marks, once it is known to be whole', async () => {
    for (const clean of [1, 0]) {
      const path = newPath()
      makeSchema1(path, clean)
      const first = await open(path)
      assert.equal(first.store.stoppedCleanly, clean === 1)
      assert.equal(first.store.scopes, 2)
      assert.deepEqual(await first.store.list('', undefined, 9), [
        { scope: '/a', mark: token('41'), raisedAt: 17, overlapping: false },
        { scope: '/b', mark: token('3.7'), raisedAt: 18, overlapping: true },
      ])
      assert.deepEqual(await first.store.leases(undefined, 10_000), [])
      assert.equal((await first.store.grant('/a', terms('one'), false)).mark, token('42'))
      await first.store.close(true)
      const second = await open(path)
      assert.deepEqual(
        (await second.store.leases(undefined, 10_000)).map(({ id }) => id),
        ['one'],
      )
      await second.store.close(true)
      const db = new Database(path)
      assert.equal(db.pragma('user_version', { simple: true }), 2)
      db.close()
    }
  })

  test('only a run that closed as clean is found clean; a new store is', async () => {
    const path = newPath()
    const found: boolean[] = []
    for (const clean of [true, true, false, true, false]) {
      const { store } = await open(path)
      found.push(store.stoppedCleanly)
      await store.close(clean)
    }
    assert.deepEqual(found, [true, true, true, false, true])
  })

  test('a run that was killed, before its first mark too, or that exited, was not clean', async () => {
    const path = newPath()
    await (await openApart(path)).kill()
    const second = await openApart(path)
    assert.equal(second.stoppedCleanly, false)
    await second.raise('a', token('1'))
    await second.exit()
    const third = await openApart(path)
    assert.equal(third.stoppedCleanly, false)
    assert.equal((await third.read('a'))?.mark, token('1'))
    await third.close(true)
  })

  test('every mark that was answered is there after kill -9 in the middle of a stream', async () => {
    const path = newPath()
    const acknowledged = new Map<string, bigint>()
    for (let round = 1; round <= 12; round++) {
      const store = await openApart(path)
      for (const [scope, mark] of acknowledged) {
        const row = await store.read(scope)
        assert.ok(row !== undefined && row.mark >= mark, `round ${round}: ${scope}`)
      }
      let answers = 0
      const calls = Array.from({ length: 400 }, (_, i) => {
        const scope = `/jobs/${i % 40}`
        return store.raise(scope, joinToken(0n, BigInt(round * 1000 + i))).then(
          ({ mark }) => {
            acknowledged.set(scope, mark)
            answers += 1
            if (answers === round * 25) void store.kill()
          },
          () => undefined,
        )
      })
      await Promise.all(calls)
      await store.kill()
    }
  })

  test('an orderly end leaves one file; a fresh store leaves no draft behind', async () => {
    const path = newPath()
    const { store } = await open(path)
    await store.raise('a', token('1'), false)
    await store.close(false)
    assert.deepEqual(readdirSync(join(path, '..')), ['fence.db'])
  })

  test('checkpoints go on through a long run, and the store is whole after each', async () => {
    const path = newPath()
    const store = await openApart(path)
    for (let batch = 0; batch < 5; batch++) {
      await Promise.all(
        Array.from({ length: 2500 }, (_, i) => store.raise(`/${batch}/${i}`, token('1'))),
      )
    }
    await store.kill()
    assert.ok(statSync(path).size > 100_000, 'marks have been moved to the main file')
    const again = await openApart(path)
    assert.equal(again.scopes, 12_500)
    await again.close(true)
  })
})

describe('an SQLite store and its thread', () => {
  test('a call that cannot be stored fails alone, without those that share its commit', async () => {
    const failures: string[] = []
    const path = newPath()
    const { store } = await open(path, {
      ...quiet,
      failed: ({ message }) => failures.push(message),
    })
    const impossible = joinToken(2n ** 64n, 0n)
    const [before, failed, after] = await Promise.allSettled([
      store.raise('a', token('1'), false),
      store.raise('b', impossible, false),
      store.raise('c', token('1'), false),
    ])
    const raised = { mark: token('1'), from: undefined, overlapping: false }
    assert.equal(failed.status, 'rejected')
    assert.deepEqual(before, { status: 'fulfilled', value: raised })
    assert.deepEqual(after, { status: 'fulfilled', value: raised })
    assert.equal(failures.length, 1)
    assert.equal(store.scopes, 2)
    assert.deepEqual(await store.raise('b', token('1'), false), raised)
    await store.close(true)
  })

  test('calls that need nothing written commit nothing', async () => {
    const commits: number[] = []
    const { store } = await open(newPath(), {
      ...quiet,
      committed: (_seconds, calls) => commits.push(calls),
    })
    await store.raise('a', token('5'), false)
    await Promise.all([
      store.raise('a', token('4'), false),
      store.raise('a', token('5'), false),
      store.read('a'),
      store.list('', undefined, 5),
    ])
    assert.deepEqual(commits, [1])
    await Promise.all([
      store.raise('a', token('4'), false),
      store.raise('a', token('6'), false),
      store.probe(),
    ])
    assert.deepEqual(commits, [1, 2])
    await store.close(true)
  })

  test('if the thread dies, what was asked and what is asked later fails, in words', async () => {
    const deaths: StoreError[] = []
    const started = once(process, 'worker')
    const { store } = await open(newPath(), { ...quiet, died: (error) => deaths.push(error) })
    const [thread] = (await started) as [Worker]
    const underway = [store.raise('a', token('1'), false), store.read('a'), store.probe()]
    const outcomes = Promise.allSettled(underway)
    await thread.terminate()
    const isDeath = (error: unknown) =>
      error instanceof StoreError && /thread of the store died/.test(error.message)
    for (const outcome of await outcomes) {
      // The first batch may have been answered in time.
      if (outcome.status === 'rejected') assert.ok(isDeath(outcome.reason))
    }
    await assert.rejects(store.raise('a', token('2'), false), isDeath)
    await assert.rejects(store.list('', undefined, 1), isDeath)
    await assert.rejects(store.close(true), isDeath)
    assert.equal(deaths.length, 1)
  })

  test('what waits when the thread dies fails too', async () => {
    const started = once(process, 'worker')
    const { store } = await open(newPath())
    const [thread] = (await started) as [Worker]
    const first = store.raise('a', token('1'), false)
    await Promise.resolve()
    const calls = Array.from({ length: 5 }, () => store.raise('b', token('1'), false))
    const outcomes = Promise.allSettled([first, ...calls])
    void thread.terminate()
    for (const { status } of (await outcomes).slice(1)) assert.equal(status, 'rejected')
  })

  test('a fresh store is made with the folders above it', async () => {
    const path = join(folder, 'x', 'y', 'z', 'fence.db')
    const { store } = await open(path)
    assert.ok(existsSync(path))
    await store.close(true)
  })
})

/** A store as the first version made it, with two marks. */
function makeSchema1(path: string, clean: number): void {
  mkdirSync(dirname(path), { recursive: true })
  const db = new Database(path)
  db.exec(`
    BEGIN;
    CREATE TABLE marks (
      scope TEXT NOT NULL PRIMARY KEY,
      generation INTEGER NOT NULL,
      number INTEGER NOT NULL,
      raised_at INTEGER NOT NULL,
      overlapping INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE run (clean INTEGER NOT NULL, complete INTEGER NOT NULL, probes INTEGER NOT NULL) STRICT;
    INSERT INTO run (clean, complete, probes) VALUES (${clean}, 1, 0);
    INSERT INTO marks VALUES ('/a', 0, 41, 17, 0), ('/b', 3, 7, 18, 1);
    PRAGMA application_id = 1717923427;
    PRAGMA user_version = 1;
    COMMIT;
    PRAGMA journal_mode = WAL;
  `)
  db.close()
}
