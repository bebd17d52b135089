import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { evaluate } from '@marcbachmann/cel-js'
import fc from 'fast-check'
import { decide } from '../../src/inject/patch.ts'
import type { Pod } from '../../src/inject/pod.ts'
import { KEYS, WRITTEN } from '../../src/inject/settings.ts'
import { INJECTOR, ENOUGH, inject, podOf, prefixed } from '../inject/samples.ts'
import { at, ofKind, readObjects, type KubernetesObject } from './objects.ts'
import { kubectl, lackingTools, renderChart } from './tools.ts'

/**
 * Which Pods the API server asks the injector about, and which it refuses by itself: the
 * CEL expressions of chart and overlay, evaluated here, since no server that knows them can be built here.
 */

const skip = lackingTools()

interface Rule {
  readonly name?: string
  readonly expression: string
}

function holds({ expression }: Rule, object: unknown): boolean {
  const result: unknown = evaluate(expression, { object })
  assert.equal(typeof result, 'boolean', expression)
  return result === true
}

/** As the API server does it: where one condition is false the others, even failing, do not count. */
function allHold(rules: readonly Rule[], object: unknown): boolean {
  const results = rules.map((rule) => {
    try {
      return holds(rule, object)
    } catch (error) {
      return error as Error
    }
  })
  if (results.includes(false)) return false
  for (const result of results) if (result instanceof Error) throw result
  return true
}

async function rulesOf(...settings: string[]) {
  return rulesIn(readObjects(await renderChart('1.36.2', settings)))
}

async function rulesOfOverlay() {
  return rulesIn(readObjects(await kubectl('kustomize', 'deploy/kustomize/overlays/cert-manager')))
}

function rulesIn(objects: readonly KubernetesObject[]) {
  const list = (object: KubernetesObject, where: string) => at(object, where) as Rule[]
  const conditions = list(ofKind(objects, 'MutatingWebhookConfiguration'), 'webhooks.0.matchConditions') // prettier-ignore
  const policy = ofKind(objects, 'ValidatingAdmissionPolicy')
  const binding = ofKind(objects, 'ValidatingAdmissionPolicyBinding')
  assert.equal(at(binding, 'spec.policyName'), policy.metadata.name)
  assert.deepEqual(at(binding, 'spec.validationActions'), ['Deny'])
  const policyConditions = list(policy, 'spec.matchConditions')
  const validations = list(policy, 'spec.validations')
  return {
    isAsked: (pod: object) => allHold(conditions, pod),
    isRefused: (pod: object) =>
      allHold(policyConditions, pod) && !validations.every((rule) => holds(rule, pod)),
  }
}

const podWith = (annotations?: Record<string, string>, labels?: Record<string, string>): Pod => ({
  metadata: { name: 'web', ...(annotations && { annotations }), ...(labels && { labels }) },
  spec: { containers: [{ name: 'app' }] },
})

const key = 'fencing-proxy.io/inject'

const CASES: [what: string, pod: Pod, asks: boolean][] = [
  ['no annotations', podWith(), false],
  ['other keys', podWith({ a: 'b' }, { c: 'd' }), false],
  ['inject: "false"', podWith({ [key]: 'false' }), false],
  ['inject: "false" beside a misspelt key', podWith({ [key]: 'false', 'fencing-proxy.io/scpoe': '/a' }), false], // prettier-ignore
  ['inject: "true"', podWith({ [key]: 'true' }), true],
  ['an inject that is neither', podWith({ [key]: 'yes' }), true],
  ['an empty inject', podWith({ [key]: '' }), true],
  ['a misspelt inject', podWith({ 'fencing-proxy.io/injcet': 'true' }), true],
  ['a misspelt inject beside known keys', podWith({ 'fencing-proxy.io/injcet': 'true', 'fencing-proxy.io/scope': '/a' }), true], // prettier-ignore
  ['the label alone', podWith(undefined, { [key]: 'true' }), true],
  ['the label beside other annotations', podWith({ a: 'b' }, { [key]: 'true' }), true],
  ['the label beside known keys', podWith({ 'fencing-proxy.io/scope': '/a' }, { [key]: 'true' }), true], // prettier-ignore
  ['the label beside inject: "false"', podWith({ [key]: 'false' }, { [key]: 'true' }), false],
  ['a label that is not true', podWith(undefined, { [key]: 'false' }), false],
  ['another prefix', podWith({ 'my.fencing-proxy.io/inject': 'true' }), false],
  ...[...KEYS, ...WRITTEN]
    .filter((name) => name !== 'inject')
    .map((name): [string, Pod, boolean] => [`${name} without inject`, podWith({ [`fencing-proxy.io/${name}`]: 'true' }), false]), // prettier-ignore
]

