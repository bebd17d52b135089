/**
 * What many would begin with: http-proxy 1.18.1. Arguments: its port, the backend's, and `kept` for an
 * agent that keeps connections; without one it does as it comes and makes a connection for each request.
 */
import http from 'node:http'
import httpProxy from 'http-proxy-original'

const [port, backendPort, connections] = process.argv.slice(2)
const proxy = httpProxy.createProxyServer({
  target: `http://127.0.0.1:${String(backendPort)}`,
  ...(connections === 'kept' && { agent: new http.Agent({ keepAlive: true, maxSockets: 256 }) }),
})
proxy.on('error', (_error, req) => req.destroy())
http.createServer((req, res) => proxy.web(req, res, {})).listen(Number(port), '127.0.0.1')
