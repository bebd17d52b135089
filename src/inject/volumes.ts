/** Where the sidecar keeps its marks and finds its configuration. Pure. */
import { deny, type Denied } from './denial.ts'
import type { Pod, Volume } from './pod.ts'
import type { Wanted } from './settings.ts'
import { CONFIG_VOLUME, STORE_VOLUME } from './sidecar.ts'

export interface Store {
  /** The name of its volume. */
  readonly volume: string
  /** The volume, where the Pod does not have it yet. */
  readonly added: readonly Volume[]
  /** What the person who asked should know; empty where that is nothing. */
  readonly warning: string
}

/** Kinds of volumes that are lost with the Pod, or left behind on a node. */
const EPHEMERAL = ['emptyDir', 'ephemeral', 'hostPath', 'csi']

const LASTING =
  'name in store-volume a volume of the Pod that is a PersistentVolumeClaim, or in store-claim a PersistentVolumeClaim to mount'
const OR_LOSE = `${LASTING}; or accept with allow-ephemeral-store: "true" that the marks are lost with the Pod`

const LOST = 'the marks are lost with the Pod (allow-ephemeral-store)'
const RIGHTS =
  'the Pod has no securityContext.fsGroup: see that user 65532 may write to the store volume'

/** `claimTemplates`: volumes that the Pod's StatefulSet is going to add. */
export function chooseStore(
  pod: Pod,
  wanted: Wanted,
  claimTemplates: readonly string[],
): Store | Denied {
  const volumes = pod.spec.volumes ?? []
  const { 'store-volume': name, 'store-claim': claimName } = wanted
  const losable = wanted['allow-ephemeral-store'] === 'true'
  // The root folder of a fresh claim belongs to root.
  const lasting = typeof pod.spec.securityContext?.fsGroup === 'number' ? '' : RIGHTS

  if (name !== undefined) {
    if (claimTemplates.includes(name)) return { volume: name, added: [], warning: lasting }
    const denied = checkVolume(name, volumes, losable)
    if (denied !== undefined) return denied
    const isClaim = volumes.some(
      (one) => one.name === name && hasKind(one, 'persistentVolumeClaim'),
    )
    return { volume: name, added: [], warning: isClaim ? lasting : LOST }
  }
  if (claimName !== undefined) {
    const volume = volumes.find((one) => one.persistentVolumeClaim?.claimName === claimName)
    if (volume?.persistentVolumeClaim?.readOnly === true) return readOnly(volume.name)
    if (volume !== undefined) return { volume: volume.name, added: [], warning: lasting }
    return addVolume(volumes, { name: STORE_VOLUME, persistentVolumeClaim: { claimName } }, lasting)
  }
  if (!losable) return deny('sqlite needs a volume that outlives the Pod', OR_LOSE)
  if (volumes.some((one) => one.name === STORE_VOLUME && hasKind(one, 'emptyDir'))) {
    return { volume: STORE_VOLUME, added: [], warning: LOST }
  }
  return addVolume(volumes, { name: STORE_VOLUME, emptyDir: {} }, LOST)
}

/** The volume of the configuration, where the Pod does not have it yet. */
export function chooseConfig(pod: Pod, wanted: Wanted): { added: readonly Volume[] } | Denied {
  if (wanted.config === undefined) return { added: [] }
  const volumes = pod.spec.volumes ?? []
  const isThere = volumes.some(
    (volume) => volume.name === CONFIG_VOLUME && volume.configMap?.name === wanted.config,
  )
  if (isThere) return { added: [] }
  return addVolume(volumes, { name: CONFIG_VOLUME, configMap: { name: wanted.config } }, '')
}

function checkVolume(
  name: string,
  volumes: readonly Volume[],
  losable: boolean,
): Denied | undefined {
  const volume = volumes.find((one) => one.name === name)
  if (volume === undefined) {
    const names = volumes.map((one) => one.name).join(', ')
    return deny(`store-volume: "${name}" is no volume of the Pod`, `it has: ${names || 'none'}`)
  }
  if (hasKind(volume, 'persistentVolumeClaim')) {
    return volume.persistentVolumeClaim?.readOnly === true ? readOnly(name) : undefined
  }
  if (EPHEMERAL.some((kind) => hasKind(volume, kind))) {
    if (losable) return undefined
    return deny(
      `store-volume: "${name}" is lost with the Pod or its node, and its marks too`,
      OR_LOSE,
    )
  }
  return deny(`store-volume: "${name}" is of a kind on which SQLite cannot keep marks`, LASTING)
}

function readOnly(name: string): Denied {
  return deny(`volume ${name} is read-only`, 'remove readOnly from it, or choose another')
}

function hasKind(volume: Volume, kind: string): boolean {
  return volume[kind] !== undefined && volume[kind] !== null
}

function addVolume(volumes: readonly Volume[], volume: Volume, warning: string): Store | Denied {
  if (!volumes.some(({ name }) => name === volume.name)) {
    return { volume: volume.name, added: [volume], warning }
  }
  return deny(`a volume named ${volume.name} is there already, and is another one`, 'rename it')
}
