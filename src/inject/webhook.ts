/**
 * The admission webhook: Kubernetes asks over HTTPS about each new Pod (/mutate) and each new
 * workload (/validate). The answer to a question that was understood is always an AdmissionReview;
 * a failure of ours is a refusal, never a Pod without its fence.
 */
import type { AddressInfo } from 'node:net'
import fastify, { type FastifyInstance } from 'fastify'
import { Counter, Gauge, Registry, collectDefaultMetrics } from 'prom-client'
import { z } from 'zod'
import type { Log } from '../log.ts'
import { readCertificate, watchCertificate, type CertificateFiles } from './certificate.ts'
import { decide } from './patch.ts'
import { fits, mistakeIn, readPod } from './pod.ts'
import type { Injector } from './settings.ts'
import { findWarnings, readManifest } from './workload.ts'

export interface WebhookSettings {
  readonly listen: { readonly host: string; readonly port: number }
  readonly certificate: CertificateFiles
  readonly injector: Injector
  /** How often the certificate's files are looked at; default: 10 s. */
  readonly certificateCheckMs?: number
  /** For a request to arrive whole; default: 10 s. */
  readonly requestTimeoutMs?: number
}

export interface RunningWebhook {
  /** `host:port`. */
  readonly address: string
  /** Answers what was asked, and closes. The same call however often. */
  close(): Promise<void>
}

/** The start failed for a reason that an operator can mend; `message` says which. */
export class WebhookStartError extends Error {
  override readonly name = 'WebhookStartError'
}

/** The API server sends no object that is larger: etcd would not take it. */
const BODY_LIMIT = 3 * 1024 * 1024
const CERTIFICATE_CHECK_MS = 10_000
/** The API server gives up after timeoutSeconds, 30 at the most. */
const REQUEST_TIMEOUT_MS = 10_000

export async function startWebhook(settings: WebhookSettings, log: Log): Promise<RunningWebhook> {
  const { listen, certificate: files, injector } = settings
  const requestTimeoutMs = settings.requestTimeoutMs ?? REQUEST_TIMEOUT_MS
  const certificate = await readCertificate(files).catch((error: unknown) => {
    throw new WebhookStartError(
      `--tls-cert ${files.cert}, --tls-key ${files.key}: ${wordsOf(error)}`,
    )
  })
  const metrics = createMetrics()
  metrics.expiresAt.set(certificate.expiresAt)

  const app = fastify({
    https: {
      cert: certificate.cert,
      key: certificate.key,
      minVersion: 'TLSv1.2',
      // Given here too, it bounds Node's headersTimeout: Node holds a request to the longer of the two.
      requestTimeout: requestTimeoutMs,
      // Node looks at the timeouts only as often as this.
      connectionsCheckingInterval: 1_000,
    },
    logger: false,
    bodyLimit: BODY_LIMIT,
    requestTimeout: requestTimeoutMs,
    // Longer than the API server keeps idle connections, so that it is never cut off while asking.
    keepAliveTimeout: 120_000,
    forceCloseConnections: 'idle',
  })
  answerQuestions(app, injector, metrics, log)

  try {
    await app.listen({ host: listen.host, port: listen.port })
  } catch (error) {
    throw new WebhookStartError(`--listen ${listen.host}:${listen.port}: ${wordsOf(error)}`)
  }
  const everyMs = settings.certificateCheckMs ?? CERTIFICATE_CHECK_MS
  const stopWatching = watchCertificate(files, certificate, everyMs, {
    changed(renewed) {
      app.server.setSecureContext({ cert: renewed.cert, key: renewed.key, minVersion: 'TLSv1.2' })
      metrics.expiresAt.set(renewed.expiresAt)
      log.info({ event: 'certificate_read', file: files.cert }, 'the certificate changed')
    },
    failed(error) {
      log.warn(
        { event: 'certificate_unreadable', err: error },
        'the former certificate stays in use',
      )
    },
  })
  const address = addressOf(app.server.address())
  log.info({ event: 'started', address, image: injector.image }, 'injecting')
  const stop = async () => {
    log.info({ event: 'stopping' }, 'stopping')
    stopWatching()
    // A server that closes no longer enforces its timeouts.
    const cut = setTimeout(() => app.server.closeAllConnections(), requestTimeoutMs)
    await app.close()
    clearTimeout(cut)
    log.info({ event: 'stopped' }, 'stopped')
  }
  let stopped: Promise<void> | undefined
  return { address, close: () => (stopped ??= stop()) }
}

function createMetrics() {
  const registry = new Registry()
  const registers = [registry]
  collectDefaultMetrics({ register: registry })
  return {
    registry,
    reviews: new Counter({
      name: 'fencing_injector_reviews_total',
      help: 'Questions of the API server, by what was answered.',
      labelNames: ['path', 'result'],
      registers,
    }),
    expiresAt: new Gauge({
      name: 'fencing_injector_certificate_expires_seconds',
      help: 'When the certificate in use expires, in seconds since 1970.',
      registers,
    }),
  }
}

type Metrics = ReturnType<typeof createMetrics>

const Review = z.looseObject({
  apiVersion: z.literal('admission.k8s.io/v1'),
  kind: z.literal('AdmissionReview'),
  request: z.looseObject({
    uid: z.string().min(1),
    kind: z.looseObject({ kind: z.string() }),
    operation: z.string(),
    subResource: z.string().nullish(),
    namespace: z.string().nullish(),
    name: z.string().nullish(),
    dryRun: z.boolean().nullish(),
    object: z.unknown(),
  }),
})
type Request = z.output<typeof Review>['request']

