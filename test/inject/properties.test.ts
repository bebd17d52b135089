import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { decide } from '../../src/inject/patch.ts'
import { containersOf, isTcp, type Container, type Pod } from '../../src/inject/pod.ts'
import { applyPatch } from './rfc6902.ts'
import { INJECTOR, containerOf, parsePod, prefixed } from './samples.ts'

const OURS = ['fence-proxy', 'fence-redirect']

/** Mostly `usual`, seldom one of the others. */
function mostly<T>(usual: T, ...others: T[]): fc.Arbitrary<T> {
  return fc.oneof({ weight: 6, arbitrary: fc.constant(usual) }, fc.constantFrom(...others))
}

const maybe = <T>(arbitrary: fc.Arbitrary<T>) =>
  fc.oneof({ weight: 2, arbitrary }, fc.constant(undefined), fc.constant(null))

const portName = fc.constantFrom('http', 'http-app', 'web', 'metrics', 'grpc-api-v1-long', 'fence-http', 'fence-admin', 'a-b-c-d-e-f-g-h').map((name) => name.slice(0, 15)) // prettier-ignore

const port = fc.record(
  {
    containerPort: fc.oneof({ weight: 8, arbitrary: fc.integer({ min: 8080, max: 8090 }) }, fc.constantFrom(15080, 15081)), // prettier-ignore
    name: maybe(portName),
    protocol: mostly('TCP', 'UDP', 'SCTP'),
    hostPort: mostly(0, 80),
    'x-unknown': fc.jsonValue(),
  },
  { requiredKeys: ['containerPort'] },
)

const action = fc.oneof(
  fc.record({ httpGet: fc.record({ port: fc.oneof(portName, fc.integer({ min: 1, max: 65535 })), host: fc.constant('localhost') }) }), // prettier-ignore
  fc.record({ tcpSocket: fc.record({ port: portName }), periodSeconds: fc.nat() }),
  fc.record({ exec: fc.record({ command: fc.array(fc.string()) }) }),
)

const container = fc.record(
  {
    name: fc.constantFrom('app', 'web', 'agent', 'queue', 'mesh'),
    image: fc.constant('example/app:1'),
    ports: maybe(fc.array(port, { maxLength: 3 })),
    env: maybe(fc.array(fc.record({ name: fc.string(), value: fc.string() }), { maxLength: 2 })),
    livenessProbe: maybe(action),
    readinessProbe: maybe(action),
    startupProbe: maybe(action),
    lifecycle: maybe(fc.record({ postStart: maybe(action), preStop: maybe(action) })),
    resources: maybe(fc.constant({})),
    volumeMounts: maybe(fc.constant([{ name: 'data', mountPath: '/d' }])),
    'x-unknown': fc.jsonValue(),
  },
  { requiredKeys: ['name', 'image'] },
)

const containers = fc.uniqueArray(container, { minLength: 1, maxLength: 4, selector: ({ name }) => name }) // prettier-ignore

const initContainers = fc.uniqueArray(
  fc.tuple(container, fc.boolean()).map(([one, native]) => ({
    ...one,
    name: `init-${one.name}`,
    ...(native && { restartPolicy: 'Always' }),
  })),
  { maxLength: 2, selector: ({ name }) => name },
)

const volume = fc.constantFrom(
  { name: 'data', persistentVolumeClaim: { claimName: 'data-0' } },
  { name: 'marks', persistentVolumeClaim: { claimName: 'marks' }, 'x-unknown': [1] },
  { name: 'scratch', emptyDir: {} },
  { name: 'fence-store', emptyDir: { medium: 'Memory' } },
  { name: 'fence-config', configMap: { name: 'other' } },
)

const annotations = fc.record(
  {
    inject: mostly('true', 'false', 'yes'),
    scope: mostly('/jobs/{job}/**', 'jobs', '/a,/b/{c}'),
    steering: fc.constantFrom('named-port', 'redirect', 'none'),
    'proxy-port': mostly('15080', '8085', '2000'),
    'allow-ephemeral-store': fc.constant('true'),
    'native-sidecar': mostly('auto', 'true', 'false'),
    'cpu-limit': mostly('500m', '0.5', '1m'),
  },
  { requiredKeys: ['inject', 'scope'] },
)

