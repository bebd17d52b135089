import { createLog } from '../src/log.ts'
import { serve } from '../src/serve.ts'
import { configFor } from './harness.ts'
import { createKnownBad } from './known-bad.ts'

/** The program that known-bad.test.ts starts where the proxy is expected to die. */
const [url = '', dataFolder = ''] = process.argv.slice(2)
const running = await serve(configFor(url, dataFolder), {
  forwarder: createKnownBad,
  log: () => createLog('silent', { write: () => undefined }),
})
process.send?.(running.addresses)
