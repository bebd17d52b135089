import http from 'node:http'
import { listenOn } from '../harness.ts'
import { startSidecar } from './sidecar.ts'
import { usageOf, type Site } from './site.ts'

/** One large body through the sidecar. */
export interface StreamMeasured {
  readonly direction: 'up' | 'down'
  readonly bytes: number
  readonly mibPerSecond: number
  /** Memory before, and at its highest while the stream ran. */
  readonly beforeMiB: number
  readonly highestMiB: number
}

const MIB = 1024 * 1024
const STREAM_BYTES = 1024 * MIB
const CHUNK = Buffer.alloc(64 * 1024, 'x')
const LOOK_EVERY_MS = 20

/** Streams 1 GiB up, then down. Client and backend are in this process. */
export async function measureStreams(
  site: Site,
  told: (words: string) => void,
): Promise<StreamMeasured[]> {
  const backend = http.createServer((req, res) => {
    let bytes = 0
    req.on('data', (chunk: Buffer) => (bytes += chunk.length))
    req.on('end', () => {
      if (req.method === 'POST') res.end(String(bytes))
      else pour(res)
    })
  })
  const backendPort = await listenOn(backend)
  const measured: StreamMeasured[] = []
  try {
    const { port, pids } = await startSidecar(site, backendPort)
    await upload(port, CHUNK.length)
    for (const direction of ['up', 'down'] as const) {
      const resident = () => usageOf(pids).residentBytes / MIB
      const beforeMiB = resident()
      let highestMiB = beforeMiB
      const looking = setInterval(() => (highestMiB = Math.max(highestMiB, resident())), LOOK_EVERY_MS) // prettier-ignore
      const begun = performance.now()
      const bytes = await (direction === 'up' ? upload(port, STREAM_BYTES) : download(port))
      clearInterval(looking)
      if (bytes !== STREAM_BYTES) throw new Error(`${bytes} bytes arrived of ${STREAM_BYTES}`)
      const mibPerSecond = bytes / MIB / ((performance.now() - begun) / 1000)
      measured.push({ direction, bytes, mibPerSecond, beforeMiB, highestMiB })
      told(`streams: 1 GiB ${direction}: ${mibPerSecond.toFixed(0)} MiB/s`)
    }
  } finally {
    backend.closeAllConnections()
    backend.close()
  }
  return measured
}

/** Writes `bytes` bytes as fast as they are taken. */
function pour(out: http.ServerResponse | http.ClientRequest, bytes = STREAM_BYTES): void {
  out.setHeader('Content-Length', bytes)
  let left = bytes
  const more = () => {
    while (left > 0) {
      left -= CHUNK.length
      if (!out.write(CHUNK)) {
        out.once('drain', more)
        return
      }
    }
    out.end()
  }
  more()
}

/** Resolves with how many bytes the backend has received. */
async function upload(port: number, bytes: number): Promise<number> {
  const headers = { 'Fencing-Token': '7' }
  const req = http.request({ port, host: '127.0.0.1', path: '/jobs/0/state', method: 'POST', headers }) // prettier-ignore
  pour(req, bytes)
  let text = ''
  await received(req, (chunk) => (text += chunk.toString()))
  return Number(text)
}

/** Resolves with how many bytes the client has received. */
async function download(port: number): Promise<number> {
  let bytes = 0
  const req = http.get({ port, host: '127.0.0.1', path: '/jobs/0/state' })
  await received(req, (chunk) => (bytes += chunk.length))
  return bytes
}

function received(req: http.ClientRequest, take: (chunk: Buffer) => void): Promise<void> {
  return new Promise((resolve, reject) => {
    req.on('error', reject)
    req.on('response', (res) => {
      if (res.statusCode !== 200) reject(new Error(`status ${String(res.statusCode)}`))
      res.on('data', take).on('end', resolve).on('error', reject)
    })
  })
}
