import type { ClientRequest, IncomingMessage, OutgoingHttpHeaders } from 'node:http'
import type { Socket } from 'node:net'
import httpProxy from 'http-proxy'
import type { Ending, Exchange, Forwarder, ForwardSettings, Outgoing } from './forward.ts'

/**
 * Upgraded connections (WebSocket), over http-proxy. A tunnel is one exchange: a write for its whole
 * life, which ends when the backend's side of it is closed.
 */
export function createTunnel(settings: ForwardSettings): Forwarder {
  const proxy = httpProxy.createProxyServer({ target: settings.url, ws: true })
  const open = new Map<IncomingMessage, Tunnel>()
  // Errors of a client's socket, told here by http-proxy; what they end, the tunnel sees as a close.
  proxy.on('error', () => undefined)
  proxy.on('proxyReqWs', (proxyReq, req) => open.get(req)?.watch(proxyReq))
  return {
    send(outgoing) {
      const tunnel = new Tunnel(outgoing, settings)
      const { req, upgrade } = outgoing
      if (upgrade === undefined) throw new Error('a tunnel carries upgrades')
      open.set(req, tunnel)
      void tunnel.ended.then(() => open.delete(req))
      req.url = outgoing.path
      req.headers = toObject([...outgoing.fields, 'Connection', 'Upgrade', 'Upgrade', 'websocket'])
      // Else http-proxy would close the client's connection on an error, before it has its answer.
      upgrade.socket.destroySoon = () => undefined
      proxy.ws(req, upgrade.socket, upgrade.head, {}, (error) => tunnel.fail(error))
      return tunnel
    },
    close() {
      for (const tunnel of open.values()) tunnel.cutOff('stopping')
      return Promise.resolve()
    },
  }
}

class Tunnel implements Exchange {
  readonly ended: Promise<Ending>
  readonly #outgoing: Outgoing
  readonly #settings: ForwardSettings
  #resolve: (ending: Ending) => void = () => undefined
  #proxyReq: ClientRequest | undefined
  #backend: Socket | undefined
  #connected = false
  #deadline: NodeJS.Timeout

  constructor(outgoing: Outgoing, settings: ForwardSettings) {
    this.#outgoing = outgoing
    this.#settings = settings
    this.ended = new Promise((resolve) => (this.#resolve = resolve))
    this.#deadline = this.#breakOffLater()
    outgoing.req.socket.once('close', this.#onClientClose)
  }

  /** http-proxy made its request to the backend; its listeners come after ours. */
  watch(proxyReq: ClientRequest): void {
    this.#proxyReq = proxyReq
    const { req, res } = this.#outgoing
    proxyReq.on('socket', (socket: Socket) => {
      socket.once('connect', () => (this.#connected = true))
    })
    proxyReq.on('upgrade', (proxyRes: IncomingMessage, backend: Socket) => {
      clearTimeout(this.#deadline)
      this.#backend = backend
      // A WebSocket is not half-closed: a client that ends its side is gone.
      if (req.socket.readableEnded) this.#endSoon()
      else req.socket.once('end', this.#endSoon)
      this.#sayOurs(proxyRes)
      res.detachSocket(req.socket)
      let whole = false
      backend.once('end', () => (whole = true))
      backend.once('close', () => {
        req.socket.destroy()
        this.#finish(whole ? { kind: 'answered', status: 101 } : { kind: 'unknown', why: 'reset' })
      })
    })
    proxyReq.on('response', (proxyRes: IncomingMessage) => {
      this.#sayOurs(proxyRes)
      res.detachSocket(req.socket)
      proxyRes.once('close', () => {
        req.socket.end()
        const status = proxyRes.statusCode ?? 0
        this.#finish(
          proxyRes.complete ? { kind: 'answered', status } : { kind: 'unknown', why: 'reset' },
        )
      })
    })
  }

  fail(cause: Error): void {
    if (this.#connected) this.#finish({ kind: 'unknown', why: 'reset', cause })
    else this.#finish({ kind: 'unsent', why: 'unreachable', cause })
  }

  overtake(): void {
    this.cutOff('overtaken')
  }

  /** Both ends are closed at once: nobody can say how much of what was sent was read. */
  cutOff(why: 'overtaken' | 'stopping'): void {
    this.#breakOff(this.#connected ? { kind: 'unknown', why } : { kind: 'unsent', why })
  }

  readonly #onClientClose = (): void => {
    if (!this.#connected) this.#breakOff({ kind: 'unsent', why: 'left' })
    else if (this.#backend === undefined) this.#breakOff({ kind: 'unknown', why: 'left' })
    else this.#endSoon()
  }

  /** http-proxy ends the backend's side; what was sent is read to its end, within bounds. */
  readonly #endSoon = (): void => {
    clearTimeout(this.#deadline)
    this.#deadline = this.#breakOffLater()
  }

  #breakOffLater(): NodeJS.Timeout {
    return setTimeout(() => {
      this.#breakOff(
        this.#connected
          ? { kind: 'unknown', why: 'timeout' }
          : { kind: 'unsent', why: 'unreachable', cause: new Error('no connection') },
      )
    }, this.#settings.responseTimeoutMs)
  }

  #breakOff(ending: Ending): void {
    const begun = this.#backend !== undefined || this.#outgoing.res.socket === null
    this.#finish(ending)
    this.#backend?.destroy()
    this.#proxyReq?.destroy()
    if (begun) this.#outgoing.req.socket.destroy()
  }

  #finish(ending: Ending): void {
    clearTimeout(this.#deadline)
    this.#outgoing.req.socket.off('close', this.#onClientClose).off('end', this.#endSoon)
    this.#resolve(ending)
  }

  #sayOurs({ headers }: IncomingMessage): void {
    for (const name of Object.keys(headers)) {
      if (name.startsWith('fencing-') || name === 'x-request-id')
        Reflect.deleteProperty(headers, name)
    }
    Object.assign(headers, toObject(this.#outgoing.answerFields))
  }
}

/** Names and values in turn as an object; repeated fields as a list. */
function toObject(fields: readonly string[]): OutgoingHttpHeaders & IncomingMessage['headers'] {
  // Without a prototype: a field may be called "constructor".
  const object = Object.create(null) as Record<string, string | string[]>
  for (let i = 0; i + 1 < fields.length; i += 2) {
    const name = (fields[i] as string).toLowerCase()
    const value = fields[i + 1] as string
    const before = object[name]
    object[name] = before === undefined ? value : [before, value].flat()
  }
  return object
}
