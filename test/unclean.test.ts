import assert from 'node:assert/strict'
import type { ServerResponse } from 'node:http'
import { describe, test, type TestContext } from 'node:test'
import {
  problem,
  readMetric,
  request,
  startBackend,
  temporaryFolder,
  until,
  write,
  type Seen,
} from './harness.ts'
import { startProgram, type Started } from './program.ts'

/**
 * A process that was killed leaves writes behind of which nobody knows. What the next one may send,
 * and when, is measured at a backend that outlives both.
 */

/** Where something has to happen before it has passed: long enough for a busy machine. */
const LONG_MS = 4_000
const SHORT_MS = 1_000

interface Begun {
  readonly token: string
  readonly path: string
  /** Wall clock, in ms, to be compared with the times in the log. */
  readonly at: number
}

/** A backend that never answers `/held` of its own accord, and notes what began to arrive, and when. */
async function outlivingBackend(t: TestContext) {
  const held: ServerResponse[] = []
  const begun: Begun[] = []
  const onHead = ({ headers, url }: Seen) =>
    begun.push({ token: String(headers['fencing-token']), path: url, at: Date.now() })
  const answer = ({ url, res }: Seen) => {
    if (url.endsWith('/held')) held.push(res)
    else res.end('done')
  }
  const backend = await startBackend(t, answer, { onHead })
  const folder = await temporaryFolder(t)
  const start = (settleMs = SHORT_MS) => {
    const settings = { fence: { settle: `${settleMs}ms` } }
    return startProgram(t, backend.url, { folder, settings })
  }
  return { held, begun, start }
}

const held = (job: number) => ({ path: `/jobs/${job}/held` })
const at = (job: number) => ({ path: `/jobs/${job}/state` })

/** When the program knew that it has to let settle what its predecessor left. */
function uncleanSince(program: Started): number {
  const [unclean] = program.events('unclean_start')
  assert.ok(unclean !== undefined, 'it knows that the last run did not stop cleanly')
  return Date.parse(String(unclean['time']))
}

const isSettling = async (program: Started) => (await program.scopes()).settlingMs > 0

/** A write of `token` is let through while what was left behind still settles. */
async function passesAtOnce(program: Started, job: number, token: number): Promise<void> {
  const answer = await write(program.port, token, at(job))
  assert.equal(answer.headers['fencing-result'], 'accepted')
  assert.ok(await isSettling(program), 'it did not wait until all had settled')
}

/** A write of `token` is held back, and begins at the backend only when all has settled. */
async function passesSettled(
  program: Started,
  begun: readonly Begun[],
  job: number,
  token: number,
  settleMs: number,
): Promise<void> {
  const before = begun.length
  const answer = await write(program.port, token, at(job))
  assert.equal(answer.headers['fencing-result'], 'accepted')
  const mine = begun.slice(before).find(({ path }) => path === at(job).path)
  assert.ok(mine !== undefined)
  const waited = mine.at - uncleanSince(program)
  assert.ok(waited >= settleMs - 1, `it began after ${waited} ms`)
}

describe('after kill -9', { concurrency: 2 }, () => {
  test('a takeover waits until what was in flight has settled; the same token, and the first of a scope, pass at once', async (t) => {
    const { begun, start } = await outlivingBackend(t)
    const first = await start()
    const lost = assert.rejects(write(first.port, 41, held(17)))
    await write(first.port, 41, at(18))
    await write(first.port, 41, at(19))
    await until(() => begun.length === 3)
    await first.kill()
    await lost

    const second = await start(LONG_MS)
    await Promise.all([
      passesAtOnce(second, 17, 41),
      passesAtOnce(second, 18, 41),
      passesAtOnce(second, 20, 1),
      // Also where nothing was in flight: nobody knows.
      passesSettled(second, begun, 19, 42, LONG_MS),
    ])
    assert.equal((await write(second.port, 42, at(17))).status, 200, 'later ones need not wait')
    assert.equal((await write(second.port, 41, at(17))).status, 409)
  })

  test('a token that was waiting behind an older write is kept from passing at once, although it is the mark', async (t) => {
    const { begun, start } = await outlivingBackend(t)
    const first = await start()
    const lost = [assert.rejects(write(first.port, 41, held(17)))]
    await until(() => begun.length === 1)
    lost.push(assert.rejects(write(first.port, 42, at(17))))
    await until(async () => (await readMetric(first.adminPort, 'fencing_takeovers_total')) === 1)
    assert.equal(begun.length, 1, '42 waits for the end of 41')
    await first.kill()
    await Promise.all(lost)

    // 41 may still land for as long as it settles; a crash meanwhile begins that anew.
    const second = await start(60_000)
    const waiting = assert.rejects(write(second.port, 42, at(17)))
    await until(async () => (await readMetric(second.adminPort, 'fencing_waiting')) === 1)
    const stale = await write(second.port, 41, at(17))
    assert.equal(stale.headers['fencing-result'], 'stale')
    assert.equal(problem(stale)['highest'], '42')
    await second.kill()
    await waiting

    const third = await start()
    await passesSettled(third, begun, 17, 42, SHORT_MS)
    assert.deepEqual(
      begun.map(({ token }) => token),
      ['41', '42'],
    )
  })

  test('a clean stop while it settles waits for that; then nothing settles any more', async (t) => {
    const { begun, start } = await outlivingBackend(t)
    const first = await start()
    const lost = assert.rejects(write(first.port, 41, held(17)))
    await until(() => begun.length === 1)
    await first.kill()
    await lost

    const second = await start()
    const since = uncleanSince(second)
    second.child.kill('SIGTERM')
    assert.deepEqual(await second.ended, { code: 0, signal: null })
    const stopped = Date.parse(String(second.events('stopped')[0]?.['time']))
    assert.ok(stopped - since >= SHORT_MS - 1, `stopped after ${stopped - since} ms`)

    const third = await start()
    assert.deepEqual(third.events('unclean_start'), [])
    assert.equal(await isSettling(third), false)
    assert.equal((await write(third.port, 42, at(17))).status, 200)
    assert.equal(await readMetric(third.adminPort, 'fencing_barrier_wait_seconds_count'), 0)
  })
})

