import { IncomingMessage, ServerResponse, createServer, type Server } from 'node:http'
import type { Socket } from 'node:net'
import type { Duplex } from 'node:stream'
import { rawFailure } from './answer.ts'
import type { Proxy } from './proxy.ts'

/**
 * The data port: a plain Node HTTP server with nothing between its parser and the proxy. What is
 * set here is what Node's defaults would hide from the proxy or decide in its place.
 */
export function createListener(proxy: Proxy, clientTimeoutMs: number): Server {
  /** The newest answer of each connection. */
  const answers = new Map<Duplex, ServerResponse>()
  /** How many requests of a connection wait for their turn. */
  const pipelined = new WeakMap<Socket, number>()
  const server = createServer({
    IncomingMessage: Request,
    headersTimeout: clientTimeoutMs,
    // Between two reads of a body the proxy watches; a large upload may take as long as it needs.
    requestTimeout: 0,
    keepAliveTimeout: Math.max(clientTimeoutMs, 5_000),
    connectionsCheckingInterval: Math.min(1_000, Math.ceil(clientTimeoutMs / 4)),
    // The proxy looks at Host itself, and says what is wrong with it.
    requireHostHeader: false,
  })
  // Keep every field: Node's default of 2000 entries drops the rest, but frames by it.
  server.maxHeadersCount = 0
  // A client that ends its side after the request still gets its answer. (Read by Node at run time.)
  Object.assign(server, { httpAllowHalfOpen: true })

  server.on('connection', (socket) => socket.once('close', () => answers.delete(socket)))
  const take = (req: IncomingMessage, res: ServerResponse) => {
    if (res.socket === null && !mayPipeline(pipelined, req, res)) return
    answers.set(req.socket, res)
    // It was told to close: no connection is kept for a further request.
    if (!server.listening) res.shouldKeepAlive = false
    void proxy.handle(req, res)
  }
  server.on('request', take)
  server.on('checkContinue', take)
  server.on('checkExpectation', take)
  const takeSocket = (req: IncomingMessage, socket: Socket, head: Buffer) => {
    // Node lets go of the connection here; answers are written as to any other request.
    socket.on('error', () => socket.destroy())
    if (answers.get(socket)?.writableFinished === false) {
      // It would take over a connection on which the answer to an earlier request is still owed.
      socket.destroy()
      return
    }
    const res = new ServerResponse(req)
    res.assignSocket(socket)
    res.shouldKeepAlive = false
    res.once('finish', () => socket.end())
    void proxy.handle(req, res, head)
  }
  server.on('upgrade', takeSocket)
  server.on('connect', takeSocket)

  server.on('clientError', (error: NodeJS.ErrnoException, socket) => {
    // An answer can only be given where none is owed to an earlier request on this connection.
    const answered = answers.get(socket)?.writableFinished ?? true
    if (!answered || !socket.writable || error.code === 'ECONNRESET') {
      socket.destroy()
      return
    }
    const problem =
      error.code === 'HPE_HEADER_OVERFLOW'
        ? 'too-many-fields'
        : error.code === 'ERR_HTTP_REQUEST_TIMEOUT'
          ? 'client-timeout'
          : 'bad-request'
    socket.end(
      rawFailure(
        problem,
        'The request is not HTTP/1.1 (RFC 9112), or its head is too long or too late.',
      ),
    )
  })
  return server
}

/** Requests that may wait on a connection for the answer to the one before. */
const MAX_PIPELINED = 100

/** Counts a request that came behind one not answered yet. False: too many did, and its connection is closed. */
function mayPipeline(
  pipelined: WeakMap<Socket, number>,
  { socket }: IncomingMessage,
  res: ServerResponse,
): boolean {
  const waiting = pipelined.get(socket) ?? 0
  // Of what was read in one piece, more may come after the end.
  if (socket.destroyed || waiting >= MAX_PIPELINED) {
    socket.destroy()
    return false
  }
  pipelined.set(socket, waiting + 1)
  res.once('socket', () => pipelined.set(socket, (pipelined.get(socket) ?? 1) - 1))
  return true
}

/**
 * Only a WebSocket handshake is an upgrade; other `Upgrade` fields (h2c) are dropped and the request
 * is an ordinary one. Node's parser sets `upgrade`, and asks again before it lets go of the connection.
 */
class Request extends IncomingMessage {
  /** Set from the constructor of IncomingMessage already, before a field of this class could be. */
  declare asksForUpgrade: boolean | null

  get upgrade(): boolean {
    if (this.asksForUpgrade !== true) return false
    if (this.method === 'CONNECT') return true
    return this.method === 'GET' && this.headers.upgrade?.toLowerCase() === 'websocket'
  }

  set upgrade(upgrade: boolean | null) {
    this.asksForUpgrade = upgrade
  }
}
