/**
 * A worker with a lease, as a process of its own, so that it can be paused. Arguments: the URL of
 * the sidecar, the TTL, a file, and `looks` or `writes`.
 *
 * It writes once, then works without a break, so that no timer of its own can run, until the file
 * is there. Then it looks at its lease, if it is one that looks, and tries to write again. It tells
 * what it found in JSON lines on stdout.
 */
import { existsSync, writeSync } from 'node:fs'
import { FencingClient, LeaseLostError } from '../../src/client/client.ts'

const [url = '', ttl = '', file = '', habit = ''] = process.argv.slice(2)

function tell(what: Record<string, unknown>): void {
  writeSync(1, `${JSON.stringify(what)}\n`)
}

const lease = await new FencingClient(url).acquire({ scope: '/jobs/17', ttl })
const keptSignal = lease.signal
const first = await lease.fetch('/jobs/17/state', { method: 'PUT', body: 'first' })
tell({ token: lease.token, status: first.status })

const sleeper = new Int32Array(new SharedArrayBuffer(4))
while (!existsSync(file)) Atomics.wait(sleeper, 0, 0, 10)

const before = keptSignal.aborted
const after = habit === 'looks' ? lease.signal.aborted : undefined
const write = lease.fetch('/jobs/17/state', { method: 'PUT', body: 'second' })
const outcome = await write.then(
  ({ status }) => `answered ${status}`,
  (error: unknown) => (error instanceof LeaseLostError ? `lost: ${error.why}` : String(error)),
)
tell({ before, after, outcome })
await lease.release()
