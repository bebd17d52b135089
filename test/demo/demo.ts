/**
 * `npm run demo`: one story, told with a real API, real workers that are really paused, and the
 * real sidecar. What is printed is drawn from what happened; where that is not what the demo
 * claims, it says so and exits with 1.
 */
import { setTimeout as delay } from 'node:timers/promises'
import type { Happening, Told, WorkerName } from './happening.ts'
import { fromWallClock, now } from './happening.ts'
import { startLeaseSource } from './lease-source.ts'
import { startLegacyApi, type LegacyApi } from './legacy-api.ts'
import { startNaiveProxy } from './naive-proxy.ts'
import {
  claim,
  Disproved,
  startSidecar,
  startWorker,
  until,
  type LogLine,
  type Sidecar,
  type Worker,
} from './processes.ts'
import { drawTimeline, painter } from './timeline.ts'

const paint = painter(process.stdout.isTTY && process.env['NO_COLOR'] === undefined)

const INTRODUCTION = `
Two workers share job 17. A lease says whose it is: each lease has a number, higher than the last,
and runs out when its holder does not renew it. Worker A is paused (a frozen machine, a long garbage
collection), its lease runs out, worker B gets the next one. Then A wakes, and knows nothing of it.
Job 17 belongs to B from then on: at the end of each act, the API should hold B's result.`

/** Each act begins with a world of its own. */
interface Stage {
  readonly api: LegacyApi
  readonly tell: (told: Told, at?: number) => void
  /** Starts a worker that writes to `target`; resolves when it has its lease. */
  readonly enter: (name: WorkerName, target: string) => Promise<Worker>
}

interface Act {
  readonly title: string
  /** What stands between the workers. */
  readonly middle: string
  readonly play: (stage: Stage) => Promise<void>
  /** What the API is expected to have done, in order, and what A is expected to be told. */
  readonly course: readonly string[]
  readonly toldA: string
  /** Why it came out so. */
  readonly why: string
}

const ACTS: readonly Act[] = [
  {
    title: 'ACT 1. Without the sidecar: both write straight to the API',
    middle: 'the API',
    play: (stage) => wakeAndWrite(stage, stage.api.url),
    course: [
      "receives B's result",
      "stores B's result",
      "receives A's result",
      "stores A's result",
    ],
    toldA: '200',
    why: "Nothing could tell the API that A's lease was over.",
  },
  {
    title: 'ACT 2. The same story, with the sidecar in front of the API',
    middle: 'the sidecar, and the API behind it',
    play: (stage) =>
      withSidecar(stage, async (sidecar) => {
        await wakeAndWrite(stage, sidecar.url, async () => {
          const { mark, raisedAt } = await sidecar.job()
          claim(mark === '42', `the sidecar was to record 42, not ${String(mark)}`)
          stage.tell({ kind: 'marked', mark }, fromWallClock(raisedAt))
        })
        await until(
          () => sidecar.log.some(({ event, token }) => event === 'stale_write' && token === '41'),
          'the sidecar was to log a stale write of 41',
        )
      }),
    course: ["receives B's result", "stores B's result"],
    toldA: '409 stale',
    why: "A's write never reached the API, and A knows now that it lost the lease.",
  },
  {
    title:
      "ACT 3. Harder: A's write is already on its way when B takes over.\n" +
      '       First with a proxy that checks each number and then forwards',
    middle: 'a naive proxy, and the API behind it',
    async play(stage) {
      const proxy = await startNaiveProxy(stage.api.url, stage.tell)
      await overtakeOnTheWay(stage, proxy.url, (b) => b.ended())
      proxy.close()
    },
    course: [
      "receives A's result",
      "receives B's result",
      "stores B's result",
      "stores A's result",
    ],
    toldA: '200',
    why: '41 was the highest number when it was checked, and no longer when its write was stored.',
  },
  {
    title: 'ACT 3, again, with the sidecar: B has to wait for what is on its way',
    middle: 'the sidecar, and the API behind it',
    play: (stage) =>
      withSidecar(stage, (sidecar) =>
        overtakeOnTheWay(stage, sidecar.url, async () => {
          await until(
            () => sidecar.log.some(({ event }) => event === 'takeover'),
            'the sidecar was to log a takeover',
          )
          await until(async () => {
            const { inFlight, waiting } = await sidecar.job()
            return inFlight === 1 && waiting === 1
          }, "the sidecar was to let B's write wait while A's was in flight")
          stage.tell({ kind: 'waiting' })
          // Part of the story: the API stays slow for a moment in which B's write could reach it.
          await delay(300)
        }),
      ),
    course: [
      "receives A's result",
      "stores A's result",
      "receives B's result",
      "stores B's result",
    ],
    toldA: '200 accepted',
    why: "A's write had ended before B's was sent: both were told the truth, and the newer one stands.",
  },
]

