import assert from 'node:assert/strict'
import { execFileSync, spawn, type ChildProcessByStdio } from 'node:child_process'
import { once } from 'node:events'
import { chmodSync, chownSync, mkdirSync, readFileSync, readdirSync } from 'node:fs'
import path from 'node:path'
import { createInterface } from 'node:readline'
import type { Readable } from 'node:stream'
import { test, type TestContext } from 'node:test'
import { CACHE } from '../deploy/tools.ts'
import { freePort } from '../free-port.ts'
import { portOf, startBackend, temporaryFolder, until, write } from '../harness.ts'

/**
 * The Dockerfile built by a real builder, and its image run: its own root file system, read-only, as
 * its own user without capabilities, with a volume where it says that one belongs.
 *
 * The bases are made on this machine of Debian's packages and of Node.js as npm has it, since no
 * registry of images is needed then. They are not the official ones, and their sizes differ.
 */

const FOLDER = path.join(CACHE, 'image')
const IMAGE = 'localhost/fencing-proxy:test'
const STORAGE = ['--storage-driver', 'vfs', '--root', `${FOLDER}/storage`, '--runroot', `${FOLDER}/run`] // prettier-ignore

interface Config {
  readonly User: string
  readonly Env: string[]
  readonly Entrypoint: string[]
  readonly Cmd: string[]
  readonly WorkingDir: string
  readonly Volumes: Record<string, unknown>
  readonly Healthcheck: { readonly Test: string[] }
}

function buildah(...args: string[]): string {
  return execFileSync('buildah', [...STORAGE, ...args]).toString()
}

interface Running {
  readonly child: ChildProcessByStdio<null, Readable, Readable>
  readonly log: Record<string, unknown>[]
  stderr: string
  port(): number
  stop(): Promise<number | null>
}

interface Image {
  readonly root: string
  readonly config: Config
}

/** Runs a command of the image as its user. `volume` is the only place that it can write to. */
function launch(
  t: TestContext,
  { root, config }: Image,
  volume: string,
  command: readonly string[],
  env: Record<string, string> = {},
): Running {
  const [uid = '', gid = ''] = config.User.split(':')
  const [data = ''] = Object.keys(config.Volumes)
  const variables = [...config.Env, ...Object.entries(env).map(([name, value]) => `${name}=${value}`)] // prettier-ignore
  const mounts = [
    'mount --make-rprivate /',
    'mount --bind "$1" "$1"',
    'mount -o remount,bind,ro "$1"',
    'mount --bind "$2" "$1$3"',
    'mount -t proc proc "$1/proc"',
    // What every runtime gives.
    'mount -t tmpfs -o size=64k dev "$1/dev"',
    'for one in null zero random urandom; do touch "$1/dev/$one"; mount --bind "/dev/$one" "$1/dev/$one"; done',
    'root=$1; shift 3',
    'exec chroot "$root" setpriv "$@"',
  ]
  const child = spawn(
    'unshare',
    [
      ...['--mount', 'sh', '-ec', mounts.join('\n'), 'sh', root, volume, data],
      ...[`--reuid=${uid}`, `--regid=${gid}`, '--clear-groups', '--no-new-privs'],
      ...['--bounding-set=-all', '--inh-caps=-all', '--ambient-caps=-all'],
      ...['env', '-i', '-C', config.WorkingDir, ...variables],
      ...command,
    ],
    { stdio: ['ignore', 'pipe', 'pipe'] },
  )
  const closed = once(child, 'close') as Promise<[number | null]>
  const running: Running = {
    child,
    log: [],
    stderr: '',
    port: () => portOf(String(running.log.find(({ event }) => event === 'started')?.['data'])),
    async stop() {
      child.kill('SIGTERM')
      const [code] = await closed
      return code
    },
  }
  child.stderr.on('data', (chunk: Buffer) => (running.stderr += chunk.toString()))
  createInterface(child.stdout).on('line', (line) => running.log.push(JSON.parse(line) as Record<string, unknown>)) // prettier-ignore
  t.after(async () => {
    child.kill('SIGKILL')
    await closed
  })
  return running
}

