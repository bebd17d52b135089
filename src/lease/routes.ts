import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import fastify, {
  type FastifyError,
  type FastifyInstance,
  type FastifyReply,
  type FastifyRequest,
  type FastifySchemaValidationError,
} from 'fastify'
import { problemOf, type AnswerDetails, type Problem } from '../answer.ts'
import { onDeparture } from '../departure.ts'
import { formatDuration, parseDuration } from '../duration.ts'
import type { Log } from '../log.ts'
import type { Metrics } from '../metrics.ts'
import { MAX_SCOPE_BYTES } from '../route.ts'
import { StoreError } from '../store/store.ts'
import { formatToken } from '../token.ts'
import type { Lease } from './lease.ts'
import type { LeaseSettings, Leases } from './leases.ts'

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

/** What is said of a lease by the one that holds it. */
interface ByLease {
  lease: string
}

interface LookUp {
  scope: string
}

/** `clientTimeoutMs`: for a body to arrive. */
export function createLeaseDoor(
  leases: Leases,
  clientTimeoutMs: number,
  metrics: Metrics,
  log: Log,
): LeaseDoor {
  const { prefix } = leases.settings
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
    schemaErrorFormatter: inWords,
    frameworkErrors: (error, request, reply) => void fail(request, reply, error, log),
  })
  app.setErrorHandler<FastifyError>((error, request, reply) => fail(request, reply, error, log))
  app.setNotFoundHandler((request, reply) =>
    refuse(request, reply, 'lease-request', {
      status: 404,
      detail: `Here are POST and GET ${prefix}/leases, POST ${prefix}/leases/{lease}/renew and DELETE ${prefix}/leases/{lease}.`,
    }),
  )
  app.addHook('onRequest', (request, reply, done) => {
    reply.headers({ 'Cache-Control': 'no-store', 'X-Request-Id': request.id })
    refuseLate(request, reply, clientTimeoutMs)
    done()
  })
  takeJsonOnly(app)

  app.post<{ Body: Acquire }>(`${prefix}/leases`, { schema: ACQUIRE }, (request, reply) =>
    acquire(leases, request, reply),
  )
  app.post<{ Params: ByLease }>(`${prefix}/leases/:lease/renew`, (request, reply) =>
    renew(leases, request, reply, metrics, log),
  )
  app.delete<{ Params: ByLease }>(`${prefix}/leases/:lease`, (request, reply) =>
    release(leases, request, reply),
  )
  app.get<{ Querystring: LookUp }>(`${prefix}/leases`, { schema: LOOK_UP }, (request, reply) =>
    lookUp(leases, request, reply),
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

async function acquire(
  leases: Leases,
  request: FastifyRequest<{ Body: Acquire }>,
  reply: FastifyReply,
) {
  const { prefix } = leases.settings
  const terms = termsOf(request, leases.settings)
  if ('mistake' in terms) return refuse(request, reply, 'lease-request', { detail: terms.mistake })
  const { scope } = terms
  const acquiring = leases.acquire(scope, { ...terms, requestId: request.id })
  const leave = () => acquiring.leave()
  reply.raw.once('close', leave)
  const { socket } = request.raw
  const stopWatching = onDeparture(socket, leave)
  const answer = await acquiring.answer
  stopWatching()
  switch (answer.is) {
    case 'granted': {
      const { lease } = answer
      // Where the answer does not reach the connection, nobody knows the lease. What is written to
      // a connection that is gone counts as finished.
      if (socket.destroyed) leases.abandon(lease.id)
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
}

function renew(
  leases: Leases,
  request: FastifyRequest<{ Params: ByLease }>,
  reply: FastifyReply,
  metrics: Metrics,
  log: Log,
) {
  const renewed = leases.renew(request.params.lease)
  metrics.leaseRenewals.inc({ result: renewed === undefined ? 'over' : 'renewed' })
  if (renewed !== undefined) return reply.send(described(renewed.scope, renewed.lease))
  log.warn(
    { event: 'lease_renewal_failed', requestId: request.id, remote: request.ip },
    'a lease that is over was to be renewed: its holder learns that it has none',
  )
  return refuse(request, reply, 'lease-over')
}

async function release(
  leases: Leases,
  request: FastifyRequest<{ Params: ByLease }>,
  reply: FastifyReply,
) {
  if (await leases.release(request.params.lease)) return reply.code(204).send()
  return refuse(request, reply, 'lease-over')
}

function lookUp(
  leases: Leases,
  request: FastifyRequest<{ Querystring: LookUp }>,
  reply: FastifyReply,
) {
  const scope = request.query.scope.normalize('NFC')
  const lease = leases.find(scope)
  if (lease === undefined) return refuse(request, reply, 'lease-none', { scope })
  const { holder, token } = lease
  const remaining = formatDuration(Math.ceil(leases.remainingMs(lease)))
  return reply.send({ scope, holder, token: formatToken(token), remaining })
}

interface Terms {
  readonly scope: string
  readonly holder: string
  readonly ttlMs: number
  readonly waitMs: number
}

/** What an acquire asks for, beyond what a schema can say. */
function termsOf(
  { body, ip }: FastifyRequest<{ Body: Acquire }>,
  { minTtlMs, maxTtlMs, defaultTtlMs }: LeaseSettings,
): Terms | { mistake: string } {
  const ttl = durationOf(body.ttl, defaultTtlMs, minTtlMs, maxTtlMs)
  if ('mistake' in ttl) return { mistake: `ttl ${ttl.mistake}` }
  const wait = durationOf(body.wait, 0, 0, maxTtlMs)
  if ('mistake' in wait) return { mistake: `wait ${wait.mistake}` }
  const { holder = ip } = body
  if (!isText(body.scope) || !isText(holder)) {
    return { mistake: 'scope and holder must be well-formed Unicode without control characters.' }
  }
  // The routes build scopes in this form, too.
  const scope = body.scope.normalize('NFC')
  if (Buffer.byteLength(scope) > MAX_SCOPE_BYTES) {
    const mistake = `scope must not be longer than ${MAX_SCOPE_BYTES} bytes: no route makes such a one.`
    return { mistake }
  }
  return { scope, holder, ttlMs: ttl.ms, waitMs: wait.ms }
}

function durationOf(
  text: string | undefined,
  fallbackMs: number,
  atLeastMs: number,
  atMostMs: number,
): { ms: number } | { mistake: string } {
  const ms = text === undefined ? fallbackMs : parseDuration(text)
  if (ms !== undefined && ms >= atLeastMs && ms <= atMostMs) return { ms }
  const range = `from ${formatDuration(atLeastMs)} to ${formatDuration(atMostMs)}`
  return { mistake: `must be a duration such as 15s, ${range}.` }
}

function isText(text: string): boolean {
  return text.isWellFormed() && !/\p{Cc}/u.test(text)
}

/** What its holder is told of a lease. */
function described(scope: string, { id, token, ttlMs }: Lease): Record<string, string> {
  return { lease: id, scope, token: formatToken(token), ttl: formatDuration(ttlMs) }
}

function refuse(
  { id }: FastifyRequest,
  reply: FastifyReply,
  problem: Problem,
  details: Omit<AnswerDetails, 'requestId'> = {},
) {
  const { status, fields, body } = problemOf(problem, { ...details, requestId: id })
  reply.code(status)
  for (let i = 0; i < fields.length; i += 2) reply.header(fields[i] ?? '', fields[i + 1])
  // As bytes: to text the framework adds a charset, which this type does not have (RFC 8259, 11).
  return reply.send(Buffer.from(body))
}

/** The gate from an error to an answer. */
function fail(request: FastifyRequest, reply: FastifyReply, error: FastifyError, log: Log) {
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

/** Where a body does not arrive in time, the client is told so, and the connection closes. */
function refuseLate(request: FastifyRequest, reply: FastifyReply, clientTimeoutMs: number): void {
  const { raw } = request
  const late = setTimeout(() => {
    // All of it has arrived, though nobody had to read it: the disk is slow, not the client.
    if (raw.complete) return
    reply.header('Connection', 'close')
    void refuse(request, reply, 'client-timeout')
  }, clientTimeoutMs)
  for (const end of ['end', 'close']) raw.once(end, () => clearTimeout(late))
}

/** Renewals and releases need no body; clients that send an empty one as JSON mean none. */
function takeJsonOnly(app: FastifyInstance): void {
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('application/json', { parseAs: 'string' }, (_request, body, done) => {
    try {
      const text = body.toString()
      done(null, text === '' ? undefined : JSON.parse(text))
    } catch {
      done(Object.assign(new Error('The body is not JSON'), { statusCode: 400 }))
    }
  })
}

/** What is wrong with a request, of all that its schema finds. */
function inWords([first]: FastifySchemaValidationError[], where: string): Error {
  const { instancePath = '', message = 'is not as it should be', params } = first ?? {}
  const unknown = params?.['additionalProperty']
  const which = unknown === undefined ? '' : `, and has ${JSON.stringify(unknown)}`
  return new Error(`${where}${instancePath} ${message}${which}`)
}
