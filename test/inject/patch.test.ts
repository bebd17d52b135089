import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { Draft } from '../../src/inject/jsonpatch.ts'
import { decide } from '../../src/inject/patch.ts'
import type { Pod } from '../../src/inject/pod.ts'
import { applyPatch } from './rfc6902.ts'
import { APP, ENOUGH, INJECTOR, REAL_ENOUGH, containerOf, denial, inject, parsePod, podOf, prefixed, realPod, reviews, without } from './samples.ts' // prettier-ignore

const named = (name: string, containerPort: number, more: object = {}) => ({ name, containerPort, protocol: 'TCP', ...more }) // prettier-ignore
const names = (list: Pod['spec']['initContainers']) => (list ?? []).map(({ name }) => name)

describe('what is refused, and with which remedy', () => {
  test('hostNetwork (istio #9002)', () => {
    assert.match(
      denial(podOf({ spec: { hostNetwork: true } })),
      /hostNetwork.*; remove hostNetwork/,
    )
  })

  for (const protocol of ['UDP', 'SCTP']) {
    test(`a ${protocol} port`, () => {
      const containers = [{ ...APP, ports: [named('dns', 53, { protocol })] }]
      const reason = denial(podOf({ containers, annotations: { 'app-port': 'dns' } }))
      assert.match(reason, new RegExp(`"dns" is a ${protocol} port.*give one of the TCP ports`))
      assert.match(denial(podOf({ containers })), /no container declares a named TCP port/)
    })
  }

  test('a port that no container declares', () => {
    for (const port of ['web', '9999']) {
      const reason = denial(podOf({ annotations: { 'app-port': port } }))
      assert.match(reason, new RegExp(`declares a port ${port}; .*http 8080/TCP of app`))
    }
    const reason = denial(podOf({ annotations: { container: 'nobody' } }))
    assert.match(reason, /no container named nobody declares/)
  })

  test('a Pod that declares no port at all', () => {
    const containers = [{ name: 'app', image: 'x' }]
    assert.match(denial(podOf({ containers })), /no container declares a named TCP port.*none/)
  })

  test('two candidate ports (telepresence #1796)', () => {
    const containers = [{ ...APP, ports: [named('http', 8080), named('metrics', 9100)] }]
    const reason = denial(podOf({ containers }))
    assert.match(reason, /http 8080\/TCP of app, metrics 9100\/TCP of app; say in app-port/)
    inject(podOf({ containers, annotations: { 'app-port': 'http' } }))
    inject(podOf({ containers, annotations: { 'app-port': '8080' } }))
  })

  test('a port without a name under named-port; redirect takes it', () => {
    const containers = [{ ...APP, ports: [{ containerPort: 8080 }] }]
    const annotations = { 'app-port': '8080' }
    assert.match(denial(podOf({ containers, annotations })), /port 8080 has no name.*; give it one/)
    inject(podOf({ containers, annotations: { ...annotations, steering: 'redirect' } }))
  })

  test('two containers name a port http (kubernetes #122170)', () => {
    const second = { name: 'second', image: 'x', ports: [named('http', 9090)] }
    const both = { containers: [APP, second] }
    assert.match(denial(podOf(both)), /several ports could be meant/)
    const reason = denial(podOf({ ...both, annotations: { container: 'app' } }))
    assert.match(
      reason,
      /the port name http is taken by container second.*; give that port another/,
    )
    const init = { ...second, restartPolicy: 'Always' }
    assert.match(denial(podOf({ spec: { initContainers: [init] } })), /taken by container second/)
  })

  test('the app already uses 15080 (jaeger-operator #1230)', () => {
    const containers = [{ ...APP, ports: [named('http', 15080)] }]
    const reason = denial(podOf({ containers }))
    assert.match(reason, /port 15080 is taken by container app; give another one in proxy-port/)
    inject(podOf({ containers, annotations: { 'proxy-port': '15090' } }))
    const udp = [{ ...APP, ports: [...APP.ports, named('quic', 15080, { protocol: 'UDP' })] }]
    inject(podOf({ containers: udp }))
  })

  test('a number that two containers declare', () => {
    const second = { name: 'second', image: 'x', ports: [named('web', 8080)] }
    const pod = podOf({ containers: [APP, second], annotations: { 'app-port': 'http' } })
    assert.match(denial(pod), /port 8080 is declared by container second too.*; remove one/)
  })

  test('a name of ours that a container has', () => {
    const other = (name: string) => ({ name: 'other', image: 'x', ports: [named(name, 7000)] })
    const annotations = { 'app-port': 'http' }
    for (const [name, steering] of [['fence-admin', 'named-port'], ['fence-http', 'named-port'], ['fence-http', 'none']] as const) {
      const containers = [APP, other(name)]
      const reason = denial(podOf({ containers, annotations: { ...annotations, steering } }))
      assert.match(reason, new RegExp(`the port name ${name} is taken by container other`))
    }
    const containers = [{ ...APP, ports: [named('fence-admin', 8080)] }]
    assert.match(denial(podOf({ containers })), /fence-admin is taken by container app/)
  }) // prettier-ignore

  test('a hostPort, which leads past the sidecar; redirect catches it', () => {
    const containers = [{ ...APP, ports: [named('http', 8080, { hostPort: 80 })] }]
    assert.match(denial(podOf({ containers })), /hostPort, which leads past the fence; remove/)
    inject(podOf({ containers, annotations: { steering: 'redirect' } }))
  })

  test('a Job where native sidecars are not to be had (istio #11659)', () => {
    for (const [more, minor] of [
      [{}, 32],
      [{}, undefined],
      [{ 'native-sidecar': 'false' }, 36],
    ] as const) {
      const reason = denial(realPod('job-first', { ...REAL_ENOUGH, ...more }), { kubernetesMinor: minor }) // prettier-ignore
      assert.match(reason, /meant to end.*; use Kubernetes 1\.33 or newer/)
    }
    const bare = podOf({ spec: { restartPolicy: 'OnFailure' } })
    assert.match(denial(bare, { kubernetesMinor: 32 }), /meant to end/)
  })

  test('native mode on 1.29 to 1.32 (kubernetes #127958), where it works for redirect only', () => {
    const native = { 'native-sidecar': 'true' }
    for (const kubernetesMinor of [29, 32]) {
      assert.match(denial(podOf({ annotations: native }), { kubernetesMinor }), /needs Kubernetes 1\.33/) // prettier-ignore
      const redirect = podOf({ annotations: { ...native, steering: 'redirect' } })
      assert.ok(inject(redirect, { kubernetesMinor }).pod.spec.initContainers)
    }
    const old = podOf({ annotations: { ...native, steering: 'redirect' } })
    assert.match(denial(old, { kubernetesMinor: 20 }), /needs Kubernetes 1\.29/)
  })

  test('a shutdown that lasts longer than the kubelet waits', () => {
    const annotations = { 'shutdown-grace-seconds': '30' }
    assert.match(
      denial(podOf({ annotations })),
      /terminationGracePeriodSeconds, which is 30; lower/,
    )
    inject(podOf({ annotations, spec: { terminationGracePeriodSeconds: 31 } }))
  })

  test('redirect without an image for it: an injector that lacks what it needs denies (serving #379)', () => {
    const pod = podOf({ annotations: { steering: 'redirect' } })
    assert.match(denial(pod, { redirectImage: undefined }), /needs an image with iptables.*--redirect-image/) // prettier-ignore
  })

  test('a foreign image under our name', () => {
    for (const image of [
      'evil/fence-proxy:2',
      'example/fence-proxy-x:2',
      'fence-proxy',
      undefined,
    ]) {
      const foreign = { name: 'fence-proxy', image }
      const reason = denial(podOf({ containers: [APP, foreign] }))
      assert.match(reason, /a container named fence-proxy is there already.*; rename or remove it/)
    }
    const redirect = { name: 'fence-redirect', image: 'evil/iptables:1' }
    assert.match(denial(podOf({ spec: { initContainers: [redirect] } })), /named fence-redirect/)
  })
})

