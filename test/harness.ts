import assert from 'node:assert/strict'
import { mkdtemp, rm } from 'node:fs/promises'
import http, {
  type IncomingHttpHeaders,
  type IncomingMessage,
  type ServerResponse,
} from 'node:http'
import net from 'node:net'
import { tmpdir } from 'node:os'
import path from 'node:path'
import type { TestContext } from 'node:test'
import type { Config, Route } from '../src/config.ts'
import { createLog } from '../src/log.ts'
import { serve, type Builders, type Running } from '../src/serve.ts'

/** Polls until `condition` holds. The only way in which tests wait. */
export async function until(
  condition: () => boolean | Promise<boolean>,
  what = condition.toString(),
  timeoutMs = 10_000,
): Promise<void> {
  const deadline = performance.now() + timeoutMs
  while (!(await condition())) {
    if (performance.now() > deadline) assert.fail(`not within ${timeoutMs} ms: ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 5))
  }
}

/** A folder that is gone after the test. */
export async function temporaryFolder(t: TestContext): Promise<string> {
  const folder = await mkdtemp(path.join(tmpdir(), 'fencing-proxy-test-'))
  t.after(() => rm(folder, { recursive: true, force: true }))
  return folder
}

export const ROUTE: Route = {
  path: '/jobs/{job}/**',
  methods: undefined,
  scope: '/jobs/{job}',
  missingToken: 'reject',
  repeat: 'many',
  mode: 'enforce',
  caseInsensitive: false,
  allow: [],
}

const LEASES = {
  prefix: '/_fencing',
  minTtlMs: 100,
  maxTtlMs: 3_600_000,
  defaultTtlMs: 15_000,
  maxWaiting: 100,
}

export type Overrides = {
  [K in keyof Config]?: Config[K] extends readonly unknown[]
    ? Config[K]
    : Partial<NonNullable<Config[K]>>
}

/** A complete configuration on free ports, with short times. */
export function configFor(url: string, dataFolder: string, overrides: Overrides = {}): Config {
  return {
    clientTimeoutMs: overrides.clientTimeoutMs ?? 5_000,
    shutdownTimeoutMs: overrides.shutdownTimeoutMs ?? 5_000,
    unmatchedWrites: overrides.unmatchedWrites ?? 'reject',
    listen: { host: '127.0.0.1', port: 0, ...overrides.listen },
    admin: { host: '127.0.0.1', port: 0, ...overrides.admin },
    upstream: { url, responseTimeoutMs: 5_000, maxConnections: 64, ...overrides.upstream },
    token: { header: 'Fencing-Token', ...overrides.token },
    store: {
      type: 'sqlite',
      path: path.join(dataFolder, 'fence.db'),
      create: true,
      ...overrides.store,
    },
    fence: { takeoverTimeoutMs: 5_000, settleMs: 300, maxWaiting: 100, ...overrides.fence },
    leases: overrides.leases === undefined ? undefined : { ...LEASES, ...overrides.leases },
    routes: overrides.routes ?? [ROUTE],
    log: { level: 'info', ...overrides.log },
  }
}

export interface TestProxy {
  readonly running: Running
  readonly port: number
  readonly adminPort: number
  readonly config: Config
  /** Every log line so far. */
  readonly log: Record<string, unknown>[]
  events(name: string): Record<string, unknown>[]
  metric(name: string, labels?: Record<string, string>): Promise<number>
  close(): Promise<{ readonly clean: boolean }>
}

/** A real proxy in this process, in front of `url`. It is closed after the test, where nothing may be left. */
export async function startProxy(
  t: TestContext,
  url: string,
  overrides: Overrides = {},
  builders: Partial<Builders> = {},
  dataFolder?: string,
): Promise<TestProxy> {
  const config = configFor(url, dataFolder ?? (await temporaryFolder(t)), overrides)
  const log: Record<string, unknown>[] = []
  const write = (line: string) => void log.push(JSON.parse(line) as Record<string, unknown>)
  const running = await serve(config, {
    log: (level) => createLog(level, { write }),
    ...builders,
  })
  const port = portOf(running.addresses.data)
  const adminPort = portOf(running.addresses.admin)
  const proxy: TestProxy = {
    running,
    port,
    adminPort,
    config,
    log,
    events: (name) => log.filter(({ event }) => event === name),
    metric: (name, labels) => readMetric(adminPort, name, labels),
    close: () => running.close(),
  }
  t.after(() => running.close())
  return proxy
}

/** The sum of a metric over the series that have these labels. */
export async function readMetric(
  adminPort: number,
  name: string,
  labels: Record<string, string> = {},
): Promise<number> {
  const { body } = await request(adminPort, { path: '/metrics' })
  return body
    .split('\n')
    .filter((line) => line.startsWith(`${name} `) || line.startsWith(`${name}{`))
    .filter((line) => Object.entries(labels).every(([k, v]) => line.includes(`${k}="${v}"`)))
    .reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(' ') + 1)), 0)
}

export function portOf(address: string): number {
  return Number(address.slice(address.lastIndexOf(':') + 1))
}

/** One request as a backend saw it. */
export interface Seen {
  readonly method: string
  readonly url: string
  readonly headers: IncomingHttpHeaders
  readonly rawHeaders: readonly string[]
  body: string
  /** The whole body arrived. */
  complete: boolean
  /** The connection broke before the answer was written. */
  broken: boolean
  readonly req: IncomingMessage
  readonly res: ServerResponse
}

export interface Backend {
  readonly url: string
  readonly port: number
  /** In the order in which their heads arrived. */
  readonly seen: Seen[]
  /** How many connections were made. */
  connections: number
}

/** A real HTTP backend. `answer` gets each request as soon as its body is whole; by default it answers 200. */
export async function startBackend(
  t: TestContext,
  answer: (seen: Seen, backend: Backend) => void = (seen) => void seen.res.end('done'),
  options: { onHead?: (seen: Seen) => void } = {},
): Promise<Backend> {
  const server = http.createServer({ keepAlive: true })
  const backend: Backend = { url: '', port: 0, seen: [], connections: 0 }
  const take = (req: IncomingMessage, res: ServerResponse) => {
    const seen: Seen = {
      method: req.method ?? '',
      url: req.url ?? '',
      headers: req.headers,
      rawHeaders: req.rawHeaders,
      body: '',
      complete: false,
      broken: false,
      req,
      res,
    }
    backend.seen.push(seen)
    res.on('close', () => (seen.broken = !res.writableFinished))
    req.on('data', (chunk: Buffer) => (seen.body += chunk.toString('latin1')))
    req.on('end', () => {
      seen.complete = true
      answer(seen, backend)
    })
    req.on('error', () => undefined)
    options.onHead?.(seen)
  }
  server.on('request', take)
  server.on('checkContinue', take)
  server.on('connection', () => backend.connections++)
  const port = await listenOn(server)
  t.after(() => {
    server.closeAllConnections()
    server.close()
  })
  return Object.assign(backend, { port, url: `http://127.0.0.1:${port}` })
}

/** A backend of raw bytes: `take` gets each connection. */
export async function startRawBackend(
  t: TestContext,
  take: (socket: net.Socket) => void,
): Promise<{ url: string; port: number; sockets: net.Socket[] }> {
  const sockets: net.Socket[] = []
  const server = net.createServer({ allowHalfOpen: true }, (socket) => {
    sockets.push(socket)
    socket.on('error', () => undefined)
    take(socket)
  })
  const port = await listenOn(server)
  t.after(() => {
    for (const socket of sockets) socket.destroy()
    server.close()
  })
  return { url: `http://127.0.0.1:${port}`, port, sockets }
}

export function listenOn(server: net.Server): Promise<number> {
  return new Promise((resolve, reject) => {
    server.once('error', reject)
    server.listen(0, '127.0.0.1', () => resolve((server.address() as net.AddressInfo).port))
  })
}

export interface Answer {
  readonly status: number
  readonly headers: IncomingHttpHeaders
  readonly rawHeaders: readonly string[]
  readonly body: string
}

export interface Ask {
  readonly method?: string
  readonly path?: string
  readonly token?: string | number | bigint
  readonly headers?: http.OutgoingHttpHeaders
  readonly body?: string | Buffer
  readonly agent?: http.Agent
}

/** One request on a connection of its own. Rejects where no whole answer comes. */
export function request(port: number, ask: Ask): Promise<Answer> {
  return new Promise((resolve, reject) => {
    const { method = 'GET', path: target = '/', token, headers = {}, body, agent } = ask
    const req = http.request({
      host: '127.0.0.1',
      port,
      method,
      path: target,
      agent: agent ?? false,
      headers: { ...(token === undefined ? {} : { 'Fencing-Token': String(token) }), ...headers },
    })
    req.on('error', reject)
    req.on('response', (res) => {
      let text = ''
      res.on('data', (chunk: Buffer) => (text += chunk.toString('latin1')))
      res.on('error', reject)
      res.on('end', () => {
        if (!res.complete) return
        resolve({
          status: res.statusCode ?? 0,
          headers: res.headers,
          rawHeaders: res.rawHeaders,
          body: text,
        })
      })
    })
    req.end(body)
  })
}

/** A write of `token` to /jobs/17, unless told otherwise. */
export function write(
  port: number,
  token: string | number | bigint,
  ask: Ask = {},
): Promise<Answer> {
  return request(port, {
    method: 'PUT',
    path: '/jobs/17/state',
    token,
    body: `by ${token}`,
    ...ask,
  })
}

export function problem(answer: Answer): Record<string, unknown> {
  assert.equal(answer.headers['content-type'], 'application/problem+json')
  return JSON.parse(answer.body) as Record<string, unknown>
}

/** A client of raw bytes. */
export interface RawClient {
  readonly socket: net.Socket
  /** Everything received so far, as latin1. */
  received: string
  /** The server ended its side. */
  ended: boolean
  /** The connection is gone, in whatever way. */
  closed: boolean
  send(bytes: string | Buffer): void
}

export async function connect(t: TestContext, port: number): Promise<RawClient> {
  const socket = net.connect({ port, host: '127.0.0.1', allowHalfOpen: true })
  const client: RawClient = {
    socket,
    received: '',
    ended: false,
    closed: false,
    send: (bytes) =>
      void socket.write(typeof bytes === 'string' ? Buffer.from(bytes, 'latin1') : bytes),
  }
  socket.on('data', (chunk) => (client.received += chunk.toString('latin1')))
  socket.on('end', () => (client.ended = true))
  socket.on('close', () => (client.closed = true))
  socket.on('error', () => undefined)
  t.after(() => socket.destroy())
  await new Promise<void>((resolve) => socket.once('connect', resolve))
  return client
}

/** The head of a PUT to /jobs/17/state with the given token and further field lines. */
export function head(token: string | number, ...lines: string[]): string {
  return [
    'PUT /jobs/17/state HTTP/1.1',
    'Host: api',
    `Fencing-Token: ${token}`,
    ...lines,
    '',
    '',
  ].join('\r\n')
}

/** A promise that the test settles, with its state in the open. */
export function gate<T = void>(): { promise: Promise<T>; open: (value: T) => void } {
  let open: (value: T) => void = () => undefined
  const promise = new Promise<T>((resolve) => (open = resolve))
  return { promise, open }
}
