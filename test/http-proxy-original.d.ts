/** What test/known-bad.ts needs of http-proxy 1.18.1, which carries no types of its own. */
declare module 'http-proxy-original' {
  import type { EventEmitter } from 'node:events'
  import type {
    Agent,
    ClientRequest,
    IncomingMessage,
    OutgoingHttpHeaders,
    ServerResponse,
  } from 'node:http'

  interface Options {
    readonly target?: string
    readonly agent?: Agent
    readonly headers?: OutgoingHttpHeaders
    readonly proxyTimeout?: number
  }

  interface Events {
    proxyReq: [proxyReq: ClientRequest, req: IncomingMessage]
    proxyRes: [proxyRes: IncomingMessage, req: IncomingMessage]
    end: [req: IncomingMessage, res: ServerResponse, proxyRes: IncomingMessage]
    econnreset: [error: NodeJS.ErrnoException, req: IncomingMessage]
    error: [error: NodeJS.ErrnoException, req: IncomingMessage]
  }

  class ProxyServer extends EventEmitter<Events> {
    web(req: IncomingMessage, res: ServerResponse, options: Options): void
  }

  const httpProxy: { createProxyServer(options: Options): ProxyServer }
  export default httpProxy
}
