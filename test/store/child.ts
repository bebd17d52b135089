import { SqliteStore } from '../../src/store/sqlite.ts'
import type { LeaseTerms } from '../../src/store/store.ts'
import type { Token } from '../../src/token.ts'

/** The program that apart.ts starts: one SQLite store, driven over the process's channel. */

export type Ask =
  | readonly ['raise', scope: string, token: Token]
  | readonly ['raiseTicking', scope: string, token: Token]
  | readonly ['grant', scope: string, lease: LeaseTerms]
  | readonly ['forget', scope: string, token: Token]
  | readonly ['leases']
  | readonly ['read', scope: string]
  | readonly ['probe']
  | readonly ['close', clean: boolean]
  | readonly ['exit']

export type Say =
  | {
      readonly say: 'opened'
      readonly created: boolean
      readonly stoppedCleanly: boolean
      readonly scopes: number
    }
  | { readonly say: 'refused'; readonly why: string }
  | { readonly say: 'committed'; readonly calls: number }
  | { readonly say: 'failed' | 'died'; readonly why: string }
  | { readonly say: 'answered'; readonly id: number; readonly answer: unknown }
  | { readonly say: 'rejected'; readonly id: number; readonly why: string }

const tell = (message: Say) => process.send?.(message)

function answer(store: SqliteStore, ask: Ask): Promise<unknown> {
  switch (ask[0]) {
    case 'raise':
      return store.raise(ask[1], ask[2], false)
    case 'raiseTicking':
      return countTicks(() => store.raise(ask[1], ask[2], false))
    case 'grant':
      return store.grant(ask[1], ask[2], false)
    case 'forget':
      return store.forget(ask[1], ask[2])
    case 'leases':
      return store.leases(undefined, 10_000)
    case 'read':
      return store.read(ask[1])
    case 'probe':
      return store.probe()
    case 'close':
      return store.close(ask[1]).finally(() => setImmediate(() => process.disconnect()))
    case 'exit':
      return process.exit(1)
  }
}

/** How often a timer of 5 ms ran, and how long it took, until `act` was done. */
async function countTicks(act: () => Promise<unknown>): Promise<{ ticks: number; ms: number }> {
  let ticks = 0
  const timer = setInterval(() => ticks++, 5)
  const started = performance.now()
  try {
    await act()
    return { ticks, ms: performance.now() - started }
  } finally {
    clearInterval(timer)
  }
}

try {
  const [path = '', create] = process.argv.slice(2)
  const store = await SqliteStore.open(
    { path, create: create === 'true' },
    {
      committed: (_seconds, calls) => tell({ say: 'committed', calls }),
      failed: ({ message }) => tell({ say: 'failed', why: message }),
      died: ({ message }) => tell({ say: 'died', why: message }),
    },
  )
  process.on('message', ({ id, ask }: { id: number; ask: Ask }) => {
    answer(store, ask).then(
      (value) => tell({ say: 'answered', id, answer: value }),
      (error: unknown) => tell({ say: 'rejected', id, why: String(error) }),
    )
  })
  const { created, stoppedCleanly, scopes } = store
  tell({ say: 'opened', created, stoppedCleanly, scopes })
} catch (error) {
  tell({ say: 'refused', why: String(error) })
  process.disconnect()
}
