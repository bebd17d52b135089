/** Where Pods are described: in objects of the kinds that make them. Pure. */
import { z } from 'zod'
import { decide } from './patch.ts'
import { Metadata, fits, mistakeIn, readPod, type Pod } from './pod.ts'
import type { Injector } from './settings.ts'
import { readFence } from './sidecar.ts'

const ManifestSchema = z.looseObject({
  kind: z.string(),
  metadata: Metadata.nullish(),
})

/** Any object of Kubernetes. */
export type Manifest = z.output<typeof ManifestSchema>

export function readManifest(
  value: unknown,
): { readonly object: Manifest } | { readonly mistake: string } {
  if (fits(ManifestSchema, value)) return { object: value }
  return { mistake: `no object of Kubernetes: ${mistakeIn(ManifestSchema, value)}` }
}

const TEMPLATES: Readonly<Record<string, readonly string[]>> = {
  Pod: [],
  ...Object.fromEntries(
    ['DaemonSet', 'Deployment', 'Job', 'ReplicaSet', 'ReplicationController', 'StatefulSet'].map(
      (kind) => [kind, ['spec', 'template']],
    ),
  ),
  CronJob: ['spec', 'jobTemplate', 'spec', 'template'],
}

/** The path from an object of this kind to its Pod or Pod template; undefined where it has none. */
export function templatePath(kind: string): readonly string[] | undefined {
  return Object.hasOwn(TEMPLATES, kind) ? TEMPLATES[kind] : undefined
}

/** A list of objects is its items. */
export function itemsOf(object: Manifest): unknown[] | undefined {
  return object.kind.endsWith('List') && Array.isArray(object.items) ? object.items : undefined
}

/** `Deployment orders/web`. */
export function nameOf({ kind, metadata }: Manifest): string {
  const name = metadata?.name ?? metadata?.generateName ?? '(no name)'
  const namespace = metadata?.namespace
  return `${kind} ${namespace === undefined || namespace === null ? name : `${namespace}/${name}`}`
}

export type Template =
  | { readonly kind: 'template'; readonly pod: Pod; readonly claimTemplates: readonly string[] }
  | { readonly kind: 'none' }
  | { readonly kind: 'mistaken'; readonly mistake: string }

export function readTemplate(object: Manifest): Template {
  const path = templatePath(object.kind)
  const value = path?.reduce<unknown>(member, object)
  if (path === undefined || value === undefined || value === null) return { kind: 'none' }
  const read = readPod(value)
  if ('mistake' in read) return { kind: 'mistaken', mistake: read.mistake }
  const claims = Claims.safeParse(object)
  const claimTemplates = claims.success
    ? (claims.data.spec.volumeClaimTemplates ?? []).map(({ metadata }) => metadata.name)
    : []
  return { kind: 'template', pod: read.pod, claimTemplates }
}

const Claims = z.object({
  spec: z.object({
    volumeClaimTemplates: z.array(z.object({ metadata: z.object({ name: z.string() }) })).nullish(),
  }),
})

const Replicated = z.object({
  spec: z.object({
    replicas: z.int().nullish(),
    strategy: z.object({ type: z.string().nullish() }).nullish(),
  }),
})

export interface Warning {
  readonly about:
    'misplaced-annotation' | 'missing-label' | 'refused' | 'several-replicas' | 'rolling-update'
  readonly words: string
}

/** What its owner should know of a workload before its Pods are made. */
export function findWarnings(object: Manifest, injector: Injector): Warning[] {
  const { prefix } = injector
  const template = readTemplate(object)
  if (template.kind !== 'template' || object.kind === 'Pod') return []
  const found: Warning[] = []
  const onTemplate = template.pod.metadata?.annotations?.[`${prefix}/inject`]
  const onObject = object.metadata?.annotations?.[`${prefix}/inject`]
  if (onObject !== undefined && onTemplate === undefined) {
    found.push({
      about: 'misplaced-annotation',
      words: `not fenced: ${prefix}/inject stands on the ${object.kind}; it belongs on the Pod template, in spec.template.metadata.annotations`,
    })
  }
  const decision = decide(template.pod, injector, template.claimTemplates)
  if (decision.kind === 'ignored') return found
  if (isOverlooked(template.pod, injector)) {
    found.push({
      about: 'missing-label',
      words: `its Pods start unfenced on a server before 1.28, which asks about labelled Pods only: add ${prefix}/inject: "true" to spec.template.metadata.labels`,
    })
  }
  if (decision.kind === 'denied') {
    return [...found, { about: 'refused', words: `its Pods will be refused: ${decision.reason}` }]
  }

  const replicated = Replicated.safeParse(object)
  if (!replicated.success) return found
  const { replicas, strategy } = replicated.data.spec
  if ((replicas ?? 1) > 1 || object.kind === 'DaemonSet') {
    const count = object.kind === 'DaemonSet' ? 'a Pod on every node' : `${replicas ?? 1} replicas`
    found.push({
      about: 'several-replicas',
      words: `${count} with a sqlite store each are no fence: every Pod knows its own marks only; use replicas: 1`,
    })
  }
  const rolls = object.kind === 'Deployment' && (strategy?.type ?? 'RollingUpdate') !== 'Recreate'
  if (rolls && readFence(decision.pod)?.storeVolume?.persistentVolumeClaim) {
    found.push({
      about: 'rolling-update',
      words:
        'RollingUpdate starts a new Pod before the old one has left the store claim: it waits for the volume (ReadWriteOnce) or finds the store locked; use strategy.type: Recreate',
    })
  }
  return found
}

/** Whether a server that calls webhooks by labels would not ask about it. */
function isOverlooked(pod: Pod, { prefix, kubernetesMinor }: Injector): boolean {
  if (kubernetesMinor === undefined || kubernetesMinor >= 28) return false
  return pod.metadata?.labels?.[`${prefix}/inject`] !== 'true' && readFence(pod) === undefined
}

function member(value: unknown, key: string): unknown {
  return isMapping(value) ? value[key] : undefined
}

export function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}
