/** What `check` looks at: Pods, and the objects that lead to Pods. Pure. */
import { z } from 'zod'
import { fits, mistakeIn, type Pod } from './pod.ts'
import { decide } from './patch.ts'
import { readAnnotations, type Injector } from './settings.ts'
import { readFence, type Fence } from './sidecar.ts'
import {
  findWarnings,
  itemsOf,
  nameOf,
  readManifest,
  readTemplate,
  type Manifest,
  type Warning,
} from './workload.ts'

const PortReference = z.union([z.string(), z.int()])
const Labels = z.record(z.string(), z.string())

const Service = z.looseObject({
  spec: z.looseObject({
    selector: Labels.nullish(),
    clusterIP: z.string().nullish(),
    ports: z.array(z.looseObject({ port: z.int(), targetPort: PortReference.nullish() })).nullish(),
  }),
})

const Selector = z.looseObject({
  matchLabels: Labels.nullish(),
  matchExpressions: z
    .array(
      z.object({ key: z.string(), operator: z.string(), values: z.array(z.string()).nullish() }),
    )
    .nullish(),
})

const NetworkPolicy = z.looseObject({
  spec: z.looseObject({
    podSelector: Selector.nullish(),
    policyTypes: z.array(z.string()).nullish(),
    ingress: z
      .array(
        z.looseObject({
          ports: z
            .array(
              z.looseObject({
                port: PortReference.nullish(),
                endPort: z.int().nullish(),
                protocol: z.string().nullish(),
              }),
            )
            .nullish(),
        }),
      )
      .nullish(),
  }),
})

const EndpointSlice = z.looseObject({
  ports: z.array(z.looseObject({ port: z.int().nullish() })).nullish(),
  endpoints: z
    .array(
      z.looseObject({
        addresses: z.array(z.string()).nullish(),
        targetRef: z.looseObject({ kind: z.string(), name: z.string() }).nullish(),
      }),
    )
    .nullish(),
})

const Status = z.looseObject({
  status: z.looseObject({
    phase: z.string().nullish(),
    podIPs: z.array(z.looseObject({ ip: z.string() })).nullish(),
  }),
})

/** How findings call it, and where it is. */
interface Named {
  readonly label: string
  readonly namespace: string
}

/** A Pod of a cluster, or what a manifest's Pods are going to be once they were injected. */
export interface Subject extends Named {
  readonly name: string
  readonly live: boolean
  /** Of a manifest: it has no fence yet, and is looked at as the injector would make it. */
  readonly foreseen: boolean
  readonly pod: Pod
  readonly labels: Readonly<Record<string, string>>
  readonly addresses: readonly string[]
  /** Whether its annotations ask for a fence. */
  readonly asks: boolean
  readonly fence: Fence | undefined
}

export type Service = Named & z.output<typeof Service>
export type NetworkPolicy = Named & z.output<typeof NetworkPolicy>
export type EndpointSlice = Named & z.output<typeof EndpointSlice>

export class Cluster {
  readonly subjects: Subject[] = []
  readonly services: Service[] = []
  readonly policies: NetworkPolicy[] = []
  readonly slices: EndpointSlice[] = []
  readonly warnings: (Warning & { readonly object: string })[] = []
  /** Objects that could not be read. */
  readonly mistakes: string[] = []
  readonly #injector: Injector

  constructor(injector: Injector) {
    this.#injector = injector
  }

  /** Takes an object in, or every object of a list. Kinds that lead to no Pod are left out. */
  take(value: unknown): void {
    const read = readManifest(value)
    if ('mistake' in read) {
      this.mistakes.push(read.mistake)
      return
    }
    const { object } = read
    const items = itemsOf(object)
    if (items !== undefined) {
      for (const item of items) this.take(item)
      return
    }
    const named = { label: nameOf(object), namespace: object.metadata?.namespace ?? 'default' }
    switch (object.kind) {
      case 'Service':
        this.#read(Service, named, object, this.services)
        break
      case 'NetworkPolicy':
        this.#read(NetworkPolicy, named, object, this.policies)
        break
      case 'EndpointSlice':
        this.#read(EndpointSlice, named, object, this.slices)
        break
      default:
        this.#takePods(object, named)
    }
  }

  #read<T>(schema: z.ZodType<T, T>, named: Named, object: Manifest, into: (Named & T)[]): void {
    if (fits(schema, object)) into.push({ ...object, ...named })
    else this.mistakes.push(`${named.label}: ${mistakeIn(schema, object)}`)
  }

  #takePods(object: Manifest, named: Named): void {
    const { metadata } = object
    const isPod = object.kind === 'Pod'
    // A ReplicaSet of a Deployment says nothing that the Deployment does not.
    if (!isPod && (metadata?.ownerReferences ?? []).length > 0) return
    const template = readTemplate(object)
    if (template.kind === 'none') return
    if (template.kind === 'mistaken') {
      this.mistakes.push(`${named.label}: ${template.mistake}`)
      return
    }
    const live = isPod && typeof metadata?.uid === 'string'
    const status = Status.safeParse(object).data?.status
    if (live && (status?.phase === 'Succeeded' || status?.phase === 'Failed')) return

    this.warnings.push(
      ...findWarnings(object, this.#injector).map((one) => ({ ...one, object: named.label })),
    )
    const pod = live
      ? template.pod
      : this.#foresee(template.pod, template.claimTemplates, isPod, named)
    const annotations = pod.metadata?.annotations ?? {}
    this.subjects.push({
      ...named,
      name: metadata?.name ?? '',
      live,
      foreseen: readFence(template.pod) === undefined && readFence(pod) !== undefined,
      pod,
      labels: pod.metadata?.labels ?? {},
      addresses: (status?.podIPs ?? []).map(({ ip }) => ip),
      asks: readAnnotations(annotations, this.#injector.prefix).kind !== 'no',
      fence: readFence(pod),
    })
  }

  /** The Pod as it will be in the cluster. */
  #foresee(pod: Pod, claimTemplates: readonly string[], isPod: boolean, { label }: Named): Pod {
    const decision = decide(pod, this.#injector, claimTemplates)
    // Of a workload, its warnings have said so.
    if (decision.kind === 'denied' && isPod) {
      this.warnings.push({ about: 'refused', object: label, words: decision.reason })
    }
    return decision.kind === 'injected' ? decision.pod : pod
  }
}

/** Whether a Service leads to the Pod: one without a selector selects none. */
export function selects({ spec, namespace }: Service, subject: Subject): boolean {
  const wanted = Object.entries(spec.selector ?? {})
  if (namespace !== subject.namespace || wanted.length === 0) return false
  return wanted.every(([key, value]) => subject.labels[key] === value)
}

/** Whether the policy decides what may come in to the Pod. */
export function governs({ spec, namespace }: NetworkPolicy, subject: Subject): boolean {
  if (namespace !== subject.namespace) return false
  if (!(spec.policyTypes ?? ['Ingress']).includes('Ingress')) return false
  const { matchLabels, matchExpressions } = spec.podSelector ?? {}
  const { labels } = subject
  return (
    Object.entries(matchLabels ?? {}).every(([key, value]) => labels[key] === value) &&
    (matchExpressions ?? []).every(({ key, operator, values }) => {
      const value = labels[key]
      const isListed = value !== undefined && (values ?? []).includes(value)
      switch (operator) {
        case 'In':
          return isListed
        case 'NotIn':
          return !isListed
        case 'Exists':
          return value !== undefined
        case 'DoesNotExist':
          return value === undefined
        default:
          return false
      }
    })
  )
}
