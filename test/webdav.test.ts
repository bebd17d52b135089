import assert from 'node:assert/strict'
import { execFile, spawn } from 'node:child_process'
import { createHash, randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { createReadStream, existsSync, readFileSync } from 'node:fs'
import { mkdir, readdir, stat, writeFile } from 'node:fs/promises'
import path from 'node:path'
import { test } from 'node:test'
import { promisify } from 'node:util'
import { parse } from 'yaml'
import type { FileSettings } from '../src/config.ts'
import { readMetric, temporaryFolder, until } from './harness.ts'
import { lacking } from './needs.ts'
import { NGINX_FILES, NGINX_PACKAGES, startDav } from './nginx.ts'
import { startProgram } from './program.ts'

/**
 * The real program with config/webdav.yaml between two programs that nobody here wrote: nginx as a
 * WebDAV server, and curl.
 */

const MEGABYTE = 1024 * 1024

interface Got {
  readonly status: number
  readonly body: string
  /** Bytes of the body that curl sent. */
  readonly uploaded: number
  /** The heads that went to and fro. */
  readonly heads: string
}

/** Runs curl to its end. Throws where it could not talk HTTP to its end; a refusal is an answer. */
async function curl(...args: readonly string[]): Promise<Got> {
  const { stdout, stderr } = await promisify(execFile)(
    'curl',
    ['-sS', '-v', '--path-as-is', '-w', '\n%{http_code} %{size_upload}', ...args],
    { maxBuffer: MEGABYTE },
  )
  const [, body = '', status, uploaded] = /^([^]*)\n(\d+) (\d+)$/.exec(stdout) ?? []
  return { status: Number(status), body, uploaded: Number(uploaded), heads: stderr }
}

const token = (value: number) => ['-H', `Fencing-Token: ${value}`]

async function digest(file: string): Promise<string> {
  const hash = createHash('sha256')
  for await (const chunk of createReadStream(file)) hash.update(chunk as Buffer)
  return hash.digest('hex')
}

test(
  'WebDAV files in nginx, written with curl',
  {
    skip: lacking(['/usr/bin/curl', ...NGINX_FILES], `curl ${NGINX_PACKAGES}`),
  },
  async (t) => {
    const nginx = await startDav(t)
    const settings = parse(readFileSync('config/webdav.yaml', 'utf8')) as FileSettings
    const proxy = await startProgram(t, nginx.url, {
      settings: { ...settings, upstream: { url: nginx.url } },
      env: { FENCING_PROXY_FENCE_SETTLE: '300ms' },
    })
    const base = `http://127.0.0.1:${proxy.port}/files`
    const folder = await temporaryFolder(t)
    const onDisk = (name: string) => path.join(nginx.root, 'files', name)
    const contentOf = (name: string) => readFileSync(onDisk(name), 'utf8')
    await mkdir(onDisk('alice'), { recursive: true })
    await mkdir(onDisk('bob'))

    await t.test(
      'PUT, GET, MKCOL, COPY, MOVE and DELETE do what they do without a proxy',
      async () => {
        const put = await curl(...token(7), '-X', 'PUT', '-d', 'first', `${base}/alice/a.txt`)
        assert.equal(put.status, 201)
        assert.match(put.heads, /Fencing-Result: accepted/)
        assert.match(put.heads, /Fencing-Scope: \/files\/alice/)
        assert.equal(contentOf('alice/a.txt'), 'first')
        assert.equal((await curl(`${base}/alice/a.txt`)).body, 'first')

        assert.equal((await curl(...token(7), '-X', 'MKCOL', `${base}/alice/sub/`)).status, 201)
        const to = (target: string) => ['-H', `Destination: ${base}/${target}`]
        const copy = ['-X', 'COPY', ...to('alice/sub/b.txt'), `${base}/alice/a.txt`]
        assert.equal((await curl(...token(7), ...copy)).status, 204)
        const move = ['-X', 'MOVE', ...to('alice/c.txt'), `${base}/alice/a.txt`]
        assert.equal((await curl(...token(7), ...move)).status, 204)
        assert.deepEqual((await readdir(onDisk('alice'))).sort(), ['c.txt', 'sub'])
        assert.equal(contentOf('alice/sub/b.txt'), 'first')
        assert.equal((await curl(...token(7), '-X', 'DELETE', `${base}/alice/c.txt`)).status, 204)
        assert.deepEqual(await readdir(onDisk('alice')), ['sub'])
      },
    )

    await t.test('a MOVE or a COPY into the files of another owner is refused', async () => {
      for (const method of ['MOVE', 'COPY']) {
        const elsewhere = ['-H', `Destination: ${base}/bob/stolen.txt`]
        const got = await curl(
          ...[...token(7), '-X', method, ...elsewhere, `${base}/alice/sub/b.txt`],
        )
        assert.equal(got.status, 400)
        assert.match(got.heads, /Fencing-Result: ambiguous/)
      }
      assert.deepEqual(await readdir(onDisk('bob')), [])
      assert.equal(contentOf('alice/sub/b.txt'), 'first')
    })

    await t.test('a write without a token is refused, in every method', async () => {
      for (const method of ['PUT', 'DELETE', 'MKCOL', 'MOVE', 'COPY']) {
        const got = await curl('-X', method, `${base}/alice/sub/b.txt`)
        assert.equal(got.status, 428, method)
      }
      // PROPPATCH is a write that no route covers.
      assert.equal((await curl('-X', 'PROPPATCH', `${base}/alice/sub/b.txt`)).status, 403)
      assert.equal(contentOf('alice/sub/b.txt'), 'first')
    })

    await t.test('PROPFIND lists a folder, without a token', async () => {
      const got = await curl('-X', 'PROPFIND', '-H', 'Depth: 1', `${base}/alice/`)
      assert.equal(got.status, 207)
      assert.match(got.body, /<D:href>\/files\/alice\/sub/)
    })

    await t.test('conditional and partial reads pass', async () => {
      const url = `${base}/alice/sub/b.txt`
      const [, etag = ''] = /^< ETag: (.*?)\r?$/im.exec((await curl(url)).heads) ?? []
      const unchanged = await curl('-H', `If-None-Match: ${etag}`, url)
      assert.deepEqual([unchanged.status, unchanged.body], [304, ''])
      const part = await curl('-r', '1-3', url)
      assert.deepEqual([part.status, part.body], [206, 'irs'])
      assert.match(part.heads, /Content-Range: bytes 1-3\/5/)
      assert.equal((await curl('-r', '90-', url)).status, 416)
      const head = await curl('-I', url)
      assert.equal(head.status, 200)
      assert.match(head.heads, /Content-Length: 5/)
    })

    await t.test('an upload of unknown length (chunked) arrives whole', async () => {
      const file = path.join(folder, 'stream')
      await writeFile(file, randomBytes(3 * MEGABYTE))
      const curling = spawn('curl', [...['-sS', '-T', '-', ...token(7)], `${base}/alice/stream`], {
        stdio: ['pipe', 'ignore', 'inherit'],
      })
      createReadStream(file).pipe(curling.stdin)
      assert.deepEqual(await once(curling, 'exit'), [0, null])
      assert.equal(await digest(onDisk('alice/stream')), await digest(file))
    })

    const large = path.join(folder, 'large')
    await t.test('100 MB up and down are the same bytes', async () => {
      await writeFile(large, randomBytes(100 * MEGABYTE))
      const up = await curl(...token(7), '-T', large, `${base}/alice/large`)
      assert.equal(up.status, 201)
      assert.match(up.heads, /^> Expect: 100-continue/m)
      assert.match(up.heads, /^< HTTP\/1\.1 100 Continue/m)
      const back = path.join(folder, 'back')
      assert.equal((await curl('-o', back, `${base}/alice/large`)).status, 200)
      const expected = await digest(large)
      assert.equal(await digest(onDisk('alice/large')), expected)
      assert.equal(await digest(back), expected)
    })

    await t.test('a stale upload is refused before its body is sent', async () => {
      assert.equal((await curl(...token(8), '-X', 'MKCOL', `${base}/alice/8/`)).status, 201)
      const got = await curl(...token(7), '-T', large, `${base}/alice/large2`)
      assert.equal(got.status, 409)
      assert.equal(got.uploaded, 0)
      assert.ok(!existsSync(onDisk('alice/large2')))
    })

    await t.test(
      'a worker that is paused in mid-upload finds its lease gone; the file of the new owner stands',
      async () => {
        const url = `${base}/bob/report`
        const worker = spawn(
          'curl',
          ['-sS', '-w', '%{http_code}', '-o', '/dev/null', '-T', '-', ...token(41), url],
          { stdio: ['pipe', 'pipe', 'ignore'] },
        )
        t.after(() => worker.kill('SIGKILL'))
        let told = ''
        worker.stdout.on('data', (chunk: Buffer) => (told += chunk.toString()))
        worker.stdin.on('error', () => undefined)
        worker.stdin.write('half of the report of 41, ')
        await until(
          async () => (await readMetric(proxy.adminPort, 'fencing_in_flight')) === 1,
          "the worker's upload is under way",
        )
        worker.kill('SIGSTOP')

        const newer = await curl(...token(42), '-X', 'PUT', '-d', 'the report of 42', url)
        assert.equal(newer.status, 201)

        worker.kill('SIGCONT')
        worker.stdin.end('and the other half')
        await once(worker, 'close')
        assert.equal(told, '409')
        const again = await curl(...token(41), '-X', 'PUT', '-d', 'the report of 41', url)
        assert.equal(again.status, 409)
        assert.match(again.heads, /Fencing-Result: stale/)
        assert.equal((await curl(...token(41), '-X', 'DELETE', url)).status, 409)
        assert.equal(contentOf('bob/report'), 'the report of 42')
      },
    )

    await t.test(
      'then the program stops cleanly, and nothing but that upload was left unknown',
      async () => {
        assert.equal(await readMetric(proxy.adminPort, 'fencing_unknown_outcomes_total'), 1)
        assert.equal(await readMetric(proxy.adminPort, 'fencing_in_flight'), 0)
        assert.ok((await stat(onDisk('alice/large'))).size > 0)
        proxy.child.kill('SIGTERM')
        assert.deepEqual(await proxy.ended, { code: 0, signal: null })
      },
    )
  },
)
