import assert from 'node:assert/strict'
import { X509Certificate } from 'node:crypto'
import { describe, test, type TestContext } from 'node:test'
import { parsePod, podOf, prefixed } from '../inject/samples.ts'
import { applyPatch } from '../inject/rfc6902.ts'
import { temporaryFolder } from '../harness.ts'
import { startInjector } from './injector.ts'
import { at, ofKind, readObjects, type KubernetesObject } from './objects.ts'
import { assertValid } from './schema.ts'
import { helm, lackingTools, renderChart } from './tools.ts'

const skip = lackingTools()

const render = async (version: string, ...settings: string[]): Promise<KubernetesObject[]> =>
  readObjects(await renderChart(version, settings))

const kinds = (objects: readonly KubernetesObject[]) => objects.map(({ kind }) => kind).sort()

const COMMON = [
  'Deployment',
  'MutatingWebhookConfiguration',
  'NetworkPolicy',
  'PodDisruptionBudget',
  'Service',
  'ServiceAccount',
  'ValidatingWebhookConfiguration',
]
const POLICY = ['ValidatingAdmissionPolicy', 'ValidatingAdmissionPolicyBinding']
const SUPPLIED = [
  'certificate.source=secret',
  'certificate.secretName=mine',
  'certificate.caBundle=-----BEGIN CERTIFICATE-----',
]

