import { writeFileSync } from 'node:fs'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import type { FileSettings } from '../../src/config.ts'
import { openStore } from '../../src/store/open.ts'
import { parseToken } from '../../src/token.ts'
import { freePort, listening, type Site, type Started } from './site.ts'
import type { Server } from './peers.ts'

const CLI = fileURLToPath(new URL('../../src/cli.js', import.meta.url))

export interface Sidecar extends Server {
  readonly started: Started
  /** From the start of the process until it takes connections. */
  readonly startMs: number
}

/** The real program with its defaults but for `more`, and its store in a file on the site's disk. */
export async function startSidecar(
  site: Site,
  backendPort: number,
  more: Partial<FileSettings> = {},
): Promise<Sidecar> {
  const [port, adminPort] = [await freePort(), await freePort()]
  const settings: FileSettings = {
    listen: `127.0.0.1:${port}`,
    admin: `127.0.0.1:${adminPort}`,
    upstream: { url: `http://127.0.0.1:${backendPort}` },
    store: { path: path.join(site.newFolder(), 'fence.db') },
    routes: [{ path: '/jobs/{job}/**' }],
    ...more,
  }
  const config = path.join(site.newFolder(), 'config.json')
  writeFileSync(config, JSON.stringify(settings))
  const begun = performance.now()
  const started = site.start('proxy', process.execPath, [CLI, 'serve', '--config', config])
  await listening(started, port)
  return { port, pids: [started.pid], started, startMs: performance.now() - begun }
}

/** How many raises wait in the store at a time while one is filled. */
const BATCH = 10_000

/** A store that holds `scopes` marks, /jobs/0 and so on, each with token 1, and was closed in order. */
export async function fillStore(site: Site, scopes: number): Promise<string> {
  const file = path.join(site.newFolder(), 'fence.db')
  const token = parseToken('1')
  if (token === undefined) throw new Error('1 is a token')
  const fail = (error: Error) => {
    throw error
  }
  const { store } = await openStore(
    { type: 'sqlite', path: file, create: true },
    { committed: () => undefined, failed: fail, died: fail },
  )
  for (let first = 0; first < scopes; first += BATCH) {
    const size = Math.min(BATCH, scopes - first)
    await Promise.all(
      Array.from({ length: size }, (_, i) => store.raise(`/jobs/${first + i}`, token, false)),
    )
  }
  await store.close(true)
  return file
}
