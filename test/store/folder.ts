import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after } from 'node:test'

/** A folder for the tests of one file, gone when they have ended. */
export function temporaryFolder(): string {
  const folder = mkdtempSync(join(tmpdir(), 'fencing-store-'))
  after(() => rmSync(folder, { recursive: true, force: true }))
  return folder
}
