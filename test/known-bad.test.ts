import assert from 'node:assert/strict'
import { fork } from 'node:child_process'
import { once } from 'node:events'
import { describe, test, type TestContext } from 'node:test'
import type { Running } from '../src/serve.ts'
import { endings, framing, trailers, type Start } from './exchange-cases.ts'
import { portOf, startProxy, temporaryFolder, until } from './harness.ts'
import { createKnownBad } from './known-bad.ts'

/**
 * http-proxy in the forwarder's place. Cases that hold with the real forwarder are run with it, word
 * for word, and have to fail here: so the hazards are real, and these tests would notice them.
 */

const knownBad: Start = (t, url, overrides) =>
  startProxy(t, url, { ...overrides, shutdownTimeoutMs: 100 }, { forwarder: createKnownBad })

/** The barrier never opens: a newer owner is kept out until its time is up. */
const KEPT_OUT = /503 !== 200/

/** Which case fails, and by which assertion: any other failure would be an accident. */
const CAUGHT: Record<string, RegExp> = {
  'a chunked DELETE whose chunk holds a request arrives as one request (CVE-2026-29057, node-http-proxy #1721)':
    /PUT \/jobs\/17\/smuggled/,
  'a chunked OPTIONS whose chunk holds a request arrives as one request (CVE-2026-29057, node-http-proxy #1721)':
    /PUT \/jobs\/17\/smuggled/,
  'a target is forwarded as it came, byte for byte': /'\/a\/b'/,

  'a client that leaves in mid-response changes nothing: the rest is read and dropped': KEPT_OUT,
  'a client that does not read its response cannot hold the scope': KEPT_OUT,
  'a response that drips has responseTimeout in all once a newer owner waits': KEPT_OUT,

  // That the client left is not noticed; once a connection is free, its write with token 7 is sent.
  'a client that leaves while its write is queued for a connection: never sent': /not within|'7'/,
  'a newer owner overtakes a write of which nothing was sent: 409 superseded, nothing settles':
    /200 !== 409/,

  // No event tells that these are over.
  'a response cut short (a Content-Length that is not reached) never looks complete to an HTTP/1.1 client':
    /not within .* client\.closed/,
  'a response cut short (chunks without their end) never looks complete to an HTTP/1.1 client':
    /not within .* client\.closed/,
  'a backend that answers with a 101 that nobody asked for: one well-formed 502': /not within/,

  // The answer ends the exchange for http-proxy, though the body still flows to the backend.
  'an answer before the body was read is delivered, both connections close, the outcome is known':
    /Connection: close/,
}

// Most of them fail by waiting in vain, which they can do side by side.
describe('with http-proxy in its place this does not hold:', { concurrency: true }, () => {
  for (const [name, failure] of Object.entries(CAUGHT)) {
    test(name, async (t) => {
      const check = endings[name] ?? framing[name]
      assert.ok(check, 'there is such a case')
      await assert.rejects(check(t, knownBad), { name: 'AssertionError', message: failure })
    })
  }

  test('one Trailer field, and the process lives (node-http-proxy #1647)', async (t) => {
    let died = ''
    const start = async (t: TestContext, url: string) => {
      const child = fork(
        new URL('./known-bad-child.js', import.meta.url),
        [url, await temporaryFolder(t)],
        { silent: true },
      )
      child.stderr?.on('data', (chunk: Buffer) => (died += chunk.toString()))
      t.after(() => child.kill())
      const [addresses] = (await once(child, 'message')) as [Running['addresses']]
      return { port: portOf(addresses.data) }
    }
    await assert.rejects(trailers(t, start), { name: 'AssertionError', message: /200/ })
    await until(() => died.includes('ERR_HTTP_TRAILER_INVALID'))
  })
})
