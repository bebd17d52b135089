import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { X509Certificate } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { copyFile, rename, rm, symlink, writeFile } from 'node:fs/promises'
import https from 'node:https'
import path from 'node:path'
import { describe, test, type TestContext } from 'node:test'
import tls from 'node:tls'
import { promisify } from 'node:util'
import type { Pod } from '../../src/inject/pod.ts'
import { startWebhook, WebhookStartError, type WebhookSettings } from '../../src/inject/webhook.ts'
import { createLog } from '../../src/log.ts'
import { temporaryFolder, until } from '../harness.ts'
import { applyPatch } from './rfc6902.ts'
import {
  INJECTOR,
  REAL_ENOUGH,
  containerOf,
  parsePod,
  podOf,
  prefixed,
  reviews,
} from './samples.ts'

const run = promisify(execFile)

interface CertificateFiles {
  readonly cert: string
  readonly key: string
}

/** A self-signed certificate for 127.0.0.1. */
async function makeCertificate(folder: string, name: string): Promise<CertificateFiles> {
  const files = { cert: path.join(folder, `${name}.crt`), key: path.join(folder, `${name}.key`) }
  await run('openssl', [
    ...['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes'],
    ...['-subj', `/CN=${name}`, '-addext', 'subjectAltName=IP:127.0.0.1', '-days', '2'],
    ...['-keyout', files.key, '-out', files.cert],
  ])
  return files
}

/** Replaces a file at once: the webhook never sees half of it. */
async function put(from: string, to: string): Promise<void> {
  await copyFile(from, `${to}.new`)
  await rename(`${to}.new`, to)
}

interface Answer {
  readonly status: number
  readonly text: string
}

interface Webhook {
  readonly port: number
  readonly files: CertificateFiles
  readonly folder: string
  readonly log: Record<string, unknown>[]
  readonly close: () => Promise<void>
  ask(target: string, body: unknown, headers?: Record<string, string>): Promise<Answer>
  get(target: string): Promise<Answer>
}

async function startOne(t: TestContext, settings: Partial<WebhookSettings> = {}): Promise<Webhook> {
  const folder = await temporaryFolder(t)
  const files = settings.certificate ?? (await makeCertificate(folder, 'webhook'))
  const log: Record<string, unknown>[] = []
  const write = (line: string) => void log.push(JSON.parse(line) as Record<string, unknown>)
  const running = await startWebhook(
    {
      listen: { host: '127.0.0.1', port: 0 },
      certificate: files,
      injector: INJECTOR,
      certificateCheckMs: 1,
      ...settings,
    },
    createLog('info', { write }),
  )
  t.after(() => running.close())
  const port = Number(running.address.split(':').at(-1))
  const ca = readFileSync(files.cert)

  const send = (method: string, target: string, body: string, headers: Record<string, string>) =>
    new Promise<Answer>((resolve, reject) => {
      const options = { host: '127.0.0.1', port, method, path: target, headers, ca, agent: false }
      const request = https.request(options, (response) => {
        let text = ''
        response.setEncoding('utf8')
        response.on('data', (chunk: string) => (text += chunk))
        response.on('end', () => resolve({ status: response.statusCode ?? 0, text }))
        response.on('error', reject)
      })
      request.on('error', reject)
      request.end(body)
    })
  return {
    port,
    files,
    folder,
    log,
    close: () => running.close(),
    ask: (target, body, headers = { 'content-type': 'application/json' }) =>
      send('POST', target, typeof body === 'string' ? body : JSON.stringify(body), headers),
    get: (target) => send('GET', target, '', {}),
  }
}

interface Response {
  readonly uid: string
  readonly allowed: boolean
  readonly patchType?: string
  readonly patch?: string
  readonly warnings?: string[]
  readonly status?: { readonly code: number; readonly message: string }
}

function responseOf({ status, text }: Answer): Response {
  assert.equal(status, 200, text)
  const review = JSON.parse(text) as { apiVersion: string; kind: string; response: Response }
  assert.equal(review.apiVersion, 'admission.k8s.io/v1')
  assert.equal(review.kind, 'AdmissionReview')
  return review.response
}

