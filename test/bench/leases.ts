import { underLoad, type Group, type Row } from './row.ts'
import type { Scripted } from './load.ts'
import type { Server } from './peers.ts'
import { startSidecar } from './sidecar.ts'
import type { Site } from './site.ts'

/** What the lease service does in a second. */
export function leases(): Group {
  return {
    name: 'leases',
    title: 'Leases',
    words:
      'Requests to the lease service over 50 connections. A grant and a release are on disk before they are answered; a renewal is not written.', // prettier-ignore
    rows: [
      row('acquire', 'each in a scope of its own, which nobody holds', acquiring),
      row('renew', '1000 leases in turn', renewing),
      row(
        'acquire and release',
        'what was granted is released: half of the requests each',
        cycling,
      ),
    ],
  }
}

function row(name: string, words: string, script: Scripted): Row {
  // Beside nothing: who hands out leases otherwise is no proxy.
  return underLoad(name, words, script, startWithLeases, 'nothing')
}

function startWithLeases(site: Site, backendPort: number): Promise<Server> {
  return startSidecar(site, backendPort, { leases: {} })
}

const ASK = `
wrk.headers['Content-Type'] = 'application/json'
local first, n = %d, 0
local function acquire()
  n = n + 1
  local scope = '/jobs/' .. first .. '-' .. n
  return wrk.format('POST', '/_fencing/leases', nil, '{"scope":"' .. scope .. '","ttl":"1h"}')
end
`

/** Scopes that no earlier round has used. */
const ask = () => ASK.replace('%d', String(Date.now()))

function acquiring(): Promise<string> {
  return Promise.resolve(`${ask()}\nrequest = acquire`)
}

async function renewing(port: number): Promise<string> {
  const ids: string[] = []
  for (let i = 0; i < 1000; i++) {
    const answer = await fetch(`http://127.0.0.1:${port}/_fencing/leases`, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify({ scope: `/renewed/${Date.now()}/${i}`, ttl: '1h' }),
    })
    const { lease } = (await answer.json()) as { lease: string }
    ids.push(lease)
  }
  return `
local ids, n = {'${ids.join("','")}'}, 0
request = function()
  n = n % #ids + 1
  return wrk.format('POST', '/_fencing/leases/' .. ids[n] .. '/renew')
end`
}

function cycling(): Promise<string> {
  return Promise.resolve(`${ask()}
local granted = {}
response = function(status, headers, body)
  if status == 201 then table.insert(granted, string.match(body, '"lease":"([^"]+)"')) end
end
request = function()
  local id = table.remove(granted)
  if id then return wrk.format('DELETE', '/_fencing/leases/' .. id) end
  return acquire()
end`)
}
