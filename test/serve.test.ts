import assert from 'node:assert/strict'
import { once } from 'node:events'
import { existsSync, writeFileSync } from 'node:fs'
import type { ServerResponse } from 'node:http'
import net from 'node:net'
import path from 'node:path'
import { describe, test, type TestContext } from 'node:test'
import {
  connect,
  head,
  listenOn,
  readMetric,
  request,
  startBackend,
  temporaryFolder,
  until,
  write,
} from './harness.ts'
import { runProgram, startProgram, type Program } from './program.ts'

/** The program as an operator meets it: start, stop, signals, exit codes, and what it says of them. */

/** A backend that answers `/held` only when told. */
async function holdingBackend(t: TestContext) {
  const held: ServerResponse[] = []
  const backend = await startBackend(t, ({ url, res }) => {
    if (url.endsWith('/held')) held.push(res)
    else res.end('done')
  })
  return { url: backend.url, seen: backend.seen, held }
}

const HELD = { path: '/jobs/17/held' }

/** It failed as it should: exit code 1, one line of words, nothing of its inside. */
async function failsInWords(program: Program, words: RegExp): Promise<void> {
  assert.deepEqual(await program.ended, { code: 1, signal: null })
  assert.match(program.stderr, words)
  assert.match(program.stderr, /^fencing-proxy: [^\n]+\n$/, 'one line')
  assert.doesNotMatch(program.stderr, /node:internal|\.js:\d/, 'no stack trace')
}

describe('start', { concurrency: 2 }, () => {
  test('says on stdout where it listens, once it does; a fresh store is a warning, a known one is not', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const first = await startProgram(t, backend.url, { folder })
    assert.equal((await write(first.port, 41)).status, 200)
    const [started] = first.events('started')
    assert.equal(started?.['level'], 'info')
    assert.equal(started['data'], `127.0.0.1:${first.port}`)
    assert.equal(started['upstream'], backend.url)
    const [created] = first.events('store_created')
    assert.equal(created?.['level'], 'warn')
    assert.equal(created['path'], path.join(folder, 'fence.db'))
    assert.match(String(created['msg']), /marks are lost/)
    first.child.kill('SIGTERM')
    assert.equal((await first.ended).code, 0)

    const second = await startProgram(t, backend.url, { folder })
    assert.deepEqual(second.events('store_created'), [])
    assert.deepEqual(second.events('unclean_start'), [])
    assert.equal((await write(second.port, 40)).status, 409)
  })

  const busyPort = async (t: TestContext) => {
    const taken = net.createServer()
    t.after(() => taken.close())
    return `127.0.0.1:${await listenOn(taken)}`
  }

  test('a busy data port is told in words, and the store stays clean', async (t) => {
    const busy = await busyPort(t)
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const failed = await runProgram(t, backend.url, { folder, settings: { listen: busy } })
    await failsInWords(failed, new RegExp(`listen: ${busy} is in use by another process`))
    assert.deepEqual(failed.events('started'), [])
    const next = await startProgram(t, backend.url, { folder })
    assert.deepEqual(next.events('unclean_start'), [])
  })

  test('a busy admin port is told in words, and does not hide that the run before was killed', async (t) => {
    const busy = await busyPort(t)
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const first = await startProgram(t, backend.url, { folder })
    await first.kill()
    const failed = await runProgram(t, backend.url, { folder, settings: { admin: busy } })
    await failsInWords(failed, new RegExp(`admin: ${busy} is in use by another process`))
    const next = await startProgram(t, backend.url, { folder })
    assert.equal(next.events('unclean_start')[0]?.['level'], 'warn')
  })

  test('the admin port comes first and the data port last: of two that are busy, the admin port is told', async (t) => {
    const [data, admin] = [await busyPort(t), await busyPort(t)]
    const backend = await startBackend(t)
    const settings = { listen: data, admin }
    const failed = await runProgram(t, backend.url, { settings })
    await failsInWords(failed, new RegExp(`admin: ${admin} is in use by another process`))
  })

  test('a busy data port serves nothing, records nothing, and does not hide that the run before was killed', async (t) => {
    const busy = await busyPort(t)
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const first = await startProgram(t, backend.url, { folder })
    assert.equal((await write(first.port, 41)).status, 200)
    await first.kill()
    const failed = await runProgram(t, backend.url, { folder, settings: { listen: busy } })
    await failsInWords(failed, new RegExp(`listen: ${busy} is in use by another process`))
    assert.deepEqual(
      failed.log().map(({ event }) => event),
      ['unclean_start'],
    )
    const next = await startProgram(t, backend.url, { folder })
    assert.equal(next.events('unclean_start').length, 1)
    assert.equal((await write(next.port, 40)).status, 409)
  })

  test('a store that another process uses is told in words, naming that process', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const first = await startProgram(t, backend.url, { folder })
    const second = await runProgram(t, backend.url, { folder })
    await failsInWords(second, /store .*fence\.db is in use by another process/)
    assert.match(second.stderr, new RegExp(`process ${first.child.pid}`))
    assert.deepEqual(second.lines, [])
    assert.equal((await write(first.port, 41)).status, 200)
  })

  test('a missing store with create: false is told in words, and none is made', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    const store = { path: path.join(folder, 'fence.db'), create: false }
    const program = await runProgram(t, backend.url, { folder, settings: { store } })
    await failsInWords(program, /there is no store .*fence\.db; .*store\.create/)
    assert.equal(existsSync(store.path), false)
  })

  test('a damaged store is told in words and left as it is', async (t) => {
    const backend = await startBackend(t)
    const folder = await temporaryFolder(t)
    writeFileSync(path.join(folder, 'fence.db'), 'this is no database at all'.repeat(100))
    const program = await runProgram(t, backend.url, { folder })
    await failsInWords(program, /store .*fence\.db is damaged .* left as it is/)
  })
})