function patched(object: unknown, { patchType, patch }: Response): Pod {
  assert.equal(patchType, 'JSONPatch')
  const operations = JSON.parse(Buffer.from(patch ?? '', 'base64').toString()) as unknown[]
  return parsePod(applyPatch(object, operations))
}

function reviewOf(object: unknown, more: Record<string, unknown> = {}) {
  const kind = { group: '', version: 'v1', kind: 'Pod' }
  const request = { uid: 'u-1', kind, operation: 'CREATE', object, namespace: 'orders', ...more }
  return { apiVersion: 'admission.k8s.io/v1', kind: 'AdmissionReview', request }
}

describe('/mutate', () => {
  test('answers every real request, first, reinvoked and dry run', async (t) => {
    const webhook = await startOne(t)
    for (const { file, body } of reviews()) {
      const pod = parsePod(body.request.object)
      const asks = pod.metadata?.annotations?.['fencing-proxy.io/inject'] === 'true'

      const asIs = responseOf(await webhook.ask('/mutate', body))
      assert.equal(asIs.uid, body.request.uid)
      assert.equal(asIs.allowed, !asks, file)
      assert.equal(asIs.patch, undefined)
      if (!asks) continue
      assert.match(asIs.status?.message ?? '', /what is to be fenced is not said/)

      const annotations = { ...pod.metadata?.annotations, ...prefixed(REAL_ENOUGH) }
      const object = { ...pod, metadata: { ...pod.metadata, annotations } }
      const whole = { ...body, request: { ...body.request, object } }
      const response = responseOf(await webhook.ask('/mutate', whole))
      assert.equal(response.allowed, true, file)
      assert.equal(response.warnings?.length, 1)
      const injected = patched(object, response)
      assert.ok(containerOf(injected, 'fence-proxy'))

      const again = responseOf(await webhook.ask('/mutate', { ...body, request: { ...body.request, object: injected } })) // prettier-ignore
      assert.deepEqual(again, { uid: body.request.uid, allowed: true })
    }
  })

  test('a dry run gets the same answer', async (t) => {
    const webhook = await startOne(t)
    const [wet, dry] = await Promise.all(
      [false, true].map(async (dryRun) => responseOf(await webhook.ask('/mutate', reviewOf(podOf(), { dryRun })))), // prettier-ignore
    )
    assert.deepEqual(dry, wet)
  })

  test('a denial says why and what to do, and has no patch', async (t) => {
    const webhook = await startOne(t)
    const pod = podOf({ spec: { hostNetwork: true } })
    const { allowed, status, patch } = responseOf(await webhook.ask('/mutate', reviewOf(pod)))
    assert.equal(allowed, false)
    assert.equal(patch, undefined)
    assert.equal(status?.code, 403)
    assert.match(status.message, /^fencing-proxy: the Pod has hostNetwork.*; remove hostNetwork$/)
  })

  test('a mirror Pod is allowed with a warning', async (t) => {
    const webhook = await startOne(t)
    const annotations = { ...podOf().metadata?.annotations, 'kubernetes.io/config.mirror': 'x' }
    const response = responseOf(await webhook.ask('/mutate', reviewOf(podOf({ metadata: { annotations } })))) // prettier-ignore
    assert.equal(response.allowed, true)
    assert.match(response.warnings?.[0] ?? '', /static Pod/)
  })

  test('a Pod that cannot be read is refused', async (t) => {
    const webhook = await startOne(t)
    const broken = { ...podOf(), spec: { containers: [{ name: 7 }] } }
    const { allowed, status } = responseOf(await webhook.ask('/mutate', reviewOf(broken)))
    assert.equal(allowed, false)
    assert.match(status?.message ?? '', /spec\.containers\.0\.name/)
  })

  test('an error of the injector is a refusal, and the process goes on', async (t) => {
    let broken = false
    const injector = {
      ...INJECTOR,
      get image(): string {
        if (broken) throw new Error('boom')
        return INJECTOR.image
      },
    }
    const webhook = await startOne(t, { injector })
    broken = true
    const failed = responseOf(await webhook.ask('/mutate', reviewOf(podOf())))
    assert.equal(failed.allowed, false)
    assert.equal(failed.status?.code, 500)
    assert.doesNotMatch(failed.status.message, /boom/)
    assert.ok(webhook.log.some(({ event }) => event === 'injection_failed'))
    broken = false
    assert.equal(responseOf(await webhook.ask('/mutate', reviewOf(podOf()))).allowed, true)
  })

  test('what is no new Pod is allowed, with a warning that the webhook is registered for too much', async (t) => {
    const webhook = await startOne(t)
    for (const more of [
      { operation: 'UPDATE' },
      { operation: 'DELETE', object: null },
      { subResource: 'ephemeralcontainers' },
      { kind: { group: 'apps', version: 'v1', kind: 'Deployment' } },
    ]) {
      const response = responseOf(await webhook.ask('/mutate', reviewOf(podOf(), more)))
      assert.equal(response.allowed, true)
      assert.equal(response.patch, undefined)
      assert.equal(response.warnings?.length, 1)
    }
  })
})

