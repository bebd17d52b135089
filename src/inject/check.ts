/**
 * Every way around the fence that shows in manifests or in a cluster's objects. Pure.
 *
 * What is not in a cluster yet is looked at as the injector would make it.
 */
import {
  Cluster,
  governs,
  selects,
  type EndpointSlice,
  type NetworkPolicy,
  type Service,
  type Subject,
} from './cluster.ts'
import { parseDocuments } from './objects.ts'
import { containersOf, isTcp, type Pod } from './pod.ts'
import type { Injector } from './settings.ts'
import { SIDECAR, type Fence } from './sidecar.ts'
import type { Warning } from './workload.ts'

export interface Finding {
  readonly way:
    | Warning['about']
    | 'missing-sidecar'
    | 'unfenced-endpoint'
    | 'numeric-target-port'
    | 'app-port-targeted'
    | 'headless-service'
    | 'endpoint-at-app-port'
    | 'host-port'
    | 'host-network'
    | 'open-app-port'
    | 'duplicate-port-name'
    | 'ephemeral-store'
  /** `Service orders/web`. */
  readonly object: string
  /** What is wrong, and how it is closed. */
  readonly words: string
}

export type Checked =
  | {
      readonly kind: 'checked'
      /** Pods and templates that have a fence. */
      readonly fenced: number
      /** Those that only ask for one, and get it where the injector is installed. */
      readonly asking: number
      readonly findings: readonly Finding[]
    }
  | { readonly kind: 'unreadable'; readonly mistakes: readonly string[] }

export function checkManifests(text: string, injector: Injector): Checked {
  const parsed = parseDocuments(text)
  if ('mistakes' in parsed) return { kind: 'unreadable', mistakes: parsed.mistakes }
  const cluster = new Cluster(injector)
  for (const document of parsed.documents) cluster.take(document.toJS())
  if (cluster.mistakes.length > 0) return { kind: 'unreadable', mistakes: cluster.mistakes }

  const { subjects, policies } = cluster
  const findings = cluster.warnings.map(({ about, object, words }): Finding => {
    return { way: about, object, words }
  })
  const fenced = subjects.filter(isFenced)
  for (const subject of subjects) {
    // A manifest's Pod that asks and gets no fence is refused, which its warning has said.
    if (!subject.asks || !subject.live || isFenced(subject)) continue
    findings.push({
      way: 'missing-sidecar',
      object: subject.label,
      words: `it asks for a fence and has no container ${SIDECAR} as the injector writes it: delete the Pod, and see that the webhook has failurePolicy: Fail`,
    })
  }
  for (const subject of fenced) findings.push(...checkPod(subject, policies))
  for (const service of cluster.services) findings.push(...checkService(service, subjects))
  for (const slice of cluster.slices) findings.push(...checkSlice(slice, subjects))
  const asking = fenced.filter(({ foreseen }) => foreseen).length
  return { kind: 'checked', fenced: fenced.length - asking, asking, findings }
}

type Fenced = Subject & { readonly fence: Fence }

function isFenced(subject: Subject): subject is Fenced {
  return subject.fence !== undefined
}

function checkPod(subject: Fenced, policies: readonly NetworkPolicy[]): Finding[] {
  const { label, pod, fence } = subject
  const findings: Finding[] = []
  const add = (way: Finding['way'], words: string) => findings.push({ way, object: label, words })

  if (pod.spec.hostNetwork === true) {
    add('host-network', `the app's port ${fence.appPort} is a port of the node: remove hostNetwork`)
  }
  for (const name of duplicateNames(pod)) {
    add(
      'duplicate-port-name',
      `two containers name a port ${name}, and a Service takes the first, fenced or not: rename one`,
    )
  }
  const { storeVolume } = fence
  if (storeVolume !== undefined && !storeVolume.persistentVolumeClaim) {
    add(
      'ephemeral-store',
      `volume ${storeVolume.name} is lost with the Pod, and every mark with it: use a PersistentVolumeClaim`,
    )
  }
  if (fence.redirects) return findings

  const hostPort = portsOf(pod).find(
    (port) => port.containerPort === fence.appPort && port.hostPort,
  )
  if (hostPort !== undefined) {
    add(
      'host-port',
      `hostPort ${hostPort.hostPort ?? 0} leads from the node to the app's port ${fence.appPort}: remove it`,
    )
  }
  const governing = policies.filter((policy) => governs(policy, subject))
  if (governing.length === 0) {
    add(
      'open-app-port',
      `port ${fence.appPort} takes connections on the Pod's own address: add a NetworkPolicy that lets in port ${fence.proxyPort} only`,
    )
  }
  for (const policy of governing.filter((one) => lets(one, pod, fence.appPort))) {
    add(
      'open-app-port',
      `${policy.label} lets connections in to the app's port ${fence.appPort}: name the ports it is for`,
    )
  }
  return findings
}

