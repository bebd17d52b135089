import { closeSync, fstatSync, openSync, readSync, writeSync } from 'node:fs'

/**
 * What happened in a run, as all of its processes saw it: one file, to which each appends a line
 * before it acts (or, where it learns of something, at once when it does). So every beginning of
 * the file is consistent: what is in it has all its causes in it.
 */

/** Milliseconds of the machine's monotonic clock, which is the same for all processes. */
export function now(): number {
  return Number(process.hrtime.bigint()) / 1e6
}

export type Happening = Happened & { readonly at: number }

export type Happened =
  // The lease source and the workers.
  | { readonly kind: 'leased'; readonly scope: string; readonly token: string; readonly to: string }
  | {
      readonly kind: 'sent'
      /** Names the write in every history; it travels as the request id. */
      readonly write: string
      readonly scope: string
      readonly token: string
      readonly bytes: number
      /** In words. */
      readonly how: string
      /** The faults that this write is made with. */
      readonly faults: readonly string[]
    }
  | {
      readonly kind: 'answered'
      readonly write: string
      readonly status: number
      readonly result: string
      /** The mark that the answer names. */
      readonly highest?: string | undefined
    }
  | { readonly kind: 'left'; readonly write: string }
  | { readonly kind: 'broken'; readonly write: string; readonly why: string }
  | { readonly kind: 'silent'; readonly write: string }
  // The backend. A write may be unknown to all others: one that was smuggled.
  | {
      readonly kind: 'begun'
      readonly write: string
      readonly scope: string
      readonly token: string
      readonly port: number
    }
  | { readonly kind: 'applied'; readonly write: string; readonly bytes: number }
  /** The whole answer is given to the connection next. */
  | { readonly kind: 'responded'; readonly write: string }
  // The network between sidecar and backend; a connection is known by its port at the backend.
  /** The sidecar's connection is broken or ended, by the network or because the backend did so. */
  | { readonly kind: 'cut'; readonly port: number }
  /** The sidecar has closed its connection. */
  | { readonly kind: 'closed'; readonly port: number }
  // Whoever runs it all.
  /** It `ends` before it is told to, and is `killed` or `stopped cleanly` when it is gone. */
  | {
      readonly kind: 'sidecar'
      readonly does: 'starts' | 'runs' | 'ends' | 'killed' | 'stopped cleanly'
    }
  /** Read from the sidecar, which was asked at `since`. */
  | {
      readonly kind: 'marks'
      readonly since: number
      readonly marks: Readonly<Record<string, string>>
    }
  | { readonly kind: 'fault'; readonly fault: string; readonly does: 'begins' | 'ends' }
  | { readonly kind: 'calm' }
  | { readonly kind: 'stuck'; readonly scope?: string; readonly why: string }

export function appendTo(file: string): (happened: Happened) => void {
  const fd = openSync(file, 'a')
  return (happened) => void writeSync(fd, `${JSON.stringify({ at: now(), ...happened })}\n`)
}

/** Reads a history that is still being written. */
export class HistoryReader {
  readonly #file: string
  #read = 0
  /** In the order of time. */
  #happenings: Happening[] = []

  constructor(file: string) {
    this.#file = file
  }

  /** All that happened so far. */
  happenings(): readonly Happening[] {
    const fresh = this.#freshLines().map((line) => JSON.parse(line) as Happening)
    this.#happenings = this.#happenings.concat(fresh).sort((a, b) => a.at - b.at)
    return this.#happenings
  }

  #freshLines(): string[] {
    const fd = openSync(this.#file, 'r')
    try {
      const fresh = Buffer.alloc(fstatSync(fd).size - this.#read)
      readSync(fd, fresh, 0, fresh.length, this.#read)
      // What is behind the last line break is still being written.
      const whole = fresh.subarray(0, fresh.lastIndexOf('\n') + 1)
      this.#read += whole.length
      return whole.toString().split('\n').slice(0, -1)
    } finally {
      closeSync(fd)
    }
  }
}
