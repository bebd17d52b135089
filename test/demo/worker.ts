/**
 * A worker: takes the lease of job 17, works, and writes the result. While it runs it renews the
 * lease; while it is paused it cannot, and it never learns that it was paused.
 *
 * Arguments: its name, the URL of the lease source, and the URL to write to. It tells what it does
 * in JSON lines on stdout.
 */
import { once } from 'node:events'
import { now, type Told, type WorkerName } from './happening.ts'
import { LEASE_MS } from './lease-source.ts'

const [worker, leases, target] = process.argv.slice(2) as [WorkerName, string, string]

function tell(told: Told): void {
  process.stdout.write(`${JSON.stringify({ ...told, at: now() })}\n`)
}

const leased = await fetch(`${leases}/lease`, { method: 'POST' })
const { token } = (await leased.json()) as { token: string }
tell({ kind: 'leased', worker, token })
const renewing = setInterval(() => {
  // That the lease is lost becomes known only after the answer: too late for a write sent meanwhile.
  fetch(`${leases}/lease/${token}`, { method: 'PUT' }).catch(() => undefined)
}, LEASE_MS / 4)

// The work. It is done when the demo says so: a pause can be put before that with no race.
await once(process.stdin, 'data')
process.stdin.destroy()

tell({ kind: 'sent', worker, token })
const answer = await fetch(`${target}/jobs/17/result`, {
  method: 'PUT',
  headers: { 'Fencing-Token': token },
  body: `${worker}'s result`,
})
const body = await answer.text()
tell({
  kind: 'answered',
  worker,
  token,
  status: answer.status,
  result: answer.headers.get('fencing-result') ?? undefined,
  highest: answer.headers.get('content-type')?.includes('problem+json')
    ? (JSON.parse(body) as { highest?: string }).highest
    : undefined,
})
clearInterval(renewing)
