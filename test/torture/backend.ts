/**
 * The API behind the sidecar: applies what it is sent, and asks no token. A program of its own, to
 * be killed; argument: the history. It tells its port to whoever started it.
 */
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import { CONDUCT_FIELD, type Conduct } from './conduct.ts'
import { appendTo, now } from './history.ts'
import { APPLIED_WITHIN_MS } from './settings.ts'

const [history = ''] = process.argv.slice(2)
const append = appendTo(history)

async function take(req: IncomingMessage, res: ServerResponse): Promise<void> {
  const write = String(req.headers['x-request-id'])
  const scope = (req.url ?? '').replace(/\/[^/]*$/, '')
  const token = String(req.headers['fencing-token'])
  append({ kind: 'begun', write, scope, token, port: req.socket.remotePort ?? 0 })
  const asked = req.headers[CONDUCT_FIELD.toLowerCase()]
  if (typeof asked !== 'string') {
    // No worker sent this; the history has it.
    respond(res, write, 400)
    return
  }
  const conduct = JSON.parse(asked) as Conduct
  if (conduct.answer === 'early') {
    respond(res, write, 413)
    return
  }
  let bytes = 0
  req.on('data', (chunk: Buffer) => (bytes += chunk.length))
  // A body that was cut off never ends, and its write is never applied.
  req.on('end', () => void apply(res, write, bytes, conduct))
}

async function apply(
  res: ServerResponse,
  write: string,
  bytes: number,
  conduct: Conduct,
): Promise<void> {
  const whole = now()
  if (conduct.answer === 'reset') setTimeout(() => res.socket?.resetAndDestroy(), conduct.answerMs)
  await delay(conduct.applyMs)
  // On a machine too busy for its delays it must not apply later than it is good for.
  const isLate = now() - whole > 2 * APPLIED_WITHIN_MS
  if (!isLate) append({ kind: 'applied', write, bytes })
  await delay(Math.max(0, conduct.answerMs - conduct.applyMs))
  await answer(res, write, isLate ? 503 : 200, conduct)
}

async function answer(
  res: ServerResponse,
  write: string,
  status: number,
  conduct: Conduct,
): Promise<void> {
  switch (conduct.answer) {
    case 'reset':
      return
    case 'truncated':
      res.writeHead(status, { 'Content-Length': 1_000 })
      res.write('cut sho')
      await delay(10)
      res.destroy()
      return
    case 'dripping':
      res.writeHead(status)
      for (let i = 0; i < 4; i++) {
        res.write('drip')
        await delay(40)
      }
      respond(res, write, status)
      return
    case 'whole':
    case 'none':
      respond(res, write, status, Buffer.alloc(conduct.answerBytes, 'a'))
      return
    case 'early':
      return
    default:
      conduct.answer satisfies never
  }
}

function respond(res: ServerResponse, write: string, status: number, body?: Buffer): void {
  append({ kind: 'responded', write })
  if (!res.headersSent) res.statusCode = status
  res.end(body)
}

const server = createServer((req, res) => {
  req.on('error', () => undefined)
  res.on('error', () => undefined)
  void take(req, res)
})
server.listen(0, '127.0.0.1', () =>
  process.send?.({ port: (server.address() as AddressInfo).port }),
)
process.on('disconnect', () => process.exit(0))
