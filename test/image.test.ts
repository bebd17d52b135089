import assert from 'node:assert/strict'
import { spawn, spawnSync, type ChildProcessByStdio } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, readFileSync } from 'node:fs'
import { chmod, readdir, stat } from 'node:fs/promises'
import path from 'node:path'
import { createInterface } from 'node:readline'
import type { Readable } from 'node:stream'
import { test, type TestContext } from 'node:test'
import { validate } from 'dockerfile-utils'
import { freePort } from './free-port.ts'
import { portOf, startBackend, temporaryFolder, until, write } from './harness.ts'
import { buildImage, filesBelow, type Image } from './image.ts'

/**
 * The image, acted out without a container engine. `npm ci` compiles SQLite for minutes, so the
 * node_modules of this checkout stand in for what it would install from the same package-lock.json;
 * IMAGE_NPM_CI=true runs it for real. Node.js is the one that runs this test, not the base image's.
 */

const CHECKOUT = process.cwd()
const DATA = '/var/lib/fencing-proxy'
const isRoot = process.getuid?.() === 0
/** Root can give a process a root file system of its own that is read-only, in most places. */
const canMount = isRoot && spawnSync('unshare', ['--mount', 'true']).status === 0

test('the Dockerfile has no mistakes', () => {
  const mistakes = validate(readFileSync('Dockerfile', 'utf8')).map(
    ({ message, range }) => `line ${range.start.line + 1}: ${JSON.stringify(message)}`,
  )
  assert.deepEqual(mistakes, [])
})

/** A command as the user of the image, in its working folder, with a root file system that is read-only. */
function confine(image: Image, command: readonly string[]): readonly string[] {
  if (!isRoot) return command
  const [uid, gid] = image.user.split(':')
  const asUser = ['setpriv', `--reuid=${uid}`, `--regid=${gid}`, '--clear-groups', ...command]
  if (!canMount) return asUser
  const data = path.join(image.root, DATA)
  const mounts = [
    'mount --make-rprivate /',
    'mount --bind "$0" "$0"',
    // Where the tree is on a file system of its own, that one.
    'mount -o remount,bind,ro "$(findmnt -n -o TARGET -T "$1")"',
    'shift',
    'cd "$0"',
    'exec "$@"',
  ]
  return ['unshare', '--mount', 'sh', '-ec', mounts.join('; '), data, image.root, ...asUser]
}

/** An absolute path of the image, as it is here; anything else as it is. */
function inside(image: Image, word: string): string {
  return word.startsWith('/') ? path.join(image.root, word) : word
}

function environment(image: Image, adminPort: number): NodeJS.ProcessEnv {
  return {
    PATH: `${path.dirname(process.execPath)}:${process.env['PATH']}`,
    ...Object.fromEntries(
      Object.entries(image.env).map(([name, value = '']) => [name, inside(image, value)] as const),
    ),
    FENCING_PROXY_ADMIN: `127.0.0.1:${adminPort}`,
  }
}

/** Runs a command as the image would. */
function launch(
  image: Image,
  command: readonly string[],
  env: NodeJS.ProcessEnv,
): ChildProcessByStdio<null, Readable, Readable> {
  const [file = '', ...args] = confine(
    image,
    command.map((word) => inside(image, word)),
  )
  const cwd = path.join(image.root, image.workingFolder)
  return spawn(file, args, { cwd, env, stdio: ['ignore', 'pipe', 'pipe'] })
}

interface Container {
  readonly port: number
  readonly adminPort: number
  /** SIGTERM; resolves to exit code and signal. */
  stop(): Promise<unknown[]>
}

/** As `docker run -e FENCING_PROXY_UPSTREAM_URL=… -e FENCING_PROXY_SCOPE=…` does, on free ports. */
async function start(t: TestContext, image: Image, url: string): Promise<Container> {
  const adminPort = await freePort()
  const child = launch(image, image.command, {
    ...environment(image, adminPort),
    FENCING_PROXY_LISTEN: '127.0.0.1:0',
    FENCING_PROXY_UPSTREAM_URL: url,
    FENCING_PROXY_SCOPE: '/jobs/{job}/**',
  })
  const exited = once(child, 'exit')
  t.after(async () => {
    child.kill('SIGKILL')
    await exited
  })
  let port = 0
  let said = ''
  child.stderr.on('data', (chunk: Buffer) => (said += chunk.toString()))
  createInterface(child.stdout).on('line', (line) => {
    const { event, data } = JSON.parse(line) as Record<string, unknown>
    if (event === 'started') port = portOf(String(data))
  })
  await until(() => {
    assert.equal(child.exitCode, null, said)
    return port > 0
  }, 'the container starts')
  return {
    port,
    adminPort,
    stop() {
      child.kill('SIGTERM')
      return exited
    },
  }
}