describe('the chart', { skip }, () => {
  test('makes only what the API of Kubernetes knows, whatever its values', async () => {
    const everything = [
      'redirectImage=example/iptables:1',
      'imagePullSecrets[0].name=registry',
      'podAnnotations.a=b',
      'nodeSelector.disk=ssd',
      'tolerations[0].operator=Exists',
      'priorityClassName=system-cluster-critical',
      'affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=zone',
      'serviceMonitor.enabled=true',
      'serviceMonitor.labels.release=prometheus',
    ]
    const issued = 'certificate.source=cert-manager'
    const cases: [settings: string[], expected: string[]][] = [
      [[], [...COMMON, ...POLICY, 'Secret']],
      [everything, [...COMMON, ...POLICY, 'Secret', 'ServiceMonitor']],
      [SUPPLIED, [...COMMON, ...POLICY]],
      [
        [...SUPPLIED, 'serviceMonitor.enabled=true'],
        [...COMMON, ...POLICY, 'ServiceMonitor', 'ConfigMap'],
      ],
      [[issued], [...COMMON, ...POLICY, 'Certificate', 'Issuer']],
      [
        [issued, 'certificate.issuerRef.name=ca'],
        [...COMMON, ...POLICY, 'Certificate'],
      ],
      [
        ['admissionPolicy.enabled=false', 'selection=label'],
        [...COMMON, 'Secret'],
      ],
      [
        ['replicas=1', 'networkPolicy.enabled=false'],
        [...COMMON, ...POLICY, 'Secret'].filter((kind) => kind !== 'PodDisruptionBudget' && kind !== 'NetworkPolicy'), // prettier-ignore
      ],
    ]
    const rendered = await Promise.all(
      cases.map(async ([settings, expected]) => {
        const objects = await render('1.36.2', ...settings)
        assert.deepEqual(kinds(objects), expected.sort(), settings.join(' '))
        return objects
      }),
    )
    assertValid(rendered.flat())
  })

  test('is valid without a server to ask for its version, and under helm lint', async () => {
    await helm('lint', '--strict', 'deploy/helm/fencing-proxy-injector')
  })

  test('refuses values that it does not know or that do not go together', async () => {
    const wrong: [settings: string[], words: RegExp][] = [
      [['certificate.sauce=helm'], /'sauce' not allowed/],
      [['replicaCount=2'], /'replicaCount' not allowed/],
      [['replicas=0'], /minimum: got 0, want 1/],
      [['selection=namespace'], /'annotation', 'label'/],
      [['certificate.source=secret'], /secretName(.|\n)*want 1/],
      [[...SUPPLIED, 'certificate.caBundle=MIIB'], /does not match pattern/],
      [['prefix=Not/A/Domain'], /does not match pattern/],
      [['kubernetesVersion=latest'], /does not match pattern/],
      [['timeoutSeconds=31'], /maximum: got 31, want 30/],
    ]
    for (const [settings, words] of wrong) await assert.rejects(render('1.36.2', ...settings), words)
    await assert.rejects(render('1.19.0'), /incompatible/)
  }) // prettier-ignore

  test('lets a server that can do so choose by annotations, and an older one by a label', async () => {
    const webhook = async (version: string, ...settings: string[]) => {
      const objects = await render(version, ...settings)
      const hook = at(ofKind(objects, 'MutatingWebhookConfiguration'), 'webhooks.0') as object
      const chosen = ['matchConditions', 'objectSelector'].filter((key) => key in hook)
      return [...chosen, ...kinds(objects).filter((kind) => POLICY.includes(kind))]
    }
    assert.deepEqual(await webhook('1.36.2'), ['matchConditions', ...POLICY])
    assert.deepEqual(await webhook('v1.30.1-gke.100'), ['matchConditions', ...POLICY])
    assert.deepEqual(await webhook('1.29.3'), ['matchConditions'])
    assert.deepEqual(await webhook('1.27.9'), ['objectSelector'])
    assert.deepEqual(await webhook('1.20.2'), ['objectSelector'])
    assert.deepEqual(await webhook('1.36.2', 'selection=label'), ['objectSelector', ...POLICY])
  })

  test('names the kinds of an old server as that server does', async () => {
    const budget = async (version: string) => ofKind(await render(version), 'PodDisruptionBudget')
    assert.equal((await budget('1.20.2')).apiVersion, 'policy/v1beta1')
    assert.equal((await budget('1.21.0')).apiVersion, 'policy/v1')
  })

  test('has every failure of the injector refuse the Pod, and only warns of workloads', async () => {
    const objects = await render('1.36.2')
    const mutating = at(ofKind(objects, 'MutatingWebhookConfiguration'), 'webhooks.0')
    const { clientConfig, namespaceSelector, matchConditions, ...rest } = mutating as Record<string, unknown> // prettier-ignore
    assert.deepEqual(rest, {
      name: 'pods.fencing-proxy.io',
      admissionReviewVersions: ['v1'],
      rules: [
        { apiGroups: [''], apiVersions: ['v1'], resources: ['pods'], operations: ['CREATE'], scope: 'Namespaced' }, // prettier-ignore
      ],
      failurePolicy: 'Fail',
      reinvocationPolicy: 'IfNeeded',
      matchPolicy: 'Equivalent',
      sideEffects: 'None',
      timeoutSeconds: 5,
    })
    assert.ok(clientConfig && matchConditions)
    assert.deepEqual(namespaceSelector, {
      matchExpressions: [
        {
          key: 'kubernetes.io/metadata.name',
          operator: 'NotIn',
          values: ['kube-system', 'fencing-proxy'],
        },
      ],
    })
    const validating = at(ofKind(objects, 'ValidatingWebhookConfiguration'), 'webhooks.0')
    assert.equal(at(validating, 'failurePolicy'), 'Ignore')
    assert.equal(at(validating, 'sideEffects'), 'None')
  })

  test('gives the injector no rights, no way out and nothing to write to', async () => {
    const objects = await render('1.36.2')
    assert.deepEqual(kinds(objects).filter((kind) => /Role/.test(kind)), []) // prettier-ignore
    const account = ofKind(objects, 'ServiceAccount')
    assert.equal(account['automountServiceAccountToken'], false)
    const spec = at(ofKind(objects, 'Deployment'), 'spec.template.spec')
    assert.equal(at(spec, 'serviceAccountName'), account.metadata.name)
    assert.equal(at(spec, 'automountServiceAccountToken'), false)
    assert.deepEqual(at(ofKind(objects, 'NetworkPolicy'), 'spec.egress'), [])
    // The least that Pod Security calls restricted.
    assert.equal(at(spec, 'securityContext.runAsNonRoot'), true)
    assert.deepEqual(at(spec, 'securityContext.seccompProfile'), { type: 'RuntimeDefault' })
    assert.deepEqual(at(spec, 'containers.0.securityContext'), {
      allowPrivilegeEscalation: false,
      readOnlyRootFilesystem: true,
      capabilities: { drop: ['ALL'] },
    })
    assert.deepEqual(Object.keys(at(spec, 'containers.0.resources') as object).sort(), ['limits', 'requests']) // prettier-ignore
  })

  test('keeps one injector while nodes are drained, and two on different nodes', async () => {
    const objects = await render('1.36.2')
    const deployment = ofKind(objects, 'Deployment')
    const labels = at(deployment, 'spec.template.metadata.labels') as Record<string, string>
    assert.equal(at(deployment, 'spec.replicas'), 2)
    assert.equal(at(deployment, 'spec.strategy.rollingUpdate.maxUnavailable'), 0)
    assert.equal(at(ofKind(objects, 'PodDisruptionBudget'), 'spec.maxUnavailable'), 1)
    const selectors = [
      at(deployment, 'spec.selector.matchLabels'),
      at(deployment, 'spec.template.spec.topologySpreadConstraints.0.labelSelector.matchLabels'),
      at(ofKind(objects, 'PodDisruptionBudget'), 'spec.selector.matchLabels'),
      at(ofKind(objects, 'NetworkPolicy'), 'spec.podSelector.matchLabels'),
      at(ofKind(objects, 'Service'), 'spec.selector'),
    ]
    for (const selector of selectors as Record<string, string>[]) {
      assert.ok(Object.keys(selector).length > 0)
      for (const [key, value] of Object.entries(selector)) assert.equal(labels[key], value)
    }
  })
})

