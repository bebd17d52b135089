import assert from 'node:assert/strict'
import { execFileSync, spawn } from 'node:child_process'
import { once } from 'node:events'
import { chownSync, rmSync, writeFileSync } from 'node:fs'
import net from 'node:net'
import path from 'node:path'
import type { TestContext } from 'node:test'
import { listenOn, until } from '../harness.ts'
import { PATH, readRecipe } from './recipe.ts'

/** A lease service that has a recipe, as it is installed on this machine. */
export interface Service {
  /** As in `recipe=NAME`. */
  readonly recipe: string
  readonly commands: readonly string[]
  /** The Debian packages that bring the commands; undefined where Debian has none. */
  readonly packages: string | undefined
  /** Starts the service with its data below `folder`; it ends with the test. */
  start(t: TestContext, folder: string): Promise<StartedService>
}

export interface StartedService {
  /** Where a recipe finds the service. */
  readonly env: NodeJS.ProcessEnv
  /** The service crashes and is started again over its data. */
  crash(): Promise<void>
  /** The service returns to what it was before its first lock, in a way that happens in practice. */
  goBack(): Promise<void>
}

const etcd: Service = {
  recipe: 'etcd',
  commands: ['etcd', 'etcdctl'],
  packages: 'etcd-server etcd-client',
  async start(t, folder) {
    const url = `http://127.0.0.1:${await freePort()}`
    const peerUrl = `http://127.0.0.1:${await freePort()}`
    const env = { ETCDCTL_ENDPOINTS: url }
    const open = (data: string) =>
      startDaemon(
        t,
        'etcd',
        [
          ...['--data-dir', path.join(folder, data), '--logger', 'zap'],
          ...['--listen-client-urls', url, '--advertise-client-urls', url],
          ...['--listen-peer-urls', peerUrl, '--initial-advertise-peer-urls', peerUrl],
          ...['--initial-cluster', `default=${peerUrl}`],
        ],
        () => succeeds('etcdctl', ['endpoint', 'health'], env),
      )
    const backup = path.join(folder, 'backup')
    let daemon = await open('data')
    run('etcdctl', ['snapshot', 'save', backup], env)
    return {
      env,
      async crash() {
        await daemon.stop()
        daemon = await open('data')
      },
      async goBack() {
        await daemon.stop()
        run('etcdctl', [
          ...['snapshot', 'restore', backup, '--data-dir', path.join(folder, 'restored')],
          ...['--initial-cluster', `default=${peerUrl}`, '--initial-advertise-peer-urls', peerUrl],
        ])
        daemon = await open('restored')
      },
    }
  },
}

const zookeeper: Service = {
  recipe: 'zookeeper',
  commands: ['zkServer.sh', 'zkCli.sh'],
  packages: 'zookeeper',
  async start(t, folder) {
    const port = await freePort()
    const data = path.join(folder, 'data')
    const config = path.join(folder, 'zoo.cfg')
    writeFileSync(
      config,
      [
        ...['tickTime=500', `dataDir=${data}`, 'admin.enableServer=false'],
        ...[`clientPort=${port}`, 'clientPortAddress=127.0.0.1', ''],
      ].join('\n'),
    )
    const open = () =>
      startDaemon(t, 'zkServer.sh', ['start-foreground', config], () => accepts(port), {
        env: { JMXDISABLE: 'true', ZOO_LOG_DIR: folder },
      })
    let daemon = await open()
    return {
      env: { ZOOKEEPER: `127.0.0.1:${port}` },
      async crash() {
        await daemon.stop()
        daemon = await open()
      },
      async goBack() {
        await daemon.stop()
        rmSync(data, { recursive: true })
        daemon = await open()
      },
    }
  },
}

const consul: Service = {
  recipe: 'consul',
  commands: ['consul', 'curl', 'jq'],
  packages: undefined,
  async start(t, folder) {
    const port = await freePort()
    const ports = { http: port, dns: -1, grpc: -1, serf_wan: -1 }
    const config = path.join(folder, 'consul.json')
    writeFileSync(
      config,
      JSON.stringify({
        ...{ server: true, bootstrap_expect: 1, bind_addr: '127.0.0.1' },
        ...{ data_dir: path.join(folder, 'data'), performance: { raft_multiplier: 1 } },
        ports: { ...ports, serf_lan: await freePort(), server: await freePort() },
      }),
    )
    const env = { CONSUL_HTTP_ADDR: `127.0.0.1:${port}` }
    const open = () =>
      startDaemon(t, 'consul', ['agent', '-config-file', config], () =>
        succeeds('consul', ['kv', 'put', 'ready'], env),
      )
    let daemon = await open()
    return {
      env,
      async crash() {
        await daemon.stop()
        daemon = await open()
      },
      async goBack() {
        await daemon.stop()
        rmSync(path.join(folder, 'data'), { recursive: true })
        daemon = await open()
      },
    }
  },
}

