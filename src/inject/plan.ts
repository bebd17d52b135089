/** What a Pod's fence is to look like, or why the Pod is refused. Pure. */
import { findAppPort, type AppPort } from './app-port.ts'
import { deny, isDenied, type Denied } from './denial.ts'
import { findContainer, type Container, type Placed, type Pod, type Volume } from './pod.ts'
import type { Injector, Wanted } from './settings.ts'
import { OWN_PORT_NAME, REDIRECT, SIDECAR, redirectContainer, sidecar } from './sidecar.ts'
import { chooseConfig, chooseStore } from './volumes.ts'

export interface Plan {
  readonly app: AppPort
  readonly sidecar: Container
  readonly native: boolean
  /** Undefined where nothing is redirected. */
  readonly redirect: Container | undefined
  readonly newVolumes: readonly Volume[]
  /** For the person who asked, in one line. */
  readonly warning: string
}

export function planFence(
  pod: Pod,
  wanted: Wanted,
  injector: Injector,
  claimTemplates: readonly string[],
): Plan | Denied {
  if (pod.spec.hostNetwork === true) {
    return deny(
      'the Pod has hostNetwork: its ports are those of the node, and nothing can stand before them',
      'remove hostNetwork',
    )
  }
  const image = wanted.image ?? injector.image
  const former = findContainer(pod, SIDECAR)
  const foreign =
    findForeign(former, image) ?? findForeign(findContainer(pod, REDIRECT), injector.redirectImage)
  if (foreign !== undefined) return foreign

  const app = findAppPort(pod, wanted, former)
  if (isDenied(app)) return app
  const mode = chooseMode(pod, wanted, injector.kubernetesMinor)
  if (isDenied(mode)) return mode
  const store = chooseStore(pod, wanted, claimTemplates)
  if (isDenied(store)) return store
  const config = chooseConfig(pod, wanted)
  if (isDenied(config)) return config
  const shutdown = chooseShutdown(pod, wanted)
  if (isDenied(shutdown)) return shutdown
  const redirect = planRedirect(wanted, injector, app)
  if (isDenied(redirect)) return redirect

  return {
    app,
    sidecar: sidecar({
      wanted,
      image,
      native: mode.native,
      portName: wanted.steering === 'named-port' ? app.originalName : OWN_PORT_NAME,
      appPort: app.port.containerPort,
      storeVolume: store.volume,
      shutdownSeconds: shutdown.seconds,
    }),
    native: mode.native,
    redirect: redirect.container,
    newVolumes: [...store.added, ...config.added],
    warning: [...steeringWarning(wanted, app), store.warning]
      .filter((part) => part !== '')
      .join('; '),
  }
}

function findForeign(present: Placed | undefined, ours: string | undefined): Denied | undefined {
  if (present === undefined) return undefined
  const { name, image } = present.container
  if (ours !== undefined && repository(image ?? '') === repository(ours)) return undefined
  return deny(
    `a container named ${name} is there already, with the image ${image ?? '(none)'} in place of ${ours ?? 'ours'}`,
    'rename or remove it',
  )
}

/** An image without its tag and its digest: another version of ours is ours. */
function repository(image: string): string {
  return image.replace(/@.*$/, '').replace(/:[^:/]*$/, '')
}

/**
 * Native sidecars exist from 1.29 on; before 1.33 no Service finds a port by its name in one
 * (kubernetes #127976, #128850); a server that is much older drops the field that makes one.
 */
function chooseMode(
  pod: Pod,
  wanted: Wanted,
  minor: number | undefined,
): { native: boolean } | Denied {
  const asked = wanted['native-sidecar']
  const least = wanted.steering === 'redirect' ? 29 : 33
  if (asked === 'true' && minor !== undefined && minor < least) {
    return deny(
      `native-sidecar: "true" needs Kubernetes 1.${least} with the steering ${wanted.steering}, and this is 1.${minor}`,
      'give "auto" or "false"',
    )
  }
  const native = asked === 'true' || (asked === 'auto' && (minor ?? 0) >= 33)
  const isJob = pod.metadata?.ownerReferences?.some(({ kind }) => kind === 'Job') ?? false
  const ends = isJob || (pod.spec.restartPolicy ?? 'Always') !== 'Always'
  if (ends && !native) {
    return deny(
      'the Pod is meant to end, as those of a Job, and beside a sidecar that is not native it never does',
      'use Kubernetes 1.33 or newer, tell the injector so (--kubernetes-version), and give native-sidecar: "auto"',
    )
  }
  return { native }
}

/** The proxy has to end by itself before the kubelet kills it, or its next start has to settle. */
function chooseShutdown(pod: Pod, wanted: Wanted): { seconds: number } | Denied {
  const grace = pod.spec.terminationGracePeriodSeconds ?? 30
  const asked = wanted['shutdown-grace-seconds']
  if (asked === undefined) return { seconds: Math.max(1, grace - 5) }
  if (asked < grace) return { seconds: asked }
  return deny(
    `shutdown-grace-seconds: "${asked}" is not below the Pod's terminationGracePeriodSeconds, which is ${grace}`,
    'lower the one or raise the other',
  )
}

function planRedirect(
  wanted: Wanted,
  { redirectImage }: Injector,
  { port }: AppPort,
): { container: Container | undefined } | Denied {
  if (wanted.steering !== 'redirect') return { container: undefined }
  if (redirectImage === undefined) {
    return deny(
      'steering: "redirect" needs an image with iptables, and the injector was given none',
      'start it with --redirect-image IMAGE, or give "named-port"',
    )
  }
  return { container: redirectContainer(redirectImage, port.containerPort, wanted['proxy-port']) }
}

/** What is fenced, and which way around the fence remains. */
function steeringWarning(
  { steering }: Wanted,
  { port, originalName, container }: AppPort,
): string[] {
  const number = port.containerPort
  const remaining = {
    'named-port': `port ${number} stays open on the Pod's own address: close it with a NetworkPolicy`,
    redirect: 'connections from inside the Pod are not redirected',
    none: `nothing leads there yet: let the Service use the targetPort ${OWN_PORT_NAME}`,
  }
  return [`port ${originalName || number} of ${container.name} is fenced`, remaining[steering]]
}
