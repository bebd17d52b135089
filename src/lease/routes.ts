import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import fastify, { type FastifyError, type FastifyReply, type FastifyRequest } from 'fastify'
import { problemOf, type AnswerDetails, type Problem } from '../answer.ts'
import { onDeparture } from '../departure.ts'
import { formatDuration, parseDuration } from '../duration.ts'
import type { Log } from '../log.ts'
import type { Metrics } from '../metrics.ts'
import { MAX_SCOPE_BYTES } from '../route.ts'
import { StoreError } from '../store/store.ts'
import { formatToken } from '../token.ts'
import type { Lease } from './lease.ts'
import type { Leases } from './leases.ts'

/** The lease service on the data port. */
export interface LeaseDoor {
  /** Before the first request. */
  ready(): Promise<void>
  /** Whether a request target is for the service and not for the backend. */
  covers(target: string): boolean
  /** Takes a request to its end. */
  handle(req: IncomingMessage, res: ServerResponse, requestId: string): Promise<void>
  close(): Promise<void>
}

const MAX_BODY = 32 * 1024

/** What an absolute-form target has before its path (RFC 9112, 3.2.2). */
const ORIGIN = /^https?:\/\/[^/?#]*/i

const ACQUIRE = {
  body: {
    type: 'object',
    additionalProperties: false,
    required: ['scope'],
    properties: {
      scope: { type: 'string', minLength: 1, maxLength: 4096 },
      holder: { type: 'string', minLength: 1, maxLength: 256 },
      ttl: { type: 'string' },
      wait: { type: 'string' },
    },
  },
} as const
interface Acquire {
  scope: string
  holder?: string
  ttl?: string
  wait?: string
}

const LOOK_UP = {
  querystring: {
    type: 'object',
    additionalProperties: false,
    required: ['scope'],
    properties: { scope: { type: 'string', minLength: 1, maxLength: 4096 } },
  },
} as const

/** `clientTimeoutMs`: for a body to arrive. */
export function createLeaseDoor(
  leases: Leases,
  clientTimeoutMs: number,
  metrics: Metrics,
  log: Log,
): LeaseDoor {
  const { prefix, minTtlMs, maxTtlMs, defaultTtlMs } = leases.settings
  const ids = new WeakMap<IncomingMessage, string>()
  let take: (req: IncomingMessage, res: ServerResponse) => void = () => undefined
  const app = fastify({
    logger: false,
    bodyLimit: MAX_BODY,
    routerOptions: { maxParamLength: 8192 },
    genReqId: (req) => ids.get(req) ?? '',
    // It listens nowhere: the proxy hands its requests over.
    serverFactory: (handler) => {
      take = handler
      return createServer()
    },
    // What is misspelt is told, not mended.
    ajv: { customOptions: { removeAdditional: false, coerceTypes: false, useDefaults: false } },
    schemaErrorFormatter: ([first], where) => {
      const { instancePath = '', message = 'is not as it should be', params } = first ?? {}
      const unknown = params?.['additionalProperty']
      const which = unknown === undefined ? '' : `, and has ${JSON.stringify(unknown)}`
      return new Error(`${where}${instancePath} ${message}${which}`)
    },
    frameworkErrors: (error, request, reply) => void fail(request, reply, error),
  })

  const refuse = (
    { id }: FastifyRequest,
    reply: FastifyReply,
    problem: Problem,
    details: Omit<AnswerDetails, 'requestId'> = {},
  ) => {
    const { status, fields, body } = problemOf(problem, { ...details, requestId: id })
    reply.code(status)
    for (let i = 0; i < fields.length; i += 2) reply.header(fields[i] ?? '', fields[i + 1])
    // As bytes: to text the framework adds a charset, which this type does not have (RFC 8259, 11).
    return reply.send(Buffer.from(body))
  }
  const fail = (request: FastifyRequest, reply: FastifyReply, error: FastifyError) => {
    if (error instanceof StoreError) return refuse(request, reply, 'lease-unavailable')
    const { statusCode: status = 500 } = error
    if (status === 415) {
      const detail = 'Send it as JSON, with Content-Type: application/json.'
      return refuse(request, reply, 'lease-request', { status, detail })
    }
    if (status >= 400 && status < 500) {
      return refuse(request, reply, 'lease-request', { status, detail: `${error.message}.` })
    }
    log.error({ event: 'lease_failed', err: error }, 'the lease service failed unforeseen')
    return refuse(request, reply, 'lease-unavailable', { status: 500, detail: 'See the log.' })
  }
  app.setErrorHandler<FastifyError>((error, request, reply) => fail(request, reply, error))
  app.setNotFoundHandler((request, reply) =>
    refuse(request, reply, 'lease-request', {
      status: 404,
      detail: `Here are POST and GET ${prefix}/leases, POST ${prefix}/leases/{lease}/renew and DELETE ${prefix}/leases/{lease}.`,
    }),
  )
  app.addHook('onRequest', (request, reply, done) => {
    const { raw } = request
    reply.headers({ 'Cache-Control': 'no-store', 'X-Request-Id': request.id })
    const late = setTimeout(() => {
      // All of it has arrived, though nobody had to read it: the disk is slow, not the client.
      if (raw.complete) return
      reply.header('Connection', 'close')
      void refuse(request, reply, 'client-timeout')
    }, clientTimeoutMs)
    for (const end of ['end', 'close']) raw.once(end, () => clearTimeout(late))
    done()
  })
  // Renewals and releases need no body; clients that send an empty one as JSON mean none.
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('application/json', { parseAs: 'string' }, (_request, body, done) => {
    try {
      const text = body.toString()
      done(null, text === '' ? undefined : JSON.parse(text))
    } catch {
      done(Object.assign(new Error('The body is not JSON'), { statusCode: 400 }))
    }
  })

  const duration = (
    text: string | undefined,
    fallbackMs: number,
    atLeastMs: number,
    atMostMs: number,
  ): { ms: number } | { mistake: string } => {
    const ms = text === undefined ? fallbackMs : parseDuration(text)
    if (ms !== undefined && ms >= atLeastMs && ms <= atMostMs) return { ms }
    const range = `from ${formatDuration(atLeastMs)} to ${formatDuration(atMostMs)}`
    return { mistake: `must be a duration such as 15s, ${range}.` }
  }

  app.post<{ Body: Acquire }>(`${prefix}/leases`, { schema: ACQUIRE }, async (request, reply) => {
    const { raw, body, ip, id: requestId } = request
    const ttl = duration(body.ttl, defaultTtlMs, minTtlMs, maxTtlMs)
    if ('mistake' in ttl) return refuse(request, reply, 'lease-request', { detail: `ttl ${ttl.mistake}` }) // prettier-ignore
    const wait = duration(body.wait, 0, 0, maxTtlMs)
    if ('mistake' in wait) return refuse(request, reply, 'lease-request', { detail: `wait ${wait.mistake}` }) // prettier-ignore
    const { holder = ip } = body
    if (!isText(body.scope) || !isText(holder)) {
      const detail = 'scope and holder must be well-formed Unicode without control characters.'
      return refuse(request, reply, 'lease-request', { detail })
    }
    // The routes build scopes in this form, too.
    const scope = body.scope.normalize('NFC')
    if (Buffer.byteLength(scope) > MAX_SCOPE_BYTES) {
      const detail = `scope must not be longer than ${MAX_SCOPE_BYTES} bytes: no route makes such a one.`
      return refuse(request, reply, 'lease-request', { detail })
    }

    const acquiring = leases.acquire(scope, {
      ...{ holder, ttlMs: ttl.ms, waitMs: wait.ms, requestId },
    })
    const leave = () => acquiring.leave()
    reply.raw.once('close', leave)
    const stopWatching = onDeparture(raw.socket, leave)
    const answer = await acquiring.answer
    stopWatching()
    switch (answer.is) {
      case 'granted': {
        const { lease } = answer
        // Where the answer does not reach the connection, nobody knows the lease. What is written to
        // a connection that is gone counts as finished.
        if (raw.socket.destroyed) leases.abandon(lease.id)
        reply.raw.once('close', () => {
          if (!reply.raw.writableFinished) leases.abandon(lease.id)
        })
        reply.code(201).header('Location', `${prefix}/leases/${lease.id}`)
        return described(scope, lease)
      }
      case 'held': {
        const { lease } = answer
        const seconds = lease && Math.max(1, Math.ceil(leases.remainingMs(lease) / 1000))
        return refuse(request, reply, 'lease-held', {
          scope,
          token: lease?.token,
          retryAfter: seconds,
          detail: lease && `Held by ${lease.holder} for another ${seconds} s, unless renewed. Try again later, or ask with a wait.`, // prettier-ignore
        })
      }
      case 'full':
        return refuse(request, reply, 'lease-full', { scope })
      case 'unavailable':
        return refuse(request, reply, 'lease-unavailable', { scope })
      default:
        return answer satisfies never
    }
  })

  app.post<{ Params: { lease: string } }>(`${prefix}/leases/:lease/renew`, (request, reply) => {
    const renewed = leases.renew(request.params.lease)
    metrics.leaseRenewals.inc({ result: renewed === undefined ? 'over' : 'renewed' })
    if (renewed !== undefined) return reply.send(described(renewed.scope, renewed.lease))
    log.warn(
      { event: 'lease_renewal_failed', requestId: request.id, remote: request.ip },
      'a lease that is over was to be renewed: its holder learns that it has none',
    )
    return refuse(request, reply, 'lease-over')
  })

  app.delete<{ Params: { lease: string } }>(`${prefix}/leases/:lease`, async (request, reply) => {
    if (await leases.release(request.params.lease)) return reply.code(204).send()
    return refuse(request, reply, 'lease-over')
  })

  app.get<{ Querystring: { scope: string } }>(
    `${prefix}/leases`,
    { schema: LOOK_UP },
    (request, reply) => {
      const scope = request.query.scope.normalize('NFC')
      const lease = leases.find(scope)
      if (lease === undefined) return refuse(request, reply, 'lease-none', { scope })
      const { holder, token } = lease
      const remaining = formatDuration(Math.ceil(leases.remainingMs(lease)))
      return reply.send({ scope, holder, token: formatToken(token), remaining })
    },
  )

  return {
    async ready() {
      await app.ready()
    },
    covers(target) {
      const path = target.replace(ORIGIN, '')
      if (!path.startsWith(prefix)) return false
      const next = path[prefix.length]
      return next === undefined || next === '/' || next === '?'
    },
    async handle(req, res, requestId) {
      if (res.closed) return
      ids.set(req, requestId)
      req.url = req.url?.replace(ORIGIN, '')
      const closed = new Promise((resolve) => res.once('close', resolve))
      take(req, res)
      await closed
    },
    async close() {
      await app.close()
    },
  }
}

/** What its holder is told of a lease. */
function described(scope: string, { id, token, ttlMs }: Lease): Record<string, string> {
  return { lease: id, scope, token: formatToken(token), ttl: formatDuration(ttlMs) }
}

function isText(text: string): boolean {
  return text.isWellFormed() && !/\p{Cc}/u.test(text)
}
