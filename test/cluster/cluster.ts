import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { cpSync, readFileSync, readdirSync, writeFileSync } from 'node:fs'
import { networkInterfaces } from 'node:os'
import path from 'node:path'
import { test } from 'node:test'
import { runInjectCheck } from '../../src/inject/run.ts'
import type { Container, Pod } from '../../src/inject/pod.ts'
import { freePort } from '../free-port.ts'
import { temporaryFolder, until } from '../harness.ts'
import { startInjector } from '../deploy/injector.ts'
import { at, ofKind, readObjects, type KubernetesObject } from '../deploy/objects.ts'
import { CACHE, CHART, helm, kubectl, lackingTools, renderChart } from '../deploy/tools.ts'
import { containerOf, parsePod } from '../inject/samples.ts'
import { startControlPlane, type Reply } from './control-plane.ts'
import { startSecondWebhook } from './second-webhook.ts'

/**
 * The chart installed in a real cluster, but for its nodes: a real API server calls the injector by
 * its Service, over TLS, and what comes of it is looked at in the cluster's own objects.
 *
 * The server is 1.20.2, the newest that Debian has the source of. It shows everything but what came
 * later: native sidecars, matchConditions, ValidatingAdmissionPolicy and the label with the name of
 * a namespace. The tests of deploy/ and inject/ hold these against the schemas of newer servers, and
 * evaluate the expressions.
 */

const PROGRAMS = path.join(CACHE, 'kubernetes-1.20.2')
const NAMESPACE = 'fencing-proxy'
const NODE = 'node-1'

/** The API server sends nothing to endpoints on loopback. */
function addressOfThisMachine(): string {
  const all = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? [])
  const found = all.find(({ family, internal }) => family === 'IPv4' && !internal)
  assert.ok(found, 'this machine has an address besides loopback')
  return found.address
}