interface Answer {
  readonly result: 'injected' | 'unchanged' | 'ignored' | 'denied' | 'warned' | 'failed'
  readonly patch?: readonly unknown[]
  readonly warnings?: readonly string[]
  /** Why it is not allowed. */
  readonly refusal?: { readonly code: number; readonly message: string }
}

function answerQuestions(
  app: FastifyInstance,
  injector: Injector,
  metrics: Metrics,
  log: Log,
): void {
  // What the API server sends is JSON; fastify would take plain text too.
  app.removeContentTypeParser('text/plain')
  app.setErrorHandler((error: Error & { statusCode?: number }, _request, reply) => {
    const status = error.statusCode ?? 500
    if (status >= 500) log.error({ event: 'webhook_failed', err: error }, 'the webhook failed')
    return reply.code(status).send({ error: status >= 500 ? 'see the log' : error.message })
  })
  app.setNotFoundHandler((_request, reply) =>
    reply.code(404).send({ error: 'here are /mutate, /validate, /healthz and /metrics' }),
  )
  app.get('/healthz', () => ({ status: 'ok' }))
  app.get('/metrics', async (_request, reply) =>
    reply.type(metrics.registry.contentType).send(await metrics.registry.metrics()),
  )

  const question = (path: string, answer: (request: Request, injector: Injector) => Answer) => {
    app.post(path, (httpRequest, reply) => {
      const { body } = httpRequest
      if (!fits(Review, body)) {
        return reply.code(400).send({ error: `no AdmissionReview: ${mistakeIn(Review, body)}` })
      }
      const { request } = body
      const answered = answerSafely(() => answer(request, injector), log)
      metrics.reviews.inc({ path, result: answered.result })
      logAnswer(log, request, answered)
      return reply.send(reviewOf(request.uid, answered))
    })
  }
  question('/mutate', mutate)
  question('/validate', validate)
}

function mutate(request: Request, injector: Injector): Answer {
  const isNewPod =
    request.kind.kind === 'Pod' && request.operation === 'CREATE' && !request.subResource
  if (!isNewPod) {
    return {
      result: 'ignored',
      warnings: [
        `the injector was asked about ${request.operation} of ${request.kind.kind}; it fences new Pods only`,
      ],
    }
  }
  const read = readPod(request.object)
  if ('mistake' in read) return refused(422, `the Pod cannot be read: ${read.mistake}`)
  const decision = decide(read.pod, injector)
  switch (decision.kind) {
    case 'ignored':
      return {
        result: 'ignored',
        warnings: decision.warning === undefined ? [] : [decision.warning],
      }
    case 'denied':
      return refused(403, decision.reason)
    case 'injected':
      return decision.patch.length === 0
        ? { result: 'unchanged' }
        : { result: 'injected', patch: decision.patch, warnings: [decision.warning] }
  }
}

/** Warns only: what cannot be fenced is refused when its Pods come. */
function validate(request: Request, injector: Injector): Answer {
  const read = readManifest(request.object)
  const warnings = 'object' in read ? findWarnings(read.object, injector) : []
  const found = warnings.map(({ words }) => words)
  return found.length === 0 ? { result: 'ignored' } : { result: 'warned', warnings: found }
}

function refused(code: number, message: string): Answer {
  return { result: 'denied', refusal: { code, message } }
}

function answerSafely(answer: () => Answer, log: Log): Answer {
  try {
    return answer()
  } catch (error) {
    log.error({ event: 'injection_failed', err: error }, 'an unforeseen error; refused')
    const message = 'the injector failed, and lets nothing pass unfenced; see its log'
    return { result: 'failed', refusal: { code: 500, message } }
  }
}

function reviewOf(uid: string, { patch, warnings: told = [], refusal }: Answer): object {
  return {
    apiVersion: 'admission.k8s.io/v1',
    kind: 'AdmissionReview',
    response: {
      uid,
      allowed: refusal === undefined,
      ...(told.length > 0 && { warnings: told.map((line) => `fencing-proxy: ${line}`) }),
      ...(patch !== undefined && {
        patchType: 'JSONPatch',
        patch: Buffer.from(JSON.stringify(patch)).toString('base64'),
      }),
      ...(refusal !== undefined && {
        status: { code: refusal.code, message: `fencing-proxy: ${refusal.message}` },
      }),
    },
  }
}

/** Pods that ask for nothing are not worth a line. */
function logAnswer(log: Log, request: Request, { result, warnings: told, refusal }: Answer): void {
  if (result === 'ignored' && (told ?? []).length === 0) return
  const read = readManifest(request.object)
  const metadata = 'object' in read ? read.object.metadata : undefined
  const about = {
    event: `admission_${result}`,
    kind: request.kind.kind,
    namespace: request.namespace,
    name: request.name ?? metadata?.name ?? metadata?.generateName,
    dryRun: request.dryRun === true,
  }
  if (refusal === undefined) log.info({ ...about, warnings: told }, result)
  else log.warn({ ...about, reason: refusal.message }, 'refused')
}

function addressOf(address: AddressInfo | string | null): string {
  if (address === null || typeof address === 'string') return String(address)
  const host = address.family === 'IPv6' ? `[${address.address}]` : address.address
  return `${host}:${address.port}`
}

function wordsOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}
