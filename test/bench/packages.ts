import { spawnSync } from 'node:child_process'
import { cpSync, existsSync } from 'node:fs'
import path from 'node:path'

/** Debian's packages that are driven here, and a file that each brings. .ci/packages installs them. */
const PACKAGES = {
  wrk: '/usr/bin/wrk',
  nginx: '/usr/sbin/nginx',
  'libnginx-mod-http-lua': '/usr/lib/nginx/modules/ngx_http_lua_module.so',
  'lua-nginx-redis': '/usr/share/lua/5.1/nginx/redis.lua',
  'redis-server': '/usr/bin/redis-server',
} as const

export type Package = keyof typeof PACKAGES

/** Load and backend: without these there is nothing to measure. */
export const NEEDED: readonly Package[] = ['wrk', 'nginx', 'libnginx-mod-http-lua']

/** In words that can be acted on; undefined where nothing is missing. */
export function explainMissing(packages: readonly Package[]): string | undefined {
  const missing = packages.filter((name) => !existsSync(PACKAGES[name]))
  if (missing.length === 0) return undefined
  return `not installed: ${missing.join(', ')} (apt-get install ${missing.join(' ')})`
}

/** Where the home-made script lies in the sources: a program with dependencies of its own. */
const EXPRESS_REDIS = path.resolve('test/bench/express-redis')

/**
 * Installs the home-made script with its dependencies below `base`, once; they are none of the
 * project's. Answers with the script, or with why there is none.
 */
export function installExpressRedis(
  base: string,
  say: (words: string) => void,
): { script: string } | { missing: string } {
  const folder = path.join(base, 'express-redis')
  cpSync(EXPRESS_REDIS, folder, { recursive: true })
  const script = path.join(folder, 'proxy.js')
  if (existsSync(path.join(folder, 'node_modules', '.package-lock.json'))) return { script }
  say('installing express, http-proxy-middleware and redis for the home-made script')
  const npm = spawnSync('npm', ['install', '--no-audit', '--no-fund', '--no-package-lock'], {
    cwd: folder,
    stdio: ['ignore', 'ignore', 'inherit'],
  })
  return npm.status === 0 ? { script } : { missing: 'npm could not install its packages' }
}