/** Acts 1 and 2: A is paused just before it writes. */
async function wakeAndWrite(
  { enter }: Stage,
  target: string,
  beforeAWakes: () => Promise<void> = () => Promise.resolve(),
): Promise<void> {
  const a = await enter('A', target)
  await a.pause()
  a.finishWork()
  const b = await enter('B', target)
  b.finishWork()
  await b.ended()
  await beforeAWakes()
  a.resume()
  await a.ended()
}

/** Act 3: A has sent its write, and the API is slow to store it until `meanwhile` is over. */
async function overtakeOnTheWay(
  { enter, api }: Stage,
  target: string,
  meanwhile: (b: Worker) => Promise<void>,
): Promise<void> {
  const store = api.slowDown()
  const a = await enter('A', target)
  a.finishWork()
  await until(() => api.history.length === 1, "the API was to receive A's write")
  await a.pause()
  const b = await enter('B', target)
  b.finishWork()
  await meanwhile(b)
  store()
  await until(() => api.history.length === 4, 'the API was to store both writes')
  await b.ended()
  a.resume()
  await a.ended()
}

async function withSidecar(stage: Stage, play: (sidecar: Sidecar) => Promise<void>): Promise<void> {
  const sidecar = await startSidecar(stage.api.url, ({ event, time, from, to }: LogLine) => {
    if (event !== 'takeover') return
    stage.tell({ kind: 'takeover', from: String(from), to: String(to) }, fromWallClock(time))
  })
  await play(sidecar)
  await sidecar.stop()
}

async function perform({ title, middle, play, course, toldA, why }: Act): Promise<void> {
  print('', paint('bold', title), '')
  const happenings: Happening[] = []
  const tell = (told: Told, at = now()) => void happenings.push({ ...told, at })
  const api = await startLegacyApi(tell)
  const leases = await startLeaseSource(tell)
  try {
    await play({
      api,
      tell,
      async enter(name, target) {
        const urls = { leases: leases.url, target }
        const worker = startWorker(name, urls, (happening) => happenings.push(happening), tell)
        await until(
          () => happenings.some((it) => it.kind === 'leased' && it.worker === name),
          `worker ${name} was to get its lease`,
        )
        return worker
      },
    })
  } finally {
    print(...drawTimeline(happenings, middle, paint))
  }
  const held = await (await fetch(`${api.url}/jobs/17/result`)).text()
  print('', verdict(held))
  claim(held === course.at(-1)?.replace('stores ', ''), `the API holds ${held || 'nothing'}`)
  claim(
    api.history.join() === course.join(),
    `the API was to do this: ${course.join(', ')}; it did this: ${api.history.join(', ')}`,
  )
  const a = answerTo('A', happenings)
  claim(a === toldA, `worker A was to be told "${toldA}", and was told "${a}"`)
  const b = answerTo('B', happenings)
  claim(b.startsWith('200'), `worker B was to be told 200, and was told "${b}"`)
  print(`  ${why}`)
  leases.close()
  api.close()
}

/** Status and `Fencing-Result` of the answer that a worker got. */
function answerTo(worker: WorkerName, happenings: readonly Happening[]): string {
  const answers = happenings.filter((happening) => happening.kind === 'answered')
  const { status, result } = answers.find((answer) => answer.worker === worker) ?? {}
  return [status, result].filter((word) => word !== undefined).join(' ')
}

function verdict(held: string): string {
  return held === "B's result"
    ? paint('green', "✓ RIGHT: the API holds B's result, and the job is B's.")
    : paint('red', `✗ WRONG: the API holds ${held || 'nothing'}, but the job is B's.`)
}

function print(...lines: readonly string[]): void {
  process.stdout.write(`${lines.join('\n')}\n`)
}

/** Resolves with the exit code. */
async function playAll(): Promise<number> {
  print(INTRODUCTION.trimStart())
  try {
    for (const act of ACTS) await perform(act)
  } catch (error) {
    if (!(error instanceof Disproved)) throw error
    process.stderr.write(`\nThe demo did not show what it claims: ${error.message}.\n`)
    return 1
  }
  print(
    '',
    'Try it in front of your own API, here on port 9000:',
    "  npm start -- --upstream http://127.0.0.1:9000 --scope '/jobs/{job}/**'",
  )
  return 0
}

/** Resolves with the exit code by which shells know a signal. */
function interrupted(): Promise<number> {
  return new Promise((resolve) => {
    process.once('SIGHUP', () => resolve(129))
    process.once('SIGINT', () => resolve(130))
    process.once('SIGTERM', () => resolve(143))
  })
}

// A reader that has gone (`| head`) wants no more.
process.stdout.on('error', () => process.exit(1))
process.exit(await Promise.race([playAll(), interrupted()]))
