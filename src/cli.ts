#!/usr/bin/env node
/** The command line. Arguments, signals, standard streams and exit codes live here only. */
import { existsSync, readFileSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { text } from 'node:stream/consumers'
import { Command, CommanderError } from 'commander'
import { stringify } from 'yaml'
import { loadConfig, type Loaded } from './config.ts'
import { addInjectCommand } from './inject/command.ts'
import { WebhookStartError, type RunningWebhook } from './inject/webhook.ts'
import { stdoutLog, type Log } from './log.ts'
import { formatMistake, MISSING } from './mistake.ts'
import { serve, StartError, type Running } from './serve.ts'
import type { Flags } from './sources.ts'

/** What an exit code says to whoever started the process. */
const CLEAN = 0
/** While starting or running: a busy port, a locked store, writes left in flight. */
const FAILED = 1
/** The command line or the configuration is wrong. */
const USAGE = 2

const START = "npm start -- --upstream http://127.0.0.1:9000 --scope '/jobs/{job}/**'"

const AFTER_HELP = `
Example: in front of an HTTP API on port 9000, where each job is a scope:
  fencing-proxy serve --upstream http://127.0.0.1:9000 --scope '/jobs/{job}/**'
  curl -X PUT -H 'Fencing-Token: 42' http://127.0.0.1:8080/jobs/17 -d done

A setting comes from its flag, else from its environment variable (fence.settle
is FENCING_PROXY_FENCE_SETTLE), else from the file, else it has its default.
Exit codes: ${CLEAN} clean stop, ${FAILED} failure while starting or running, ${USAGE} usage or
configuration.`

function commandLine(): Command {
  const program = new Command('fencing-proxy')
    .description(
      'Stands in front of an HTTP API and forwards a write only while its fencing token is the newest of its scope, so that a worker that has lost its lease can no longer write.', // prettier-ignore
    )
    .version(version())
    .addHelpText('after', AFTER_HELP)
    // Commander would exit with 1 for a wrong flag.
    .exitOverride()
  withSettings(program.command('serve').description('run the proxy')).action(runServe)
  withSettings(
    program
      .command('check')
      .description('print the complete effective configuration, or what is wrong with it'),
  ).action(runCheck)
  addInjectCommand(program, {
    version: version(),
    read: (file) => (file === '-' ? text(process.stdin) : readFile(file, 'utf8')),
    finish({ code, output, messages }) {
      process.stdout.write(output)
      for (const message of messages) say(message)
      process.exitCode = code
    },
    log: stdoutLog('info').log,
    serve: serveInjector,
  })
  return program
}

interface SettingFlags extends Flags {
  readonly config?: string
}

function withSettings(command: Command): Command {
  return command
    .option('--config <file>', 'YAML or JSON file (see config/full.yaml)')
    .option('--upstream <url>', 'the backend, such as http://127.0.0.1:9000')
    .option(
      '--scope <pattern>',
      "paths to fence, such as '/jobs/{job}/**'; may be repeated; takes the place of every route in the file",
      (pattern: string, earlier: string[] | undefined) => [...(earlier ?? []), pattern],
    )
    .option('--listen <host:port>', 'the data port (default: 0.0.0.0:8080)')
    .option('--admin <host:port>', 'health, metrics, scopes (default: 127.0.0.1:9901)')
    .option('--data <directory>', 'where the store is kept (default: data)')
    .option('--leases', 'hand out leases with tokens, under /_fencing')
}

async function runServe(flags: SettingFlags): Promise<void> {
  const loaded = load(flags)
  if (!loaded.ok) {
    explainMistakes(loaded.mistakes)
    process.exitCode = USAGE
    return
  }
  // From here on, so that a signal while starting is not lost.
  const stopped = firstStopSignal()
  let running: Running
  try {
    running = await serve(loaded.config, { log: openLog })
  } catch (error) {
    if (!(error instanceof StartError)) throw error
    return exit(FAILED, error.message)
  }
  const failure = await Promise.race([stopped, running.died])
  if (failure instanceof Error) return exit(FAILED, failure.message)
  const end = await Promise.race([running.close(), running.died])
  if (end instanceof Error) return exit(FAILED, end.message)
  return end.clean ? exit(CLEAN) : exit(FAILED, end.why)
}

/** Writes down what of the log is not written yet. */
let flushLog = () => Promise.resolve()

function openLog(level: string): Log {
  const { log, flush } = stdoutLog(level)
  flushLog = flush
  return log
}

async function serveInjector(start: Promise<RunningWebhook>): Promise<void> {
  const stopped = firstStopSignal()
  let webhook: RunningWebhook
  try {
    webhook = await start
  } catch (error) {
    if (!(error instanceof WebhookStartError)) throw error
    return exit(FAILED, error.message)
  }
  await stopped
  await webhook.close()
  return exit(CLEAN)
}

function runCheck(flags: SettingFlags): void {
  const loaded = load(flags)
  if (loaded.ok) {
    process.stdout.write(stringify(loaded.settings, { lineWidth: 0 }))
  } else {
    explainMistakes(loaded.mistakes)
    process.exitCode = USAGE
  }
}

function load({ config, ...flags }: SettingFlags): Loaded {
  return loadConfig({ file: config, env: process.env, flags })
}

function explainMistakes(mistakes: Extract<Loaded, { ok: false }>['mistakes']): void {
  const number = mistakes.length === 1 ? 'a mistake' : `${mistakes.length} mistakes`
  say(`${number} in the configuration; nothing was started`)
  for (const mistake of mistakes) process.stderr.write(`  ${formatMistake(mistake)}\n`)
  const lacksNeeded = mistakes.some(
    ({ path, found }) => found === MISSING && (path === 'upstream.url' || path === 'routes'),
  )
  if (!lacksNeeded) return
  process.stderr.write(
    `It needs the URL of the backend and what to fence. For example:\n  ${START}\n`,
  )
}

/** Resolves at the first SIGTERM or SIGINT; a second one ends the process at once. */
function firstStopSignal(): Promise<void> {
  return new Promise((resolve) => {
    let stopping = false
    const onSignal = (signal: NodeJS.Signals) => {
      if (stopping)
        void exit(FAILED, `${signal} again: stopped at once, without waiting for writes`)
      stopping = true
      resolve()
    }
    process.on('SIGTERM', onSignal)
    process.on('SIGINT', onSignal)
  })
}

function say(message: string): void {
  process.stderr.write(`fencing-proxy: ${message}\n`)
}

/** Says why, has the log written down, and ends the process. */
async function exit(code: number, message?: string): Promise<void> {
  if (message !== undefined) say(message)
  await flushLog()
  process.exit(code)
}

function version(): string {
  // One level up from dist/, two from where tests build to.
  const above = ['../package.json', '../../package.json'].map((up) => new URL(up, import.meta.url))
  const file = above.find((url) => existsSync(url))
  if (file === undefined) return 'unknown'
  return (JSON.parse(readFileSync(file, 'utf8')) as { version: string }).version
}

// Whoever reads has seen enough (`… --help | head`).
process.stdout.on('error', (error: NodeJS.ErrnoException) => {
  void exit(error.code === 'EPIPE' ? CLEAN : FAILED)
})

process.on('uncaughtException', (error: unknown) => {
  const message = error instanceof Error ? error.message : String(error)
  void exit(FAILED, `stopped by an unforeseen error: ${message.replace(/\s*\n\s*/g, ' ')}`)
})

try {
  await commandLine().parseAsync()
} catch (error) {
  if (!(error instanceof CommanderError)) throw error
  process.exitCode = error.exitCode === 0 ? CLEAN : USAGE
}
