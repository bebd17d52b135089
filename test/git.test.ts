import assert from 'node:assert/strict'
import { execFile, spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { mkdir, readFile, writeFile } from 'node:fs/promises'
import http, { type IncomingMessage, type ServerResponse } from 'node:http'
import path from 'node:path'
import { test, type TestContext } from 'node:test'
import { promisify } from 'node:util'
import { listenOn, readMetric, temporaryFolder } from './harness.ts'
import { lacking } from './needs.ts'
import { startProgram } from './program.ts'

/** The real program between a git client and git's own HTTP server: pushes are fenced, per repository. */

const HTTP_BACKEND = '/usr/lib/git-core/git-http-backend'

interface GitServer {
  readonly url: string
  /** Transfer-Encoding of each push so far; undefined where its length was known. */
  readonly pushes: (string | undefined)[]
}

/** `git http-backend` over the repositories in `root`, which speaks CGI (RFC 3875). */
async function startGit(t: TestContext, root: string): Promise<GitServer> {
  const pushes: (string | undefined)[] = []
  const server = http.createServer((req, res) => {
    if (req.url?.endsWith('/git-receive-pack')) pushes.push(req.headers['transfer-encoding'])
    serveGit(root, req, res)
  })
  const port = await listenOn(server)
  t.after(() => {
    server.closeAllConnections()
    server.close()
  })
  return { url: `http://127.0.0.1:${port}`, pushes }
}

function serveGit(root: string, req: IncomingMessage, res: ServerResponse): void {
  const [target = '', query = ''] = (req.url ?? '').split('?')
  const cgi = spawn(HTTP_BACKEND, {
    env: {
      ...quiet(root),
      GIT_PROJECT_ROOT: root,
      GIT_HTTP_EXPORT_ALL: '1',
      REQUEST_METHOD: req.method,
      PATH_INFO: target,
      QUERY_STRING: query,
      CONTENT_TYPE: req.headers['content-type'],
      CONTENT_LENGTH: req.headers['content-length'],
      HTTP_CONTENT_ENCODING: req.headers['content-encoding'],
      GIT_PROTOCOL: req.headers['git-protocol'] as string | undefined,
      REMOTE_USER: 'worker',
      REMOTE_ADDR: '127.0.0.1',
    },
    stdio: ['pipe', 'pipe', 'inherit'],
  })
  req.pipe(cgi.stdin)
  cgi.stdin.on('error', () => undefined)
  let head: Buffer | undefined = Buffer.alloc(0)
  cgi.stdout.on('data', (chunk: Buffer) => {
    if (head === undefined) return void res.write(chunk)
    head = Buffer.concat([head, chunk])
    const end = head.indexOf('\r\n\r\n')
    if (end < 0) return
    const lines = head.toString('latin1', 0, end).split('\r\n')
    const fields = lines.map((line) => /^([^:]+): *(.*)$/.exec(line)?.slice(1) ?? [])
    const status = fields.find(([name]) => name === 'Status')?.[1] ?? '200'
    res.writeHead(Number.parseInt(status), fields.filter(([name]) => name !== 'Status').flat())
    res.write(head.subarray(end + 4))
    head = undefined
  })
  cgi.stdout.on('end', () => res.end())
}

/** An environment in which git reads no configuration of this machine and its user. */
function quiet(home: string): NodeJS.ProcessEnv {
  return {
    PATH: process.env['PATH'],
    HOME: home,
    LC_ALL: 'C',
    GIT_CONFIG_NOSYSTEM: '1',
    GIT_TERMINAL_PROMPT: '0',
    GIT_AUTHOR_NAME: 'worker',
    GIT_AUTHOR_EMAIL: 'worker@example.org',
    GIT_COMMITTER_NAME: 'worker',
    GIT_COMMITTER_EMAIL: 'worker@example.org',
  }
}

test(
  'git pushes through the proxy',
  {
    skip: lacking(['/usr/bin/git', HTTP_BACKEND], 'git'),
  },
  async (t) => {
    const folder = await temporaryFolder(t)
    const root = path.join(folder, 'repositories')
    await mkdir(root)
    const git = async (where: string, ...args: readonly string[]) => {
      const { stdout } = await promisify(execFile)('git', ['-C', where, ...args], {
        env: quiet(folder),
      })
      return stdout.trim()
    }
    const as = (token: string) => ['-c', `http.extraHeader=Fencing-Token: ${token}`]
    await git(root, 'init', '-q', '--bare', '-b', 'main', 'job.git')
    const server = await startGit(t, root)
    const proxy = await startProgram(t, server.url, {
      settings: {
        routes: [
          { path: '/{repository}/git-receive-pack', scope: '/{repository}' },
          // A fetch is a POST, too, and changes nothing.
          { path: '/{repository}/git-upload-pack', scope: '/{repository}', missingToken: 'pass' },
        ],
      },
    })
    const url = `http://127.0.0.1:${proxy.port}/job.git`
    const main = () => git(path.join(root, 'job.git'), 'rev-parse', 'main')

    /** A clone that has a commit of its own. */
    const clone = async (name: string, content: string | Buffer) => {
      await git(folder, 'clone', '-q', url, name)
      const work = path.join(folder, name)
      await writeFile(path.join(work, name), content)
      await git(work, 'add', '.')
      await git(work, 'commit', '-q', '-m', name)
      return work
    }

    await t.test('a push with a token arrives, and a clone without one has it', async () => {
      const work = await clone('first', 'first')
      await git(work, ...as('7'), 'push', '-q', 'origin', 'HEAD:main')
      assert.equal(await main(), await git(work, 'rev-parse', 'HEAD'))
      await git(folder, 'clone', '-q', url, 'reader')
      assert.equal(await readFile(path.join(folder, 'reader', 'first'), 'utf8'), 'first')
    })

    await t.test('a push that is sent in chunks arrives whole', async () => {
      // Beyond http.postBuffer (1 MiB), git does not know the length beforehand.
      const work = await clone('large', randomBytes(5 * 1024 * 1024))
      await git(work, ...as('7'), 'push', '-q', 'origin', 'HEAD:main')
      assert.equal(await main(), await git(work, 'rev-parse', 'HEAD'))
      assert.equal(server.pushes.at(-1), 'chunked')
      await git(path.join(root, 'job.git'), 'fsck', '--strict')
    })

    await t.test(
      'a push of an older owner is refused, and the repository is unchanged',
      async () => {
        const [newer, older] = [await clone('newer', 'newer'), await clone('older', 'older')]
        await git(newer, ...as('8'), 'push', '-q', 'origin', 'HEAD:main')
        const before = await main()
        for (const content of [undefined, randomBytes(5 * 1024 * 1024)]) {
          if (content !== undefined) {
            await writeFile(path.join(older, 'older'), content)
            await git(older, 'commit', '-q', '-a', '-m', 'larger')
          }
          // It would overwrite what the newer owner pushed.
          await assert.rejects(
            git(older, ...as('7'), 'push', '-f', 'origin', 'HEAD:main'),
            (error) => {
              assert.match(String((error as { stderr?: string }).stderr), /HTTP 409|error: 409/)
              return true
            },
          )
        }
        assert.equal(await main(), before)
        assert.equal(
          await git(path.join(root, 'job.git'), 'for-each-ref', '--count=9'),
          `${before} commit\trefs/heads/main`,
        )
        const stale = await readMetric(proxy.adminPort, 'fencing_stale_writes_total')
        assert.ok(stale >= 2)
      },
    )

    await t.test('a push without a token is refused', async () => {
      const work = path.join(folder, 'older')
      await assert.rejects(git(work, 'push', '-f', 'origin', 'HEAD:main'), /428/)
    })

    await t.test('the new owner goes on', async () => {
      const work = path.join(folder, 'newer')
      await git(work, 'commit', '-q', '--allow-empty', '-m', 'next')
      await git(work, ...as('8'), 'push', '-q', 'origin', 'HEAD:main')
      assert.equal(await main(), await git(work, 'rev-parse', 'HEAD'))
      assert.equal(await readMetric(proxy.adminPort, 'fencing_unknown_outcomes_total'), 0)
    })
  },
)
