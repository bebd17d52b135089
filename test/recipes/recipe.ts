import assert from 'node:assert/strict'
import { execFileSync, spawn } from 'node:child_process'
import { once } from 'node:events'
import { readdirSync, readFileSync } from 'node:fs'
import path from 'node:path'
import { createInterface } from 'node:readline'
import { setTimeout } from 'node:timers/promises'
import type { TestContext } from 'node:test'

/** The text that readers copy from is the text that runs here. */
const TEXT = 'README.md'

/** The code block of the text whose fence line ends in `recipe=NAME`. */
export function readRecipe(name: string): string {
  const block = new RegExp(`^\`\`\`\\w+ recipe=${name}\\n(.*?)^\`\`\`$`, 'ms')
  const code = block.exec(readFileSync(TEXT, 'utf8'))?.[1]
  return code ?? assert.fail(`${TEXT} has no code block with recipe=${name}`)
}

/** Where `work` is, and the commands that Debian keeps outside the usual path. */
export const PATH = [
  path.resolve('test/recipes/bin'),
  '/usr/share/zookeeper/bin',
  ...postgresqlFolders(),
  process.env['PATH'] ?? '',
].join(':')

function postgresqlFolders(): string[] {
  try {
    return readdirSync('/usr/lib/postgresql').map((version) => `/usr/lib/postgresql/${version}/bin`)
  } catch {
    return []
  }
}

export function isInstalled(command: string): boolean {
  try {
    execFileSync('sh', ['-c', 'command -v "$0"', command], { env: { PATH }, stdio: 'ignore' })
    return true
  } catch {
    return false
  }
}

export interface Owner {
  readonly token: string
  /** The statuses of its own writes so far. */
  readonly answers: readonly string[]
  /** The worker is paused, and with it whatever renews its lock. */
  pause(): void
  resume(): void
  /** Resolves when the recipe has ended. */
  readonly ended: Promise<unknown>
}

/**
 * Runs a recipe, again and again while another owner has the lock, until it calls `work` with a
 * token. `work` then writes to `TARGET`, again and again, until it is refused: the owner keeps the
 * lock for as long as the service lets it.
 */
export async function takeLock(
  t: TestContext,
  recipe: string,
  env: NodeJS.ProcessEnv,
): Promise<Owner> {
  while (!t.signal.aborted) {
    // A process group of its own: the worker is stopped as a whole.
    const worker = spawn('bash', ['-c', readRecipe(recipe)], {
      env: { ...env, PATH },
      stdio: ['ignore', 'pipe', 'inherit'],
      detached: true,
    })
    const ended = once(worker, 'exit')
    const signal = (name: NodeJS.Signals) => {
      if (worker.pid !== undefined && worker.exitCode === null) process.kill(-worker.pid, name)
    }
    t.after(() => signal('SIGKILL'))
    const lines = createInterface(worker.stdout)
    const said: string[] = []
    lines.on('line', (line) => said.push(line))
    await Promise.race([once(lines, 'line'), ended])
    const [token, ...answers] = said
    if (token !== undefined) {
      lines.on('line', (line) => answers.push(line))
      const pause = () => signal('SIGSTOP')
      return { token, answers, pause, resume: () => signal('SIGCONT'), ended }
    }
    await setTimeout(200)
  }
  throw t.signal.reason
}