describe('certificates', { skip }, () => {
  test('made by Helm are for the name that the API server calls, and signed by the CA it is told', async () => {
    const objects = await render('1.36.2')
    const data = at(ofKind(objects, 'Secret'), 'data') as Record<string, string>
    const pem = (key: string) => Buffer.from(data[key] ?? '', 'base64').toString()
    const [ca, cert] = [new X509Certificate(pem('ca.crt')), new X509Certificate(pem('tls.crt'))]
    assert.ok(ca.ca)
    assert.ok(cert.verify(ca.publicKey))
    assert.equal(
      cert.checkHost('fencing-proxy-injector.fencing-proxy.svc'),
      'fencing-proxy-injector.fencing-proxy.svc',
    )
    for (const kind of ['MutatingWebhookConfiguration', 'ValidatingWebhookConfiguration']) {
      assert.equal(at(ofKind(objects, kind), 'webhooks.0.clientConfig.caBundle'), data['ca.crt'])
    }
  })

  test('of cert-manager are mounted where it puts them, and it tells the API server', async () => {
    const objects = await render('1.36.2', 'certificate.source=cert-manager')
    const certificate = ofKind(objects, 'Certificate')
    const secretName = at(ofKind(objects, 'Deployment'), 'spec.template.spec.volumes.0.secret.secretName') // prettier-ignore
    assert.equal(at(certificate, 'spec.secretName'), secretName)
    assert.equal(at(certificate, 'spec.issuerRef.name'), ofKind(objects, 'Issuer').metadata.name)
    for (const kind of ['MutatingWebhookConfiguration', 'ValidatingWebhookConfiguration']) {
      const { metadata, ...rest } = ofKind(objects, kind)
      assert.equal(
        metadata.annotations?.['cert-manager.io/inject-ca-from'],
        `fencing-proxy/${certificate.metadata.name}`,
      )
      assert.equal(at(rest, 'webhooks.0.clientConfig.caBundle'), undefined)
    }
  })

  test('of one’s own are mounted, and no other is made', async () => {
    const objects = await render('1.36.2', ...SUPPLIED)
    assert.equal(
      at(ofKind(objects, 'Deployment'), 'spec.template.spec.volumes.0.secret.secretName'),
      'mine',
    )
    assert.equal(
      at(ofKind(objects, 'MutatingWebhookConfiguration'), 'webhooks.0.clientConfig.caBundle'),
      Buffer.from('-----BEGIN CERTIFICATE-----').toString('base64'),
    )
  })
})

describe('Prometheus knows the injector by the CA', { skip }, () => {
  const monitored = async (...settings: string[]) => {
    const objects = await render('1.36.2', 'serviceMonitor.enabled=true', ...settings)
    const [endpoint] = at(ofKind(objects, 'ServiceMonitor'), 'spec.endpoints') as object[]
    return { objects, ca: at(endpoint, 'tlsConfig.ca') }
  }

  test('in the Secret that is made with it', async () => {
    const { objects, ca } = await monitored()
    assert.deepEqual(ca, { secret: { name: ofKind(objects, 'Secret').metadata.name, key: 'ca.crt' } }) // prettier-ignore
    assert.ok('ca.crt' in (at(ofKind(objects, 'Secret'), 'data') as object))
    const issued = await monitored('certificate.source=cert-manager')
    const name = at(ofKind(issued.objects, 'Certificate'), 'spec.secretName')
    assert.deepEqual(issued.ca, { secret: { name, key: 'ca.crt' } })
  })

  test('of the values, where the Secret is one’s own and need not hold it', async () => {
    const pem = '-----BEGIN CERTIFICATE-----\nMIIB: #\n-----END CERTIFICATE-----\n'
    const { objects, ca } = await monitored(...SUPPLIED, `certificate.caBundle=${pem}`)
    const map = ofKind(objects, 'ConfigMap')
    assert.deepEqual(ca, { configMap: { name: map.metadata.name, key: 'ca.crt' } })
    assert.deepEqual(map['data'], { 'ca.crt': pem })
    const service = ofKind(objects, 'Service').metadata.namespace
    assert.equal(map.metadata.namespace, service)
  })
})

