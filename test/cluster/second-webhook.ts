import { execFile } from 'node:child_process'
import { readFile } from 'node:fs/promises'
import https from 'node:https'
import path from 'node:path'
import type { TestContext } from 'node:test'
import { promisify } from 'node:util'
import { listenOn } from '../harness.ts'
import { parsePod } from '../inject/samples.ts'

const run = promisify(execFile)

/**
 * Somebody else's webhook, with the habits of several: it puts its container first, gives the app a
 * probe on the port `http`, and sets the user of every container.
 */
export async function startSecondWebhook(
  t: TestContext,
  folder: string,
): Promise<{ url: string; caBundle: string }> {
  const file = (name: string) => path.join(folder, name)
  await run('openssl', [
    ...['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes'],
    ...['-subj', '/CN=second', '-addext', 'subjectAltName=IP:127.0.0.1', '-days', '2'],
    ...['-keyout', file('second.key'), '-out', file('second.crt')],
  ])
  const [cert, key] = await Promise.all([readFile(file('second.crt')), readFile(file('second.key'))]) // prettier-ignore
  const server = https.createServer({ cert, key }, (request, response) => {
    let text = ''
    request.setEncoding('utf8')
    request.on('data', (chunk: string) => (text += chunk))
    request.on('end', () => {
      const review = JSON.parse(text) as { request: { uid: string; object: unknown } }
      const { spec } = parsePod(review.request.object)
      const isDone = spec.containers.some(({ name }) => name === 'mesh')
      const users = spec.containers.map((container, i) => {
        const value = { runAsUser: 1000 }
        return { op: container.securityContext ? 'replace' : 'add', path: `/spec/containers/${i}/securityContext`, value } // prettier-ignore
      })
      const probe = { httpGet: { path: '/', port: 'http' } }
      const patch = [
        ...users,
        { op: 'add', path: '/spec/containers/0/readinessProbe', value: probe },
        { op: 'add', path: '/spec/containers/0', value: { name: 'mesh', image: 'mesh' } },
      ]
      response.setHeader('content-type', 'application/json')
      response.end(JSON.stringify({
        ...{ apiVersion: 'admission.k8s.io/v1', kind: 'AdmissionReview' },
        response: {
          ...{ uid: review.request.uid, allowed: true },
          ...(!isDone && { patchType: 'JSONPatch', patch: Buffer.from(JSON.stringify(patch)).toString('base64') }),
        },
      })) // prettier-ignore
    })
  })
  const port = await listenOn(server)
  t.after(() => {
    server.closeAllConnections()
    server.close()
  })
  return { url: `https://127.0.0.1:${port}/mutate`, caBundle: cert.toString('base64') }
}