describe('the store of sqlite', () => {
  const kinds: [name: string, volume: object, reason: RegExp | undefined, losable: boolean][] = [
    ['emptyDir', { emptyDir: {} }, /lost with the Pod/, true],
    ['ephemeral', { ephemeral: { volumeClaimTemplate: {} } }, /lost with the Pod/, true],
    ['hostPath', { hostPath: { path: '/x' } }, /lost with the Pod/, true],
    ['csi', { csi: { driver: 'x' } }, /lost with the Pod/, true],
    ['nfs', { nfs: { server: 'x', path: '/' } }, /a kind on which SQLite cannot keep marks/, false],
    ['configMap', { configMap: { name: 'x' } }, /a kind on which SQLite cannot keep marks/, false],
    ['a claim', { persistentVolumeClaim: { claimName: 'x' } }, undefined, false],
    ['a read-only claim', { persistentVolumeClaim: { claimName: 'x', readOnly: true } }, /read-only; remove readOnly/, false], // prettier-ignore
  ]
  for (const [name, volume, reason, losable] of kinds) {
    test(`on ${name}`, () => {
      const spec = { volumes: [{ name: 'data', ...volume }] }
      if (reason === undefined) inject(podOf({ spec }))
      else assert.match(denial(podOf({ spec })), reason)
      const accepting = podOf({ spec, annotations: { 'allow-ephemeral-store': 'true' } })
      if (losable) assert.match(inject(accepting).warning, /marks are lost with the Pod/)
      else if (reason !== undefined) assert.match(denial(accepting), reason)
    })
  }

  test('a volume that the Pod has not is refused, with those it has', () => {
    const reason = denial(podOf({ annotations: { 'store-volume': 'marks' } }))
    assert.match(reason, /"marks" is no volume of the Pod; it has: data/)
  })

  test('no volume at all is refused, with the three ways out', () => {
    const reason = denial(realPod('replicaset-first', { scope: '/a' }))
    for (const way of ['store-volume', 'store-claim', 'allow-ephemeral-store']) {
      assert.ok(reason.includes(way), reason)
    }
  })

  test('a claim is added, or found among the volumes of the Pod', () => {
    const annotations = prefixed({ ...without('store-volume'), 'store-claim': 'marks' })
    const added = inject(podOf({ metadata: { annotations } })).pod
    assert.deepEqual(added.spec.volumes?.at(-1), { name: 'fence-store', persistentVolumeClaim: { claimName: 'marks' } }) // prettier-ignore

    const volumes = [{ name: 'mine', persistentVolumeClaim: { claimName: 'marks' } }]
    const found = inject(podOf({ metadata: { annotations }, spec: { volumes } })).pod
    assert.deepEqual(found.spec.volumes, volumes)
    assert.equal(containerOf(found, 'fence-proxy').volumeMounts?.[0]?.name, 'mine')

    const claim = { claimName: 'marks', readOnly: true }
    const readOnly = { volumes: [{ name: 'mine', persistentVolumeClaim: claim }] }
    assert.match(denial(podOf({ metadata: { annotations }, spec: readOnly })), /mine is read-only/)

    const taken = [{ name: 'fence-store', emptyDir: {} }]
    const refused = podOf({ metadata: { annotations }, spec: { volumes: taken } })
    assert.match(denial(refused), /a volume named fence-store is there already/)
  })

  test('a StatefulSet claim is mounted by its name, and no volume is added (juicefs-csi-driver #959)', () => {
    const pod = realPod('statefulset-first', { scope: '/a/{x}', 'store-volume': 'data' })
    const injected = inject(pod)
    assert.deepEqual(injected.pod.spec.volumes, pod.spec.volumes)
    const { volumeMounts } = containerOf(injected.pod, 'fence-proxy')
    assert.deepEqual(volumeMounts, [{ name: 'data', mountPath: '/var/lib/fencing-proxy' }])
  })

  test('an fsGroup that is missing is told: a fresh claim belongs to root', () => {
    assert.match(
      inject(podOf({ spec: { securityContext: {} } })).warning,
      /no securityContext\.fsGroup/,
    )
    assert.doesNotMatch(inject(podOf()).warning, /fsGroup/)
  })

  test('journal and temporary files lie on the volume too', () => {
    const { env } = containerOf(inject(podOf()).pod, 'fence-proxy')
    const folder = env?.find(({ name }) => name === 'SQLITE_TMPDIR')?.value
    assert.equal(folder, '/var/lib/fencing-proxy')
  })
})

