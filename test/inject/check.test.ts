import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { parse } from 'yaml'
import { checkManifests, type Finding } from '../../src/inject/check.ts'
import { injectManifests } from '../../src/inject/manifest.ts'
import { APP, ENOUGH, INJECTOR, inject, podOf, prefixed, without, type Parts } from './samples.ts'

type Json = Record<string, unknown>

const LABELS = { app: 'web' }

function manifestOf(parts: Parts = {}): Json {
  return { kind: 'Pod', ...podOf({ ...parts, metadata: { labels: LABELS, ...parts.metadata } }) }
}

/** A Pod of a cluster, injected. */
function live(name = 'web', parts: Parts = {}, changes: Json = {}): Json {
  const pod = podOf({ ...parts, metadata: { labels: LABELS, ...parts.metadata } })
  const { pod: injected } = inject(pod)
  return {
    kind: 'Pod',
    metadata: { ...injected.metadata, name, uid: `uid-${name}` },
    spec: injected.spec,
    status: { phase: 'Running', podIPs: [{ ip: `10.0.0.${name.length}` }] },
    ...changes,
  }
}

/** A Pod of a cluster that came in past the injector. */
function bypassed(name: string, annotations = prefixed(ENOUGH)): Json {
  const metadata = { name, uid: `uid-${name}`, labels: LABELS, annotations }
  return { ...manifestOf(), metadata }
}

function service(port: Json, more: Json = {}): Json {
  return { kind: 'Service', metadata: { name: 'web' }, spec: { selector: LABELS, ports: [port], ...more } } // prettier-ignore
}

const GOOD_SERVICE = service({ port: 80, targetPort: 'http' })

/** Lets in what the sidecar is for. */
const POLICY = policy([{ ports: [{ port: 15080 }, { port: 15081, protocol: 'TCP' }] }])

function policy(ingress: Json[], more: Json = {}): Json {
  return { kind: 'NetworkPolicy', metadata: { name: 'only-fence' }, spec: { podSelector: { matchLabels: LABELS }, ingress, ...more } } // prettier-ignore
}

function check(...objects: unknown[]) {
  const text = JSON.stringify({ kind: 'List', items: objects })
  const checked = checkManifests(text, INJECTOR)
  assert.ok(checked.kind === 'checked', JSON.stringify(checked))
  return checked
}

function ways(...objects: unknown[]): Finding['way'][] {
  return check(...objects).findings.map(({ way }) => way)
}

describe('no way around', () => {
  test('a fenced Pod behind a named port and a NetworkPolicy, live or to be', () => {
    const none = { kind: 'checked', findings: [] }
    assert.deepEqual(check(live(), GOOD_SERVICE, POLICY), { ...none, fenced: 1, asking: 0 })
    assert.deepEqual(check(manifestOf(), GOOD_SERVICE, POLICY), { ...none, fenced: 0, asking: 1 })
  })

  test('a manifest is looked at alike before and after injection', () => {
    const before = JSON.stringify(manifestOf())
    const result = injectManifests(before, INJECTOR)
    assert.ok(result.kind === 'injected')
    const [after, first] = [result.yaml, before].map((text) => checkManifests(text, INJECTOR))
    assert.deepEqual(after, { ...first, fenced: 1, asking: 0 })
  })

  test('redirection needs neither', () => {
    const pod = live('web', { annotations: { steering: 'redirect' } })
    const ip = service({ port: 80, targetPort: 8080 }, { clusterIP: 'None' })
    assert.deepEqual(ways(pod, ip), [])
  })

  test('Pods that ask for nothing are nobody’s business', () => {
    const pod = bypassed('plain', {})
    assert.deepEqual(check(pod, service({ port: 80, targetPort: 8080 })), {
      kind: 'checked',
      fenced: 0,
      asking: 0,
      findings: [],
    })
  })

  test('Pods that have ended receive nothing', () => {
    const ended = { ...bypassed('old'), status: { phase: 'Succeeded' } }
    assert.deepEqual(ways(ended, live(), GOOD_SERVICE, POLICY), [])
  })
})

