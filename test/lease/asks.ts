import assert from 'node:assert/strict'
import { problem, request, type Answer, type Ask } from '../harness.ts'

/** What workers say to the lease service. */

export interface Leased {
  readonly lease: string
  readonly scope: string
  readonly token: string
  readonly ttl: string
}

const JSON_BODY = { 'Content-Type': 'application/json' }

export function acquire(port: number, body: unknown, ask: Ask = {}): Promise<Answer> {
  const text = typeof body === 'string' ? body : JSON.stringify(body)
  return request(port, {
    method: 'POST',
    path: '/_fencing/leases',
    headers: JSON_BODY,
    body: text,
    ...ask,
  })
}

/** Acquires a lease that nothing stands against. */
export async function leased(port: number, body: Record<string, unknown>): Promise<Leased> {
  const answer = await acquire(port, body)
  assert.equal(answer.status, 201, answer.body)
  return JSON.parse(answer.body) as Leased
}

export function renew(port: number, lease: string, ask: Ask = {}): Promise<Answer> {
  return request(port, { method: 'POST', path: `/_fencing/leases/${lease}/renew`, ...ask })
}

export function release(port: number, lease: string, ask: Ask = {}): Promise<Answer> {
  return request(port, { method: 'DELETE', path: `/_fencing/leases/${lease}`, ...ask })
}

export function lookUp(port: number, scope: string): Promise<Answer> {
  return request(port, { path: `/_fencing/leases?scope=${encodeURIComponent(scope)}` })
}

export function isProblem(answer: Answer, status: number, name: string): Record<string, unknown> {
  assert.equal(answer.status, status, answer.body)
  const told = problem(answer)
  assert.equal(told['type'], `urn:fencing-proxy:problem:${name}`)
  assert.equal(told['status'], status)
  assert.equal(told['requestId'], answer.headers['x-request-id'])
  return told
}

/** An acquire as bytes. */
export function acquireBytes(body: Record<string, unknown>, ...lines: string[]): string {
  const text = JSON.stringify(body)
  const head = [
    'POST /_fencing/leases HTTP/1.1',
    'Host: api',
    'Content-Type: application/json',
    `Content-Length: ${Buffer.byteLength(text)}`,
    ...lines,
  ]
  return `${head.join('\r\n')}\r\n\r\n${text}`
}