describe('named ports', () => {
  test('the sidecar takes the name over, and the app gets another', () => {
    const { pod, patch } = inject(podOf())
    assert.deepEqual(containerOf(pod, 'app').ports, [named('http-app', 8080)])
    assert.deepEqual(containerOf(pod, 'fence-proxy').ports, [
      named('http', 15080),
      named('fence-admin', 15081),
    ])
    const rename = patch.findIndex(({ op, path }) => op === 'replace' && path === '/spec/containers/0/ports/0/name') // prettier-ignore
    assert.deepEqual(patch[rename - 1], { op: 'test', path: '/spec/containers/0/ports/0/name', value: 'http' }) // prettier-ignore
  })

  test('the new name has 15 characters at most, no double hyphen, and is nobody else’s', () => {
    const renamed = (name: string, others: string[] = []) => {
      const other = { name: 'other', image: 'x', ports: others.map((one, i) => named(one, 9000 + i)) } // prettier-ignore
      const containers = [{ ...APP, ports: [named(name, 8080)] }, other]
      const { pod } = inject(podOf({ containers, annotations: { 'app-port': name } }))
      return containerOf(pod, 'app').ports?.[0]?.name
    }
    assert.equal(renamed('fifteen-letters'), 'fifteen-let-app')
    assert.equal(renamed('abcdefghij-klmn'), 'abcdefghij-app')
    assert.equal(renamed('http', ['http-app']), 'http-app2')
    assert.equal(renamed('http', ['http-app', 'http-app2']), 'http-app3')
    assert.equal(renamed('fifteen-letters', ['fifteen-let-app']), 'fifteen-le-app2')
  })

  test('probes and hooks that use the name are rewritten with it (consul-k8s #535, istio.io #10119)', () => {
    const http = (port: unknown) => ({
      httpGet: { path: '/', port, scheme: 'HTTP' },
      periodSeconds: 7,
    })
    const tcp = (port: unknown) => ({ tcpSocket: { port } })
    const app = {
      ...APP,
      livenessProbe: http('http'),
      readinessProbe: tcp('http'),
      startupProbe: http(8080),
      lifecycle: { postStart: tcp('http'), preStop: http('http') },
    }
    const { pod, patch } = inject(podOf({ containers: [app] }))
    const after = containerOf(pod, 'app')
    assert.deepEqual(after.livenessProbe, http('http-app'))
    assert.deepEqual(after.readinessProbe, tcp('http-app'))
    assert.deepEqual(after.startupProbe, http(8080))
    assert.deepEqual(after.lifecycle, { postStart: tcp('http-app'), preStop: http('http-app') })
    for (const [i, { op, path }] of patch.entries()) {
      if (op !== 'replace') continue
      const before = patch[i - 1]
      assert.ok(before?.op === 'test' && before.path === path, `no test before ${path}`)
    }
  })

  test('a probe with host: localhost keeps it (istio #32687)', () => {
    const app = { ...APP, readinessProbe: { httpGet: { host: 'localhost', port: 'http' } } }
    const { readinessProbe } = containerOf(inject(podOf({ containers: [app] })).pod, 'app')
    assert.deepEqual(readinessProbe, { httpGet: { host: 'localhost', port: 'http-app' } })
  })

  test('probes of other containers stay: names hold within one container', () => {
    const other = {
      name: 'other',
      image: 'x',
      ports: [named('web', 9000)],
      readinessProbe: { httpGet: { port: 'web' } },
      livenessProbe: { exec: { command: ['true'] } },
    }
    const pod = podOf({ containers: [APP, other], annotations: { 'app-port': 'http' } })
    assert.deepEqual(containerOf(inject(pod).pod, 'other'), other)
  })
})

