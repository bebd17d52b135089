import assert from 'node:assert/strict'
import { execFileSync, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { cp, mkdir, readdir, writeFile } from 'node:fs/promises'
import path from 'node:path'
import { test, type TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'
import { temporaryFolder, until } from './harness.ts'

const DEMO = fileURLToPath(new URL('demo/demo.js', import.meta.url))

/** Runs the demo in a process group of its own, with a folder of its own for temporary files. */
async function startDemo(t: TestContext, script = DEMO) {
  const temporary = await temporaryFolder(t)
  const child = spawn(process.execPath, [script], {
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { PATH: process.env['PATH'], TMPDIR: temporary, FENCING_PROXY_LISTEN: 'mistaken' },
  })
  const group = -(child.pid ?? assert.fail('the demo did not start'))
  // A dead process that nobody has asked about yet (Z) runs no more.
  const running = () => processStates(-group).some((state) => state !== 'Z')
  t.after(() => running() && process.kill(group, 'SIGKILL'))
  let out = ''
  let err = ''
  child.stdout.on('data', (chunk: Buffer) => (out += chunk.toString()))
  child.stderr.on('data', (chunk: Buffer) => (err += chunk.toString()))
  const exited = once(child, 'exit') as Promise<[number | null]>
  // Not before whoever shares the demo's stderr has ended, too.
  const closed = once(child, 'close')
  return {
    child,
    group,
    out: () => out,
    err: () => err,
    temporaryFiles: () => readdir(temporary),
    hasStoppedProcess: () => processStates(-group).includes('T'),
    /** Resolves with the exit code, when nothing that the demo started is left. */
    async ended() {
      const [code] = await exited
      await until(() => !running(), 'every process of the demo has ended', 2_000)
      await closed
      assert.deepEqual(await readdir(temporary), [])
      return code
    },
  }
}

/** The states, as the operating system names them, of the processes in a group. */
function processStates(group: number): string[] {
  return allProcesses()
    .filter(([itsGroup]) => itsGroup === String(group))
    .map(([, state = '']) => state.charAt(0))
}

/** Group and state of every process. Where there is no /proc, there is a ps. */
function allProcesses(): (readonly string[])[] {
  if (!existsSync('/proc/self/stat')) {
    const lines = execFileSync('ps', ['-A', '-o', 'pgid=,state='], { encoding: 'latin1' })
    return lines.split('\n').map((line) => line.trim().split(/ +/))
  }
  return readdirSync('/proc').flatMap((pid) => {
    if (!/^[0-9]+$/.test(pid)) return []
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, 'latin1')
      const [state = '', , group = ''] = stat.slice(stat.lastIndexOf(')') + 2).split(' ')
      return [[group, state]]
    } catch {
      // It ended meanwhile.
      return []
    }
  })
}

/** The lines in which each act says what the API holds. */
function verdicts(output: string): string[] {
  return output.split('\n').filter((line) => /^[✓✗]/.test(line))
}

const OVERWRITTEN = "✗ WRONG: the API holds A's result, but the job is B's."
const STANDS = "✓ RIGHT: the API holds B's result, and the job is B's."

test('the demo shows a stale write with and without the sidecar, in under 20 s, as plain text of at most 100 columns', async (t) => {
  const started = performance.now()
  const demo = await startDemo(t)
  const code = await demo.ended()
  assert.deepEqual([code, demo.err()], [0, ''])
  assert.ok(performance.now() - started < 20_000)
  assert.deepEqual(verdicts(demo.out()), [OVERWRITTEN, STANDS, OVERWRITTEN, STANDS])
  assert.match(demo.out(), /409 stale ◀─+ +sidecar: 41 < 42, not forwarded/)
  assert.match(demo.out(), /B waits.*\n.*API: stores A's result\n.*API: stores B's result\n/)
  assert.match(demo.out(), /npm start -- --upstream \S+ --scope '\/jobs\/\{job\}\/\*\*'\n$/)
  for (const line of demo.out().split('\n')) {
    assert.ok(line.length <= 100 && !line.includes('\x1b'), line)
  }
})

for (const [name, signal, whom, exitCode] of [
  ['Ctrl-C', 'SIGINT', 'group', 130],
  ['a SIGTERM to the demo alone', 'SIGTERM', 'demo', 143],
] as const) {
  test(`${name} ends all that the demo started, a paused worker too`, async (t) => {
    const demo = await startDemo(t)
    await until(
      async () => (await demo.temporaryFiles()).length > 0 && demo.hasStoppedProcess(),
      'the sidecar runs and a worker is paused',
    )
    process.kill(whom === 'group' ? demo.group : -demo.group, signal)
    assert.equal(await demo.ended(), exitCode)
    assert.equal(demo.err(), '')
  })
}

test('a reader that goes away ends the demo without a word', async (t) => {
  const demo = await startDemo(t)
  await until(() => demo.out().includes('ACT 1'), 'the demo has begun')
  demo.child.stdout.destroy()
  assert.deepEqual([await demo.ended(), demo.err()], [1, ''])
})

/** The demo in another place, where `cli` stands in for the sidecar. */
async function demoWith(t: TestContext, cli: string): Promise<string> {
  const folder = await temporaryFolder(t)
  await cp(path.dirname(DEMO), path.join(folder, 'test/demo'), { recursive: true })
  await mkdir(path.join(folder, 'src'))
  await writeFile(path.join(folder, 'package.json'), '{ "type": "module" }')
  await writeFile(path.join(folder, 'src/cli.js'), cli)
  return path.join(folder, 'test/demo/demo.js')
}

test('the demo exits with 1 and says so where the sidecar lets a stale write through', async (t) => {
  const cli = `
    import { createServer, request } from 'node:http'
    const upstream = process.argv[process.argv.indexOf('--upstream') + 1]
    const data = createServer((req, res) => {
      const onward = request(upstream + req.url, { method: req.method }, (answer) => answer.pipe(res))
      req.pipe(onward)
    }).listen(0, '127.0.0.1')
    const admin = createServer((req, res) => res.end('{"mark":"42"}')).listen(0, '127.0.0.1')
    admin.on('listening', () => {
      const at = (server) => '127.0.0.1:' + server.address().port
      console.log(JSON.stringify({ event: 'started', data: at(data), admin: at(admin) }))
      console.log(JSON.stringify({ event: 'stale_write', token: '41' }))
    })
    process.on('SIGTERM', () => process.exit(0))`
  const demo = await startDemo(t, await demoWith(t, cli))
  assert.equal(await demo.ended(), 1)
  assert.deepEqual(verdicts(demo.out()), [OVERWRITTEN, OVERWRITTEN])
  assert.match(demo.err(), /^\nThe demo did not show what it claims: the API holds A's result\.\n$/)
})

test('the demo exits with 1 and says so where the sidecar does not start', async (t) => {
  const demo = await startDemo(t, await demoWith(t, 'process.exit(1)'))
  assert.equal(await demo.ended(), 1)
  assert.match(demo.err(), /did not show what it claims: the sidecar did not start\.\n$/)
})
