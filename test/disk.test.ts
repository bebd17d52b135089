import assert from 'node:assert/strict'
import { mkdirSync } from 'node:fs'
import path from 'node:path'
import { after, describe, test, type TestContext } from 'node:test'
import type { FileSettings } from '../src/config.ts'
import { createFaultyDisk, noFaultyDisk, type DiskFault } from './faults/disk.ts'
import {
  problem,
  readMetric,
  request,
  startBackend,
  temporaryFolder,
  until,
  write,
  type Answer,
} from './harness.ts'
import { startProgram, type Started } from './program.ts'

/** The real program, its store on a disk that fails on command. Each test has a disk of its own. */

const at = (job: number) => ({ path: `/jobs/${job}/state` })

function setUp() {
  const disk = createFaultyDisk('faulty')
  after(() => disk.remove())
  const open = async (t: TestContext, fence?: FileSettings['fence']) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const store = { path: path.join(folder, 'faulty', 'fence.db') }
    mkdirSync(path.dirname(store.path))
    const settings = { store, ...(fence === undefined ? {} : { fence }) }
    const start = () => startProgram(t, backend.url, { folder, settings, env: disk.env })
    const forwarded = () => backend.seen.map(({ headers }) => headers['fencing-token'])
    return { forwarded, start }
  }
  return { disk, open }
}

function assertUnavailable(answer: Answer): void {
  assert.equal(answer.status, 503)
  assert.equal(answer.headers['fencing-result'], 'unavailable')
  assert.match(String(answer.headers['retry-after']), /^\d+$/)
}

function assertStale(answer: Answer, highest: string): void {
  assert.equal(answer.headers['fencing-result'], 'stale')
  assert.equal(problem(answer)['highest'], highest)
}

const ready = async ({ adminPort }: Started) =>
  (await request(adminPort, { path: '/readyz' })).status