describe('Services', () => {
  const findingsOf = (...objects: unknown[]) => ways(live(), POLICY, ...objects)

  test('a numeric targetPort (telepresence #3730), given or meant', () => {
    assert.deepEqual(findingsOf(service({ port: 80, targetPort: 8080 })), ['numeric-target-port'])
    assert.deepEqual(findingsOf(service({ port: 8080 })), ['numeric-target-port'])
    assert.deepEqual(findingsOf(service({ port: 80, targetPort: 15080 })), [])
  })

  test('the new name of the app port as targetPort', () => {
    assert.deepEqual(findingsOf(service({ port: 80, targetPort: 'http-app' })), ['app-port-targeted']) // prettier-ignore
  })

  test('a headless Service', () => {
    const headless = service({ port: 80, targetPort: 'http' }, { clusterIP: 'None' })
    assert.deepEqual(findingsOf(headless), ['headless-service'])
  })

  test('an unfenced Pod behind the same Service, unless only the sidecar has the name', () => {
    const pods = [live('web', { annotations: { steering: 'none' } }), bypassed('second', {})]
    assert.deepEqual(ways(...pods, POLICY, service({ port: 80, targetPort: 'fence-http' })), [])
    const second = [live(), bypassed('second', {}), POLICY]
    assert.deepEqual(ways(...second, GOOD_SERVICE), ['unfenced-endpoint'])
  })

  test('two fenced Pods, each with its own marks', () => {
    assert.deepEqual(ways(live('a'), live('b'), POLICY, GOOD_SERVICE), ['several-replicas'])
    assert.deepEqual(ways(live('a'), manifestOf(), POLICY, GOOD_SERVICE), [])
  })

  test('of another namespace, of other Pods and without a selector lead nowhere here', () => {
    const wrong = { port: 80, targetPort: 8080 }
    const elsewhere = { ...service(wrong), metadata: { name: 'web', namespace: 'other' } }
    const others = service(wrong, { selector: { app: 'web', tier: 'x' } })
    for (const one of [
      elsewhere,
      others,
      service(wrong, { selector: null }),
      service(wrong, { selector: {} }),
    ]) {
      // prettier-ignore
      assert.deepEqual(findingsOf(one), [])
    }
    const here = { ...service(wrong), metadata: { name: 'web', namespace: 'default' } }
    assert.deepEqual(findingsOf(here), ['numeric-target-port'])
  })
})

describe('EndpointSlices', () => {
  const slice = (port: number, endpoint: Json) => ({
    kind: 'EndpointSlice',
    metadata: { name: 'web-x1' },
    ports: [{ name: '', port }],
    endpoints: [endpoint],
  })
  const byName = { addresses: ['10.9.9.9'], targetRef: { kind: 'Pod', name: 'web' } }

  test('that send traffic to the app’s own port, by Pod or by address', () => {
    for (const endpoint of [byName, { addresses: ['10.0.0.3'] }]) {
      assert.deepEqual(ways(live(), POLICY, slice(8080, endpoint)), ['endpoint-at-app-port'])
      assert.deepEqual(ways(live(), POLICY, slice(15080, endpoint)), [])
    }
    assert.deepEqual(ways(live(), POLICY, slice(8080, { addresses: ['10.0.0.77'] })), [])
  })

  test('of another namespace, whose Pods have the same names', () => {
    const elsewhere = { ...slice(8080, byName), metadata: { name: 'web-x1', namespace: 'other' } }
    assert.deepEqual(ways(live(), POLICY, elsewhere), [])
  })

  test('that hold unfenced Pods beside fenced ones', () => {
    const both = { ...slice(15080, byName), endpoints: [byName, { targetRef: { kind: 'Pod', name: 'second' } }] } // prettier-ignore
    assert.deepEqual(ways(live(), bypassed('second', {}), POLICY, both), ['unfenced-endpoint'])
  })
})