describe('the container', () => {
  test('is native and first on 1.33, so that user init containers reach it (istio #54562, aws-app-mesh #774)', () => {
    const initContainers = [
      { name: 'migrate', image: 'x', args: ['up'] },
      { name: 'agent', image: 'y', restartPolicy: 'Always' },
    ]
    const { pod } = inject(podOf({ spec: { initContainers } }))
    assert.equal(containerOf(pod, 'fence-proxy').restartPolicy, 'Always')
    assert.equal(pod.spec.initContainers?.[0]?.name, 'fence-proxy')
    assert.deepEqual(pod.spec.initContainers.slice(1), initContainers)
  })

  test('is classic and last before 1.33, and where nobody says the version', () => {
    const second = { name: 'second', image: 'x' }
    for (const kubernetesMinor of [20, 29, 32, undefined]) {
      const { pod } = inject(podOf({ containers: [APP, second] }), { kubernetesMinor })
      assert.deepEqual(names(pod.spec.containers), ['app', 'second', 'fence-proxy'])
      assert.equal(pod.spec.initContainers, undefined)
      assert.equal('restartPolicy' in containerOf(pod, 'fence-proxy'), false)
    }
  })

  test('is what the Pod says of native-sidecar', () => {
    const asks = (value: string) => podOf({ annotations: { 'native-sidecar': value } })
    assert.equal(inject(asks('false')).pod.spec.initContainers, undefined)
    const { pod } = inject(asks('true'), { kubernetesMinor: undefined })
    assert.deepEqual(names(pod.spec.initContainers), ['fence-proxy'])
  })

  test('passes a restricted namespace (dapr #5916, consul-k8s #4441)', () => {
    assert.deepEqual(containerOf(inject(podOf()).pod, 'fence-proxy').securityContext, {
      allowPrivilegeEscalation: false,
      readOnlyRootFilesystem: true,
      runAsNonRoot: true,
      runAsUser: 65532,
      runAsGroup: 65532,
      capabilities: { drop: ['ALL'] },
      seccompProfile: { type: 'RuntimeDefault' },
    })
  })

  test('has requests and limits, for quotas (linkerd2 #2750) and autoscalers (linkerd2 #1480)', () => {
    const { resources } = containerOf(inject(podOf()).pod, 'fence-proxy')
    assert.deepEqual(resources, {
      requests: { cpu: '100m', memory: '128Mi' },
      limits: { cpu: '1', memory: '512Mi' },
    })
  })

  test('is probed on its admin port', () => {
    const sidecar = containerOf(inject(podOf({ annotations: { 'admin-port': '2001' } })).pod, 'fence-proxy') // prettier-ignore
    for (const [probe, path] of [['startupProbe', '/healthz'], ['livenessProbe', '/healthz'], ['readinessProbe', '/readyz']] as const) {
      assert.deepEqual(sidecar[probe]?.httpGet, { path, port: 2001, scheme: 'HTTP' })
    }
  }) // prettier-ignore

  test('is beside the app, which stays as it is: no env, no mounts, no resources needed there (kuma #4525, network-resources-injector #8)', () => {
    const { pod } = inject(podOf())
    assert.deepEqual(containerOf(pod, 'app'), { ...APP, ports: [named('http-app', 8080)] })
  })

  test('finds the app by name when another webhook put a container before it (actions-runner-controller #1264), and keeps the order (generic-sidecar-injector #22)', () => {
    const agent = { name: 'agent', image: 'x', ports: [named('agent', 7000)] }
    const pod = podOf({ containers: [agent, APP], annotations: { 'app-port': 'http' } })
    const { spec } = inject(pod, { kubernetesMinor: 30 }).pod
    assert.deepEqual(names(spec.containers), ['agent', 'app', 'fence-proxy'])
    assert.equal(spec.containers[1]?.ports?.[0]?.name, 'http-app')
  })

  test('ends by itself before the kubelet ends it', () => {
    const timeout = (grace?: number) => {
      const { pod } = inject(podOf({ spec: { terminationGracePeriodSeconds: grace } }))
      const { env } = containerOf(pod, 'fence-proxy')
      return env?.find(({ name }) => name === 'FENCING_PROXY_SHUTDOWN_TIMEOUT')?.value
    }
    assert.equal(timeout(), '25s')
    assert.equal(timeout(120), '115s')
    assert.equal(timeout(0), '1s')
  })
})