describe('/validate', () => {
  const kind = { group: 'apps', version: 'v1', kind: 'Deployment' }
  const template = { metadata: podOf().metadata, spec: podOf().spec }

  test('warns of what will not work, and allows it', async (t) => {
    const webhook = await startOne(t)
    const deployment = { kind: 'Deployment', metadata: { name: 'web' }, spec: { replicas: 2, template } } // prettier-ignore
    const response = responseOf(await webhook.ask('/validate', reviewOf(deployment, { kind })))
    assert.equal(response.allowed, true)
    assert.equal(response.warnings?.length, 2)
    assert.match(response.warnings[0] ?? '', /^fencing-proxy: 2 replicas/)
    assert.match(response.warnings[1] ?? '', /RollingUpdate/)
  })

  test('says nothing where nothing is wrong, and of what it cannot read', async (t) => {
    const webhook = await startOne(t)
    const spec = { strategy: { type: 'Recreate' }, template }
    for (const object of [{ kind: 'Deployment', spec }, null, 7, { kind: 'Deployment' }]) {
      const response = responseOf(await webhook.ask('/validate', reviewOf(object, { kind })))
      assert.deepEqual(response, { uid: 'u-1', allowed: true })
    }
  })
})

describe('what is no question', () => {
  test('gets 415, 400, 413 or 404', async (t) => {
    const webhook = await startOne(t)
    const json = { 'content-type': 'application/json' }
    const fine = JSON.stringify(reviewOf(podOf()))
    const padded = (bytes: number) => fine.padEnd(bytes, ' ')
    const cases: [status: number, body: unknown, headers: Record<string, string>][] = [
      [415, fine, { 'content-type': 'text/plain' }],
      [415, fine, { 'content-type': 'application/yaml' }],
      [415, fine, {}],
      [400, '', json],
      [400, '{"kind":', json],
      [400, '[]', json],
      [400, 'null', json],
      [400, { ...reviewOf(podOf()), apiVersion: 'admission.k8s.io/v1beta1' }, json],
      [400, { apiVersion: 'admission.k8s.io/v1', kind: 'AdmissionReview' }, json],
      [400, reviewOf(podOf(), { uid: '' }), json],
      [413, padded(3 * 1024 * 1024 + 1), json],
      [200, padded(3 * 1024 * 1024), json],
      [200, fine, { 'content-type': 'application/json; charset=utf-8' }],
    ]
    for (const [status, body, headers] of cases) {
      const answer = await webhook.ask('/mutate', body, headers)
      assert.equal(answer.status, status, `${JSON.stringify(headers)} ${answer.text}`)
    }
    assert.equal((await webhook.get('/mutate')).status, 404)
    assert.equal((await webhook.ask('/', {})).status, 404)
  })

  test('a request that does not arrive whole is given up, also while stopping', async (t) => {
    const webhook = await startOne(t, { requestTimeoutMs: 200 })
    const halfRequest = () => {
      const ca = readFileSync(webhook.files.cert)
      const socket = tls.connect({ host: '127.0.0.1', port: webhook.port, ca })
      t.after(() => socket.destroy())
      const seen = { received: '', secure: false, closed: false }
      socket.on('data', (chunk: Buffer) => (seen.received += chunk.toString()))
      socket.on('secureConnect', () => (seen.secure = true))
      socket.on('error', () => undefined)
      socket.on('close', () => (seen.closed = true))
      socket.write('POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{') // prettier-ignore
      return seen
    }
    const first = halfRequest()
    await until(() => first.closed, 'the connection is closed')
    assert.match(first.received, /^HTTP\/1\.1 408 /)

    const second = halfRequest()
    await until(() => second.secure, 'it is connected')
    await webhook.close()
    await until(() => second.closed, 'the second is closed')
  })
})

