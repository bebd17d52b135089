/**
 * A worker: takes leases and writes with their tokens. It never looks at the clock again, so that
 * one that was paused goes on with what it had. A program of its own, to be stopped by SIGSTOP;
 * argument: its task as JSON. It asks whoever started it for leases.
 */
import { once } from 'node:events'
import { setTimeout as delay } from 'node:timers/promises'
import { Client, type Plan } from './client.ts'
import { chooseConduct, faultsOf } from './conduct.ts'
import { appendTo } from './history.ts'
import { Random } from './random.ts'
import type { FaultName } from './settings.ts'

export interface Task {
  readonly name: string
  readonly seed: number
  /** Of the sidecar. */
  readonly port: number
  readonly scopes: readonly [string, ...string[]]
  readonly faults: readonly FaultName[]
  readonly history: string
}

export type ToLeases =
  | { readonly say: 'want'; readonly scope: string }
  /** As when the session of a worker that broke down ends: another may have the lease at once. */
  | { readonly say: 'gone'; readonly scope: string; readonly token: string }
export interface LeaseAnswer {
  readonly token?: string
}

const task = JSON.parse(process.argv[2] ?? '') as Task
const faults: ReadonlySet<FaultName> = new Set(task.faults)
const random = new Random(task.seed)
const client = new Client(task.port, appendTo(task.history))
const underway = new Set<Promise<unknown>>()
/** Tokens that it had, by scope. */
const old = new Map<string, string[]>()
let isStopping = false
let written = 0

function tell(said: ToLeases): void {
  process.send?.(said)
}

function plan(scope: string, token: string, isOld: boolean): Plan {
  const leaves = faults.has('leave') && random.chance(0.2)
  const conduct = chooseConduct(random, faults, leaves)
  const isSlow = random.chance(0.2)
  const parts = Array.from({ length: random.between(0, isSlow ? 5 : 2) }, () =>
    random.between(1, random.chance(0.1) ? 100_000 : 1_000),
  )
  // In the middle of the body, or while it waits for the answer.
  const afterParts = random.chance(0.6) ? parts.length : random.between(0, parts.length)
  return {
    id: `${task.name}-${++written}`,
    scope,
    token,
    method: random.pick(['PUT', 'POST', 'PATCH', 'DELETE']),
    chunked: random.chance(0.5),
    parts,
    pauseMs: isSlow ? random.between(5, 60) : 0,
    leaves: leaves
      ? { afterParts, afterMs: random.between(0, random.chance(0.5) ? 40 : 300) }
      : undefined,
    conduct,
    faults: [
      ...faultsOf(conduct),
      ...(leaves ? (['leave'] as const) : []),
      ...(isOld ? (['old-token'] as const) : []),
    ],
  }
}

async function useLease(scope: string, token: string): Promise<void> {
  const tokens = old.get(scope) ?? []
  old.set(scope, [...tokens, token].slice(-3))
  for (let i = random.between(1, 6); i > 0 && !isStopping; i--) {
    const [first, ...more] = tokens
    const isOld = first !== undefined && faults.has('old-token') && random.chance(0.25)
    const mine = isOld ? random.pick([first, ...more]) : token
    const planned = plan(scope, mine, isOld)
    const write = client.write(planned)
    underway.add(write)
    void write.finally(() => underway.delete(write))
    // Some at the same time.
    if (underway.size > 3 || random.chance(0.7)) {
      const told = await write
      if (told === undefined) {
        if (planned.leaves !== undefined && random.chance(0.7)) {
          tell({ say: 'gone', scope, token })
          return
        }
        await delay(random.between(50, 400))
      }
      // It has lost its lease, but not every program looks at what it is told.
      if (told?.status === 409 && mine === token && random.chance(0.7)) return
    }
    await delay(random.between(0, 40))
  }
}

process.on('disconnect', () => process.exit(0))
process.on('message', (message: LeaseAnswer | 'stop') => {
  if (message === 'stop') isStopping = true
})

while (!isStopping) {
  const scope = random.pick(task.scopes)
  tell({ say: 'want', scope })
  const [answer] = (await once(process, 'message')) as [LeaseAnswer | 'stop']
  if (answer === 'stop') break
  if (answer.token === undefined) await delay(random.between(5, 20))
  else await useLease(scope, answer.token)
}
await Promise.all(underway)
client.close()
process.disconnect()
