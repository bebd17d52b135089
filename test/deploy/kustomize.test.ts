import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { copyFile, cp, readFile } from 'node:fs/promises'
import path from 'node:path'
import { describe, test, type TestContext } from 'node:test'
import { promisify } from 'node:util'
import { temporaryFolder } from '../harness.ts'
import { at, ofKind, readObjects, type KubernetesObject } from './objects.ts'
import { assertValid } from './schema.ts'
import { kubectl, lackingTools, renderChart } from './tools.ts'

const skip = lackingTools()
const run = promisify(execFile)

/** A copy of the folder with a certificate where the user is to put one. */
async function copyWithCertificate(t: TestContext): Promise<string> {
  const folder = await temporaryFolder(t)
  await cp('deploy/kustomize', folder, { recursive: true })
  const place = path.join(folder, 'overlays/supplied-certificate')
  await run('openssl', [
    ...['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes'],
    ...['-subj', '/CN=webhook', '-days', '2'],
    ...['-keyout', path.join(place, 'tls.key'), '-out', path.join(place, 'tls.crt')],
  ])
  await copyFile(path.join(place, 'tls.crt'), path.join(place, 'ca.crt'))
  return folder
}

const build = async (folder: string): Promise<KubernetesObject[]> =>
  readObjects(await kubectl('kustomize', folder))

/** What both ways of installing must agree on, in an order of its own. */
function essence(objects: readonly KubernetesObject[]): object[] {
  const isHelms = (key: string) => /^(helm\.sh\/chart|app\.kubernetes\.io\/(version|managed-by|instance))$/.test(key) // prettier-ignore
  const clean = (value: unknown): unknown => {
    if (Array.isArray(value)) return value.map(clean)
    if (typeof value !== 'object' || value === null) return value
    const entries = Object.entries(value).filter(([key]) => !isHelms(key))
    return Object.fromEntries(entries.map(([key, member]) => [key, clean(member)]))
  }
  return objects
    .filter(({ kind }) => kind !== 'Namespace' && kind !== 'Secret')
    .map((object) => clean(object) as KubernetesObject)
    .sort((a, b) => a.kind.localeCompare(b.kind))
}

describe('the overlays of Kustomize', { skip }, () => {
  test('with cert-manager install what the chart installs', async () => {
    const objects = await build('deploy/kustomize/overlays/cert-manager')
    assertValid(objects)
    const settings = ['certificate.source=cert-manager', 'kubernetesVersion=1.33']
    const chart = readObjects(await renderChart('1.33.0', settings))
    assert.deepEqual(essence(objects), essence(chart))
  })

  test('with a supplied certificate tell the API server its CA, and install the same else', async (t) => {
    const folder = await copyWithCertificate(t)
    const objects = await build(path.join(folder, 'overlays/supplied-certificate'))
    assertValid(objects)
    const ca = await readFile(path.join(folder, 'overlays/supplied-certificate/ca.crt'), 'utf8')
    const settings = [
      'certificate.source=secret',
      'certificate.secretName=fencing-proxy-injector-tls',
      `certificate.caBundle=${ca}`,
      'kubernetesVersion=1.33',
    ]
    const chart = readObjects(await renderChart('1.33.0', settings))
    assert.deepEqual(essence(trimmed(objects)), essence(chart))
    const mounted = at(ofKind(objects, 'Deployment'), 'spec.template.spec.volumes.0.secret.secretName') // prettier-ignore
    const secret = ofKind(objects, 'Secret')
    assert.equal(secret.metadata.name, mounted)
    assert.deepEqual(Object.keys(at(secret, 'data') as object).sort(), ['ca.crt', 'tls.crt', 'tls.key']) // prettier-ignore
  })

  test('for older servers choose by the label, as the chart does', async (t) => {
    const folder = await copyWithCertificate(t)
    const objects = await build(path.join(folder, 'overlays/older-servers'))
    assertValid(objects)
    const ca = await readFile(path.join(folder, 'overlays/supplied-certificate/ca.crt'), 'utf8')
    const settings = [
      'certificate.source=secret',
      'certificate.secretName=fencing-proxy-injector-tls',
      `certificate.caBundle=${ca}`,
      'kubernetesVersion=1.21',
    ]
    const chart = readObjects(await renderChart('1.21.0', settings))
    assert.deepEqual(essence(trimmed(objects)), essence(chart))
  })

  test('take a ServiceMonitor in, and the image from one place', async (t) => {
    const folder = await temporaryFolder(t)
    await cp('deploy/kustomize', folder, { recursive: true })
    const overlay = path.join(folder, 'overlays/cert-manager')
    const sed = [
      's/^# components:/components:/',
      's/^#   - /  - /',
      's/newTag: .*/newName: example\\/fence\\n    newTag: v7/',
    ]
    await run('sed', [
      '-i',
      ...sed.flatMap((one) => ['-e', one]),
      path.join(overlay, 'kustomization.yaml'),
    ])
    const objects = await build(overlay)
    assertValid(objects)
    const chart = readObjects(
      await renderChart('1.33.0', ['certificate.source=cert-manager', 'serviceMonitor.enabled=true']),
    ) // prettier-ignore
    const monitor = (all: KubernetesObject[]) => essence([ofKind(all, 'ServiceMonitor')])
    assert.deepEqual(monitor(objects), monitor(chart))
    const container = at(ofKind(objects, 'Deployment'), 'spec.template.spec.containers.0')
    assert.equal(at(container, 'image'), 'example/fence:v7')
    assert.ok((at(container, 'args') as string[]).includes('--image=example/fence:v7'))
  })
})

/** Kustomize breaks long base64 into lines, which means nothing. */
function trimmed(objects: readonly KubernetesObject[]): KubernetesObject[] {
  const text = JSON.stringify(objects, (key, value: unknown) =>
    key === 'caBundle' && typeof value === 'string' ? value.replace(/\s/g, '') : value,
  )
  return JSON.parse(text) as KubernetesObject[]
}
