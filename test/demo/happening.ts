/**
 * What the timeline is drawn from: each thing that happened, told by whoever did it or saw it, at
 * the moment when it did.
 */
export type WorkerName = 'A' | 'B'

export type Told =
  | { readonly kind: 'leased'; readonly worker: WorkerName; readonly token: string }
  | { readonly kind: 'paused' | 'resumed'; readonly worker: WorkerName }
  | { readonly kind: 'expired'; readonly token: string }
  | { readonly kind: 'sent'; readonly worker: WorkerName; readonly token: string }
  | {
      readonly kind: 'answered'
      readonly worker: WorkerName
      readonly token: string
      readonly status: number
      /** What the sidecar made of the write: its `Fencing-Result`. */
      readonly result?: string | undefined
      /** The mark, where a refusal names it. */
      readonly highest?: string | undefined
    }
  /** A proxy that only checks found nothing against a write. */
  | { readonly kind: 'checked'; readonly token: string }
  /** The sidecar's mark, as its admin port shows it. */
  | { readonly kind: 'marked'; readonly mark: string }
  | { readonly kind: 'takeover'; readonly from: string; readonly to: string }
  /** The sidecar holds a newer write back, because an older one is in flight. */
  | { readonly kind: 'waiting' }
  | { readonly kind: 'received'; readonly result: string; readonly slow: boolean }
  | { readonly kind: 'stored'; readonly result: string }

export type Happening = Told & { readonly at: number }

/** Milliseconds by the machine's monotonic clock: the same in every process, so that they compare. */
export function now(): number {
  return Number(process.hrtime.bigint()) / 1e6
}

/** The moment by that clock at which something happened that the sidecar dated for people to read. */
export function fromWallClock(date: unknown): number {
  return now() - (Date.now() - Date.parse(String(date)))
}