/** The exit code of the image's health check. */
async function health(image: Image, adminPort: number): Promise<number | null> {
  const child = launch(image, image.healthcheck, environment(image, adminPort))
  await once(child, 'exit')
  return child.exitCode
}

interface Package {
  readonly dependencies: Record<string, string>
  readonly devDependencies: Record<string, string>
}

test('the image, from a clean copy of the tree', async (t) => {
  const folder = await temporaryFolder(t)
  // The user of the image has to get through.
  await chmod(folder, 0o755)
  const image = await buildImage({
    context: CHECKOUT,
    folder,
    installs: process.env['IMAGE_NPM_CI'] === 'true',
  })
  const app = path.join(image.root, 'app')

  await t.test('its base is slim, and has the fix for CVE-2026-58044', () => {
    const [, major, minor, patch] =
      /^node:(\d+)\.(\d+)\.(\d+)-bookworm-slim$/.exec(image.base) ?? []
    assert.equal(major, '24')
    assert.ok(Number(minor) * 1000 + Number(patch) >= 18_001, image.base)
  })

  await t.test(
    'it holds what runs: no sources, compiler, npm or development dependency',
    async () => {
      const content = ['LICENSE', 'config', 'dist', 'node_modules', 'package.json']
      assert.deepEqual((await readdir(app)).sort(), content)
      const { dependencies, devDependencies } = JSON.parse(
        readFileSync(path.join(app, 'package.json'), 'utf8'),
      ) as Package
      const installed = (name: string) => existsSync(path.join(app, 'node_modules', name))
      assert.deepEqual(
        Object.keys(dependencies).filter((name) => !installed(name)),
        [],
      )
      assert.deepEqual(Object.keys(devDependencies).filter(installed), [])
      const files = await filesBelow(app)
      const compiled = /\.(?:c|cc|cpp|h|hpp|o|a|mk|gypi?|ts\.map)$|^dist\/.*(?<!\.d)\.ts$/
      assert.deepEqual(
        files.filter((file) => compiled.test(file)),
        [],
      )
      assert.deepEqual(
        files.filter((file) => file.endsWith('.node')),
        ['node_modules/better-sqlite3/build/Release/better_sqlite3.node'],
      )
      const local = path.join(image.root, 'usr/local')
      assert.deepEqual(await readdir(path.join(local, 'bin')), ['node'])
      assert.ok(!existsSync(path.join(local, 'lib/node_modules')))
      assert.deepEqual(await readdir(path.join(image.root, 'opt')), [])
    },
  )

  await t.test('it runs as nobody, and only the data folder is its own', async () => {
    assert.equal(image.user, '65532:65532')
    const { mode, uid } = await stat(path.join(image.root, DATA))
    assert.equal(mode & 0o777, 0o700)
    if (!isRoot) return
    assert.equal(uid, 65532)
    for (const place of ['app', 'app/dist', 'app/node_modules', 'usr/local']) {
      const [file = '', ...args] = confine(image, ['touch', path.join(image.root, place, 'x')])
      const { status, stderr } = spawnSync(file, args, { encoding: 'utf8' })
      assert.equal(status, 1)
      assert.match(stderr, canMount ? /Read-only file system/ : /Permission denied/)
    }
  })

  const backend = await startBackend(t)
  await t.test('it starts, is healthy, fences, and stops cleanly', async (t) => {
    const running = await start(t, image, backend.url)
    assert.equal(await health(image, running.adminPort), 0)
    assert.equal((await write(running.port, 42)).status, 200)
    assert.equal((await write(running.port, 41)).status, 409)
    assert.deepEqual(await running.stop(), [0, null])
    assert.equal(await health(image, running.adminPort), 1)
    assert.ok(existsSync(path.join(image.root, DATA, 'fence.db')))
  })

  await t.test('the next container over the same volume knows the marks', async (t) => {
    const running = await start(t, image, backend.url)
    assert.equal((await write(running.port, 41)).status, 409)
    assert.equal((await write(running.port, 42)).status, 200)
    assert.deepEqual(await running.stop(), [0, null])
  })
})
