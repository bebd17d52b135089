import { SAME_TOKEN } from './load.ts'
import { measure, type Round } from './row.ts'
import { fillStore, startSidecar } from './sidecar.ts'
import { usageOf, type Site } from './site.ts'
import { spreadOf, type Spread } from './spread.ts'

/** What a store with many scopes costs. */
export interface ScopesMeasured {
  readonly scopes: number
  readonly startMs: Spread
  /** Right after the start, before any request. */
  readonly residentMiB: Spread
  /** Under writes to scopes picked at random, and what memory came to after them. */
  readonly load: Round
}

export const SCOPE_COUNTS = [1, 1000, 1_000_000] as const
const STARTS = 3
/** Marks are read from disk while the memory for them fills. */
const LOAD_SECONDS = 5

/** Starts the sidecar several times over stores of several sizes. */
export async function measureScopes(
  site: Site,
  backendPort: number,
  told: (words: string) => void,
): Promise<ScopesMeasured[]> {
  const measured: ScopesMeasured[] = []
  for (const scopes of SCOPE_COUNTS) {
    const file = await fillStore(site, scopes)
    const starts: { startMs: number; residentMiB: number }[] = []
    let load: Round | undefined
    for (let i = 0; i < STARTS; i++) {
      const sidecar = await startSidecar(site, backendPort, { store: { path: file } })
      const { residentBytes } = usageOf(sidecar.pids)
      starts.push({ startMs: sidecar.startMs, residentMiB: residentBytes / (1024 * 1024) })
      if (i === STARTS - 1) {
        const random = { ...SAME_TOKEN, token: { kind: 'same', from: 1 } as const }
        const picked = { ...random, scopes: { count: scopes, order: 'random' } as const }
        load = await measure(site, sidecar, picked, LOAD_SECONDS)
      }
      await site.stop(sidecar.started)
    }
    const startMs = spreadOf(starts.map((start) => start.startMs))
    const residentMiB = spreadOf(starts.map((start) => start.residentMiB))
    if (startMs === undefined || residentMiB === undefined || load === undefined) continue
    measured.push({ scopes, startMs, residentMiB, load })
    told(`scopes: ${scopes} on disk: started in ${startMs.median.toFixed(0)} ms`)
  }
  return measured
}
