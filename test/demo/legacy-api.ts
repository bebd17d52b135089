import { text } from 'node:stream/consumers'
import type { Told } from './happening.ts'
import { startServer, type Server } from './server.ts'

/**
 * The API that nobody wants to touch: it stores the result of a job for whoever sends one, knows
 * nothing of leases, and the last write stands.
 */
export interface LegacyApi extends Server {
  /** In order: what it received and what it stored. */
  readonly history: readonly string[]
  /** The next write is stored only when the returned function is called. */
  slowDown(): () => void
}

export async function startLegacyApi(tell: (told: Told) => void): Promise<LegacyApi> {
  const results = new Map<string, string>()
  const history: string[] = []
  let slow: Promise<void> | undefined

  const server = await startServer(async (req, res) => {
    const job = req.url ?? ''
    if (req.method !== 'PUT') {
      res.end(results.get(job) ?? '')
      return
    }
    const result = await text(req)
    const held = slow
    slow = undefined
    history.push(`receives ${result}`)
    tell({ kind: 'received', result, slow: held !== undefined })
    await held
    results.set(job, result)
    history.push(`stores ${result}`)
    tell({ kind: 'stored', result })
    res.end('stored')
  })

  return {
    ...server,
    history,
    slowDown() {
      let store = () => {}
      slow = new Promise((resolve) => (store = resolve))
      return () => store()
    },
  }
}