describe('stop', { concurrency: 2 }, () => {
  for (const signal of ['SIGTERM', 'SIGINT'] as const) {
    test(`${signal}: exit code 0; the last events are stopping and stopped; stdout is JSON lines only`, async (t) => {
      const backend = await startBackend(t)
      const program = await startProgram(t, backend.url)
      await write(program.port, 42)
      await write(program.port, 41)
      program.child.kill(signal)
      assert.deepEqual(await program.ended, { code: 0, signal: null })
      assert.equal(program.stderr, '')
      const events = program.log().map(({ event }) => event)
      assert.deepEqual(events.slice(-3), ['stale_write', 'stopping', 'stopped'])
      assert.equal(program.events('stopped')[0]?.['clean'], true)
      for (const line of program.log()) {
        assert.equal(typeof line['time'], 'string')
        assert.equal(typeof line['level'], 'string')
        assert.equal(typeof line['event'], 'string')
      }
    })
  }

  test('a write in flight is finished first; meanwhile it is not ready, and a request gets 503 unavailable and the connection closes', async (t) => {
    const backend = await holdingBackend(t)
    const program = await startProgram(t, backend.url)
    assert.equal((await request(program.adminPort, { path: '/readyz' })).status, 200)
    const early = await connect(t, program.port)
    const writing = write(program.port, 41, HELD)
    await until(() => backend.held.length === 1)
    program.child.kill('SIGTERM')
    await until(() => program.events('stopping').length === 1)

    early.send(head(41, 'Content-Length: 0'))
    await until(() => early.ended || early.closed)
    assert.match(early.received, /^HTTP\/1\.1 503 /)
    assert.match(early.received, /\r\nFencing-Result: unavailable\r\n/)
    assert.match(early.received, /\r\nRetry-After: \d+\r\n/)
    assert.match(early.received, /\r\nConnection: close\r\n/i)
    assert.equal(backend.seen.length, 1)
    const ready = await request(program.adminPort, { path: '/readyz' })
    assert.equal(ready.status, 503)
    assert.match(ready.body, /stopping/)
    assert.equal((await request(program.adminPort, { path: '/healthz' })).status, 200)
    assert.equal(program.child.exitCode, null)

    backend.held[0]?.end('done at last')
    const answer = await writing
    assert.equal(answer.body, 'done at last')
    assert.equal(answer.headers['fencing-result'], 'accepted')
    assert.deepEqual(await program.ended, { code: 0, signal: null })
  })

  test('a slow client gets its whole response before the end', async (t) => {
    const size = 24 * 1024 * 1024 + 9_000
    const backend = await startBackend(t, ({ res }) => res.end(Buffer.alloc(size, 'x')))
    const program = await startProgram(t, backend.url)
    const client = await connect(t, program.port)
    client.socket.pause()
    client.send(head(41, 'Content-Length: 0'))
    await until(() => backend.seen.length === 1)
    program.child.kill('SIGTERM')
    await until(() => program.events('stopping').length === 1)
    client.socket.resume()
    // Slower than the proxy is with the last bytes, so that they are still on their way at its end.
    client.socket.on('data', () => {
      client.socket.pause()
      setTimeout(() => client.socket.resume(), 5)
    })
    await until(() => client.closed || client.ended)
    assert.equal(client.received.length - client.received.indexOf('\r\n\r\n') - 4, size)
    assert.deepEqual(await program.ended, { code: 0, signal: null })
  })

  test('what settles is waited for, and then the stop is clean', async (t) => {
    const backend = await startBackend(t, ({ req }) => req.socket.resetAndDestroy())
    const settings = { fence: { settle: '700ms' } }
    const program = await startProgram(t, backend.url, { settings })
    assert.equal((await write(program.port, 41)).headers['fencing-result'], 'unknown')
    const endedAt = performance.now()
    program.child.kill('SIGTERM')
    assert.deepEqual(await program.ended, { code: 0, signal: null })
    assert.ok(performance.now() - endedAt >= 650)
    assert.equal(program.events('stopped')[0]?.['clean'], true)
  })

  test('a second signal ends the process at once, with 1 and in words', async (t) => {
    const backend = await holdingBackend(t)
    const program = await startProgram(t, backend.url)
    const writing = assert.rejects(write(program.port, 41, HELD))
    await until(() => backend.held.length === 1)
    program.child.kill('SIGTERM')
    await until(() => program.events('stopping').length === 1)
    program.child.kill('SIGINT')
    await failsInWords(program, /SIGINT again: stopped at once/)
    await writing
    assert.deepEqual(program.events('stopped'), [])
  })

  test('a write that outlasts shutdownTimeout is cut off: exit code 1 in words, and the next start is unclean', async (t) => {
    const backend = await holdingBackend(t)
    const folder = await temporaryFolder(t)
    const settings = { shutdownTimeout: '300ms' }
    const program = await startProgram(t, backend.url, { folder, settings })
    const writing = assert.rejects(write(program.port, 41, HELD))
    await until(() => backend.held.length === 1)
    program.child.kill('SIGTERM')
    await failsInWords(program, /before every write had ended \(shutdownTimeout\)/)
    await writing
    assert.equal(program.events('stopped')[0]?.['clean'], false)
    const next = await startProgram(t, backend.url, { folder })
    assert.equal(next.events('unclean_start').length, 1)
  })

  test('a stream that is read and a body that never began outlast shutdownTimeout: a clean stop all the same', async (t) => {
    const backend = await startBackend(t, ({ res }) => res.write('data: first\n\n'))
    const folder = await temporaryFolder(t)
    const settings = { shutdownTimeout: '300ms' }
    const program = await startProgram(t, backend.url, { folder, settings })
    const [reader, writer] = [await connect(t, program.port), await connect(t, program.port)]
    reader.send('GET /events HTTP/1.1\r\nHost: api\r\n\r\n')
    writer.send(
      'POST /jobs/17 HTTP/1.1\r\nHost: api\r\nFencing-Token: 41\r\nTransfer-Encoding: chunked\r\n\r\n',
    )
    await until(() => reader.received.includes('data: first'))
    await until(async () => (await readMetric(program.adminPort, 'fencing_in_flight')) === 1)
    program.child.kill('SIGTERM')
    assert.deepEqual(await program.ended, { code: 0, signal: null })
    assert.equal(program.events('stopped')[0]?.['clean'], true)
    const next = await startProgram(t, backend.url, { folder })
    assert.deepEqual(next.events('unclean_start'), [])
  })

  test('a signal while it starts stops it as well', async (t) => {
    const backend = await startBackend(t)
    const program = await runProgram(t, backend.url)
    await until(() => program.lines.length > 0)
    program.child.kill('SIGTERM')
    assert.deepEqual(await program.ended, { code: 0, signal: null })
    assert.equal(program.log().at(-1)?.['event'], 'stopped')
  })
})

