import assert from 'node:assert/strict'
import { mkdirSync, readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { after, afterEach, describe, test } from 'node:test'
import { createFaultyDisk, noFaultyDisk, type DiskFault } from '../faults/disk.ts'
import { joinToken } from '../../src/token.ts'
import { storesApart } from './apart.ts'
import { terms, token } from './contract.ts'
import { temporaryFolder } from './folder.ts'

describe('an SQLite store on a faulty disk', { skip: noFaultyDisk }, () => {
  const folder = temporaryFolder()
  const openApart = storesApart()
  const disk = createFaultyDisk('faulty')
  after(() => disk.remove())
  afterEach(() => disk.heal())
  let files = 0
  const newPath = () => join(folder, `${files++}`, 'faulty', 'fence.db')
  const open = (path: string) => openApart(path, { env: disk.env })

  const faults: [Extract<DiskFault, string>, RegExp][] = [
    ['enospc-write', /the disk of the store .* is full; free some space/],
    ['eio-fsync', /the disk of the store .* failed; look at the disk/],
  ]
  for (const [fault, words] of faults) {
    test(`fails closed on ${fault}, in words, and goes on once it is over`, async () => {
      const path = newPath()
      const store = await open(path)
      await store.raise('a', token('5'))
      await store.raise('b', token('5'))

      disk.fail(fault)
      const [rising, first, equal, stale, row] = await Promise.allSettled([
        store.raise('a', token('6')),
        store.raise('new', token('1')),
        store.raise('b', token('5')),
        store.raise('b', token('4')),
        store.read('a'),
      ])
      for (const failed of [rising, first]) {
        assert.equal(failed.status, 'rejected')
        assert.match(String(failed.reason), words)
      }
      for (const unwritten of [equal, stale]) {
        assert.equal(unwritten.status, 'fulfilled', 'what needs no commit is answered')
        assert.equal(unwritten.value.mark, token('5'))
      }
      if (fault === 'eio-fsync') {
        // The mark 6 may be in the file, and a crash would bring it back.
        assert.equal(row.status, 'rejected')
        for (const scope of ['a', 'new']) await assert.rejects(store.read(scope), words)
        await assert.rejects(store.raise('a', token('5')), words)
      } else {
        assert.equal(row.status, 'fulfilled')
        assert.equal(row.value?.mark, token('5'), 'memory and disk agree')
        assert.equal(await store.read('new'), undefined)
      }
      await assert.rejects(store.probe(), words)
      for (let i = 0; i < 20; i++) await assert.rejects(store.raise('a', token('7')), words)
      assert.ok(store.failures.length > 0)

      disk.heal()
      await store.probe()
      const raised = await store.raise('a', token('6'))
      assert.deepEqual(raised, { mark: token('6'), from: token('5'), overlapping: false })
      await store.raise('new', token('2'))
      await store.kill()

      const again = await open(path)
      assert.equal(again.scopes, 3)
      assert.equal((await again.read('a'))?.mark, token('6'))
      assert.equal((await again.read('b'))?.mark, token('5'))
      assert.equal((await again.read('new'))?.mark, token('2'))
      await again.close(true)
    })

    test(`grants and forgets nothing on ${fault}, and goes on once it is over`, async () => {
      const path = newPath()
      const store = await open(path)
      await store.grant('held', terms('one'))
      await store.raise('a', token('5'))

      disk.fail(fault)
      const outcomes = await Promise.allSettled([
        store.grant('held', terms('two')),
        store.grant('new', terms('first')),
        store.forget('held', token('1')),
        store.raise('a', token('6')),
        store.probe(),
      ])
      for (const outcome of outcomes) {
        assert.equal(outcome.status, 'rejected')
        assert.match(String(outcome.reason), words)
      }
      if (fault === 'eio-fsync') await assert.rejects(store.raise('a', token('4')), words)
      else assert.equal((await store.raise('a', token('4'))).mark, token('5'), 'no commit needed')
      assert.deepEqual(
        (await store.leases()).map(({ id }) => id),
        ['one'],
      )

      disk.heal()
      assert.equal((await store.read('held'))?.mark, token('1'), 'memory and disk agree')
      assert.equal((await store.grant('new', terms('again'))).mark, token('1'))
      assert.equal((await store.grant('held', terms('three'))).mark, token('2'))
      await store.forget('held', token('2'))
      await store.kill()
      const after = await open(path)
      assert.deepEqual(
        (await after.leases()).map(({ id }) => id),
        ['again'],
      )
      assert.equal((await after.grant('held', terms('four'))).mark, token('3'))
      await after.close(true)
    })

    test(`a raise refused on ${fault} does not come back with a crash, once the scope was answered again`, async () => {
      const path = newPath()
      const store = await open(path)
      await store.raise('a', token('41'))
      disk.fail(fault)
      await assert.rejects(store.raise('a', token('42')), words)
      disk.heal()
      assert.equal((await store.raise('a', token('41'))).mark, token('41'))
      await store.kill()
      const again = await open(path)
      assert.equal((await again.read('a'))?.mark, token('41'))
      await again.close(true)
    })

    test(`does not open on ${fault}, and leaves no half store`, async () => {
      const path = newPath()
      mkdirSync(dirname(path), { recursive: true })
      disk.fail(fault)
      await assert.rejects(open(path), words)
      assert.deepEqual(readdirSync(dirname(path)), [])
      disk.heal()
      const store = await open(path)
      assert.equal(store.created, true)
      await store.raise('a', token('1'))
      await store.close(true)

      disk.fail(fault)
      await assert.rejects(open(path), words)
      disk.heal()
      const again = await open(path)
      assert.equal(again.stoppedCleanly, true)
      assert.equal((await again.read('a'))?.mark, token('1'))
      await again.close(true)
    })

    test(`closes on ${fault} with an error, and has its marks afterwards`, async () => {
      const path = newPath()
      const store = await open(path)
      await store.raise('a', token('1'))
      disk.fail(fault)
      await assert.rejects(store.close(true), words)
      disk.heal()
      const again = await open(path)
      // What a failed fsync left unsaid may have reached the disk all the same, and is true.
      if (fault === 'enospc-write') assert.equal(again.stoppedCleanly, false)
      assert.equal((await again.read('a'))?.mark, token('1'))
      await again.close(true)
    })
  }

  test('whatever the disk did, no answered mark is lost', async () => {
    const path = newPath()
    const acknowledged = new Map<string, bigint>()
    let store = await open(path)
    for (let round = 1; round <= 8; round++) {
      const fault = faults[round % 2]?.[0] ?? 'eio-fsync'
      const calls = Array.from({ length: 150 }, async (_, i) => {
        const scope = `/jobs/${i % 30}`
        if (i === 50) disk.fail(fault)
        if (i === 100) disk.heal()
        try {
          const { mark } = await store.raise(scope, joinToken(0n, BigInt(round * 1000 + i)))
          acknowledged.set(scope, mark)
        } catch (error) {
          assert.match(String(error), /the disk of the store/)
        }
      })
      await Promise.all(calls)
      disk.heal()
      await store.probe()
      for (const [scope, mark] of acknowledged) {
        assert.equal((await store.read(scope))?.mark, mark)
      }
      await store.kill()
      store = await open(path)
      for (const [scope, mark] of acknowledged) {
        const row = await store.read(scope)
        assert.ok(row !== undefined && row.mark >= mark)
      }
    }
    await store.close(true)
  })

  test('a slow fsync keeps the raise waiting, never the event loop', async () => {
    const store = await open(newPath())
    disk.fail({ slowFsyncMs: 500 })
    const { ticks, ms } = await store.raiseTicking('a', token('1'))
    assert.ok(ms >= 500, `answered after ${ms} ms`)
    assert.ok(ticks >= 20, `${ticks} ticks`)
    disk.heal()
    await store.close(true)
  })

  test('raises that come while the disk is busy share a commit', async () => {
    const store = await open(newPath())
    disk.fail({ slowFsyncMs: 200 })
    const before = store.commits.length
    const first = store.raise('first', token('1'))
    const rest = Array.from({ length: 300 }, (_, i) => store.raise(`/jobs/${i}`, token('1')))
    await Promise.all([first, ...rest])
    disk.heal()
    const commits = store.commits.slice(before)
    assert.equal(
      commits.reduce((a, b) => a + b),
      301,
    )
    assert.ok(commits.length <= 5, `${commits.length} commits`)
    await store.close(true)
  })
})
