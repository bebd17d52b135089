import { formatToken, joinToken } from '../../src/token.ts'
import { LEASE_MS } from './settings.ts'
import { now, type Happened } from './history.ts'
import type { Random } from './random.ts'

/**
 * Who may act in a scope. It lives as long as the run, so its numbers need no disk to rise always.
 * They begin where floating-point numbers are not exact, and now and then they fall, in a new
 * generation, as after a restored backup.
 */
export class LeaseSource {
  readonly #random: Random
  readonly #append: (happened: Happened) => void
  #onTaken: (() => void)[] = []
  readonly #leases = new Map<string, { generation: bigint; number: bigint; until: number }>()

  constructor(random: Random, append: (happened: Happened) => void) {
    this.#random = random
    this.#append = append
  }

  /** The token of a new lease, or undefined while another holds the scope. */
  take(scope: string, to: string): string | undefined {
    const last = this.#leases.get(scope)
    if (last !== undefined && now() < last.until) return undefined
    let { generation, number } = last ?? { generation: 0n, number: FIRST }
    if (this.#random.chance(RESTORED)) {
      generation++
      number = FIRST
    } else number++
    const until = now() + this.#random.between(LEASE_MS / 2, LEASE_MS * 2)
    this.#leases.set(scope, { generation, number, until })
    const token = tokenOf({ generation, number })
    this.#append({ kind: 'leased', scope, token, to })
    for (const resolve of this.#onTaken.splice(0)) resolve()
    return token
  }

  /** Resolves with the next lease that anybody takes. */
  taken(): Promise<void> {
    return new Promise((resolve) => this.#onTaken.push(resolve))
  }

  /** Its holder is known to be gone: the lease is over, where it is still the scope's. */
  release(scope: string, token: string): void {
    const last = this.#leases.get(scope)
    if (last === undefined || tokenOf(last) !== token) return
    this.#leases.set(scope, { ...last, until: now() })
  }

  /** As `take`, without waiting for a lease to end. */
  seize(scope: string, to: string): string {
    this.#leases.set(scope, { generation: 0n, number: FIRST, ...this.#leases.get(scope), until: 0 })
    return this.take(scope, to) ?? scope
  }
}

function tokenOf({ generation, number }: { generation: bigint; number: bigint }): string {
  return formatToken(joinToken(generation, number))
}

/** From here on a floating-point number stands for 256 of these. */
const FIRST = 2n ** 60n

const RESTORED = 0.02
