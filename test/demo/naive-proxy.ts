import { text } from 'node:stream/consumers'
import type { Told } from './happening.ts'
import { startServer, type Server } from './server.ts'

/** What one would write first: check the number, then forward. Act 3 shows why it does not fence. */
export async function startNaiveProxy(
  upstream: string,
  tell: (told: Told) => void,
): Promise<Server> {
  let highest = 0n
  return startServer(async (req, res) => {
    const token = BigInt(String(req.headers['fencing-token']))
    if (token < highest) {
      res.writeHead(409).end()
      return
    }
    highest = token
    tell({ kind: 'checked', token: String(token) })
    const answer = await fetch(upstream + (req.url ?? ''), { method: 'PUT', body: await text(req) })
    res.writeHead(answer.status).end(await answer.text())
  })
}
