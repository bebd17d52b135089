import type { Random } from './random.ts'
import { APPLIED_WITHIN_MS, RESPONSE_TIMEOUT_MS, type FaultName } from './settings.ts'

/** How the backend treats a write. The worker chooses it and sends it along as a field. */
export interface Conduct {
  /** From the end of the body until the write is applied, whatever became of its connection. */
  readonly applyMs: number
  /** From the end of the body until the answer, which is not given before the write is applied. */
  readonly answerMs: number
  readonly answer:
    | 'whole'
    /** In pieces, with pauses. */
    | 'dripping'
    /** 413, before the body is read. Nothing is applied. */
    | 'early'
    /** No answer for longer than the sidecar waits. */
    | 'none'
    /** The connection is reset, perhaps before the write is applied. */
    | 'reset'
    /** The connection is closed in the middle of the answer. */
    | 'truncated'
  readonly answerBytes: number
}

const ORDINARY = [
  'whole',
  'whole',
  'whole',
  'whole',
  'whole',
  'whole',
  'dripping',
  'early',
] as const

/** Below the response timeout: it is no silence. By what the worker does meanwhile. */
const SLOW_ANSWER_MS = { stays: 200, leaves: 600 }

export const CONDUCT_FIELD = 'X-Conduct'

export function chooseConduct(
  random: Random,
  faults: ReadonlySet<FaultName>,
  leaves: boolean,
): Conduct {
  const resets = faults.has('reset-backend') && random.chance(0.06)
  const stalls = faults.has('stall-backend') && random.chance(0.03)
  const answer: Conduct['answer'] = resets
    ? random.pick<'reset' | 'truncated'>(['reset', 'reset', 'truncated'])
    : stalls
      ? 'none'
      : random.pick<Conduct['answer']>(ORDINARY)
  // Who leaves has often waited for long.
  const isSlow = random.chance(leaves ? 0.8 : 0.3)
  return {
    applyMs: isSlow ? random.between(0, APPLIED_WITHIN_MS) : random.between(0, 5),
    answerMs:
      answer === 'none'
        ? 2 * RESPONSE_TIMEOUT_MS
        : random.between(0, isSlow ? SLOW_ANSWER_MS[leaves ? 'leaves' : 'stays'] : 10),
    answer,
    // Now and then more than any buffer on the way holds: a client that does not read is felt.
    answerBytes: random.chance(0.03) ? 4 * 1024 * 1024 : random.between(0, 2_000),
  }
}

/** The faults that a write is made with, for the report. */
export function faultsOf({ answer }: Conduct): FaultName[] {
  if (answer === 'reset' || answer === 'truncated') return ['reset-backend']
  return answer === 'none' ? ['stall-backend'] : []
}
