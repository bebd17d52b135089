/**
 * The floor of the sidecar's construction: undici's dispatch under Node's HTTP server, and nothing
 * else. No fence, no checks, no timeouts, no care for clients that leave. Arguments: its port, the
 * backend's.
 */
import http, { type ServerResponse } from 'node:http'
import { Pool, type Dispatcher } from 'undici'

const [port, backendPort] = process.argv.slice(2)
const pool = new Pool(`http://127.0.0.1:${String(backendPort)}`, {
  connections: 256,
  pipelining: 1,
})
http
  .createServer((req, res) => {
    const { method = 'GET', url = '/', rawHeaders } = req
    const headers = rawHeaders.filter((_, i) => !isHop(rawHeaders[i - (i % 2)]))
    const body = 'content-length' in req.headers || 'transfer-encoding' in req.headers ? req : null
    pool.dispatch({ method, path: url, headers, body }, new Passing(res))
  })
  .listen(Number(port), '127.0.0.1')

class Passing implements Dispatcher.DispatchHandler {
  readonly #res: ServerResponse

  constructor(res: ServerResponse) {
    this.#res = res
  }

  onConnect(): void {
    // Nothing is ever cut off here.
  }

  onHeaders(status: number, fields: Buffer[], _resume: () => void, text: string): boolean {
    const raw = fields.map((field) => field.toString('latin1'))
    this.#res.writeHead(status, text, raw)
    return true
  }

  onData(chunk: Buffer): boolean {
    return this.#res.write(chunk)
  }

  onComplete(): void {
    this.#res.end()
  }

  onError(): void {
    this.#res.destroy()
  }
}

function isHop(name: string | undefined): boolean {
  return name === 'Connection' || name === 'Transfer-Encoding'
}
