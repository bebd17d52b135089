/** The sidecar's times in a run. Short, so that there are many takeovers; long enough for a busy machine. */
export const SETTLE_MS = 600
export const RESPONSE_TIMEOUT_MS = 800
export const TAKEOVER_TIMEOUT_MS = 2_000
/** Not shorter than the response timeout: the checker counts on it. */
export const CLIENT_TIMEOUT_MS = 2_000
export const SHUTDOWN_TIMEOUT_MS = 4_000

/**
 * The promise is good for outcomes that are unknown for no longer than `settle`. So the backend
 * applies within the one of a whole body, or never, and the network holds requests no longer than
 * the other: together well below `settle`.
 */
export const APPLIED_WITHIN_MS = 150
export const HELD_WITHIN_MS = 150

export const LEASE_MS = 250

/** Longer than all of the above together: who gets no answer for so long has been forgotten. */
export const SILENCE_SECONDS = 12

/** What can be made to go wrong, as named by `--faults`. */
export const FAULTS = [
  'pause-worker',
  'leave',
  'old-token',
  'kill-sidecar',
  'stop-sidecar',
  'pause-sidecar',
  'slow-disk',
  'failing-disk',
  'full-disk',
  'slow-network',
  'stall-network',
  'cut-network',
  'reset-backend',
  'stall-backend',
  'kill-backend',
] as const

export type FaultName = (typeof FAULTS)[number]