/** The webhook is asked about the Pods that the API server refuses where they have no fence. */
describe('who asks for a fence, for the webhook and for the policy', { skip }, () => {
  for (const [where, load] of [
    ['chart', () => rulesOf()],
    ['overlay', rulesOfOverlay],
  ] as const) {
    test(`each case, in the ${where}`, async () => {
      const { isAsked, isRefused } = await load()
      for (const [what, pod, asks] of CASES) {
        const injected = decide(pod, INJECTOR).kind !== 'ignored'
        const answers = { isAsked: isAsked(pod), isRefused: isRefused(pod), injected }
        assert.deepEqual(answers, { isAsked: asks, isRefused: asks, injected: asks }, what)
      }
    })
  }

  test('nobody but those to whom the injector has something to say, whatever annotations and labels', async () => {
    const { isAsked, isRefused } = await rulesOf()
    const entries = fc.dictionary(
      fc.constantFrom(key, 'fencing-proxy.io/scope', 'fencing-proxy.io/injcet', 'fencing-proxy.io/status', 'other/inject'), // prettier-ignore
      fc.constantFrom('true', 'false', 'True', '', '/jobs/{job}/**'),
    )
    const maybe = fc.option(entries, { nil: undefined })
    fc.assert(
      fc.property(maybe, maybe, (annotations, labels) => {
        const pod = podWith(annotations, labels)
        const asks = decide(pod, INJECTOR).kind !== 'ignored'
        assert.equal(isAsked(pod), asks)
        assert.equal(isRefused(pod), asks)
      }),
      { numRuns: 2_000 },
    )
  })

  test('by the prefix of the release', async () => {
    const { isAsked, isRefused } = await rulesOf('prefix=fence.example.com')
    for (const asks of [isAsked, isRefused]) {
      assert.ok(asks(podWith({ 'fence.example.com/inject': 'true' })))
      assert.ok(asks(podWith(undefined, { 'fence.example.com/inject': 'true' })))
      assert.ok(!asks(podWith({ [key]: 'true' }, { [key]: 'true' })))
    }
  })

  test('not its own Pods, so that it can start while it is down (vault-k8s #258)', async () => {
    const objects = readObjects(await renderChart('1.36.2', ['podAnnotations.a=b']))
    const own = at(ofKind(objects, 'Deployment'), 'spec.template') as object
    const { isAsked, isRefused } = await rulesOf()
    assert.ok(!isAsked(own))
    assert.ok(!isRefused(own))
  })
})

describe('the API server refuses by itself', { skip }, () => {
  test('a Pod that asks for a fence and has none', async () => {
    const { isRefused } = await rulesOf()
    assert.ok(isRefused(podOf()))
  })

  test('no injected Pod, native or not, redirected or not', async () => {
    const { isRefused } = await rulesOf()
    for (const kubernetesMinor of [20, 36]) {
      for (const steering of ['named-port', 'redirect', 'none']) {
        const { pod } = inject(podOf({ annotations: { steering } }), { kubernetesMinor })
        assert.ok(!isRefused(pod), steering)
      }
    }
  })

  test('no Pod that asks for nothing, and none that the node runs anyway', async () => {
    const { isRefused } = await rulesOf()
    assert.ok(!isRefused(podWith()))
    assert.ok(!isRefused(podWith(prefixed({ ...ENOUGH, inject: 'false' }))))
    assert.ok(!isRefused(podWith(prefixed({ scope: '/a' }))), 'the injector ignores it, too')
    const mirrored = { ...prefixed(ENOUGH), 'kubernetes.io/config.mirror': 'x' }
    assert.ok(!isRefused(podWith(mirrored)))
    const labelled = { 'kubernetes.io/config.mirror': 'x' }
    assert.ok(!isRefused(podWith(labelled, { [key]: 'true' })))
  })

  test('a container that only has the name', async () => {
    const { isRefused } = await rulesOf()
    const annotations = prefixed(ENOUGH)
    const args = ['serve', '--upstream', 'http://127.0.0.1:8080']
    const pod = (spec: object) => ({ metadata: { annotations }, spec })
    const app = { name: 'app' }
    assert.ok(!isRefused(pod({ containers: [app, { name: 'fence-proxy', args }] })), 'as it should be') // prettier-ignore
    assert.ok(isRefused(pod({ containers: [app, { name: 'fence-proxy' }] })))
    assert.ok(isRefused(pod({ containers: [{ name: 'fence-proxy', args, command: ['sleep'] }] })))
    assert.ok(
      isRefused(pod({ containers: [app], initContainers: [{ name: 'fence-proxy', args }] })),
      'an init container that ends is no sidecar',
    )
  })
})
