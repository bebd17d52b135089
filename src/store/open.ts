import { SqliteStore } from './sqlite.ts'
import type { Store, StoreEvents } from './store.ts'

export interface StoreConfig {
  readonly type: 'sqlite'
  readonly path: string
  /** False: a missing store is an error, not a fresh start. */
  readonly create: boolean
}

/**
 * Opens the store that `config` names: the one place that knows the engines. `created` says that
 * there was none, so that the one just made knows no marks. Rejects with a `StoreError`.
 */
export async function openStore(
  config: StoreConfig,
  events: StoreEvents,
): Promise<{ store: Store; created: boolean }> {
  const store = await SqliteStore.open(config, events)
  return { store, created: store.created }
}
