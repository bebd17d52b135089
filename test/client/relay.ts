import net from 'node:net'
import type { TestContext } from 'node:test'
import { listenOn } from '../harness.ts'

/** The network between a client and its sidecar, which can lose answers. */
export interface Relay {
  readonly url: string
  /** Request lines in the order in which they came, such as `DELETE /_fencing/leases/abc`. */
  readonly requests: string[]
  /** Whether the answer to a request gets lost on its way. */
  loses: (requestLine: string) => boolean
}

export async function startRelay(t: TestContext, port: number): Promise<Relay> {
  const sockets = new Set<net.Socket>()
  const server = net.createServer((client) => {
    const upstream = net.connect({ port, host: '127.0.0.1' })
    for (const socket of [client, upstream]) {
      sockets.add(socket)
      socket.on('error', () => undefined)
    }
    let isLosing = false
    client.on('data', (bytes) => {
      const [, line] = /^([A-Z]+ \S+) HTTP\/1\.1\r\n/.exec(bytes.toString('latin1')) ?? []
      if (line !== undefined) {
        relay.requests.push(line)
        isLosing = relay.loses(line)
      }
      upstream.write(bytes)
    })
    upstream.on('data', (bytes) => {
      if (!isLosing) client.write(bytes)
    })
    client.on('close', () => upstream.destroy())
    upstream.on('close', () => client.destroy())
  })
  const relay: Relay = { url: '', requests: [], loses: () => false }
  t.after(() => {
    for (const socket of sockets) socket.destroy()
    server.close()
  })
  return Object.assign(relay, { url: `http://127.0.0.1:${await listenOn(server)}` })
}