describe('metadata', () => {
  test('label, status and default container are written', () => {
    const { metadata } = inject(podOf({ metadata: { labels: null }, annotations: {} })).pod
    assert.deepEqual(metadata?.labels, { 'fencing-proxy.io/fenced': 'true' })
    assert.equal(metadata.annotations?.['fencing-proxy.io/status'], 'injected')
    assert.equal(metadata.annotations['kubectl.kubernetes.io/default-container'], 'app')
  })

  test('a default container that the user set stays (linkerd2 #7497)', () => {
    const key = 'kubectl.kubernetes.io/default-container'
    const annotations = { ...prefixed(ENOUGH), [key]: 'second' }
    const { metadata } = inject(podOf({ metadata: { annotations } })).pod
    assert.equal(metadata?.annotations?.[key], 'second')
  })

  test('parents are created as objects and lists, never as text (kubernetes #90623)', () => {
    const pod = podOf({ annotations: { 'allow-ephemeral-store': 'true' }, spec: { volumes: null, initContainers: null } })
    if (pod.metadata?.annotations) delete pod.metadata.annotations['fencing-proxy.io/store-volume']
    const { patch } = inject(pod)
    const values = ['/metadata/labels', '/spec/volumes', '/spec/initContainers'].map(
      (path) => patch.find((operation) => operation.path === path && 'value' in operation),
    )
    assert.deepEqual(values.map((operation) => operation && 'value' in operation && operation.value), [{}, [], []])
  }) // prettier-ignore

  test('the warning is one line that says what stays open', () => {
    const { warning } = inject(podOf())
    assert.equal(
      warning,
      "port http of app is fenced; port 8080 stays open on the Pod's own address: close it with a NetworkPolicy",
    )
  })

  test('a mirror Pod is let through with a warning', () => {
    const annotations = { ...prefixed(ENOUGH), 'kubernetes.io/config.mirror': 'x' }
    const decision = decide(podOf({ metadata: { annotations } }), INJECTOR)
    assert.ok(decision.kind === 'ignored')
    assert.match(decision.warning ?? '', /static Pod/)
    const asksNothing = podOf({ metadata: { annotations: { 'kubernetes.io/config.mirror': 'x' } } })
    assert.deepEqual(decide(asksNothing, INJECTOR), { kind: 'ignored', warning: undefined })
  })
})

