import assert from 'node:assert/strict'
import { chmodSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { after, describe, test, type TestContext } from 'node:test'
import { startBackend, startProxy, until, write } from '../harness.ts'
import { isInstalled, takeLock } from './recipe.ts'
import { SERVICES, type Service } from './services.ts'

/**
 * The recipes of the README, each run as it stands there against the real service, end to end
 * through the proxy. They mostly wait for locks to expire, so they run side by side.
 */
describe('recipes for tokens', { concurrency: true, timeout: 90_000 }, () => {
  const root = mkdtempSync(path.join(tmpdir(), 'fencing-recipes-'))
  chmodSync(root, 0o755) // PostgreSQL runs as another user
  after(() => rmSync(root, { recursive: true }))

  for (const service of SERVICES) {
    test(`${service.recipe}: every owner has a higher token, a paused one is refused, and one that went back is let in by a generation`, async (t) => {
      if (isMissing(t, service)) return
      const folder = path.join(root, service.recipe)
      mkdirSync(folder)
      const started = await service.start(t, folder)
      const backend = await startBackend(t)
      const { port } = await startProxy(t, backend.url)
      const target = `http://127.0.0.1:${port}/jobs/17/state`
      const take = () => takeLock(t, service.recipe, { ...started.env, TARGET: target })
      const writesOf = (token: string) =>
        backend.seen.filter(({ headers }) => headers['fencing-token'] === token).length
      const result = async (token: string) => (await write(port, token)).headers['fencing-result']

      const a = await take()
      await until(() => writesOf(a.token) > 1, 'the first owner writes')
      a.pause()
      const b = await take()
      assert.ok(BigInt(b.token) > BigInt(a.token), `${b.token} after ${a.token}`)
      await until(() => writesOf(b.token) > 0, 'its successor writes')
      const before = writesOf(a.token)
      a.resume()
      await until(() => a.answers.at(-1) === '409', 'the paused owner wakes, writes on, is refused')
      await a.ended
      assert.equal(writesOf(a.token), before, 'nothing of it reached the backend any more')
      assert.equal(await result(b.token), 'accepted')

      b.pause()
      await started.crash()
      const c = await take()
      assert.ok(BigInt(c.token) > BigInt(b.token), `${c.token} after ${b.token} and a crash`)
      assert.equal(await result(c.token), 'accepted')

      c.pause()
      await started.goBack()
      const d = await take()
      assert.ok(BigInt(d.token) < BigInt(c.token), `${d.token} after ${c.token} and a loss`)
      assert.equal(await result(d.token), 'stale', 'the fence does not go back')
      assert.equal(await result(`1.${d.token}`), 'accepted')
      assert.equal(await result(c.token), 'stale')

      const tokens = backend.seen.map(({ headers }) => headers['fencing-token'])
      assert.deepEqual(
        tokens.filter((token, i) => token !== tokens[i - 1]),
        [a.token, b.token, c.token, `1.${d.token}`],
      )
    })
  }
})

/** Skips aloud where the service is not installed. In CI a service that Debian has is a must. */
function isMissing(t: TestContext, { commands, packages }: Service): boolean {
  const missing = [...commands, 'curl'].filter((command) => !isInstalled(command))
  if (missing.length === 0) return false
  const remedy =
    packages === undefined
      ? 'Debian has no package of it; put it on the PATH'
      : `apt-get install --no-install-recommends ${packages}`
  const why = `${missing.join(', ')} not found: ${remedy}`
  if (process.env['CI'] === 'true' && packages !== undefined) assert.fail(why)
  t.skip(why)
  return true
}