const store = fc.oneof(
  { weight: 4, arbitrary: fc.constant({ 'store-volume': 'data' }) },
  fc.constantFrom({ 'store-volume': 'scratch' }, { 'store-volume': 'nothing' }, {}),
  fc.constantFrom({ 'store-claim': 'marks' }, { 'store-claim': 'new' }),
)

interface Drawn {
  readonly containers: readonly {
    readonly name: string
    ports?: DrawnPort[] | null | undefined
  }[]
}
interface DrawnPort {
  name?: string | null | undefined
  containerPort: number
}

/** Nearly every Pod's ports differ in name and number. */
function tidy({ containers }: Drawn): void {
  const taken = new Set<string | number>([15080, 15081, 'fence-admin', 'fence-http'])
  for (const one of containers) {
    one.ports = (one.ports ?? []).filter(({ containerPort }) => !taken.has(containerPort) && taken.add(containerPort)) // prettier-ignore
    for (const drawn of one.ports) {
      if (typeof drawn.name !== 'string') continue
      if (taken.has(drawn.name)) delete drawn.name
      else taken.add(drawn.name)
    }
  }
}

/** One of the declared ports, by its name or its number, or nothing. */
function appPort({ containers }: Drawn, choice: number, by: string): Record<string, string> {
  const declared = containers.flatMap(({ name: owner, ports }) => (ports ?? []).map((one) => ({ owner, ...one }))) // prettier-ignore
  const chosen = declared[choice % Math.max(1, declared.length)]
  if (chosen === undefined || by === 'nothing') return {}
  const port = by === 'name' && chosen.name ? chosen.name : String(chosen.containerPort)
  return by === 'container' ? { container: chosen.owner, 'app-port': port } : { 'app-port': port }
}

const pods: fc.Arbitrary<Pod> = fc
  .record({
    chosen: annotations,
    store,
    choice: fc.nat(),
    by: mostly('name', 'number', 'container', 'nothing'),
    isTidy: mostly(true, false),
    labels: maybe(fc.constant({ app: 'x', 'a/b~c': 'y' })),
    unknown: fc.jsonValue(),
    spec: fc.record({
      containers,
      initContainers: maybe(initContainers),
      volumes: maybe(fc.uniqueArray(volume, { maxLength: 4, selector: ({ name }) => name })),
      restartPolicy: mostly('Always', 'Never'),
      hostNetwork: mostly(false, true),
    }),
  })
  .map(({ chosen, store: kept, choice, by, isTidy, labels, unknown, spec }) => {
    const drawn = structuredClone(spec)
    if (isTidy) tidy({ containers: [...drawn.containers, ...(drawn.initContainers ?? [])] })
    if ('store-volume' in kept && kept['store-volume'] === 'data') {
      const others = (drawn.volumes ?? []).filter(({ name }) => name !== 'data')
      drawn.volumes = [...others, { name: 'data', persistentVolumeClaim: { claimName: 'data-0' } }]
    }
    const all = prefixed({ ...chosen, ...kept, ...appPort(drawn, choice, by) })
    const pod = {
      metadata: { annotations: all, labels, 'x-unknown': unknown },
      spec: { ...drawn, 'x-unknown': unknown },
      status: unknown,
    }
    return parsePod(JSON.parse(JSON.stringify(pod)))
  })

const injectors = fc.constantFrom(20, 30, 33, 36, undefined).map((kubernetesMinor) => {
  return { ...INJECTOR, kubernetesMinor }
}) // prettier-ignore

test('a fence is whole, steady, and takes nothing from the user, whatever the Pod', () => {
  let injected = 0
  fc.assert(
    fc.property(pods, injectors, (pod, injector) => {
      const before = structuredClone(pod)
      const decision = decide(pod, injector)
      assert.deepEqual(pod, before, 'the Pod that was asked about stays as it was')
      if (decision.kind === 'denied') assert.match(decision.reason, /^[^\n]+$/)
      if (decision.kind !== 'injected') return
      injected += 1
      const after = parsePod(applyPatch(pod, JSON.parse(JSON.stringify(decision.patch)) as unknown[]))
      assert.deepEqual(after, decision.pod)

      const again = decide(after, injector)
      assert.ok(again.kind === 'injected', JSON.stringify(again))
      assert.deepEqual(again.patch, [])

      nothingIsLost(pod, after)
      portsAreUnique(pod, after)
      const { resources } = containerOf(after, 'fence-proxy')
      assert.deepEqual(Object.keys(Object(resources) as object).sort(), ['limits', 'requests'])
    }),
    { numRuns: 1_000 },
  )
  assert.ok(injected > 100, `only ${injected} of the Pods were injected`)
}) // prettier-ignore