describe('health and metrics', () => {
  test('tell how it goes', async (t) => {
    const webhook = await startOne(t)
    assert.equal((await webhook.get('/healthz')).status, 200)
    await webhook.ask('/mutate', reviewOf(podOf()))
    await webhook.ask('/mutate', reviewOf(podOf({ spec: { hostNetwork: true } })))
    const { text } = await webhook.get('/metrics')
    assert.match(text, /^fencing_injector_reviews_total\{path="\/mutate",result="injected"\} 1$/m)
    assert.match(text, /^fencing_injector_reviews_total\{path="\/mutate",result="denied"\} 1$/m)
    const expiry = Number(/^fencing_injector_certificate_expires_seconds (\S+)$/m.exec(text)?.[1])
    const { validTo } = new X509Certificate(readFileSync(webhook.files.cert))
    assert.equal(expiry, Date.parse(validTo) / 1000)
  })

  test('the log names what was decided and nothing of what the Pod holds', async (t) => {
    const webhook = await startOne(t)
    const app = { name: 'app', image: 'x', env: [{ name: 'PASSWORD', value: 'hunter2' }] }
    const ports = [{ name: 'http', containerPort: 8080 }]
    await webhook.ask('/mutate', reviewOf(podOf({ containers: [{ ...app, ports }] })))
    await webhook.ask('/mutate', reviewOf(podOf({ containers: [app] })))
    await webhook.ask('/mutate', reviewOf({ ...podOf(), metadata: { name: 'asks-nothing' } }))
    const [injected, denied, ...rest] = webhook.log.filter(({ event }) => String(event).startsWith('admission_')) // prettier-ignore
    assert.deepEqual(rest, [])
    assert.equal(injected?.event, 'admission_injected')
    assert.equal(injected.namespace, 'orders')
    assert.equal(injected.name, 'web')
    assert.equal(denied?.event, 'admission_denied')
    assert.match(String(denied.reason), /no container declares/)
    assert.doesNotMatch(JSON.stringify(webhook.log), /hunter2|PASSWORD|PRIVATE KEY/)
  })
})