test('a real control plane', { timeout: 900_000 }, async (t) => {
  assert.equal(lackingTools(), false)
  execFileSync('bash', ['test/cluster/control-plane.sh', PROGRAMS], { stdio: 'inherit' })
  const folder = await temporaryFolder(t)
  const { kubeconfig, ask } = await startControlPlane(t, PROGRAMS, folder)
  const cluster = ['--kubeconfig', kubeconfig]

  const created = async (target: string, object: object, query = ''): Promise<Reply> => {
    const reply = await ask('POST', `${target}${query}`, object)
    assert.ok(reply.status < 300, `${reply.status} ${reply.body.message}`)
    return reply
  }
  const list = async (target: string): Promise<KubernetesObject[]> => {
    const { status, body } = await ask('GET', target)
    assert.equal(status, 200, body.message)
    return body.items as KubernetesObject[]
  }
  const namespace = async (name: string): Promise<string> => {
    await created('/api/v1/namespaces', { metadata: { name } })
    // Without its account, and the token of that, a Pod is refused.
    const account = `/api/v1/namespaces/${name}/serviceaccounts/default`
    const isReady = async () => (await ask('GET', account)).body['secrets'] !== undefined
    await until(isReady, `${name} is ready`)
    return name
  }
  const podsOf = (name: string, app: string) =>
    list(`/api/v1/namespaces/${name}/pods?labelSelector=${encodeURIComponent(`app=${app}`)}`)
  const apply = async (name: string, objects: readonly object[]): Promise<string[]> => {
    const warnings: string[] = []
    for (const object of objects as KubernetesObject[]) {
      const group = object.apiVersion === 'v1' ? '/api/v1' : `/apis/${object.apiVersion}`
      const kind = object.kind.toLowerCase().replace(/y$/, 'ie')
      const reply = await created(`${group}/namespaces/${name}/${kind}s`, object)
      warnings.push(...reply.warnings)
    }
    return warnings
  }
  /** What a kubelet would do: the Pod runs on a node, is ready, and has an address. */
  const runPod = async (name: string, pod: KubernetesObject, ip: string) => {
    const target = `/api/v1/namespaces/${name}/pods/${pod.metadata.name}`
    await created(`${target}/binding`, {
      ...{ apiVersion: 'v1', kind: 'Binding', metadata: { name: pod.metadata.name } },
      target: { apiVersion: 'v1', kind: 'Node', name: NODE },
    })
    const conditions = ['PodScheduled', 'Initialized', 'ContainersReady', 'Ready'].map((type) => {
      return { type, status: 'True' }
    })
    const status = { phase: 'Running', podIP: ip, podIPs: [{ ip }], conditions }
    const patched = await ask('PATCH', `${target}/status`, { status }, 'application/merge-patch+json') // prettier-ignore
    assert.equal(patched.status, 200, patched.body.message)
  }
  /** Address and port to which a Service leads, as a kube-proxy would be told. */
  const endpointsOf = async (name: string, service: string): Promise<string[]> => {
    const query = `labelSelector=${encodeURIComponent(`kubernetes.io/service-name=${service}`)}`
    const slices = await list(`/apis/discovery.k8s.io/v1beta1/namespaces/${name}/endpointslices?${query}`) // prettier-ignore
    return slices.flatMap((slice) => {
      const ports = (slice['ports'] as { port: number }[] | undefined) ?? []
      const endpoints = (slice['endpoints'] as { addresses: string[] }[] | undefined) ?? []
      return endpoints.flatMap(({ addresses }) =>
        addresses.flatMap((address) => ports.map(({ port }) => `${address}:${port}`)),
      )
    })
  }
  const manifest = (file: string) => readObjects(readFileSync(`deploy/kubernetes/${file}`, 'utf8'))

  await created('/api/v1/nodes', { metadata: { name: NODE } })
  const address = addressOfThisMachine()
  const port = await freePort()
  const install = () =>
    helm(
      ...['upgrade', '--install', 'fencing-proxy-injector', CHART, ...cluster],
      ...['--namespace', NAMESPACE, '--create-namespace', '--set', `port=${port}`],
    )
  await install()
  const installed = async () => {
    const secret = await list(`/api/v1/namespaces/${NAMESPACE}/secrets?fieldSelector=type=kubernetes.io/tls`) // prettier-ignore
    const kinds = { MutatingWebhookConfiguration: 'mutating', ValidatingWebhookConfiguration: 'validating' } // prettier-ignore
    const hooks = await Promise.all(
      Object.entries(kinds).map(async ([kind, name]) => {
        const target = `/apis/admissionregistration.k8s.io/v1/${name}webhookconfigurations`
        return (await list(target)).map((object) => ({ ...object, kind }))
      }),
    )
    const deployments = await list(`/apis/apps/v1/namespaces/${NAMESPACE}/deployments`)
    return [
      ...secret.map((object) => ({ ...object, kind: 'Secret' })),
      ...deployments.map((object) => ({ ...object, kind: 'Deployment' })),
      ...hooks.flat(),
    ]
  }
  const objects = await installed()
  const startIt = (sub: typeof t) =>
    startInjector(sub, objects, path.join(folder, 'tls'), `${address}:${port}`)
  let injector = await startIt(t)
  /** How often the injector was asked about a Pod of that name, and answered so. Its log takes a moment. */
  const answers = (event: string, name: string) =>
    injector.log.filter((line) => line['event'] === event && line['name'] === name).length

  await t.test('makes the injector’s own Pods while no injector answers', async () => {
    const target = `/api/v1/namespaces/${NAMESPACE}/pods`
    await until(
      async () => (await list(target)).length === 2,
      'the Deployment has its Pods',
      60_000,
    )
    const [pod] = await list(target)
    assert.ok(pod)
    await runPod(NAMESPACE, pod, address)
    const reached = async () => (await endpointsOf(NAMESPACE, 'fencing-proxy-injector')).length > 0
    await until(reached, 'the Service leads to the injector', 60_000)
    // From here on the API server finds it by its Service.
    const probe = { metadata: { name: 'probe', labels: { 'fencing-proxy.io/inject': 'true' } }, spec: { containers: [{ name: 'a', image: 'a' }] } } // prettier-ignore
    const answered = async () => {
      const { body } = await ask('POST', '/api/v1/namespaces/default/pods?dryRun=All', probe)
      return /no annotation says which/.test(body.message ?? '')
    }
    await until(answered, 'the API server asks the injector', 60_000)
  })

  await t.test(
    'fences the annotated Deployment, and its Service leads to the sidecar',
    async () => {
      const name = await namespace('deployment')
      const warnings = await apply(name, manifest('annotated-deployment.yaml'))
      assert.deepEqual(warnings, [])
      await until(
        async () => (await podsOf(name, 'jobs-api')).length === 1,
        'there is a Pod',
        60_000,
      )
      const [pod] = await podsOf(name, 'jobs-api')
      assert.ok(pod)
      const { spec, metadata } = parsePod(pod)
      assert.deepEqual(spec.containers.map((one) => one.name), ['api', 'fence-proxy']) // prettier-ignore
      assert.equal(metadata?.labels?.['fencing-proxy.io/fenced'], 'true')
      const ports = spec.containers.map((one) => one.ports?.map((own) => `${own.name}:${own.containerPort}`)) // prettier-ignore
      assert.deepEqual(ports, [['http-app:9000'], ['http:15080', 'fence-admin:15081']])
      assert.equal(spec.containers[0]?.readinessProbe?.httpGet?.port, 'http-app')
      assert.ok(spec.volumes?.some((volume) => volume.persistentVolumeClaim?.claimName === 'jobs-api-marks')) // prettier-ignore

      await runPod(name, pod, '10.1.0.1')
      await until(async () => (await endpointsOf(name, 'jobs-api')).length > 0, 'there is an endpoint', 60_000) // prettier-ignore
      assert.deepEqual(await endpointsOf(name, 'jobs-api'), ['10.1.0.1:15080'])
      const live = await kubectl('get', ...cluster, '-n', name, '-o', 'json', 'pods,services,networkpolicies,endpointslices') // prettier-ignore
      const checked = runInjectCheck(live, { image: 'fencing-proxy:0.1.0', kubernetesVersion: '1.20' }) // prettier-ignore
      assert.deepEqual(checked.messages, ['1 Pod or template is fenced, and no way around shows'])
    },
  )

  await t.test(
    'a Service with a numeric targetPort leads around, and the check says so',
    async () => {
      const name = 'deployment'
      const service = { apiVersion: 'v1', kind: 'Service', metadata: { name: 'numeric' }, spec: { selector: { app: 'jobs-api' }, ports: [{ port: 80, targetPort: 9000 }] } } // prettier-ignore
      await apply(name, [service])
      await until(async () => (await endpointsOf(name, 'numeric')).length > 0, 'there is an endpoint', 60_000) // prettier-ignore
      assert.deepEqual(await endpointsOf(name, 'numeric'), ['10.1.0.1:9000'])
      const live = await kubectl('get', ...cluster, '-n', name, '-o', 'json', 'pods,services,networkpolicies,endpointslices') // prettier-ignore
      const checked = runInjectCheck(live, { image: 'fencing-proxy:0.1.0' })
      assert.equal(checked.code, 1)
      assert.match(checked.output, /^numeric-target-port: Service deployment\/numeric: targetPort 9000 leads past/m) // prettier-ignore
      assert.match(checked.output, /^endpoint-at-app-port: /m)
    },
  )

  await t.test(
    'leaves its own Pod alone when that comes again, as the server completed it',
    async () => {
      const [pod] = await podsOf('deployment', 'jobs-api')
      assert.ok(pod)
      const { metadata, spec } = parsePod(pod)
      const again = { metadata: { name: 'again', labels: { app: 'again' }, annotations: metadata?.annotations }, spec: { ...spec, nodeName: undefined } } // prettier-ignore
      again.metadata.labels = { ...again.metadata.labels, 'fencing-proxy.io/inject': 'true', 'fencing-proxy.io/fenced': 'true' } as typeof again.metadata.labels // prettier-ignore
      const { body } = await created('/api/v1/namespaces/deployment/pods', again, '?dryRun=All')
      assert.deepEqual(parsePod(body).spec.containers, spec.containers)
      await until(() => answers('admission_unchanged', 'again') === 1, 'it said so')
    },
  )

  await t.test('mounts the claim of a StatefulSet by its name', async () => {
    const name = await namespace('statefulset')
    const labels = { app: 'orders', 'fencing-proxy.io/inject': 'true' }
    const annotations = { 'fencing-proxy.io/inject': 'true', 'fencing-proxy.io/scope': '/jobs/{job}', 'fencing-proxy.io/store-volume': 'marks' } // prettier-ignore
    const set = {
      ...{ apiVersion: 'apps/v1', kind: 'StatefulSet', metadata: { name: 'orders' } },
      spec: {
        ...{ serviceName: 'orders', replicas: 1, selector: { matchLabels: { app: 'orders' } } },
        template: {
          metadata: { labels, annotations },
          spec: {
            securityContext: { fsGroup: 65532 },
            containers: [{ name: 'app', image: 'app', ports: [{ name: 'http', containerPort: 80 }] }], // prettier-ignore
          },
        },
        volumeClaimTemplates: [
          {
            metadata: { name: 'marks' },
            spec: {
              accessModes: ['ReadWriteOnce'],
              resources: { requests: { storage: '1Gi' } },
            },
          },
        ],
      },
    }
    assert.deepEqual(await apply(name, [set]), [])
    await until(async () => (await podsOf(name, 'orders')).length === 1, 'there is a Pod', 60_000)
    const pod = parsePod((await podsOf(name, 'orders'))[0])
    const sidecar = containerOf(pod, 'fence-proxy')
    assert.deepEqual(sidecar.volumeMounts?.[0], { name: 'marks', mountPath: '/var/lib/fencing-proxy' }) // prettier-ignore
    assert.deepEqual(
      pod.spec.volumes?.filter((volume) => volume.persistentVolumeClaim).map((volume) => volume.persistentVolumeClaim?.claimName), // prettier-ignore
      ['marks-orders-0'],
    )
    // A Pod whose volumes were changed is deleted and made anew, for ever (juicefs-csi-driver #959).
    const { uid } = pod.metadata ?? {}
    await created(`/api/v1/namespaces/${name}/pods/orders-0/binding`, {
      ...{ apiVersion: 'v1', kind: 'Binding', metadata: { name: 'orders-0' } },
      target: { apiVersion: 'v1', kind: 'Node', name: NODE },
    })
    const scaled = await ask('PATCH', `/apis/apps/v1/namespaces/${name}/statefulsets/orders`, { metadata: { labels: { touched: 'yes' } } }, 'application/merge-patch+json') // prettier-ignore
    assert.equal(scaled.status, 200)
    const observed = async () => {
      const { body } = await ask('GET', `/apis/apps/v1/namespaces/${name}/statefulsets/orders`)
      return at(body, 'status.observedGeneration') === at(body, 'metadata.generation')
    }
    await until(observed, 'the controller has looked again', 60_000)
    assert.equal(parsePod((await podsOf(name, 'orders'))[0]).metadata?.uid, uid)
  })

  await t.test(
    'makes no Pod of a Job that could never complete, and its events say why',
    async () => {
      const name = await namespace('job')
      const metadata = {
        labels: { app: 'once', 'fencing-proxy.io/inject': 'true' },
        annotations: { 'fencing-proxy.io/inject': 'true', 'fencing-proxy.io/scope': '/a', 'fencing-proxy.io/allow-ephemeral-store': 'true' }, // prettier-ignore
      }
      const containers = [
        { name: 'app', image: 'app', ports: [{ name: 'http', containerPort: 80 }] },
      ]
      const template = { metadata, spec: { restartPolicy: 'Never', containers } }
      const job = { apiVersion: 'batch/v1', kind: 'Job', metadata: { name: 'once' }, spec: { template } } // prettier-ignore
      const [warning = ''] = await apply(name, [job])
      assert.match(warning, /^fencing-proxy: its Pods will be refused: the Pod is meant to end/)
      const failed = async () =>
        (await list(`/api/v1/namespaces/${name}/events`)).some(
          (event) =>
        /denied the request: fencing-proxy: the Pod is meant to end.*use Kubernetes 1\.33 or newer/.test(String(event['message'])), // prettier-ignore
        )
      await until(failed, 'an event says it', 60_000)
      assert.deepEqual(await podsOf(name, 'once'), [])
    },
  )

  await t.test('passes denials on, in words', async () => {
    const name = await namespace('denials')
    const enough = { inject: 'true', scope: '/jobs/{job}/**', 'allow-ephemeral-store': 'true' }
    const app: Container = { name: 'app', image: 'app', ports: [{ name: 'http', containerPort: 8080 }] } // prettier-ignore
    const pod = (annotations: Record<string, string>, spec: Partial<Pod['spec']> = {}) => ({
      metadata: {
        name: 'denied',
        labels: { 'fencing-proxy.io/inject': 'true' },
        annotations: Object.fromEntries(
          Object.entries(annotations).map(([key, value]) => [`fencing-proxy.io/${key}`, value]),
        ),
      },
      spec: { containers: [app], ...spec },
    })
    const sctp: Container = { ...app, ports: [{ name: 'http', containerPort: 8080, protocol: 'UDP' }] } // prettier-ignore
    const cases: [object, RegExp][] = [
      [pod({}), /the label fencing-proxy\.io\/inject asks for a fence, and no annotation says which/],
      [pod({ ...enough, inject: 'yes' }), /fencing-proxy\.io\/inject: "yes": valid: "true", "false"/],
      [pod({ ...enough, injcet: 'true' }), /injcet: unknown key \(did you mean inject\?\)/],
      [pod(enough, { hostNetwork: true, containers: [{ ...app, ports: [{ name: 'http', containerPort: 8080, hostPort: 8080 }] }] }), /hostNetwork.*; remove hostNetwork/], // prettier-ignore
      [pod({ ...enough, 'app-port': 'http' }, { containers: [sctp] }), /is a UDP port/],
      [pod({ ...enough, 'app-port': '9999' }), /no container declares a port 9999; .*http 8080\/TCP of app/], // prettier-ignore
      [pod({ inject: 'true', scope: '/a' }), /sqlite needs a volume that outlives the Pod/],
      [pod({ ...enough, 'store-volume': 'nothing' }), /"nothing" is no volume of the Pod/],
      [pod({ ...enough, 'proxy-port': '8080' }), /port 8080 is taken by container app/],
      [pod({ ...enough, steering: 'redirect' }), /the injector was given none; start it with --redirect-image/], // prettier-ignore
      [pod({ ...enough, 'native-sidecar': 'true' }), /needs Kubernetes 1\.33 .* and this is 1\.20/],
      [pod(enough, { containers: [app, { name: 'fence-proxy', image: 'evil/fence' }] }), /a container named fence-proxy is there already, with the image evil\/fence/], // prettier-ignore
    ] // prettier-ignore
    for (const [object, words] of cases) {
      const { status, body } = await ask('POST', `/api/v1/namespaces/${name}/pods`, object)
      assert.equal(status, 403, body.message)
      assert.match(body.message ?? '', words)
      assert.match(body.message ?? '', /^admission webhook "pods\.fencing-proxy\.io" denied the request: fencing-proxy: /) // prettier-ignore
    }
    assert.deepEqual(await list(`/api/v1/namespaces/${name}/pods`), [])

    const { body, warnings } = await created(`/api/v1/namespaces/${name}/pods`, pod(enough), '?dryRun=All') // prettier-ignore
    assert.equal(containerOf(parsePod(body), 'fence-proxy').ports?.[0]?.name, 'http')
    assert.match(
      warnings.join(),
      /^fencing-proxy: port http of app is fenced; port 8080 stays open/,
    )
    assert.deepEqual(await list(`/api/v1/namespaces/${name}/pods`), [], 'it was a dry run')
  })

  await t.test('warns of workloads that will not do what they seem to', async () => {
    const name = await namespace('warnings')
    const inject = { 'fencing-proxy.io/inject': 'true' }
    const enough = { ...inject, 'fencing-proxy.io/scope': '/a', 'fencing-proxy.io/store-claim': 'marks' } // prettier-ignore
    const deployment = (app: string, annotations: object, template: object, spec: object = {}) => ({
      ...{ apiVersion: 'apps/v1', kind: 'Deployment', metadata: { name: app, annotations } },
      spec: {
        ...{ replicas: 0, selector: { matchLabels: { app } }, ...spec },
        template: {
          metadata: { labels: { app, ...inject }, annotations: template },
          spec: { containers: [{ name: 'app', image: 'a', ports: [{ name: 'http', containerPort: 80 }] }] }, // prettier-ignore
        },
      },
    })
    const told = async (object: object) => (await apply(name, [object])).join('\n')
    assert.match(await told(deployment('a', inject, {})), /stands on the Deployment; it belongs on the Pod template/) // prettier-ignore
    const rolling = await told(deployment('b', {}, enough, { replicas: 2 }))
    assert.match(rolling, /^fencing-proxy: 2 replicas with a sqlite store each are no fence/m)
    assert.match(rolling, /^fencing-proxy: RollingUpdate starts a new Pod before/m)
    assert.equal(await told(deployment('c', {}, enough, { strategy: { type: 'Recreate' } })), '')
  })

  await t.test('a fenced Pod has what a quota asks for', async () => {
    const name = await namespace('quota')
    const hard = { 'limits.cpu': '2', 'limits.memory': '1Gi', 'requests.cpu': '1', 'requests.memory': '1Gi' } // prettier-ignore
    await created(`/api/v1/namespaces/${name}/resourcequotas`, { metadata: { name: 'all' }, spec: { hard } }) // prettier-ignore
    const counted = async () => {
      const [quota] = await list(`/api/v1/namespaces/${name}/resourcequotas`)
      return at(quota, 'status.hard') !== undefined
    }
    await until(counted, 'the quota is in effect', 60_000)
    const resources = { requests: { cpu: '100m', memory: '64Mi' }, limits: { cpu: '100m', memory: '64Mi' } } // prettier-ignore
    const pod = {
      metadata: {
        name: 'web',
        labels: { 'fencing-proxy.io/inject': 'true' },
        annotations: { 'fencing-proxy.io/inject': 'true', 'fencing-proxy.io/scope': '/a', 'fencing-proxy.io/store-claim': 'marks' }, // prettier-ignore
      },
      spec: { containers: [{ name: 'app', image: 'a', ports: [{ name: 'http', containerPort: 80 }], resources }] }, // prettier-ignore
    }
    await created(`/api/v1/namespaces/${name}/pods`, pod)
  })

  await t.test(
    'a second webhook that acts after it brings it back, and the fence stays whole',
    async (sub) => {
      const name = await namespace('second')
      const second = await startSecondWebhook(sub, folder)
      const hooks = '/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations'
      sub.after(() => ask('DELETE', `${hooks}/z-second`))
      await created(hooks, {
        metadata: { name: 'z-second' },
        webhooks: [
          {
            ...{ name: 'second.example.com', sideEffects: 'None', admissionReviewVersions: ['v1'] },
            clientConfig: { url: second.url, caBundle: second.caBundle },
            rules: [
              { apiGroups: [''], apiVersions: ['v1'], resources: ['pods'], operations: ['CREATE'] },
            ],
            objectSelector: { matchLabels: { second: 'yes' } },
          },
        ],
      })
      const pod = {
        metadata: {
          name: 'web',
          labels: { second: 'yes', 'fencing-proxy.io/inject': 'true' },
          annotations: { 'fencing-proxy.io/inject': 'true', 'fencing-proxy.io/scope': '/a', 'fencing-proxy.io/store-claim': 'marks' }, // prettier-ignore
        },
        spec: { containers: [{ name: 'app', image: 'a', ports: [{ name: 'http', containerPort: 80 }] }] }, // prettier-ignore
      }
      const post = async (podName: string) => {
        const named = { ...pod, metadata: { ...pod.metadata, name: podName } }
        const { body } = await created(`/api/v1/namespaces/${name}/pods`, named, '?dryRun=All')
        return parsePod(body)
      }
      // The server learns of a webhook by and by.
      const takesPart = async () => (await post('web')).spec.containers[0]?.name === 'mesh'
      await until(takesPart, 'the second one takes part', 30_000)
      const { spec } = await post('asked-twice')
      await until(
        () => answers('admission_injected', 'asked-twice') === 2,
        'asked, and asked again',
      )
      assert.deepEqual(spec.containers.map((one) => one.name), ['mesh', 'app', 'fence-proxy']) // prettier-ignore
      const app = spec.containers[1]
      assert.equal(app?.ports?.[0]?.name, 'http-app')
      // By the old name, which is the sidecar's now: that is how the second one knew the Pod's port.
      assert.equal(app?.readinessProbe?.httpGet?.port, 'http-app')
      const [fence] = spec.containers.slice(-1)
      assert.equal(at(fence, 'securityContext.runAsUser'), 65532, 'what the second one changed is ours again') // prettier-ignore
    },
  )

  await t.test(
    'with the injector down, what asks for a fence waits, and all else goes on',
    async () => {
      const name = await namespace('down')
      assert.equal(await injector.stop(), 0)
      const pod = (app: string, labels: object, annotations: object = {}) => ({
        metadata: { name: app, labels: { app, ...labels }, annotations },
        spec: { containers: [{ name: 'app', image: 'a', ports: [{ name: 'http', containerPort: 80 }] }] }, // prettier-ignore
      })
      const label = { 'fencing-proxy.io/inject': 'true' }
      const annotations = { ...label, 'fencing-proxy.io/scope': '/a', 'fencing-proxy.io/store-claim': 'm' } // prettier-ignore
      const refused = await ask('POST', `/api/v1/namespaces/${name}/pods`, pod('asks', label, annotations)) // prettier-ignore
      assert.equal(refused.status, 500)
      assert.match(refused.body.message ?? '', /failed calling webhook "pods\.fencing-proxy\.io".*connection refused/) // prettier-ignore
      await created(`/api/v1/namespaces/${name}/pods`, pod('does-not', {}))
      // What a server before 1.28 cannot express, and the README warns of.
      await created(`/api/v1/namespaces/${name}/pods`, pod('annotated-only', {}, annotations))

      const template = {
        metadata: pod('web', label, annotations).metadata,
        spec: pod('web', {}).spec,
      }
      const deployment = { apiVersion: 'apps/v1', kind: 'Deployment', metadata: { name: 'web' }, spec: { replicas: 1, strategy: { type: 'Recreate' }, selector: { matchLabels: { app: 'web' } }, template } } // prettier-ignore
      await apply(name, [deployment])
      const failed = async () =>
        (await list(`/api/v1/namespaces/${name}/events`)).some((event) =>
          String(event['message']).includes('failed calling webhook'),
        )
      await until(failed, 'the ReplicaSet says what it waits for', 60_000)
      assert.deepEqual(await podsOf(name, 'web'), [])
      injector = await startIt(t)
      await until(async () => (await podsOf(name, 'web')).length === 1, 'its Pod comes', 120_000)
      containerOf(parsePod((await podsOf(name, 'web'))[0]), 'fence-proxy')
    },
  )

  await t.test(
    'an upgrade keeps the certificate, and a removal leaves no webhook behind',
    async () => {
      const data = (all: readonly KubernetesObject[]) =>
        ofKind(all, 'Secret')['data'] as Record<string, string>
      await install()
      assert.deepEqual(data(await installed()), data(objects))
      for (const kind of ['MutatingWebhookConfiguration', 'ValidatingWebhookConfiguration']) {
        const hook = ofKind(await installed(), kind)
        assert.equal(at(hook, 'webhooks.0.clientConfig.caBundle'), data(objects)['ca.crt'])
      }
      const fenced = await podsOf('deployment', 'jobs-api')
      await helm('uninstall', 'fencing-proxy-injector', ...cluster, '--namespace', NAMESPACE)
      await injector.stop()
      const free = async () => {
        const pod = { metadata: { name: 'free', labels: { 'fencing-proxy.io/inject': 'true' } }, spec: { containers: [{ name: 'a', image: 'a' }] } } // prettier-ignore
        return (await ask('POST', '/api/v1/namespaces/default/pods?dryRun=All', pod)).status === 201
      }
      await until(free, 'nobody is asked any more', 30_000)
      assert.deepEqual(await podsOf('deployment', 'jobs-api'), fenced, 'what runs goes on')
    },
  )

  await t.test(
    'every manifest of deploy/ passes a dry run, but for what 1.20 does not know',
    async (sub) => {
      const kustomize = await temporaryFolder(sub)
      cpSync('deploy/kustomize', kustomize, { recursive: true })
      const place = path.join(kustomize, 'overlays/supplied-certificate')
      for (const name of ['tls.crt', 'tls.key', 'ca.crt']) {
        cpSync(path.join(folder, 'tls', name), path.join(place, name))
      }
      const texts: [file: string, text: string][] = [
        ['the chart', await renderChart('1.20.2', ['replicas=3'])],
        ['kustomize', await kubectl('kustomize', path.join(kustomize, 'overlays/older-servers'))],
        ...readdirSync('deploy/kubernetes').map((file): [string, string] => [file, readFileSync(`deploy/kubernetes/${file}`, 'utf8')]), // prettier-ignore
      ]
      const unknown: Record<string, RegExp> = {
        'kustomize PodDisruptionBudget': /no matches for kind "PodDisruptionBudget" in version "policy\/v1"/, // prettier-ignore
        'statefulset.yaml StatefulSet': /unknown field "restartPolicy"/,
      }
      const outcomes: Record<string, string> = {}
      for (const [file, text] of texts) {
        for (const [i, object] of readObjects(text).entries()) {
          const written = path.join(folder, `dry-run-${i}.json`)
          writeFileSync(written, JSON.stringify(object))
          const args = ['apply', ...cluster, '--dry-run=server', '--validate=strict', '-f', written]
          const outcome = await kubectl(...args).then(() => 'passed', String)
          outcomes[`${file} ${object.kind}`] = outcome
          const expected = unknown[`${file} ${object.kind}`]
          if (expected === undefined) assert.equal(outcome, 'passed', `${file} ${object.kind}`)
          else assert.match(outcome, expected)
        }
      }
      assert.equal(Object.keys(outcomes).length >= 20, true, Object.keys(outcomes).join())
    },
  )
})
