import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { parse, parseAllDocuments } from 'yaml'
import { injectManifests } from '../../src/inject/manifest.ts'
import { APP, ENOUGH, INJECTOR, podOf, prefixed, without } from './samples.ts'

type Json = Record<string, unknown>

const { metadata, spec } = podOf()
const TEMPLATE = { metadata: { labels: { app: 'web' }, annotations: metadata?.annotations }, spec }

function objectOf(kind: string, more: Json = {}): Json {
  const name = { name: 'web' }
  if (kind === 'Pod') return { kind, metadata: { ...metadata }, spec, ...more }
  if (kind === 'CronJob') return { kind, metadata: name, spec: { jobTemplate: { spec: { template: TEMPLATE } } }, ...more } // prettier-ignore
  return { kind, metadata: name, spec: { template: TEMPLATE }, ...more }
}

/** JSON is YAML. */
const textOf = (...objects: unknown[]) => objects.map((object) => JSON.stringify(object)).join('\n---\n') // prettier-ignore

function injected(text: string) {
  const result = injectManifests(text, INJECTOR)
  assert.equal(result.kind, 'injected', JSON.stringify(result))
  // Read as YAML 1.1, as kubectl does, and as 1.2: both must see the same.
  const documents = parseAllDocuments(result.yaml).map((document) => document.toJS() as Json)
  const inOldReading = parseAllDocuments(result.yaml, { version: '1.1' }).map((document) => document.toJS() as Json) // prettier-ignore
  assert.deepEqual(inOldReading, documents)
  return { documents, yaml: result.yaml, warnings: result.warnings }
}

const countOf = (value: unknown) => JSON.stringify(value).split('"name":"fence-proxy"').length - 1

