import { accessSync, constants } from 'node:fs'

/**
 * What a test drives is not there: the reason to skip it, with the way to install it, or false. CI
 * installs everything, so that nothing is skipped unnoticed there.
 *
 * @throws under CI=true where something is missing.
 */
export function lacking(files: readonly string[], packages: string): string | false {
  const missing = files.filter((file) => !isReadable(file))
  if (missing.length === 0) return false
  const reason = `${missing.join(' and ')} not found: apt-get install ${packages}`
  if (process.env['CI'] === 'true') throw new Error(reason)
  return reason
}

function isReadable(file: string): boolean {
  try {
    accessSync(file, constants.R_OK)
    return true
  } catch {
    return false
  }
}
