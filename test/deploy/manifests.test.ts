import assert from 'node:assert/strict'
import { readFileSync, readdirSync } from 'node:fs'
import { describe, test } from 'node:test'
import { runInject, runInjectCheck } from '../../src/inject/run.ts'
import { at, ofKind, readObjects } from './objects.ts'
import { assertValid } from './schema.ts'

/** The manifests under deploy/kubernetes. deploy.test.ts sees that what they start would run. */

const FOLDER = 'deploy/kubernetes'
const read = (file: string) => readFileSync(`${FOLDER}/${file}`, 'utf8')

test('every manifest is what the API of Kubernetes knows', () => {
  const files = readdirSync(FOLDER)
  assert.ok(files.length >= 3)
  assertValid(files.flatMap((file) => readObjects(read(file))))
})

test('what the API of Kubernetes does not know is found, at any depth', () => {
  const [pod] = readObjects(`
    apiVersion: v1
    kind: Pod
    metadata: { name: a }
    spec: { containers: [{ name: a, ports: [{ containerPort: 80, protocoll: TCP }] }] }`)
  assert.ok(pod)
  assert.throws(() => assertValid([pod]), /protocoll.*does not exist/)
  const [kind] = readObjects('apiVersion: apps/v1\nkind: Deploiment\nmetadata: { name: a }')
  assert.ok(kind)
  assert.throws(() => assertValid([kind]), /Deploiment/)
})

describe('the annotated Deployment', () => {
  const flags = { image: 'fencing-proxy:0.1.0' }
  for (const kubernetesVersion of ['1.27', '1.36']) {
    test(`is fenced on ${kubernetesVersion} with no way around, before and after`, () => {
      const text = read('annotated-deployment.yaml')
      const done = (words: string) => ({ code: 0, output: '', messages: [words] })
      assert.deepEqual(
        runInjectCheck(text, { ...flags, kubernetesVersion }),
        done(
          '1 Pod or template asks for a fence: it is fenced where the injector is installed, and no way around shows then',
        ),
      )
      const injected = runInject(text, { ...flags, kubernetesVersion })
      assert.equal(injected.code, 0)
      assert.deepEqual(
        runInjectCheck(injected.output, { ...flags, kubernetesVersion }),
        done('1 Pod or template is fenced, and no way around shows'),
      )
      const objects = readObjects(injected.output)
      assertValid(objects)
      assert.equal(at(ofKind(objects, 'Service'), 'spec.ports.0.targetPort'), 'http')
      const spec = at(ofKind(objects, 'Deployment'), 'spec.template.spec') as object
      assert.equal('initContainers' in spec, kubernetesVersion === '1.36')
    })
  }
})