describe('injection into manifests', () => {
  const kinds = ['Pod', 'Deployment', 'StatefulSet', 'DaemonSet', 'ReplicaSet', 'ReplicationController', 'Job', 'CronJob'] // prettier-ignore
  for (const kind of kinds) {
    test(`a ${kind} is injected once, and the result is left as it is`, () => {
      const { documents, yaml } = injected(textOf(objectOf(kind)))
      assert.equal(countOf(documents), 1)
      assert.equal(injected(yaml).yaml, yaml)
    })
  }

  test('other kinds, and Pods that ask for nothing, pass', () => {
    const others = [
      { kind: 'Service', spec: { ports: [{ port: 80 }] } },
      { kind: 'ConfigMap', data: { 'x.yaml': 'kind: Pod\n' } },
      { kind: 'Deployment', spec: { template: { spec } } },
      { kind: 'Deployment', metadata: { name: 'a-patch' }, spec: { replicas: 3 } },
      { kind: 'FooList', spec: {} },
    ]
    assert.deepEqual(injected(textOf(...others)).documents, others)
  })

  test('a List is its items, also within a List', () => {
    const list = { kind: 'List', items: [objectOf('Pod'), { kind: 'PodList', items: [objectOf('Pod')] }] } // prettier-ignore
    assert.equal(countOf(injected(textOf(list)).documents), 2)
  })

  test('every document of a file comes out, in order, each apart', () => {
    const text = `# first
apiVersion: v1
kind: ConfigMap
metadata: {name: one}
data: {answer: "yes", mode: "0644", time: "12:30:00", day: "2026-12-01", octal: "0o17"}
---
---
${textOf(objectOf('Deployment'))}
--- # last
kind: Service
metadata:
  name: three # stays
`
    const { documents, yaml } = injected(text)
    assert.deepEqual(documents.map(({ kind }) => kind), ['ConfigMap', 'Deployment', 'Service']) // prettier-ignore
    assert.deepEqual(documents[0]?.data, { answer: 'yes', mode: '0644', time: '12:30:00', day: '2026-12-01', octal: '0o17' }) // prettier-ignore
    assert.match(yaml, /name: three # stays/)
  })

  test('an empty file comes out empty', () => {
    for (const text of ['', '---\n', '# nothing\n']) {
      assert.deepEqual(injectManifests(text, INJECTOR), {
        kind: 'injected',
        yaml: '',
        warnings: [],
      })
    }
  })

  test('unknown fields stay, wherever they are', () => {
    const object = objectOf('Deployment', { status: { x: [1, { y: null }] }, 'x-top': true })
    const [after] = injected(textOf(object)).documents
    assert.deepEqual(after?.status, object.status)
    assert.equal(after?.['x-top'], true)
    const pod = objectOf('Pod', { spec: { ...spec, 'x-spec': { deep: ['x'] } } })
    assert.deepEqual((injected(textOf(pod)).documents[0]?.spec as Json)['x-spec'], { deep: ['x'] })
  })

  test('values are read as kubectl reads them, and written so that nobody reads them otherwise', () => {
    const text = `
kind: Pod
metadata:
  annotations: {${Object.entries(prefixed(ENOUGH)).map(([key, value]) => `${key}: "${value}"`).join(', ')}}
  labels: {a: "yes", b: "on", c: "1e3", d: "0x1f", e: "null", f: "1_000", g: "12:30", h: 'n'}
spec:
  volumes:
    - {name: data, persistentVolumeClaim: {claimName: data}}
    - {name: keys, secret: {secretName: keys, defaultMode: 0400}}
  containers:
    - name: app
      image: example/app:1
      args: [2026-12-01, 12:30:45, ~, "~", 1.0]
      tty: yes
      ports: [{name: http, containerPort: 8080}]
`
    // ~ in args is no string; Kubernetes would refuse it, and so do we.
    assert.match(JSON.stringify(injectManifests(text, INJECTOR)), /unreadable.*args\.2: must be a string/) // prettier-ignore
    const { documents } = injected(text.replace(', ~, "~", 1.0', ', "~"'))
    const [pod] = documents as [{ metadata: { labels: Json }; spec: { volumes: Json[]; containers: Json[] } }] // prettier-ignore
    const { a, b, c, d, e, f, g, h } = pod.metadata.labels
    assert.deepEqual({ a, b, c, d, e, f, g, h }, { a: 'yes', b: 'on', c: '1e3', d: '0x1f', e: 'null', f: '1_000', g: '12:30', h: 'n' }) // prettier-ignore
    assert.deepEqual(pod.spec.volumes[1]?.secret, { secretName: 'keys', defaultMode: 0o400 })
    assert.deepEqual(pod.spec.containers[0]?.args, ['2026-12-01', '12:30:45', '~'])
    assert.equal(pod.spec.containers[0].tty, true)
  }) // prettier-ignore

  test('anchors, merge keys and long lines survive', () => {
    const long = 'word '.repeat(60).trim()
    const text = textOf(objectOf('Pod')).replace(/}$/, `,"x-base": &base {"a":1,"b":"${long}"},"x-use":{"<<": *base,"c":2}}`) // prettier-ignore
    const [pod] = injected(text.replace('"<<"', '<<')).documents
    assert.deepEqual(pod?.['x-use'], { a: 1, b: long, c: 2 })
  })

  test('a claim template of a StatefulSet is a volume of its Pods', () => {
    const volumeClaimTemplates = [{ metadata: { name: 'marks' }, spec: {} }]
    const annotations = prefixed({ ...ENOUGH, 'store-volume': 'marks' })
    const template = { ...TEMPLATE, metadata: { annotations } }
    const object = { kind: 'StatefulSet', metadata: { name: 'x' }, spec: { template, volumeClaimTemplates } } // prettier-ignore
    const [after] = injected(textOf(object)).documents
    assert.match(JSON.stringify(after), /"volumeMounts":\[\{"name":"marks"/)
    const { spec: afterSpec } = (after?.spec as { template: { spec: Json } }).template
    assert.deepEqual(afterSpec.volumes, spec.volumes)
    const result = injectManifests(textOf({ ...object, spec: { template } }), INJECTOR)
    assert.equal(result.kind, 'refused')
  })
})

describe('what is told', () => {
  test('one refused object keeps back all, and every reason is given', () => {
    const refused = objectOf('Pod', { metadata: { name: 'a', annotations: prefixed(without('scope')) } }) // prettier-ignore
    const another = objectOf('Pod', { spec: { ...spec, hostNetwork: true } })
    const result = injectManifests(textOf(objectOf('Deployment'), refused, another), INJECTOR)
    assert.ok(result.kind === 'refused')
    assert.equal(result.reasons.length, 2)
    assert.match(result.reasons[0] ?? '', /^Pod a: .*what is to be fenced is not said/)
    assert.match(result.reasons[1] ?? '', /^Pod web: the Pod has hostNetwork/)
  })

  test('annotations on the Deployment itself (dapr #4932), replicas, and RollingUpdate', () => {
    const on = { name: 'web', namespace: 'orders', annotations: prefixed(ENOUGH) }
    const misplaced = { kind: 'Deployment', metadata: on, spec: { template: { spec } } }
    const many = objectOf('StatefulSet', { spec: { replicas: 3, template: TEMPLATE } })
    const rolling = objectOf('Deployment')
    const daemon = objectOf('DaemonSet')
    const quiet = objectOf('Deployment', { spec: { strategy: { type: 'Recreate' }, template: TEMPLATE } }) // prettier-ignore
    const told = (object: Json) => injected(textOf(object)).warnings.filter((one) => !/is fenced;/.test(one)) // prettier-ignore
    assert.match(told(misplaced).join(), /^Deployment orders\/web: not fenced: fencing-proxy\.io\/inject stands on the Deployment; it belongs on the Pod template/) // prettier-ignore
    assert.match(told(many).join(), /^StatefulSet web: 3 replicas/)
    assert.match(told(rolling).join(), /^Deployment web: RollingUpdate .*Recreate$/)
    assert.match(told(daemon).join(), /^DaemonSet web: a Pod on every node/)
    assert.deepEqual(told(quiet), [])
  })

  test('what is no YAML and what is no object is unreadable, and nothing is written', () => {
    const value = { ...APP, ports: 'http' }
    const cases: [string, RegExp][] = [
      ['a: [', /./],
      ['a: 1\na: 2', /unique/],
      ['just text', /no object of Kubernetes/],
      ['- kind: Pod', /no object of Kubernetes/],
      ['metadata: {}', /no object of Kubernetes: kind/],
      [textOf(objectOf('Pod', { spec: { containers: [value] } })), /^Pod web: spec\.containers\.0\.ports/], // prettier-ignore
      [textOf(objectOf('Pod')).replace('"true"', 'true'), /inject: must be a string \(quote it\)/],
      [textOf({ kind: 'List', items: [null] }), /no object of Kubernetes/],
    ]
    for (const [text, mistake] of cases) {
      const result = injectManifests(text, INJECTOR)
      assert.ok(result.kind === 'unreadable', text)
      assert.match(result.mistakes.join('\n'), mistake)
    }
  })
})

test('what is printed is block YAML for people', () => {
  const { yaml } = injected(textOf(objectOf('Pod')))
  assert.match(yaml, /^kind: Pod\nmetadata:\n {2}name: web\n/)
  assert.equal((parse(yaml) as Json).kind, 'Pod')
})
