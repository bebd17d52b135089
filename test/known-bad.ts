import {
  Agent,
  type ClientRequest,
  type IncomingMessage,
  type OutgoingHttpHeaders,
} from 'node:http'
import httpProxy from 'http-proxy-original'
import type { Ending, Exchange, Forwarder, ForwardSettings, Outgoing } from '../src/forward.ts'

/**
 * http-proxy 1.18.1 in the place of src/forward.ts: what a careful author would write over the
 * events that it has. It is here to be caught: the tests that hold with the real forwarder must
 * notice what goes wrong with this one.
 */
export function createKnownBad(settings: ForwardSettings): Forwarder {
  const agent = new Agent({ keepAlive: true, maxSockets: settings.maxConnections })
  const proxy = httpProxy.createProxyServer({
    target: settings.url,
    agent,
    proxyTimeout: settings.responseTimeoutMs,
  })
  const open = new Map<IncomingMessage, EventExchange>()
  proxy.on('proxyReq', (proxyReq, req) => open.get(req)?.onConnection(proxyReq))
  proxy.on('proxyRes', (proxyRes, req) => open.get(req)?.onResponse(proxyRes))
  proxy.on('end', (req, _res, proxyRes) => {
    open.get(req)?.finish({ kind: 'answered', status: proxyRes.statusCode ?? 0 })
  })
  proxy.on('econnreset', (cause, req) => {
    open.get(req)?.finish({ kind: 'unknown', why: 'left', cause })
  })
  proxy.on('error', (cause, req) => open.get(req)?.onError(cause))
  return {
    send(outgoing) {
      const { req, res, path, fields } = outgoing
      const exchange = new EventExchange(outgoing)
      open.set(req, exchange)
      void exchange.ended.then(() => open.delete(req))
      req.url = path
      // Laid over the fields that came, which http-proxy reads by itself, framing included.
      proxy.web(req, res, { headers: toObject(fields) })
      return exchange
    },
    close() {
      agent.destroy()
      return Promise.resolve()
    },
  }
}

class EventExchange implements Exchange {
  readonly ended: Promise<Ending>
  readonly #outgoing: Outgoing
  #resolve: (ending: Ending) => void = () => undefined
  #proxyReq: ClientRequest | undefined

  constructor(outgoing: Outgoing) {
    this.#outgoing = outgoing
    this.ended = new Promise((resolve) => (this.#resolve = resolve))
  }

  /** http-proxy gives its request away when it has a connection, not before. */
  onConnection(proxyReq: ClientRequest): void {
    this.#proxyReq = proxyReq
  }

  onResponse({ headers }: IncomingMessage): void {
    for (const name of Object.keys(headers)) {
      if (name.startsWith('fencing-')) Reflect.deleteProperty(headers, name)
    }
    Object.assign(headers, toObject(this.#outgoing.answerFields))
  }

  onError(cause: NodeJS.ErrnoException): void {
    const connected = this.#proxyReq?.socket?.connecting === false
    if (!connected || cause.code === 'ECONNREFUSED') {
      this.finish({ kind: 'unsent', why: 'unreachable', cause })
    } else this.finish({ kind: 'unknown', why: 'reset', cause })
  }

  overtake(): void {
    if (this.#proxyReq === undefined || this.#outgoing.req.complete) return
    this.finish({ kind: 'unknown', why: 'overtaken' })
    this.#proxyReq.destroy()
  }

  finish(ending: Ending): void {
    this.#resolve(ending)
  }
}

/** Names and values in turn as an object, as http-proxy takes them. */
function toObject(fields: readonly string[]): OutgoingHttpHeaders {
  const object: Record<string, string | string[]> = {}
  for (let i = 0; i + 1 < fields.length; i += 2) {
    const name = (fields[i] as string).toLowerCase()
    const value = fields[i + 1] as string
    const before = object[name]
    object[name] = before === undefined ? value : [before, value].flat()
  }
  return object
}
