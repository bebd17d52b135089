/**
 * The sidecar with one part replaced by a broken one. Arguments: which (a key of BROKEN), and the
 * configuration file. Signals and exit codes are those of the real program.
 */
import { loadConfig } from '../../../src/config.ts'
import { serve } from '../../../src/serve.ts'
import { BROKEN, type BrokenName } from './variants.ts'

const [name = '', file] = process.argv.slice(2)
if (!(name in BROKEN)) throw new Error(`no broken sidecar is called "${name}"`)
const loaded = loadConfig({ file, env: {}, flags: {} })
if (!loaded.ok) throw new Error(JSON.stringify(loaded.mistakes))
const running = await serve(loaded.config, BROKEN[name as BrokenName])
process.on('SIGTERM', () => {
  void running.close().then(({ clean }) => process.exit(clean ? 0 : 1))
})