describe('Pods', () => {
  test('that ask for a fence and came in without', () => {
    assert.deepEqual(ways(bypassed('web')), ['missing-sidecar'])
    const forged = prefixed({ ...ENOUGH, status: 'injected' })
    assert.deepEqual(ways(bypassed('web', forged)), ['missing-sidecar'])
    const fake = bypassed('web')
    const spec = fake.spec as { containers: Json[] }
    spec.containers.push({ name: 'fence-proxy', image: INJECTOR.image, command: ['sleep'], args: ['--listen', ':1', '--upstream', ':2'] }) // prettier-ignore
    assert.deepEqual(ways(fake), ['missing-sidecar'])
  })

  test('that will be refused', () => {
    const pod = manifestOf({ metadata: { annotations: prefixed(without('scope')) } })
    const { findings } = check(pod)
    assert.deepEqual(findings.map(({ way }) => way), ['refused']) // prettier-ignore
    assert.match(findings[0]?.words ?? '', /what is to be fenced is not said/)
  })

  test('with a hostPort, with hostNetwork', () => {
    const changed = (change: (spec: { containers: Json[] } & Json) => void) => {
      const pod = structuredClone(live())
      change(pod.spec as { containers: Json[] } & Json)
      return ways(pod, POLICY)
    }
    assert.deepEqual(changed((spec) => (spec.hostNetwork = true)), ['host-network'])
    const port = { name: 'http-app', containerPort: 8080, hostPort: 80 }
    assert.deepEqual(changed((spec) => (spec.containers[0] = { ...APP, ports: [port] })), ['host-port']) // prettier-ignore
  }) // prettier-ignore

  test('with two ports of one name', () => {
    const pod = structuredClone(live())
    const other = { name: 'late', image: 'x', ports: [{ name: 'http', containerPort: 9000 }] }
    const spec = pod.spec as { containers: Json[] }
    spec.containers.push(other)
    assert.deepEqual(ways(pod, POLICY), ['duplicate-port-name'])
  })

  test('with a store that is lost with them', () => {
    const annotations = prefixed({ ...without('store-volume'), 'allow-ephemeral-store': 'true' })
    assert.deepEqual(ways(live('web', { metadata: { annotations } }), POLICY), ['ephemeral-store'])
  })
})

describe('the app’s own port is open', () => {
  const openWith = (...policies: Json[]) => ways(live(), ...policies).includes('open-app-port')

  test('without a NetworkPolicy, or with one for others', () => {
    assert.equal(openWith(), true)
    assert.equal(openWith(policy([], { podSelector: { matchLabels: { app: 'other' } } })), true)
    assert.equal(openWith({ ...policy([]), metadata: { name: 'x', namespace: 'other' } }), true)
    assert.equal(openWith(policy([], { policyTypes: ['Egress'] })), true)
  })

  test('with one whose rules let it in', () => {
    assert.equal(openWith(policy([{}])), true)
    assert.equal(openWith(policy([{ from: [{ podSelector: {} }] }])), true)
    assert.equal(openWith(policy([{ ports: [{ protocol: 'TCP' }] }])), true)
    assert.equal(openWith(policy([{ ports: [{ port: 8080 }] }])), true)
    assert.equal(openWith(policy([{ ports: [{ port: 8000, endPort: 9000 }] }])), true)
    assert.equal(openWith(policy([{ ports: [{ port: 'http-app' }] }])), true)
    assert.equal(openWith(POLICY, policy([{ ports: [{ port: 8080 }] }])), true)
  })

  test('not with one that lets in the sidecar only, or nobody', () => {
    assert.equal(openWith(POLICY), false)
    assert.equal(openWith(policy([])), false)
    assert.equal(openWith(policy([], { ingress: undefined, podSelector: {} })), false)
    assert.equal(openWith(policy([{ ports: [{ port: 'http' }] }])), false)
    assert.equal(openWith(policy([{ ports: [{ port: 8080, protocol: 'UDP' }] }])), false)
    assert.equal(openWith(policy([{ ports: [{ port: 8000, endPort: 8079 }] }])), false)
  })

  test('policies choose Pods by expressions too', () => {
    const selecting = (operator: string, values?: string[], key = 'app') =>
      policy([], { podSelector: { matchExpressions: [{ key, operator, values }] } })
    assert.equal(openWith(selecting('In', ['web', 'x'])), false)
    assert.equal(openWith(selecting('In', ['x'])), true)
    assert.equal(openWith(selecting('NotIn', ['x'])), false)
    assert.equal(openWith(selecting('NotIn', ['web'])), true)
    assert.equal(openWith(selecting('NotIn', ['x'], 'tier')), false)
    assert.equal(openWith(selecting('Exists')), false)
    assert.equal(openWith(selecting('Exists', undefined, 'tier')), true)
    assert.equal(openWith(selecting('DoesNotExist', undefined, 'tier')), false)
    assert.equal(openWith(selecting('DoesNotExist')), true)
  })
})