function portsOf(pod: Pod) {
  return containersOf(pod).flatMap(({ container }) => container.ports ?? [])
}

function duplicateNames(pod: Pod): Set<string> {
  const names = portsOf(pod).flatMap(({ name }) => (name ? [name] : []))
  return new Set(names.filter((name, i) => names.indexOf(name) !== i))
}

/** Whether one of the policy's rules lets somebody in to the port. */
function lets({ spec }: NetworkPolicy, pod: Pod, number: number): boolean {
  return (spec.ingress ?? []).some(({ ports }) => {
    if ((ports ?? []).length === 0) return true
    return (ports ?? []).some(({ port, endPort, protocol }) => {
      if ((protocol ?? 'TCP') !== 'TCP') return false
      if (port === undefined || port === null) return true
      const from = resolvePort(pod, port)
      return from !== undefined && from <= number && number <= (endPort ?? from)
    })
  })
}

/** The number that a Service reaches by this targetPort: the first port of that name. */
function resolvePort(pod: Pod, reference: string | number): number | undefined {
  if (typeof reference === 'number') return reference
  return portsOf(pod).find((port) => port.name === reference && isTcp(port))?.containerPort
}

function checkService(service: Service, subjects: readonly Subject[]): Finding[] {
  const selected = subjects.filter((subject) => selects(service, subject))
  const fenced = selected.filter(isFenced)
  if (fenced.length === 0) return []
  const findings: Finding[] = []
  const add = (way: Finding['way'], words: string) =>
    findings.push({ way, object: service.label, words })
  const open = fenced.filter(({ fence }) => !fence.redirects)

  if (service.spec.clusterIP === 'None' && open.length > 0) {
    add(
      'headless-service',
      `its name leads to the Pods' own addresses, where the app's port is open (${labels(open)}): close it with a NetworkPolicy, or let clients use a Service with a clusterIP`,
    )
  }
  for (const { port, targetPort } of service.spec.ports ?? []) {
    const target = targetPort ?? port
    const past = open.filter(({ pod, fence }) => resolvePort(pod, target) === fence.appPort)
    if (past.length > 0 && typeof target === 'number') {
      add(
        'numeric-target-port',
        `targetPort ${target} leads past the fence of ${labels(past)}: use the name of the port`,
      )
    } else if (past.length > 0) {
      add(
        'app-port-targeted',
        `targetPort ${target} is the app's own port in ${labels(past)}: use the name of the sidecar's port`,
      )
    }
    const unfenced = selected.filter(
      (one) => !isFenced(one) && resolvePort(one.pod, target) !== undefined,
    )
    if (unfenced.length > 0) {
      add(
        'unfenced-endpoint',
        `port ${port} leads to Pods without a fence too (${labels(unfenced)}): annotate them, or let the selector leave them out`,
      )
    }
  }
  // A manifest beside its own live Pods is not another replica.
  const live = fenced.filter((one) => one.live)
  const replicas = live.length > 0 ? live : fenced
  if (replicas.length > 1) {
    add(
      'several-replicas',
      `it leads to ${replicas.length} fenced Pods, each of which knows its own marks only (${labels(replicas)}): use one`,
    )
  }
  return findings
}

/** What a Service really leads to, and slices that were made by hand. */
function checkSlice(slice: EndpointSlice, subjects: readonly Subject[]): Finding[] {
  const ports = (slice.ports ?? []).map(({ port }) => port)
  const reached = subjects.filter(
    ({ live, namespace, name, addresses }) =>
      live &&
      (slice.endpoints ?? []).some(
        (endpoint) =>
          (endpoint.targetRef?.kind === 'Pod' &&
            endpoint.targetRef.name === name &&
            slice.namespace === namespace) ||
          endpoint.addresses?.some((address) => addresses.includes(address)),
      ),
  )
  const findings: Finding[] = []
  const past = reached
    .filter(isFenced)
    .filter(({ fence }) => !fence.redirects && ports.includes(fence.appPort))
  if (past.length > 0) {
    findings.push({
      way: 'endpoint-at-app-port',
      object: slice.label,
      words: `it sends traffic to the app's own port of ${labels(past)}: see to the targetPort of its Service`,
    })
  }
  const unfenced = reached.filter((one) => !isFenced(one))
  if (unfenced.length > 0 && reached.some(isFenced)) {
    findings.push({
      way: 'unfenced-endpoint',
      object: slice.label,
      words: `it sends traffic to Pods without a fence too: ${labels(unfenced)}`,
    })
  }
  return findings
}

function labels(subjects: readonly Subject[]): string {
  return subjects.map(({ label }) => label).join(', ')
}