describe('a Pod that was injected before', () => {
  test('is left as it is: our own output fed back gives no operation (istio #25931)', () => {
    for (const annotations of [
      {},
      { 'app-port': 'http' },
      { 'app-port': '8080' },
      { steering: 'redirect' },
      { steering: 'none' },
      { 'native-sidecar': 'false' },
      { 'cpu-limit': '0.5' },
    ]) {
      const { pod } = inject(podOf({ annotations }))
      assert.deepEqual(inject(pod).patch, [], JSON.stringify(annotations))
    }
    const inConfigMap = prefixed({ inject: 'true', config: 'fence', 'store-claim': 'marks' })
    const { pod } = inject(podOf({ metadata: { annotations: inConfigMap } }))
    assert.equal(pod.spec.volumes?.length, 3)
    assert.deepEqual(inject(pod).patch, [])
  })

  test('is left as it is after the API server filled in its defaults and spelt quantities its way', () => {
    const { pod } = inject(podOf({ annotations: { 'cpu-limit': '0.5', 'memory-limit': '1024Mi' } }))
    const served = parsePod(structuredClone(pod))
    const sidecar = containerOf(served, 'fence-proxy')
    Object.assign(sidecar, {
      imagePullPolicy: 'IfNotPresent',
      terminationMessagePath: '/dev/termination-log',
      terminationMessagePolicy: 'File',
      resizePolicy: [{ resourceName: 'cpu', restartPolicy: 'NotRequired' }],
      resources: {
        limits: { cpu: '500m', memory: '1Gi', 'ephemeral-storage': '1Gi' },
        requests: { cpu: '100m', memory: '128Mi' },
      },
    })
    sidecar.volumeMounts?.push({ name: 'kube-api-access-x', mountPath: '/var/run/secrets/x' })
    sidecar.env?.push({ name: 'OTHER', value: 'x' })
    assert.deepEqual(inject(served).patch, [])
  })

  test('keeps its fence when another webhook adds a container, an init container and a probe (kserve #3517)', () => {
    const { pod } = inject(podOf())
    const changed = parsePod(structuredClone(pod))
    changed.spec.containers.unshift({ name: 'mesh', image: 'x', ports: [named('mesh', 15001)] })
    changed.spec.initContainers?.unshift({ name: 'mesh-init', image: 'x' })
    const app = containerOf(changed, 'app')
    app.readinessProbe = { httpGet: { path: '/', port: 'http' } }
    const annotations = changed.metadata?.annotations ?? {}
    annotations['fencing-proxy.io/app-port'] = 'http'
    const { patch, pod: after } = inject(changed)
    assert.deepEqual(names(after.spec.containers), ['mesh', 'app'])
    assert.deepEqual(names(after.spec.initContainers), ['mesh-init', 'fence-proxy'])
    assert.equal(containerOf(after, 'app').readinessProbe?.httpGet?.port, 'http-app')
    assert.deepEqual(patch.map(({ op, path }) => `${op} ${path}`), [
      'test /spec/containers/1/readinessProbe/httpGet/port',
      'replace /spec/containers/1/readinessProbe/httpGet/port',
    ]) // prettier-ignore
  })

  test('is refused when another webhook adds a second port of the fenced name', () => {
    const { pod } = inject(podOf())
    pod.spec.containers.push({ name: 'late', image: 'x', ports: [named('http', 9000)] })
    assert.match(denial(pod), /several ports could be meant|taken by container late/)
  })

  test('gets its own fields back when somebody changed them', () => {
    const original = inject(podOf()).pod
    const changes: ((sidecar: ReturnType<typeof containerOf>) => void)[] = [
      (sidecar) => (sidecar.args = ['serve']),
      (sidecar) => (sidecar.command = ['sleep', '1d']),
      (sidecar) => (sidecar.image = 'example/fence-proxy:1'),
      (sidecar) => (sidecar.securityContext = { privileged: true }),
      (sidecar) => (sidecar.lifecycle = { preStop: { exec: { command: ['x'] } } }),
      (sidecar) => (sidecar.envFrom = [{ configMapRef: { name: 'x' } }]),
      (sidecar) => sidecar.env?.push({ name: 'FENCING_PROXY_UNMATCHED_WRITES', value: 'pass' }),
      (sidecar) => sidecar.volumeMounts?.push({ name: 'x', mountPath: '/var/lib/fencing-proxy/a' }),
      (sidecar) => delete sidecar.readinessProbe,
      (sidecar) => delete sidecar.resources,
    ]
    for (const change of changes) {
      const pod = parsePod(structuredClone(original))
      change(containerOf(pod, 'fence-proxy'))
      const { pod: after, patch } = inject(pod)
      assert.deepEqual(containerOf(after, 'fence-proxy'), containerOf(original, 'fence-proxy'), change.toString()) // prettier-ignore
      assert.deepEqual(patch[0], { op: 'test', path: '/spec/initContainers/0/name', value: 'fence-proxy' }) // prettier-ignore
    }
  })

  test('a forged status is not believed (vault-k8s)', () => {
    const annotations = { status: 'injected' }
    const { pod } = inject(podOf({ annotations, metadata: { labels: { 'fencing-proxy.io/fenced': 'true' } } })) // prettier-ignore
    assert.ok(containerOf(pod, 'fence-proxy'))
    const real = inject(realPod('replicaset-first', { ...REAL_ENOUGH, status: 'injected' })).pod
    assert.ok(containerOf(real, 'fence-proxy'))
  })

  test('moves when the mode changes, and loses the redirection with the steering', () => {
    const setting = (pod: Pod, key: string, value: string) => {
      const changed = parsePod(structuredClone(pod))
      const annotations = changed.metadata?.annotations ?? {}
      annotations[`fencing-proxy.io/${key}`] = value
      return changed
    }
    const redirected = inject(podOf({ annotations: { steering: 'redirect' } })).pod
    assert.deepEqual(names(redirected.spec.initContainers), ['fence-proxy', 'fence-redirect'])
    assert.equal(containerOf(redirected, 'app').ports?.[0]?.name, 'http')

    const renamed = inject(setting(redirected, 'steering', 'named-port')).pod
    assert.deepEqual(names(renamed.spec.initContainers), ['fence-proxy'])
    assert.equal(containerOf(renamed, 'app').ports?.[0]?.name, 'http-app')

    const back = inject(setting(renamed, 'steering', 'none')).pod
    assert.equal(containerOf(back, 'app').ports?.[0]?.name, 'http')
    assert.equal(containerOf(back, 'fence-proxy').ports?.[0]?.name, 'fence-http')

    const classic = inject(setting(renamed, 'native-sidecar', 'false')).pod
    assert.deepEqual(names(classic.spec.containers), ['app', 'fence-proxy'])
    assert.deepEqual(names(classic.spec.initContainers), [])
  })

  test('probes follow the port back', () => {
    const app = { ...APP, readinessProbe: { httpGet: { path: '/', port: 'http' } } }
    const { pod } = inject(podOf({ containers: [app] }))
    const annotations = pod.metadata?.annotations ?? {}
    annotations['fencing-proxy.io/steering'] = 'none'
    assert.deepEqual(containerOf(inject(pod).pod, 'app'), app)
  })
})

