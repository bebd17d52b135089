/**
 * Kubernetes objects, as far as injection looks at them. Every other field stays as it came: the
 * schemas are loose. `null` and absent are the same to Kubernetes, and to us.
 */
import { z } from 'zod'

const text = z.string({ error: 'must be a string (quote it)' })
const portNumber = z.int().min(1).max(65535)
/** A port, or the name of one in the same container. */
const portReference = z.union([text, z.int()])

const Port = z.looseObject({
  name: text.nullish(),
  containerPort: portNumber,
  protocol: text.nullish(),
  hostPort: z.int().nullish(),
})

/** A probe, or a hook at the start or the end of a container. */
const Action = z.looseObject({
  httpGet: z.looseObject({ port: portReference }).nullish(),
  tcpSocket: z.looseObject({ port: portReference }).nullish(),
})

const Container = z.looseObject({
  name: text,
  image: text.nullish(),
  args: z.array(text).nullish(),
  env: z.array(z.looseObject({ name: text })).nullish(),
  restartPolicy: text.nullish(),
  ports: z.array(Port).nullish(),
  volumeMounts: z.array(z.looseObject({ name: text, mountPath: text })).nullish(),
  livenessProbe: Action.nullish(),
  readinessProbe: Action.nullish(),
  startupProbe: Action.nullish(),
  lifecycle: z.looseObject({ postStart: Action.nullish(), preStop: Action.nullish() }).nullish(),
})

const Volume = z.looseObject({
  name: text,
  persistentVolumeClaim: z
    .looseObject({ claimName: text, readOnly: z.boolean().nullish() })
    .nullish(),
  configMap: z.looseObject({ name: text.nullish() }).nullish(),
})

const Texts = z.record(z.string(), text)

export const Metadata = z.looseObject({
  name: text.nullish(),
  generateName: text.nullish(),
  namespace: text.nullish(),
  uid: text.nullish(),
  annotations: Texts.nullish(),
  labels: Texts.nullish(),
  ownerReferences: z.array(z.looseObject({ kind: text, name: text })).nullish(),
})

const PodSchema = z.looseObject({
  metadata: Metadata.nullish(),
  spec: z.looseObject({
    containers: z.array(Container),
    initContainers: z.array(Container).nullish(),
    volumes: z.array(Volume).nullish(),
    hostNetwork: z.boolean().nullish(),
    restartPolicy: text.nullish(),
    terminationGracePeriodSeconds: z.int().nullish(),
    securityContext: z.looseObject({ fsGroup: z.int().nullish() }).nullish(),
  }),
})

/** A Pod, or the template of one. */
export type Pod = z.output<typeof PodSchema>
export type Container = z.output<typeof Container>
export type Port = z.output<typeof Port>
export type Volume = z.output<typeof Volume>

/** Where a container stands in its Pod. */
export type ContainerList = 'containers' | 'initContainers'

/** Every container of a Pod, with its place. */
export function containersOf(pod: Pod): Placed[] {
  const listed = (list: ContainerList) =>
    (pod.spec[list] ?? []).map((container, index) => ({ list, index, container }))
  return [...listed('containers'), ...listed('initContainers')]
}

export function findContainer(pod: Pod, name: string): Placed | undefined {
  return containersOf(pod).find(({ container }) => container.name === name)
}

export interface Placed {
  readonly list: ContainerList
  readonly index: number
  readonly container: Container
}

export function isTcp(port: Port): boolean {
  return (port.protocol ?? 'TCP') === 'TCP'
}

export function readPod(value: unknown): { readonly pod: Pod } | { readonly mistake: string } {
  return fits(PodSchema, value) ? { pod: value } : { mistake: mistakeIn(PodSchema, value) }
}

/**
 * Whether the value is what the schema says, which must change nothing in it. The value itself is
 * used from there on: what zod answers has its keys in another order, which people would notice.
 */
export function fits<T>(schema: z.ZodType<T, T>, value: unknown): value is T {
  return schema.safeParse(value).success
}

/** In one line; empty where the value fits. */
export function mistakeIn(schema: z.ZodType, value: unknown): string {
  const issues = schema.safeParse(value).error?.issues ?? []
  return issues
    .map((issue) => `${issue.path.map(String).join('.') || 'the object'}: ${issue.message}`)
    .join('; ')
}