const redis: Service = {
  recipe: 'redis',
  commands: ['redis-server', 'redis-cli'],
  packages: 'redis-server redis-tools',
  async start(t, folder) {
    const port = await freePort()
    const url = `redis://127.0.0.1:${port}`
    const open = (appendOnly: 'yes' | 'no') =>
      startDaemon(
        t,
        'redis-server',
        [
          ...['--port', String(port), '--bind', '127.0.0.1', '--dir', folder],
          ...['--appendonly', appendOnly, '--save', ''],
        ],
        () => succeeds('redis-cli', ['-e', '-u', url, 'PING'], {}),
      )
    let daemon = await open('yes')
    return {
      env: { REDIS_URL: url },
      async crash() {
        await daemon.stop()
        daemon = await open('yes')
      },
      async goBack() {
        await daemon.stop()
        daemon = await open('no')
      },
    }
  },
}

const postgresql: Service = {
  recipe: 'postgresql',
  commands: ['initdb', 'postgres', 'pg_dump', 'psql'],
  packages: 'postgresql',
  async start(t, folder) {
    // PostgreSQL refuses to run as root; its package brings a user for it.
    const user = process.getuid?.() === 0 ? { uid: idOf('-u'), gid: idOf('-g') } : undefined
    if (user !== undefined) chownSync(folder, user.uid, user.gid)
    const data = path.join(folder, 'data')
    const backup = path.join(folder, 'backup.sql')
    const env = { PGHOST: folder, PGUSER: 'postgres' }
    const open = () =>
      startDaemon(
        t,
        'postgres',
        ['-D', data, '-k', folder, '-c', 'listen_addresses='],
        () => succeeds('psql', ['-c', 'SELECT 1'], env),
        // Its crash that leaves no child behind: it does not even write a checkpoint.
        { ...user, stopSignal: 'SIGQUIT' },
      )
    run('initdb', ['-D', data, '-U', 'postgres', '-A', 'trust', '--no-sync'], {}, user)
    let daemon = await open()
    run('psql', ['-c', readRecipe('postgresql-setup')], env)
    run('pg_dump', ['--clean', '-f', backup], env)
    return {
      env,
      async crash() {
        await daemon.stop()
        daemon = await open()
      },
      goBack() {
        run('psql', ['-v', 'ON_ERROR_STOP=1', '-f', backup], env)
        return Promise.resolve()
      },
    }
  },
}

export const SERVICES: readonly Service[] = [etcd, zookeeper, consul, redis, postgresql]

interface Daemon {
  stop(): Promise<void>
}

interface Circumstances {
  readonly uid?: number
  readonly gid?: number
  readonly env?: NodeJS.ProcessEnv
  readonly stopSignal?: NodeJS.Signals
}

async function startDaemon(
  t: TestContext,
  command: string,
  args: readonly string[],
  isReady: () => Promise<boolean>,
  { env, stopSignal = 'SIGKILL', ...identity }: Circumstances = {},
): Promise<Daemon> {
  const child = spawn(command, args, {
    ...identity,
    cwd: '/',
    env: { ...env, PATH },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const exit = once(child, 'exit')
  const stop = async () => {
    child.kill(stopSignal)
    await exit
  }
  t.after(stop)
  let said = ''
  child.stdout.on('data', (chunk: Buffer) => (said += chunk.toString()))
  child.stderr.on('data', (chunk: Buffer) => (said += chunk.toString()))
  const isReadyOrDead = () => {
    assert.equal(child.exitCode, null, `${command} has ended: ${said}`)
    return isReady()
  }
  await until(isReadyOrDead, `${command} is ready`, 30_000)
  return { stop }
}

function run(
  command: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv = {},
  identity: { readonly uid?: number; readonly gid?: number } = {},
): void {
  execFileSync(command, args, { ...identity, cwd: '/', env: { ...env, PATH }, stdio: 'pipe' })
}

async function succeeds(
  command: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv,
): Promise<boolean> {
  const child = spawn(command, args, { env: { ...env, PATH }, stdio: 'ignore' })
  const [code] = (await once(child, 'exit')) as [number | null]
  return code === 0
}

function accepts(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = net.connect({ port, host: '127.0.0.1' })
    socket.on('connect', () => {
      socket.destroy()
      resolve(true)
    })
    socket.on('error', () => resolve(false))
  })
}

async function freePort(): Promise<number> {
  const server = net.createServer()
  const port = await listenOn(server)
  server.close()
  await once(server, 'close')
  return port
}

function idOf(which: '-u' | '-g'): number {
  return Number(execFileSync('id', [which, 'postgres'], { encoding: 'utf8' }))
}