describe('real requests of a 1.36.2 server', () => {
  const files = ['replicaset-first', 'replicaset-reinvoked', 'statefulset-first', 'statefulset-reinvoked', 'job-first', 'job-reinvoked'] // prettier-ignore
  for (const file of files) {
    test(`${file} is injected, and then left as it is`, () => {
      const { pod } = inject(realPod(file, REAL_ENOUGH))
      assert.equal(
        names(pod.spec.initContainers).filter((name) => name === 'fence-proxy').length,
        1,
      )
      assert.equal(containerOf(pod, 'fence-proxy').ports?.[0]?.name, 'http')
      assert.equal(pod.spec.containers[0]?.ports?.[0]?.name, 'http-app')
      assert.deepEqual(inject(pod).patch, [])
    })
  }

  test('the probe that an earlier injector forgot is mended at reinvocation', () => {
    const { pod } = inject(realPod('replicaset-reinvoked', REAL_ENOUGH))
    assert.equal(containerOf(pod, 'app').readinessProbe?.httpGet?.port, 'http-app')
  })

  test('as they are, they are refused: they do not say what to fence and where to keep marks', () => {
    for (const { file, body } of reviews()) {
      const pod = parsePod(body.request.object)
      const asks = pod.metadata?.annotations?.['fencing-proxy.io/inject'] === 'true'
      assert.equal(decide(pod, INJECTOR).kind, asks ? 'denied' : 'ignored', file)
    }
  })

  test('a megabyte of managedFields survives', () => {
    const pod = realPod('replicaset-first', REAL_ENOUGH)
    const managedFields = Array.from({ length: 1000 }, (_, i) => ({ manager: `m${i}`, x: 'x'.repeat(1000) })) // prettier-ignore
    pod.metadata = { ...pod.metadata, managedFields }
    assert.deepEqual(inject(pod).pod.metadata?.managedFields, managedFields)
  })
})