test('every mark that an answer named is there after kill -9 in the middle of takeovers', async (t) => {
  const SCOPES = 20
  const backend = await startBackend(t)
  const folder = await temporaryFolder(t)
  const start = () =>
    startProgram(t, backend.url, { folder, settings: { fence: { settle: '0ms' } } })
  const acknowledged = new Map<number, bigint>()
  let token = 0n
  for (let round = 0; round < 4; round++) {
    const program = await start()
    for (const [job, mark] of acknowledged) {
      const { body } = await request(program.adminPort, { path: `/scopes/jobs/${job}` })
      const found = BigInt((JSON.parse(body) as { mark: string }).mark)
      assert.ok(found >= mark, `/jobs/${job} was at ${mark} and is at ${found}`)
    }
    let answers = 0
    let alive = true
    const hammer = async (job: number) => {
      while (alive) {
        const mine = ++token
        // The connection breaks when the process is killed.
        const answer = await write(program.port, mine, at(job)).catch(() => undefined)
        if (answer === undefined) return
        assert.ok(answer.status === 200 || answer.status === 409)
        const named = answer.status === 200 ? mine : BigInt(String(problem(answer)['highest']))
        if (named > (acknowledged.get(job) ?? 0n)) acknowledged.set(job, named)
        answers++
      }
    }
    const hammers = Array.from({ length: 2 * SCOPES }, (_, i) => hammer(i % SCOPES))
    await until(() => answers > 150 + 37 * round)
    await program.kill()
    alive = false
    await Promise.all(hammers)
    assert.equal(acknowledged.size, SCOPES)
  }
})

test('a process that is paused in the middle of traffic admits nothing meanwhile, and goes on in order', async (t) => {
  const { begun, held: answers, start } = await outlivingBackend(t)
  const program = await start()
  const old = write(program.port, 41, held(17))
  await until(() => begun.length === 1)
  program.child.kill('SIGSTOP')
  const during = [
    write(program.port, 42, at(17)),
    write(program.port, 41, at(17)),
    write(program.port, 7, at(18)),
    write(program.port, 8, at(18)),
  ]
  answers[0]?.end('done at last')
  // As long as a takeover would have taken many times over.
  await new Promise((resolve) => setTimeout(resolve, 500))
  assert.equal(begun.length, 1, 'nothing is sent while it is paused')
  program.child.kill('SIGCONT')
  const results = (await Promise.all(during)).map(({ headers }) => headers['fencing-result'])
  assert.equal((await old).body, 'done at last')
  assert.deepEqual([results[0], results[3]], ['accepted', 'accepted'])
  for (const job of [17, 18]) {
    const tokens = begun
      .filter(({ path }) => path.startsWith(`/jobs/${job}/`))
      .map(({ token }) => Number(token))
    assert.deepEqual(
      tokens,
      tokens.toSorted((a, b) => a - b),
      'never backwards',
    )
  }
  assert.equal((await write(program.port, 41, at(17))).status, 409)
  assert.equal(await readMetric(program.adminPort, 'fencing_in_flight'), 0)
})
