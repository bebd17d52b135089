// The home-made fence: Express, http-proxy-middleware, and the compare in Redis. It has no barrier.
// Arguments: its port, the backend's, that of Redis.
import http from 'node:http'
import express from 'express'
import { createProxyMiddleware } from 'http-proxy-middleware'
import { createClient, defineScript } from 'redis'

const [port, backendPort, redisPort] = process.argv.slice(2)
const redis = createClient({
  url: `redis://127.0.0.1:${redisPort}`,
  scripts: {
    raise: defineScript({
      NUMBER_OF_KEYS: 1,
      SCRIPT: `
        local mark = tonumber(redis.call('GET', KEYS[1]) or '-1')
        local token = tonumber(ARGV[1])
        if token > mark then redis.call('SET', KEYS[1], ARGV[1]) end
        return token >= mark and 1 or 0`,
      parseCommand(parser, scope, token) {
        parser.pushKey(scope)
        parser.push(token)
      },
      transformReply: (reply) => reply === 1,
    }),
  },
})
await redis.connect()

const app = express()
app.disable('x-powered-by')
app.use('/jobs/:job', async (req, res, next) => {
  const token = req.get('Fencing-Token')
  if (token === undefined) return res.status(428).end()
  const isCurrent = await redis.raise(`/jobs/${req.params.job}`, token)
  return isCurrent ? next() : res.status(409).end()
})
app.use(
  createProxyMiddleware({
    target: `http://127.0.0.1:${backendPort}`,
    agent: new http.Agent({ keepAlive: true, maxSockets: 256 }),
  }),
)
app.listen(Number(port), '127.0.0.1')
