import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdir, writeFile } from 'node:fs/promises'
import net from 'node:net'
import path from 'node:path'
import type { TestContext } from 'node:test'
import { freePort } from './free-port.ts'
import { temporaryFolder, until } from './harness.ts'

const NGINX = '/usr/sbin/nginx'
const DAV_EXT = '/usr/lib/nginx/modules/ngx_http_dav_ext_module.so'

/** What `lacking` looks for. */
export const NGINX_FILES = [NGINX, DAV_EXT]
export const NGINX_PACKAGES = 'nginx libnginx-mod-http-dav-ext'

export interface DavServer {
  readonly url: string
  /** What it serves. */
  readonly root: string
}

/** nginx as a file server that takes WebDAV, over an empty folder; it ends with the test. */
export async function startDav(t: TestContext): Promise<DavServer> {
  const folder = await temporaryFolder(t)
  const root = path.join(folder, 'root')
  await mkdir(root)
  const port = await freePort()
  const config = path.join(folder, 'nginx.conf')
  const temporary = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi']
  await writeFile(
    config,
    `
    load_module ${DAV_EXT};
    daemon off;
    # One process, so that its end is the end of all of it.
    master_process off;
    pid ${folder}/nginx.pid;
    error_log stderr error;
    events {}
    http {
      access_log off;
      ${temporary.map((name) => `${name}_temp_path ${folder}/${name};`).join('\n')}
      client_max_body_size 0;
      server {
        listen 127.0.0.1:${port};
        root ${root};
        dav_methods PUT DELETE MKCOL COPY MOVE;
        dav_ext_methods PROPFIND OPTIONS;
      }
    }`,
  )
  const nginx = spawn(NGINX, ['-c', config, '-p', folder, '-e', 'stderr'], {
    stdio: ['ignore', 'ignore', 'inherit'],
  })
  const exited = once(nginx, 'exit')
  t.after(async () => {
    nginx.kill('SIGKILL')
    await exited
  })
  await until(() => accepts(port), 'nginx takes connections')
  return { url: `http://127.0.0.1:${port}`, root }
}

function accepts(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = net.connect({ port, host: '127.0.0.1' })
    socket.once('connect', () => {
      socket.destroy()
      resolve(true)
    })
    socket.once('error', () => resolve(false))
  })
}
