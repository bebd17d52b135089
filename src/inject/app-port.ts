/** Which port of which container is to be fenced, and under which name it goes on. Pure. */
import { deny, isDenied, type Denied } from './denial.ts'
import { containersOf, isTcp, type Container, type Placed, type Pod, type Port } from './pod.ts'
import type { Wanted } from './settings.ts'
import { ADMIN_PORT_NAME, OWN_PORT_NAME, SIDECAR } from './sidecar.ts'

export interface AppPort {
  readonly container: Container
  readonly containerIndex: number
  readonly port: Port
  readonly portIndex: number
  /** The name that the port had before any injection; empty where it has none. */
  readonly originalName: string
  /** The name that it is to have. */
  readonly newName: string
}

/** `former` is the sidecar of an earlier injection. */
export function findAppPort(
  pod: Pod,
  wanted: Wanted,
  former: Placed | undefined,
): AppPort | Denied {
  const declared = declaredPorts(pod, findRenamed(pod, former))
  const chosen = choose(declared, wanted)
  if (isDenied(chosen)) return chosen
  const app = { ...chosen, newName: chooseName(pod, wanted, chosen) }
  return findConflict(pod, wanted, app) ?? app
}

type Declared = Omit<AppPort, 'newName'>

function declaredPorts(pod: Pod, renamed: ReturnType<typeof findRenamed>): Declared[] {
  return pod.spec.containers
    .map((container, containerIndex) => ({ container, containerIndex }))
    .filter(({ container }) => container.name !== SIDECAR)
    .flatMap((place) =>
      (place.container.ports ?? []).map((port, portIndex) => {
        const originalName = (port === renamed?.port ? renamed.from : port.name) ?? ''
        return { ...place, port, portIndex, originalName }
      }),
    )
}

/** The port that an earlier injection renamed, and the name that the sidecar took over from it. */
function findRenamed(
  pod: Pod,
  former: Placed | undefined,
): { port: Port; from: string } | undefined {
  const from = (former?.container.ports ?? [])
    .map(({ name }) => name)
    .find((name) => name !== ADMIN_PORT_NAME && name !== OWN_PORT_NAME)
  if (from === undefined || from === null) return undefined
  const ports = userPorts(pod).map(({ port }) => port)
  const args = former?.container.args ?? []
  const upstream = args[args.indexOf('--upstream') + 1]
  const port =
    ports.find(({ containerPort }) => upstream === `http://127.0.0.1:${containerPort}`) ??
    ports.find(({ name }) => name === appName(from, ''))
  return port === undefined ? undefined : { port, from }
}

function userPorts(pod: Pod): { port: Port; container: Container }[] {
  return containersOf(pod)
    .filter(({ container }) => container.name !== SIDECAR)
    .flatMap(({ container }) => (container.ports ?? []).map((port) => ({ port, container })))
}

function choose(declared: readonly Declared[], wanted: Wanted): Declared | Denied {
  const { container: only, 'app-port': asked, steering } = wanted
  const known = declared.map(describe).join(', ') || 'none'
  const candidates = declared.filter(
    ({ container, port, originalName }) =>
      container.name === (only ?? container.name) &&
      (asked === undefined
        ? originalName !== '' && isTcp(port)
        : asked === (typeof asked === 'number' ? port.containerPort : originalName)),
  )
  // One number may be declared for TCP and for UDP.
  const found = candidates.filter(({ port }) => isTcp(port))
  const [app] = found

  if (app === undefined && candidates[0] !== undefined) {
    const protocol = candidates[0].port.protocol ?? ''
    return deny(
      `app-port: "${asked ?? ''}" is a ${protocol} port, and only HTTP over TCP can be fenced`,
      `give one of the TCP ports; the Pod declares: ${known}`,
    )
  }
  if (app === undefined) {
    const owner = only === undefined ? 'no container' : `no container named ${only}`
    return deny(
      `${owner} declares ${asked === undefined ? 'a named TCP port' : `a port ${asked}`}`,
      `declare it in the app container's ports, or correct app-port and container; the Pod declares: ${known}`,
    )
  }
  if (found.length > 1) {
    return deny(
      `several ports could be meant: ${found.map(describe).join(', ')}`,
      'say in app-port which of them is to be fenced, and in container whose it is',
    )
  }
  if (steering === 'named-port' && app.originalName === '') {
    return deny(
      `port ${app.port.containerPort} has no name, and the steering named-port works by names`,
      'give it one and let the Service use it as targetPort, or choose another steering',
    )
  }
  return app
}

function describe({ container, port, originalName }: Declared): string {
  return `${originalName || '(no name)'} ${port.containerPort}/${port.protocol ?? 'TCP'} of ${container.name}`
}

/** The name that the app's port goes by once the sidecar has its old one. */
function chooseName(pod: Pod, wanted: Wanted, { port, originalName }: Declared): string {
  if (wanted.steering !== 'named-port') return originalName
  // Renamed before.
  if (port.name !== undefined && port.name !== null && port.name !== originalName) return port.name
  const names = userPorts(pod).map((user) => user.port.name)
  for (let count = 1; ; count++) {
    const name = appName(originalName, count === 1 ? '' : String(count))
    if (!names.includes(name)) return name
  }
}

/** At most 15 characters, and no two hyphens together (RFC 6335). */
function appName(name: string, suffix: string): string {
  return `${name.slice(0, 11 - suffix.length).replace(/-$/, '')}-app${suffix}`
}

/** What would leave it to a Service, or to the kernel, to choose between the fence and another. */
function findConflict(pod: Pod, wanted: Wanted, app: AppPort): Denied | undefined {
  for (const key of ['proxy-port', 'admin-port'] as const) {
    const number = wanted[key]
    const owner = userPorts(pod).find(({ port }) => isTcp(port) && port.containerPort === number)
    if (owner === undefined) continue
    return deny(
      `port ${number} is taken by container ${owner.container.name}`,
      `give another one in ${key}`,
    )
  }
  const reserved = [ADMIN_PORT_NAME, OWN_PORT_NAME]
  const clash = userPorts(pod).find(({ port }) => {
    if (port === app.port) return reserved.includes(app.originalName)
    const name = port.name ?? ''
    return name !== '' && [...reserved, app.originalName].includes(name)
  })
  if (clash !== undefined) {
    const name = clash.port === app.port ? app.originalName : (clash.port.name ?? '')
    return deny(
      `the port name ${name} is taken by container ${clash.container.name}, and a Service finds the first port of a name, fenced or not`,
      'give that port another name',
    )
  }
  const number = app.port.containerPort
  const second = userPorts(pod).find(
    ({ port }) => port !== app.port && isTcp(port) && port.containerPort === number,
  )
  if (second !== undefined) {
    return deny(
      `port ${number} is declared by container ${second.container.name} too, and only one can listen on it`,
      'remove one of the declarations',
    )
  }
  if (wanted.steering === 'named-port' && (app.port.hostPort ?? 0) !== 0) {
    return deny(
      `port ${app.originalName} has a hostPort, which leads past the fence`,
      'remove the hostPort, or choose the steering redirect',
    )
  }
  return undefined
}
