import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import http from 'node:http'
import { test, type TestContext } from 'node:test'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import { inFlight } from './exchange-cases.ts'
import {
  connect,
  head,
  listenOn,
  startBackend,
  startProxy,
  startRawBackend,
  until,
} from './harness.ts'
import { startProgram, type Started } from './program.ts'

/** Bodies pass through in parts: nothing waits for the whole, nothing piles up in memory. */

const MIB = 1024 * 1024
const SIZE = 200 * MIB
/** What the process may grow by, whatever passes through it: buffers of a few connections, and garbage. */
const ROOM = 120 * MIB

function residentBytes({ child }: Started): number {
  const status = readFileSync(`/proc/${child.pid}/status`, 'utf8')
  return Number(/^VmRSS:\s+(\d+) kB$/m.exec(status)?.[1]) * 1024
}

/** Looks at the memory of the process until told to stop; answers with its growth at the worst. */
function watchMemory(t: TestContext, program: Started): () => number {
  const before = residentBytes(program)
  let most = before
  const timer = setInterval(() => (most = Math.max(most, residentBytes(program))), 10)
  t.after(() => clearInterval(timer))
  return () => {
    clearInterval(timer)
    return most - before
  }
}

function assertRoom(grown: number): void {
  assert.ok(grown < ROOM, `it grew by ${Math.round(grown / MIB)} MiB`)
}

/** Sends 200 MiB and reads as many back. Answers with how many bytes came. */
function exchange(port: number): Promise<number> {
  return new Promise((resolve, reject) => {
    const req = http.request({
      host: '127.0.0.1',
      port,
      method: 'PUT',
      path: '/jobs/17/state',
      agent: false,
      headers: { 'Fencing-Token': '41', 'Content-Length': SIZE },
    })
    req.on('error', reject)
    req.on('response', (res) => {
      let came = 0
      res.on('data', (part: Buffer) => (came += part.length))
      res.on('error', reject)
      res.on('end', () => resolve(came))
    })
    send(req, SIZE)
  })
}

/** Writes `size` bytes as fast as they are taken. */
function send(to: http.ClientRequest | http.ServerResponse, size: number): void {
  const part = Buffer.alloc(MIB / 4, 'x')
  let left = size
  const more = () => {
    while (left > 0) {
      left -= part.length
      if (!to.write(part)) {
        to.once('drain', more)
        return
      }
    }
    to.end()
  }
  more()
}

/** A backend that counts what it gets and answers with 200 MiB. */
async function bulkBackend(t: TestContext) {
  const backend = { url: '', received: 0, broken: false }
  const server = http.createServer((req, res) => {
    req.on('data', (part: Buffer) => (backend.received += part.length))
    req.on('end', () => {
      res.setHeader('Content-Length', SIZE)
      send(res, SIZE)
    })
    res.on('close', () => (backend.broken = !res.writableFinished))
  })
  t.after(() => {
    server.closeAllConnections()
    server.close()
  })
  backend.url = `http://127.0.0.1:${await listenOn(server)}`
  return backend
}

const noProc = process.platform === 'linux' ? false : 'the memory of a process is read from /proc'

test('200 MiB up and 200 MiB down pass in flat memory', { skip: noProc }, async (t) => {
  const backend = await bulkBackend(t)
  const program = await startProgram(t, backend.url)
  const growth = watchMemory(t, program)
  assert.equal(await exchange(program.port), SIZE)
  assert.equal(backend.received, SIZE)
  const grown = growth()
  assert.ok(grown < ROOM, `it grew by ${Math.round(grown / MIB)} MiB`)
})

test(
  'a backend that does not read makes the client wait, not the memory grow',
  { skip: noProc },
  async (t) => {
    const { url, sockets } = await startRawBackend(t, (socket) => socket.pause())
    const program = await startProgram(t, url)
    const growth = watchMemory(t, program)
    const client = await connect(t, program.port)
    client.send(head(41, `Content-Length: ${SIZE}`))
    client.socket.write(Buffer.alloc(SIZE, 'x'))
    await settled(() => client.socket.bytesWritten - client.socket.writableLength)
    assert.ok(client.socket.writableLength > ROOM, 'the rest is still with the client')
    assert.equal(sockets.length, 1)
    assertRoom(growth())
  },
)

test(
  'a client that reads slowly makes the backend wait, not the memory grow',
  { skip: noProc },
  async (t) => {
    const backend = await startBackend(t, ({ res }) => send(res, SIZE))
    const program = await startProgram(t, backend.url)
    const growth = watchMemory(t, program)
    const client = await connect(t, program.port)
    client.socket.pause()
    client.send(head(41, 'Content-Length: 0'))
    await until(() => backend.seen.length === 1)
    const taken = () => backend.seen[0]?.req.socket.bytesWritten ?? 0
    await settled(taken)
    assert.ok(taken() < ROOM, 'the rest is still with the backend')
    assertRoom(growth())
    client.socket.destroy()
  },
)

/** Waits until a number has risen and not changed for a while. */
async function settled(count: () => number): Promise<void> {
  let last = 0
  let since = performance.now()
  await until(() => {
    if (count() !== last) {
      last = count()
      since = performance.now()
    }
    return last > 0 && performance.now() - since > 700
  })
}

test('each part of a response arrives at once, its head before all', async (t) => {
  const backend = await startBackend(t, ({ res }) => {
    res.writeHead(200, { 'Content-Type': 'text/event-stream' })
    res.flushHeaders()
  })
  const proxy = await startProxy(t, backend.url)
  const client = await connect(t, proxy.port)
  client.send('GET /events HTTP/1.1\r\nHost: api\r\n\r\n')
  await until(() => client.received.includes('\r\n\r\n'))
  for (const event of ['data: 1\n\n', 'data: 2\n\n']) {
    backend.seen[0]?.res.write(event)
    await until(() => client.received.includes(event))
  }
})

test('each part of a request arrives at once', async (t) => {
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const client = await connect(t, proxy.port)
  client.send(head(41, 'Transfer-Encoding: chunked') + '5\r\nfirst\r\n')
  await until(() => backend.seen[0]?.body === 'first')
  client.send('6\r\nsecond\r\n')
  await until(() => backend.seen[0]?.body === 'firstsecond')
  assert.equal(backend.seen[0]?.complete, false)
  client.send('0\r\n\r\n')
  await until(() => client.received.includes('done'))
})

test('a small body that comes byte by byte takes its length in memory, not a hundred times that', async (t) => {
  setFlagsFromString('--expose-gc')
  const collectGarbage = runInNewContext('gc') as () => void
  const used = () => {
    collectGarbage()
    const { heapUsed, arrayBuffers } = process.memoryUsage()
    return heapUsed + arrayBuffers
  }
  const backend = await startBackend(t)
  const proxy = await startProxy(t, backend.url)
  const bytes = 16 * 1024
  const clients = await Promise.all(Array.from({ length: 4 }, () => connect(t, proxy.port)))
  for (const { send } of clients) send(head(41, `Content-Length: ${bytes}`))
  await until(inFlight(proxy, clients.length))
  const before = used()
  for (let i = 0; i < bytes - 1; i++) {
    for (const { send } of clients) send('x')
    // By then the loop has read what was sent.
    await new Promise((resolve) => setImmediate(resolve))
  }
  const grown = used() - before
  assert.ok(grown < clients.length * 20 * bytes, `it grew by ${Math.round(grown / 1024)} KiB`)
  for (const { send } of clients) send('y')
  await until(() => clients.every(({ received }) => received.includes('done')))
  for (const { body } of backend.seen) assert.equal(body, 'x'.repeat(bytes - 1) + 'y')
})