describe('a faulty disk', { skip: noFaultyDisk, concurrency: 2 }, () => {
  const faults: [DiskFault & string, RegExp][] = [
    ['enospc-write', /is full; free some space/],
    ['eio-fsync', /failed; look at the disk/],
  ]
  for (const [fault, words] of faults) {
    test(`${fault}: what needs a commit is refused and not forwarded, owners go on; once it is over, all goes on without a restart`, async (t) => {
      const { disk, open } = setUp()
      const { forwarded, start } = await open(t)
      const before = await start()
      await write(before.port, 41, at(17))
      await write(before.port, 41, at(18))
      before.child.kill('SIGTERM')
      await before.ended

      const program = await start()
      await write(program.port, 41, at(17))
      const warm = forwarded().length
      disk.fail(fault)
      for (let i = 0; i < 3; i++) assertUnavailable(await write(program.port, 42, at(17)))
      assertUnavailable(await write(program.port, 1, at(19)))
      assert.equal(forwarded().length, warm, 'nothing was forwarded')
      if (fault === 'eio-fsync') {
        // 42 may be in the file, and a crash would bring it back: nobody is let into its scope.
        for (const token of [40, 41]) assertUnavailable(await write(program.port, token, at(17)))
      } else {
        assert.equal((await write(program.port, 41, at(17))).headers['fencing-result'], 'accepted')
        assertStale(await write(program.port, 40, at(17)), '41')
      }
      // Not asked for yet in this run: its mark is on disk only.
      assertStale(await write(program.port, 40, at(18)), '41')
      assert.equal((await write(program.port, 41, at(18))).headers['fencing-result'], 'accepted')
      assert.equal((await request(program.port, { path: '/jobs/17/state' })).status, 200)
      assert.equal(await ready(program), 503)
      assert.equal((await request(program.adminPort, { path: '/healthz' })).status, 200)
      assert.ok((await readMetric(program.adminPort, 'fencing_store_errors_total')) > 0)
      assert.match(JSON.stringify(program.events('store_error')[0]?.['err']), words)

      disk.heal()
      assert.equal((await write(program.port, 41, at(17))).headers['fencing-result'], 'accepted')
      assert.equal(await ready(program), 200)
      assert.equal((await write(program.port, 42, at(17))).headers['fencing-result'], 'accepted')
      assert.equal((await write(program.port, 1, at(19))).headers['fencing-result'], 'accepted')
      assertStale(await write(program.port, 41, at(17)), '42')
      await program.kill()

      const next = await start()
      assertStale(await write(next.port, 41, at(17)), '42')
      assertStale(await write(next.port, 0, at(19)), '1')
    })
  }

  test('a stop that cannot be recorded says so in words, with exit code 1; the next start is unclean', async (t) => {
    const { disk, open } = setUp()
    const { start } = await open(t)
    const program = await start()
    await write(program.port, 41)
    disk.fail('enospc-write')
    program.child.kill('SIGTERM')
    assert.deepEqual(await program.ended, { code: 1, signal: null })
    assert.match(
      program.stderr,
      /^fencing-proxy: [^\n]*the disk of the store[^\n]* is full[^\n]*\n$/,
    )
    assert.doesNotMatch(program.stderr, /unforeseen/)
    assert.equal(program.events('stopped')[0]?.['clean'], false)
    disk.heal()
    const next = await start()
    assert.equal(next.events('unclean_start').length, 1)
  })

  test('a slow fsync holds up the takeover and its scope alone: reads and other owners pass', async (t) => {
    const { disk, open } = setUp()
    const { forwarded, start } = await open(t)
    const program = await start()
    await write(program.port, 41, at(17))
    await write(program.port, 41, at(18))
    disk.fail({ slowFsyncMs: 2_500 })
    let taken = false
    const takeover = write(program.port, 42, at(17)).finally(() => (taken = true))
    const waiting = (count: number) => async () =>
      (await readMetric(program.adminPort, 'fencing_waiting')) === count
    await until(waiting(1))
    // These may be older than a mark that is not on disk yet: they wait for it.
    const older = write(program.port, 41, at(17))
    await until(waiting(2))
    assert.equal((await request(program.port, { path: '/jobs/17/state' })).status, 200)
    assert.equal((await write(program.port, 41, at(18))).status, 200)
    assertStale(await write(program.port, 40, at(18)), '41')
    assert.equal(taken, false)
    assert.deepEqual(forwarded(), ['41', '41', undefined, '41'], 'nothing of 42 yet')
    assert.equal((await takeover).headers['fencing-result'], 'accepted')
    assertStale(await older, '42')
  })

  test('takeoverTimeout bounds the wait for the disk; the mark may have risen all the same', async (t) => {
    const { disk, open } = setUp()
    const { forwarded, start } = await open(t, { takeoverTimeout: '300ms' })
    const program = await start()
    await write(program.port, 41)
    disk.fail({ slowFsyncMs: 2_500 })
    const since = performance.now()
    assertUnavailable(await write(program.port, 42))
    const waited = performance.now() - since
    assert.ok(waited >= 295 && waited < 2_500, `${waited} ms`)
    disk.heal()
    const mark = async () => {
      const { body } = await request(program.adminPort, { path: '/scopes/jobs/17' })
      return (JSON.parse(body) as { mark: string }).mark
    }
    await until(async () => (await mark()) === '42')
    assertStale(await write(program.port, 41), '42')
    assert.deepEqual(forwarded(), ['41'], 'the write that was refused is not sent later')
    assert.equal((await write(program.port, 42)).headers['fencing-result'], 'accepted')
  })

  test('killed while a commit is on its way: the write was neither answered nor forwarded', async (t) => {
    const { disk, open } = setUp()
    const { forwarded, start } = await open(t)
    const program = await start()
    await write(program.port, 41)
    disk.fail({ slowFsyncMs: 1_500 })
    const lost = assert.rejects(write(program.port, 42))
    await until(async () => (await readMetric(program.adminPort, 'fencing_waiting')) === 1)
    await program.kill()
    await lost
    disk.heal()
    assert.deepEqual(forwarded(), ['41'])
    const next = await start()
    const { status } = await write(next.port, 41)
    assert.ok(status === 200 || status === 409, 'either mark is right, for nobody was told')
    assert.equal((await write(next.port, 43)).headers['fencing-result'], 'accepted')
  })
})