describe('accidents', { concurrency: 2 }, () => {
  for (const [name, mishap] of Object.entries({
    'an uncaught exception': `throw new Error('boom\\n    at once')`,
    'an unhandled rejection': `Promise.reject(new Error('boom\\n    at once'))`,
  })) {
    test(`${name}: exit code 1 and one line of words`, async (t) => {
      const backend = await startBackend(t)
      const code = encodeURIComponent(`process.on('SIGUSR2', () => { ${mishap} })`)
      const env = { NODE_OPTIONS: `--import=data:text/javascript,${code}` }
      const program = await startProgram(t, backend.url, { env })
      program.child.kill('SIGUSR2')
      await failsInWords(program, /stopped by an unforeseen error: boom at once/)
    })
  }

  test('the thread of the store dies: exit code 1 in words, and what was logged last is on stdout', async (t) => {
    const backend = await startBackend(t)
    // The stop comes with the death, so that its line is logged at the very end.
    const code = encodeURIComponent(`
      import threads from 'node:worker_threads'
      import { syncBuiltinESMExports } from 'node:module'
      threads.Worker = class extends threads.Worker {
        constructor(...args) {
          super(...args)
          process.on('SIGUSR2', () => this.terminate())
          this.on('exit', () => process.emit('SIGTERM', 'SIGTERM'))
        }
      }
      syncBuiltinESMExports()`)
    const env = { NODE_OPTIONS: `--import=data:text/javascript,${code}` }
    const program = await startProgram(t, backend.url, { env })
    await write(program.port, 42)
    assert.equal((await write(program.port, 41)).status, 409)
    program.child.kill('SIGUSR2')
    await failsInWords(program, /the thread of the store died, restart the process/)
    const events = program.log().map(({ event }) => event)
    assert.deepEqual(events.slice(-2), ['stale_write', 'stopping'])
  })

  test('it goes on when nobody reads its log any more', async (t) => {
    const backend = await startBackend(t)
    const program = await startProgram(t, backend.url)
    program.child.stdout.destroy()
    await write(program.port, 42)
    for (let i = 0; i < 50; i++) assert.equal((await write(program.port, 41)).status, 409)
    assert.equal((await write(program.port, 42)).status, 200)
    assert.equal(await readMetric(program.adminPort, 'fencing_stale_writes_total'), 50)
    program.child.kill('SIGTERM')
    assert.deepEqual(await program.ended, { code: 0, signal: null })
  })

  test('it stops where the reader of its log has gone unnoticed, or is there and reads no more', async (t) => {
    const backend = await startBackend(t)
    const [gone, stuck] = [await startProgram(t, backend.url), await startProgram(t, backend.url)]
    gone.child.stdout.destroy()
    gone.child.kill('SIGTERM') // the first that it writes to nobody is that it stops
    assert.deepEqual(await gone.ended, { code: 0, signal: null })

    stuck.child.stdout.pause()
    await write(stuck.port, 42)
    // More than pipes and buffers hold: about 300 bytes for each line.
    for (let i = 0; i < 1000; i++) assert.equal((await write(stuck.port, 41)).status, 409)
    stuck.child.kill('SIGTERM')
    await once(stuck.child, 'exit')
    assert.equal(stuck.child.exitCode, 0)
    stuck.child.stdout.resume()
  })
})
