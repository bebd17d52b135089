import { setTimeout as delay } from 'node:timers/promises'
import { now, type Told } from './happening.ts'
import { startServer, type Server } from './server.ts'

/** Short, because every act waits for one lease to run out. A real one would last 15 s or so. */
export const LEASE_MS = 600

/**
 * One job's lease: held by one worker at a time, until it is no longer renewed. Each comes with a
 * number, one higher than the last. POST /lease takes it, waiting while another holds it;
 * PUT /lease/{token} renews it.
 */
export async function startLeaseSource(tell: (told: Told) => void): Promise<Server> {
  let token = 40
  let held = false
  let end = 0
  return startServer(async (req, res) => {
    if (req.method === 'PUT') {
      const current = held && now() < end && req.url === `/lease/${token}`
      if (current) end = now() + LEASE_MS
      res.writeHead(current ? 204 : 410).end()
      return
    }
    while (now() < end) await delay(5)
    if (held) tell({ kind: 'expired', token: String(token) })
    held = true
    token++
    end = now() + LEASE_MS
    res.end(JSON.stringify({ token: String(token) }))
  })
}
