/** What is added to a Pod: the sidecar, the container that redirects, and their volumes. Pure. */
import { parseQuantity } from './quantity.ts'
import { redirectScript } from './redirect.ts'
import { findContainer, type Container, type Pod, type Volume } from './pod.ts'
import type { Wanted } from './settings.ts'

export const SIDECAR = 'fence-proxy'
export const REDIRECT = 'fence-redirect'
export const ADMIN_PORT_NAME = 'fence-admin'
/** Of the proxy port where it takes no name over: a Service can aim at what only the sidecar has. */
export const OWN_PORT_NAME = 'fence-http'
export const STORE_VOLUME = 'fence-store'
export const CONFIG_VOLUME = 'fence-config'

const DATA = '/var/lib/fencing-proxy'
const CONFIG = '/etc/fencing-proxy'
/** A user that no other container of the Pod is likely to be; images call it nonroot. */
const USER = 65532

/** Everything that the sidecar depends on. */
export interface SidecarPlan {
  readonly wanted: Wanted
  readonly image: string
  readonly native: boolean
  /** The name of the proxy port. */
  readonly portName: string
  readonly appPort: number
  readonly storeVolume: string
  readonly shutdownSeconds: number
}

export function sidecar(plan: SidecarPlan): Container {
  const { wanted } = plan
  const [proxyPort, adminPort] = [wanted['proxy-port'], wanted['admin-port']]
  const routes = wanted.scope?.flatMap((pattern) => ['--scope', literally(pattern)]) ?? [
    '--config',
    `${CONFIG}/config.yaml`,
  ]
  const level = wanted['log-level']
  return {
    name: SIDECAR,
    image: plan.image,
    args: [
      'serve',
      ...['--listen', `0.0.0.0:${proxyPort}`],
      ...['--admin', `0.0.0.0:${adminPort}`],
      ...['--upstream', `http://127.0.0.1:${plan.appPort}`],
      ...['--data', DATA],
      ...routes,
    ],
    env: [
      { name: 'FENCING_PROXY_SHUTDOWN_TIMEOUT', value: `${plan.shutdownSeconds}s` },
      ...(level === undefined ? [] : [{ name: 'FENCING_PROXY_LOG_LEVEL', value: level }]),
      // The root file system is read-only, /tmp too.
      { name: 'SQLITE_TMPDIR', value: DATA },
    ],
    ports: [
      { name: plan.portName, containerPort: proxyPort, protocol: 'TCP' },
      { name: ADMIN_PORT_NAME, containerPort: adminPort, protocol: 'TCP' },
    ],
    // A native sidecar holds up the containers after it until it has started.
    startupProbe: probe('/healthz', adminPort, 1, 60),
    readinessProbe: probe('/readyz', adminPort, 5, 2),
    livenessProbe: probe('/healthz', adminPort, 10, 3),
    resources: {
      requests: { cpu: wanted['cpu-request'], memory: wanted['memory-request'] },
      limits: { cpu: wanted['cpu-limit'], memory: wanted['memory-limit'] },
    },
    securityContext: {
      allowPrivilegeEscalation: false,
      readOnlyRootFilesystem: true,
      runAsNonRoot: true,
      runAsUser: USER,
      runAsGroup: USER,
      capabilities: { drop: ['ALL'] },
      seccompProfile: { type: 'RuntimeDefault' },
    },
    volumeMounts: [
      { name: plan.storeVolume, mountPath: DATA },
      ...(wanted.config === undefined
        ? []
        : [{ name: CONFIG_VOLUME, mountPath: CONFIG, readOnly: true }]),
    ],
    ...(plan.native ? { restartPolicy: 'Always' } : {}),
  }
}

/** Kubernetes reads $(NAME) in an argument as a variable, and $$ as a $. */
function literally(argument: string): string {
  return argument.replaceAll('$', () => '$$')
}

/** Every field that the API server would fill in is given: what comes back is what was written. */
function probe(path: string, port: number, periodSeconds: number, failureThreshold: number) {
  return {
    httpGet: { path, port, scheme: 'HTTP' },
    timeoutSeconds: 3,
    periodSeconds,
    successThreshold: 1,
    failureThreshold,
  }
}