describe('what the chart starts answers what the chart registers', { skip }, () => {
  const start = async (t: TestContext, ...settings: string[]) => {
    const objects = await render('1.36.2', ...settings)
    const injector = await startInjector(t, objects, await temporaryFolder(t))
    const pathOf = (kind: string) =>
      String(at(ofKind(objects, kind), 'webhooks.0.clientConfig.service.path'))
    return { objects, injector, pathOf }
  }

  test('Pods at the one path, with the image of the release, and workloads at the other', async (t) => {
    const { injector, pathOf } = await start(t, 'image.repository=example/fence', 'image.tag=v7')
    const pod = podOf()
    const kind = { group: '', version: 'v1', kind: 'Pod' }
    const ask = async (target: string, request: object) => {
      const answer = await injector.ask('POST', target, {
        ...{ apiVersion: 'admission.k8s.io/v1', kind: 'AdmissionReview' },
        request: { uid: '1', operation: 'CREATE', namespace: 'orders', ...request },
      })
      assert.equal(answer.status, 200, answer.text)
      return at(JSON.parse(answer.text), 'response') as Record<string, unknown>
    }
    const { patch } = await ask(pathOf('MutatingWebhookConfiguration'), { kind, object: pod })
    const operations = JSON.parse(Buffer.from(String(patch), 'base64').toString()) as unknown[]
    const [sidecar] = parsePod(applyPatch(pod, operations)).spec.initContainers ?? []
    assert.equal(sidecar?.image, 'example/fence:v7')
    assert.equal(sidecar.restartPolicy, 'Always', 'native, as the server is new enough')

    const deployment = {
      ...{ apiVersion: 'apps/v1', kind: 'Deployment' },
      metadata: { name: 'web', annotations: prefixed({ inject: 'true' }) },
      spec: { template: { spec: pod.spec } },
    }
    const warned = await ask(pathOf('ValidatingWebhookConfiguration'), {
      kind: { group: 'apps', version: 'v1', kind: 'Deployment' },
      object: deployment,
    })
    assert.match(String(warned['warnings']), /it belongs on the Pod template/)
  })

  test('the probes, the Service and the ServiceMonitor find it', async (t) => {
    const { objects, injector } = await start(t, 'serviceMonitor.enabled=true', 'port=9443')
    const container = at(ofKind(objects, 'Deployment'), 'spec.template.spec.containers.0')
    const [port] = at(container, 'ports') as { name: string; containerPort: number }[]
    assert.equal(port?.containerPort, 9443)
    for (const probe of ['startupProbe', 'readinessProbe', 'livenessProbe']) {
      const { path: target, port: name, scheme } = at(container, `${probe}.httpGet`) as Record<string, string> // prettier-ignore
      assert.deepEqual({ name, scheme }, { name: port.name, scheme: 'HTTPS' })
      assert.equal((await injector.ask('GET', target ?? '')).status, 200)
    }
    assert.equal(at(ofKind(objects, 'Service'), 'spec.ports.0.targetPort'), port.name)
    assert.equal(at(ofKind(objects, 'NetworkPolicy'), 'spec.ingress.0.ports.0.port'), port.name)
    const [endpoint] = at(ofKind(objects, 'ServiceMonitor'), 'spec.endpoints') as object[]
    assert.equal(at(endpoint, 'port'), at(ofKind(objects, 'Service'), 'spec.ports.0.name'))
    assert.equal(at(endpoint, 'tlsConfig.serverName'), injector.serverName)
    const metrics = await injector.ask('GET', '/metrics')
    assert.match(metrics.text, /^fencing_injector_certificate_expires_seconds \d/m)
    assert.equal(await injector.stop(), 0)
  })
})