test('keys with slashes and tildes are escaped in paths (RFC 6901)', () => {
  const pod = podOf({ metadata: { labels: {} } })
  const draft = new Draft(pod)
  draft.set(['metadata', 'labels', 'a~b/c~1'], 'x')
  assert.equal(draft.operations[0]?.path, '/metadata/labels/a~0b~1c~01')
  assert.deepEqual(applyPatch(pod, draft.operations), draft.pod)
})

describe('steering', () => {
  test('redirect adds an init container with the least capabilities, after the native sidecar', () => {
    const { pod, warning } = inject(podOf({ annotations: { steering: 'redirect' } }))
    const { command, securityContext, resources } = containerOf(pod, 'fence-redirect')
    assert.deepEqual(securityContext, {
      allowPrivilegeEscalation: false,
      readOnlyRootFilesystem: true,
      runAsNonRoot: false,
      runAsUser: 0,
      runAsGroup: 0,
      capabilities: { drop: ['ALL'], add: ['NET_ADMIN', 'NET_RAW'] },
      seccompProfile: { type: 'RuntimeDefault' },
    })
    assert.ok(resources)
    assert.match(JSON.stringify(command), /--dport 8080 -j REDIRECT --to-ports 15080/)
    assert.equal(containerOf(pod, 'fence-proxy').ports?.[0]?.name, 'fence-http')
    assert.match(warning, /connections from inside the Pod are not redirected/)
  })

  test('redirect beside a classic sidecar comes before the init containers of the user', () => {
    const initContainers = [{ name: 'migrate', image: 'x' }]
    const pod = podOf({ annotations: { steering: 'redirect' }, spec: { initContainers } })
    const { spec } = inject(pod, { kubernetesMinor: 30 }).pod
    assert.deepEqual(names(spec.initContainers), ['fence-redirect', 'migrate'])
  })

  test('none renames nothing, and says how to lead traffic to the sidecar', () => {
    const { pod, warning } = inject(podOf({ annotations: { steering: 'none' } }))
    assert.deepEqual(containerOf(pod, 'app'), APP)
    assert.match(warning, /let the Service use the targetPort fence-http/)
  })
})