describe('workloads', () => {
  const { spec, metadata } = manifestOf() as { spec: Json; metadata: Json }
  const deployment = (more: Json) => ({
    kind: 'Deployment',
    metadata: { name: 'web' },
    spec: { strategy: { type: 'Recreate' }, template: { metadata, spec }, ...more },
  })

  test('with replicas, with RollingUpdate, with the annotation in the wrong place, and refused', () => {
    assert.deepEqual(ways(deployment({}), POLICY, GOOD_SERVICE), [])
    assert.deepEqual(ways(deployment({ replicas: 2 }), POLICY), ['several-replicas'])
    assert.deepEqual(ways(deployment({ strategy: null }), POLICY), ['rolling-update'])
    const misplaced = { ...deployment({ template: { spec } }), metadata: { name: 'web', annotations: prefixed(ENOUGH) } } // prettier-ignore
    assert.deepEqual(ways(misplaced), ['misplaced-annotation'])
    const refused = deployment({ template: { metadata, spec: { ...spec, hostNetwork: true } } })
    assert.deepEqual(ways(refused), ['refused'])
  })

  test('without the label by which a server before 1.28 knows them', () => {
    const old = (object: Json, kubernetesMinor: number) => {
      const checked = checkManifests(JSON.stringify({ kind: 'List', items: [object, POLICY, GOOD_SERVICE] }), { ...INJECTOR, kubernetesMinor }) // prettier-ignore
      assert.ok(checked.kind === 'checked')
      return checked.findings.map(({ way }) => way)
    }
    assert.deepEqual(old(deployment({}), 27), ['missing-label'])
    assert.deepEqual(old(deployment({}), 28), [])
    const labels = { ...(metadata['labels'] as Json), 'fencing-proxy.io/inject': 'true' }
    const labelled = deployment({ template: { metadata: { ...metadata, labels }, spec } })
    assert.deepEqual(old(labelled, 27), [])
    const refused = deployment({ template: { metadata, spec: { ...spec, hostNetwork: true } } })
    assert.deepEqual(old(refused, 27), ['missing-label', 'refused'])
    const written = injectManifests(JSON.stringify(deployment({})), { ...INJECTOR, kubernetesMinor: 27 }) // prettier-ignore
    assert.ok(written.kind === 'injected')
    assert.doesNotMatch(written.warnings.join(), /label/, 'what is written into the manifest needs none') // prettier-ignore
    const done: unknown = parse(written.yaml)
    assert.deepEqual(old(done as Json, 27), [])
  })

  test('a ReplicaSet of a Deployment is not looked at twice', () => {
    const owner = { ownerReferences: [{ kind: 'Deployment', name: 'web' }] }
    const set = { kind: 'ReplicaSet', metadata: { name: 'web-1', ...owner }, spec: { replicas: 2, template: { metadata, spec } } } // prettier-ignore
    assert.deepEqual(ways(set, POLICY), [])
  })
})

test('what cannot be read is not taken for harmless', () => {
  for (const object of [
    { ...GOOD_SERVICE, spec: { ports: 'x' } },
    { kind: 'Pod', spec: { containers: 7 } },
    { metadata: {} },
    policy([{ ports: [{ port: {} }] }]),
  ]) {
    assert.equal(checkManifests(JSON.stringify(object), INJECTOR).kind, 'unreadable')
  }
})

test('a finding names its object, in its namespace', () => {
  const pod = {
    ...manifestOf(),
    metadata: { ...(manifestOf().metadata as Json), namespace: 'orders' },
  }
  assert.equal(check(pod).findings[0]?.object, 'Pod orders/web')
})