test('the image', { timeout: 1_800_000 }, async (t) => {
  assert.equal(process.getuid?.(), 0, 'building and running an image needs root here')
  const built = execFileSync('bash', ['test/image/build.sh', FOLDER, IMAGE], {
    stdio: ['ignore', 'pipe', 'inherit'],
    maxBuffer: 64 * 1024 * 1024,
  })
  const { Docker } = JSON.parse(built.toString()) as { Docker: { config: Config } }
  const container = buildah('from', '--pull-never', IMAGE).trim()
  t.after(() => buildah('rm', container))
  const root = buildah('mount', container).trim()
  const image: Image = { root, config: Docker.config }
  const serve = [...image.config.Entrypoint, ...image.config.Cmd]

  const size = (folder: string) => Number(execFileSync('du', ['-sb', folder]).toString().split('\t')[0]) / 1e6 // prettier-ignore
  const sizes = { image: size(root), node: size(`${root}/usr/local`), product: size(`${root}/app`) }
  const rounded = Object.entries(sizes).map(([what, megabytes]) => `${what} ${megabytes.toFixed(1)} MB`) // prettier-ignore
  t.diagnostic(`unpacked: ${rounded.join(', ')}`)

  await t.test('holds what runs, and not what it was made of', () => {
    assert.deepEqual(readdirSync(`${root}/app`).sort(), ['LICENSE', 'config', 'dist', 'node_modules', 'package.json']) // prettier-ignore
    const modules = readdirSync(`${root}/app/node_modules`)
    assert.ok(modules.includes('undici'))
    assert.ok(!modules.includes('typescript') && !modules.includes('eslint'))
    assert.deepEqual(readdirSync(`${root}/usr/local/bin`), ['node'])
    assert.ok(sizes.product < 40, `the product is ${sizes.product} MB`)
  })

  const environment = (url: string, adminPort: number) => ({
    FENCING_PROXY_UPSTREAM_URL: url,
    FENCING_PROXY_SCOPE: '/jobs/{job}/**',
    FENCING_PROXY_LISTEN: '127.0.0.1:0',
    FENCING_PROXY_ADMIN: `127.0.0.1:${adminPort}`,
  })
  const volumeOf = async (sub: TestContext) => {
    const volume = path.join(await temporaryFolder(sub), 'volume')
    mkdirSync(volume, { mode: 0o700 })
    chownSync(volume, 65532, 65532)
    return volume
  }
  const started = async (program: Running) => {
    await until(() => {
      assert.equal(program.child.exitCode, null, program.stderr)
      return program.log.some(({ event }) => event === 'started')
    }, 'it starts')
  }

  await t.test(
    'fences writes, ends on SIGTERM, and knows its marks when it starts again',
    async (sub) => {
      const backend = await startBackend(sub)
      const volume = await volumeOf(sub)
      const env = environment(backend.url, await freePort())
      const first = launch(sub, image, volume, serve, env)
      await started(first)
      assert.equal((await write(first.port(), 42)).headers['fencing-result'], 'accepted')
      assert.equal((await write(first.port(), 41)).status, 409)

      const status = readFileSync(`/proc/${first.child.pid}/status`, 'utf8')
      assert.match(status, /^Uid:\t65532\t65532\t65532\t65532$/m)
      assert.match(status, /^Gid:\t65532\t65532\t65532\t65532$/m)
      assert.match(status, /^CapEff:\t0000000000000000$/m)
      assert.match(status, /^CapBnd:\t0000000000000000$/m)
      const mounts = readFileSync(`/proc/${first.child.pid}/mountinfo`, 'utf8').split('\n')
      assert.match(mounts.find((line) => line.split(' ')[4] === '/') ?? '', / \/ ro[, ]/)

      const check = image.config.Healthcheck.Test
      assert.equal(check[0], 'CMD')
      const health = launch(sub, image, volume, check.slice(1), env)
      assert.deepEqual(await once(health.child, 'exit'), [0, null], health.stderr)

      assert.equal(await first.stop(), 0)
      const again = launch(sub, image, volume, serve, env)
      await started(again)
      assert.ok(!again.log.some(({ event }) => event === 'unclean_start'), 'the stop was clean')
      assert.equal((await write(again.port(), 41)).status, 409)
      assert.equal((await write(again.port(), 43)).headers['fencing-result'], 'accepted')
      assert.deepEqual(backend.seen.map(({ headers }) => headers['fencing-token']), ['42', '43']) // prettier-ignore
      assert.equal(await again.stop(), 0)
    },
  )

  await t.test('does not start where it cannot keep marks', async (sub) => {
    const volume = await volumeOf(sub)
    chownSync(volume, 0, 0)
    chmodSync(volume, 0o755)
    const program = launch(sub, image, volume, serve, environment('http://127.0.0.1:1', await freePort())) // prettier-ignore
    assert.deepEqual(await once(program.child, 'close'), [1, null])
    assert.match(program.stderr, /\/var\/lib\/fencing-proxy/)
  })

  await t.test('is the injector’s image, too', async (sub) => {
    const program = launch(sub, image, await volumeOf(sub), [...image.config.Entrypoint, 'inject', 'check', '-f', '/app/config/full.yaml']) // prettier-ignore
    const [code] = (await once(program.child, 'close')) as [number]
    assert.equal(code, 2)
    assert.match(program.stderr, /no object of Kubernetes/)
  })
})