describe('TLS', () => {
  const served = (port: number) =>
    new Promise<{ name: string; protocol: string | null }>((resolve, reject) => {
      const socket = tls.connect({ host: '127.0.0.1', port, rejectUnauthorized: false }, () => {
        resolve({
          name: String(socket.getPeerCertificate().subject.CN),
          protocol: socket.getProtocol(),
        })
        socket.destroy()
      })
      socket.on('error', reject)
    })

  test('is all that it speaks, and not in an old version', async (t) => {
    const webhook = await startOne(t)
    const untrusting = new Promise((resolve, reject) => {
      tls.connect({ host: '127.0.0.1', port: webhook.port }, () => resolve(undefined)).on('error', reject) // prettier-ignore
    })
    await assert.rejects(untrusting, { code: 'DEPTH_ZERO_SELF_SIGNED_CERT' })
    const old = new Promise((resolve, reject) => {
      const options = { maxVersion: 'TLSv1.1', minVersion: 'TLSv1', ciphers: 'DEFAULT@SECLEVEL=0' } as const // prettier-ignore
      tls.connect({ host: '127.0.0.1', port: webhook.port, rejectUnauthorized: false, ...options }, () => resolve(undefined)).on('error', reject) // prettier-ignore
    })
    await assert.rejects(old, /alert protocol version/)
  })

  test('uses a renewed certificate without a restart, and keeps the old one while the files do not fit', async (t) => {
    const folder = await temporaryFolder(t)
    const first = await makeCertificate(folder, 'first')
    const second = await makeCertificate(folder, 'second')
    const certificate = { cert: path.join(folder, 'tls.crt'), key: path.join(folder, 'tls.key') }
    await put(first.cert, certificate.cert)
    await put(first.key, certificate.key)
    const webhook = await startOne(t, { certificate })
    assert.equal((await served(webhook.port)).name, 'first')

    const seen = (event: string) => webhook.log.filter((line) => line.event === event).length
    await put(second.cert, certificate.cert)
    await until(() => seen('certificate_unreadable') === 1, 'the mismatch is told')
    assert.equal((await served(webhook.port)).name, 'first')
    await rm(certificate.key)
    await until(() => seen('certificate_unreadable') === 2, 'the missing file is told')
    assert.equal((await served(webhook.port)).name, 'first')

    await put(second.key, certificate.key)
    await until(() => seen('certificate_read') === 1, 'the new certificate is read')
    assert.equal((await served(webhook.port)).name, 'second')
    const broken = path.join(folder, 'broken')
    await writeFile(broken, 'no certificate')
    await put(broken, certificate.cert)
    await until(() => seen('certificate_unreadable') === 3, 'the broken file is told')
    assert.equal((await served(webhook.port)).name, 'second')

    const told = webhook.log
      .filter(({ event }) => event === 'certificate_unreadable')
      .map(({ err }) => JSON.stringify(err))
    for (const [i, reason] of told.entries()) assert.notEqual(reason, told[i - 1], 'told once')
  })

  test('follows the symbolic link that Kubernetes swaps in a Secret volume', async (t) => {
    const folder = await temporaryFolder(t)
    const [first, second] = [path.join(folder, '1'), path.join(folder, '2')]
    for (const [link, name] of [[first, 'first'], [second, 'second']] as const) {
      await run('mkdir', [link])
      const files = await makeCertificate(folder, name)
      await rename(files.cert, path.join(link, 'tls.crt'))
      await rename(files.key, path.join(link, 'tls.key'))
    }
    const data = path.join(folder, '..data')
    await symlink('1', data)
    const certificate = { cert: path.join(data, 'tls.crt'), key: path.join(data, 'tls.key') }
    const webhook = await startOne(t, { certificate })
    await symlink('2', `${data}_tmp`)
    await rename(`${data}_tmp`, data)
    await until(async () => (await served(webhook.port)).name === 'second', 'the new one is served')
  }) // prettier-ignore
})

describe('start and stop', () => {
  test('a start that cannot succeed says which flag is wrong', async (t) => {
    const webhook = await startOne(t)
    const missing = { cert: '/nowhere/tls.crt', key: '/nowhere/tls.key' }
    await assert.rejects(startOne(t, { certificate: missing }), (error) => {
      return error instanceof WebhookStartError && /--tls-cert \/nowhere\/tls\.crt/.test(error.message)
    })
    const other = await makeCertificate(webhook.folder, 'other')
    const unfit = { cert: webhook.files.cert, key: other.key }
    await assert.rejects(startOne(t, { certificate: unfit }), WebhookStartError)
    const listen = { host: '127.0.0.1', port: webhook.port }
    await assert.rejects(startOne(t, { listen }), (error) => {
      return error instanceof WebhookStartError && /--listen .*EADDRINUSE/.test(error.message)
    })
  }) // prettier-ignore

  test('it stops while a client keeps a connection open, and however often it is told', async (t) => {
    const webhook = await startOne(t)
    const agent = new https.Agent({ keepAlive: true, ca: readFileSync(webhook.files.cert) })
    t.after(() => agent.destroy())
    await new Promise<void>((resolve, reject) => {
      https.get({ host: '127.0.0.1', port: webhook.port, path: '/healthz', agent }, (response) => {
        response.resume().on('end', resolve)
      }).on('error', reject)
    })
    await Promise.all([webhook.close(), webhook.close()])
    await assert.rejects(webhook.get('/healthz'), { code: 'ECONNREFUSED' })
    assert.equal(webhook.log.filter(({ event }) => event === 'stopped').length, 1)
  }) // prettier-ignore
})