/** Runs once, before the containers of the Pod, and needs what no other container here gets. */
export function redirectContainer(image: string, appPort: number, proxyPort: number): Container {
  const resources = { cpu: '10m', memory: '32Mi' }
  return {
    name: REDIRECT,
    image,
    command: ['/bin/sh', '-c', redirectScript(appPort, proxyPort)],
    // iptables-legacy takes a lock; this is the one place a read-only container can write to.
    env: [{ name: 'XTABLES_LOCKFILE', value: '/dev/shm/xtables.lock' }],
    resources: { requests: resources, limits: resources },
    securityContext: {
      allowPrivilegeEscalation: false,
      readOnlyRootFilesystem: true,
      runAsNonRoot: false,
      // Capabilities that are added reach a process of root only.
      runAsUser: 0,
      runAsGroup: 0,
      // NET_RAW is for iptables-legacy.
      capabilities: { drop: ['ALL'], add: ['NET_ADMIN', 'NET_RAW'] },
      seccompProfile: { type: 'RuntimeDefault' },
    },
  }
}

/** What the API server and other webhooks may fill in; it decides nothing about the fence. */
const NOT_OURS = [
  'imagePullPolicy',
  'resizePolicy',
  'terminationMessagePath',
  'terminationMessagePolicy',
]

/**
 * `ours`, with what others rightly added to `present`: what the API server fills in, mounts
 * elsewhere (a service account's), variables that are not the proxy's. All else that is not ours
 * goes: a `command` or a privilege would make another container of it.
 */
export function rewrite(present: Container, ours: Container): Container {
  const kept = Object.entries(present).filter(([key]) => NOT_OURS.includes(key))
  const env = (present.env ?? []).filter(
    ({ name }) => !name.startsWith('FENCING_PROXY_') && !named(ours.env, name),
  )
  const mounts = (present.volumeMounts ?? []).filter(
    ({ mountPath }) => !liesIn(mountPath, DATA) && !liesIn(mountPath, CONFIG),
  )
  const whole: Container = { ...ours, ...Object.fromEntries(kept) }
  if (env.length > 0) whole.env = [...(ours.env ?? []), ...env]
  if (mounts.length > 0) whole.volumeMounts = [...(ours.volumeMounts ?? []), ...mounts]
  whole.resources = keepSpelling(present.resources, ours.resources)
  return whole
}

function named(entries: Container['env'], name: string): boolean {
  return entries?.some((entry) => entry.name === name) ?? false
}

function liesIn(path: string, folder: string): boolean {
  return path === folder || path.startsWith(`${folder}/`)
}

/** The API server writes 0.5 as 500m; the same amount, so the same container. */
function keepSpelling(present: unknown, ours: unknown): unknown {
  if (typeof ours === 'object' && ours !== null) {
    const there = typeof present === 'object' && present !== null ? present : {}
    const entries = Object.entries(ours).map(([key, value]): [string, unknown] => [
      key,
      keepSpelling(Object.entries(there).find(([name]) => name === key)?.[1], value),
    ])
    return { ...there, ...Object.fromEntries(entries) }
  }
  const same = parseQuantity(String(present)) === parseQuantity(String(ours))
  return same ? present : ours
}

/** A fence as the containers of an injected Pod show it. */
export interface Fence {
  readonly proxyPort: number
  readonly appPort: number
  /** Whether what comes to the app's port from outside the Pod goes to the proxy. */
  readonly redirects: boolean
  /** Where the marks are; undefined where the Pod's StatefulSet is going to add the volume. */
  readonly storeVolume: Volume | undefined
}

/** Undefined where the Pod has no container that is, by name and arguments, a sidecar of ours. */
export function readFence(pod: Pod): Fence | undefined {
  const container = findContainer(pod, SIDECAR)?.container
  if (container?.command !== undefined) return undefined
  const portAfter = (flag: string) => {
    const args = container?.args ?? []
    const port = /:(\d+)$/.exec(args[args.indexOf(flag) + 1] ?? '')?.[1]
    return port === undefined ? undefined : Number(port)
  }
  const [proxyPort, appPort] = [portAfter('--listen'), portAfter('--upstream')]
  if (proxyPort === undefined || appPort === undefined) return undefined
  const mounted = container?.volumeMounts?.find(({ mountPath }) => mountPath === DATA)?.name
  return {
    proxyPort,
    appPort,
    redirects: findContainer(pod, REDIRECT) !== undefined,
    storeVolume: pod.spec.volumes?.find(({ name }) => name === mounted),
  }
}
