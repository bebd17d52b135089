import { existsSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { freePort, listening, type Site } from './site.ts'

/** What stands between the load and the backend, or the backend itself. */
export interface Server {
  readonly port: number
  /** Its processes, those of its store included. */
  readonly pids: readonly number[]
}

/** The same kept connections everywhere: as many as wanted, for as long as wanted. */
const LISTEN = 'keepalive_requests 1000000000; keepalive_timeout 1h; client_max_body_size 0; client_body_buffer_size 2m;' // prettier-ignore

/** Answers 200 to everything once the body has arrived whole, for as little CPU as possible. */
export function startBackend(site: Site): Promise<Server> {
  return startNginx(site, 'load', (port) => ({
    lua: true,
    http: `server { listen 127.0.0.1:${port} backlog=4096; ${LISTEN}
      location / { content_by_lua_block {
        ngx.req.read_body()
        ngx.header.content_length = 8
        ngx.print('applied\\n')
      } }
    }`,
  }))
}

export function startPlainNginx(site: Site, backendPort: number): Promise<Server> {
  return startNginx(site, 'proxy', (port) => ({
    lua: false,
    http: `${upstream(backendPort)} server { listen 127.0.0.1:${port} backlog=4096; ${LISTEN}
      location / { ${PROXY_PASS} }
    }`,
  }))
}

/** The compare happens in Redis, in one script; the forward after it. There is no barrier. */
export async function startNginxWithRedis(site: Site, backendPort: number): Promise<Server> {
  const redis = await startRedis(site)
  const nginx = await startNginx(site, 'proxy', (port) => ({
    lua: true,
    http: `${upstream(backendPort)} server { listen 127.0.0.1:${port} backlog=4096; ${LISTEN}
      location / {
        access_by_lua_block { ${luaFence(redis.port)} }
        ${PROXY_PASS}
      }
    }`,
  }))
  return { port: nginx.port, pids: [...nginx.pids, ...redis.pids] }
}

export async function startExpressWithRedis(
  site: Site,
  backendPort: number,
  script: string,
): Promise<Server> {
  const redis = await startRedis(site)
  const express = await startScript(site, script, [backendPort, redis.port])
  return { port: express.port, pids: [...express.pids, ...redis.pids] }
}

/** With an agent that keeps connections, as who cares for speed would set it up. */
export function startBareHttpProxy(site: Site, backendPort: number): Promise<Server> {
  return startScript(site, besides('bare-http-proxy.js'), [backendPort, 'kept'])
}

/** As its manual begins: `createProxyServer({ target })`. */
export function startHttpProxyAsItComes(site: Site, backendPort: number): Promise<Server> {
  return startScript(site, besides('bare-http-proxy.js'), [backendPort])
}

export function startBareUndici(site: Site, backendPort: number): Promise<Server> {
  return startScript(site, besides('bare-undici.js'), [backendPort])
}

function besides(name: string): string {
  return fileURLToPath(new URL(name, import.meta.url))
}

async function startScript(
  site: Site,
  script: string,
  args: readonly (number | string)[],
): Promise<Server> {
  const port = await freePort()
  const node = site.start('proxy', process.execPath, [script, ...[port, ...args].map(String)])
  await listening(node, port)
  return { port, pids: [node.pid] }
}

/** Each write is on disk before it is answered, as it is in the sidecar. */
async function startRedis(site: Site): Promise<Server> {
  const port = await freePort()
  const redis = site.start('proxy', 'redis-server', [
    ...['--bind', '127.0.0.1', '--port', String(port), '--dir', site.newFolder(), '--save', ''],
    ...['--appendonly', 'yes', '--appendfsync', 'always', '--auto-aof-rewrite-percentage', '0'],
  ])
  await listening(redis, port)
  return { port, pids: [redis.pid] }
}

interface NginxSettings {
  readonly lua: boolean
  /** What stands in the block `http`. */
  readonly http: string
}

const MODULES = '/usr/lib/nginx/modules'

async function startNginx(
  site: Site,
  core: 'load' | 'proxy',
  settingsFor: (port: number) => NginxSettings,
): Promise<Server> {
  const port = await freePort()
  const { lua, http } = settingsFor(port)
  const folder = site.newFolder()
  const file = path.join(folder, 'nginx.conf')
  // The Lua module does not load without this one, where Debian built it to need it.
  const modules = lua ? ['ndk_http_module.so', 'ngx_http_lua_module.so'] : []
  const temporary = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi']
  const text = `
daemon off;
worker_processes 1;
${process.getuid?.() === 0 ? 'user root;' : ''}
pid ${folder}/nginx.pid;
error_log stderr warn;
${modules
  .map((name) => path.join(MODULES, name))
  .filter((module) => existsSync(module))
  .map((module) => `load_module ${module};`)
  .join('\n')}
worker_rlimit_nofile 8192;
events { worker_connections 4096; }
http {
  access_log off;
  ${temporary.map((name) => `${name}_temp_path ${folder}/${name};`).join('\n  ')}
  ${http}
}
`
  writeFileSync(file, text)
  const nginx = site.start(core, 'nginx', ['-p', folder, '-c', file])
  await listening(nginx, port)
  return { port, pids: [nginx.pid] }
}

function upstream(port: number): string {
  return `upstream backend { server 127.0.0.1:${port}; keepalive 512; keepalive_requests 1000000000; keepalive_timeout 1h; }` // prettier-ignore
}

const PROXY_PASS = `proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection '';
        proxy_set_header Host $host; proxy_request_buffering off; proxy_next_upstream off;`

function luaFence(redisPort: number): string {
  return `
          local scope = ngx.var.uri:match('^/jobs/[^/]+')
          local token = ngx.var.http_fencing_token
          if not scope or not token then return ngx.exit(428) end
          local redis = require('nginx.redis'):new()
          local connected = redis:connect('127.0.0.1', ${redisPort})
          if not connected then return ngx.exit(503) end
          local current, err = redis:eval([[
            local mark = tonumber(redis.call('GET', KEYS[1]) or '-1')
            local token = tonumber(ARGV[1])
            if token > mark then redis.call('SET', KEYS[1], ARGV[1]) end
            return token >= mark and 1 or 0]], 1, scope, token)
          if err then return ngx.exit(503) end
          redis:set_keepalive(3600000, 512)
          if current == 0 then return ngx.exit(409) end
        `
}
