import pino, { type DestinationStream, type Logger } from 'pino'

/**
 * The log: JSON lines on stdout, one `event` each. What is written is named field by field where
 * it is logged; requests, headers and bodies are never handed over, so there is nothing to redact.
 */
export type Log = Logger

export function createLog(level: string, destination: DestinationStream): Log {
  return pino(
    {
      level,
      base: null,
      timestamp: pino.stdTimeFunctions.isoTime,
      formatters: { level: (label) => ({ level: label }) },
      serializers: { err: describe },
    },
    destination,
  )
}

/** How long the end of the process waits for whoever reads its stdout. */
const FLUSH_WITHIN_MS = 1_000

/**
 * Stdout, written without blocking the event loop, in pieces of up to 16 KiB and no later than a tenth
 * of a second after the fact: one write for each line would cost more than a refusal. Wait for `flush`
 * before the process exits; it takes no longer than a second, whether anybody reads or not.
 *
 * A log that cannot be written (its reader is gone, its disk is full) loses lines. It does not end
 * the fence.
 */
export function stdoutLog(level: string): { log: Log; flush: () => Promise<void> } {
  const destination = pino.destination({
    dest: 1,
    sync: false,
    minLength: 16_384,
    maxWrite: 65_536,
    periodicFlush: 100,
  })
  destination.on('error', () => undefined)
  // Called at the exit, and tries for ever where nobody reads: a stop would never end.
  destination.flushSync = () => undefined
  const flush = () =>
    new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, FLUSH_WITHIN_MS)
      destination.flush(() => {
        clearTimeout(timer)
        resolve()
      })
    })
  return { log: createLog(level, destination), flush }
}

/** An error as the log shows it: its words and its code, no stack. */
function describe(error: unknown): unknown {
  if (!(error instanceof Error)) return error
  const code = 'code' in error ? error.code : undefined
  return { type: error.name, message: error.message, code }
}
