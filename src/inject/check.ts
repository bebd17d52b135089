/**
 * Every way around the fence that shows in manifests or in a cluster's objects. Pure.
 *
 * A Pod that is not in a cluster yet (it has no uid) and every template are looked at as the
 * injector would make them.
 */
import { z } from 'zod'
import { parseDocuments } from './objects.ts'
import { decide } from './patch.ts'
import { containersOf, describeIssues, findContainer, isTcp, type Container, type Pod, type Port } from './pod.ts' // prettier-ignore
import type { Injector } from './settings.ts'
import { ADMIN_PORT_NAME, REDIRECT, SIDECAR, storeVolumeOf } from './sidecar.ts'
import { Manifest, itemsOf, nameOf, readTemplate, warnings } from './workload.ts'

export interface Finding {
  readonly way:
    | 'refused'
    | 'missing-sidecar'
    | 'unfenced-endpoint'
    | 'numeric-target-port'
    | 'app-port-targeted'
    | 'headless-service'
    | 'host-port'
    | 'host-network'
    | 'open-app-port'
    | 'duplicate-port-name'
    | 'ephemeral-store'
    | 'several-replicas'
    | 'endpoint-past-fence'
    | 'workload'
  /** `Service orders/web`. */
  readonly object: string
  /** What is wrong, and how to close it. */
  readonly detail: string
}

export type Checked =
  | { readonly kind: 'checked'; readonly fencedPods: number; readonly findings: readonly Finding[] }
  | { readonly kind: 'unreadable'; readonly mistakes: readonly string[] }

export function checkManifests(text: string, injector: Injector): Checked {
  const parsed = parseDocuments(text)
  if ('mistakes' in parsed) return { kind: 'unreadable', mistakes: parsed.mistakes }
  const world: World = { pods: [], services: [], policies: [], slices: [], findings: [], mistakes: [] }
  for (const document of parsed.documents) sort(document.toJS(), injector, world)
  if (world.mistakes.length > 0) return { kind: 'unreadable', mistakes: world.mistakes }

  const { findings } = world
  for (const pod of world.pods) findings.push(...checkPod(pod, world.policies))
  for (const service of world.services) findings.push(...checkService(service, world.pods))
  for (const slice of world.slices) findings.push(...checkSlice(slice, world.pods))
  const fencedPods = world.pods.filter(({ fence }) => fence !== undefined).length
  return { kind: 'checked', fencedPods, findings }
}

/** A Pod, or what a workload's Pods are going to be. */
interface Subject {
  readonly object: string
  readonly name: string | undefined
  readonly namespace: string
  readonly labels: Readonly<Record<string, string>>
  readonly pod: Pod
  readonly fence: FenceOf | undefined
}

/** What its sidecar says of itself. */
interface FenceOf {
  readonly proxyPort: number
  readonly appPort: Port | undefined
  readonly appContainer: Container | undefined
  readonly redirects: boolean
}

interface World {
  readonly pods: Subject[]
  readonly services: Service[]
  readonly policies: Policy[]
  readonly slices: Slice[]
  readonly findings: Finding[]
  readonly mistakes: string[]
}