function nothingIsLost(before: Pod, after: Pod): void {
  for (const list of ['containers', 'initContainers'] as const) {
    const users = (after.spec[list] ?? []).filter(({ name }) => !OURS.includes(name))
    const restored = users.map((user, i) => restore(user, before.spec[list]?.[i]))
    assert.deepEqual(restored, before.spec[list] ?? [])
  }
  const volumes = before.spec.volumes ?? []
  assert.deepEqual((after.spec.volumes ?? []).slice(0, volumes.length), volumes)
  assert.deepEqual(after.spec['x-unknown'], before.spec['x-unknown'])
  assert.deepEqual(after.status, before.status)
  const { annotations: oldAnnotations, labels: oldLabels, ...oldRest } = before.metadata ?? {}
  const { annotations: newAnnotations, labels: newLabels, ...newRest } = after.metadata ?? {}
  assert.deepEqual(newRest, oldRest)
  assert.deepEqual({ ...newAnnotations, ...oldAnnotations }, newAnnotations)
  assert.deepEqual({ ...newLabels, ...oldLabels }, newLabels)
}

/** The container with its port, and with what named that port, called as before. */
function restore(after: Container, before: Container | undefined): Container {
  const restored = structuredClone(after)
  const at = (after.ports ?? []).findIndex(({ name }, i) => name !== before?.ports?.[i]?.name)
  const [renamed, original] = [restored.ports?.[at], before?.ports?.[at]]
  if (renamed === undefined || original === undefined || before === undefined) return restored
  const { name: newName } = renamed
  renamed.name = original.name
  const former = actionsOf(before)
  for (const [i, action] of actionsOf(restored).entries()) {
    for (const kind of ['httpGet', 'tcpSocket'] as const) {
      const [now, was] = [action?.[kind], former[i]?.[kind]]
      if (!now || !was || was.port !== original.name) continue
      assert.equal(now.port, newName, 'what named the port names it still')
      now.port = was.port
    }
  }
  return restored
}

function actionsOf(container: Container) {
  const { livenessProbe, readinessProbe, startupProbe, lifecycle } = container
  return [livenessProbe, readinessProbe, startupProbe, lifecycle?.postStart, lifecycle?.preStop]
}

function portsAreUnique(before: Pod, after: Pod): void {
  const own = containerOf(after, 'fence-proxy').ports ?? []
  assert.equal(own.length, 2)
  const renamed = before.spec.containers.flatMap(({ name: owner, ports }) =>
    (ports ?? []).filter(({ name }, i) => name !== containerOf(after, owner).ports?.[i]?.name),
  )
  const isNamed = before.metadata?.annotations?.['fencing-proxy.io/steering'] ?? 'named-port'
  assert.equal(renamed.length, isNamed === 'named-port' ? 1 : 0)
  for (const { name } of renamed) assert.equal(own[0]?.name, name, 'the sidecar has the old name')
  const all = containersOf(after).flatMap(({ container: { ports } }) => ports ?? []).filter(isTcp) // prettier-ignore
  for (const { name, containerPort } of own) {
    assert.equal(all.filter((one) => one.containerPort === containerPort).length, 1)
    const owners = containersOf(after).filter(({ container: { ports } }) => ports?.some((one) => one.name === name)) // prettier-ignore
    assert.deepEqual(owners.map(({ container: { name: owner } }) => owner), ['fence-proxy']) // prettier-ignore
  }
  const names = (pod: Pod) => containersOf(pod).flatMap(({ container: { ports } }) => (ports ?? []).flatMap(({ name }) => name ?? [])) // prettier-ignore
  const twice = (list: string[]) => list.filter((name, i) => list.indexOf(name) !== i)
  const were = twice(names(before))
  for (const name of twice(names(after))) assert.ok(were.includes(name), `${name} is there twice`)
}
