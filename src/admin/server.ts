import fastify, { type FastifyInstance } from 'fastify'
import type { Fence } from '../fence.ts'
import type { InFlight } from '../inflight.ts'
import type { Leases } from '../lease/leases.ts'
import type { Log } from '../log.ts'
import type { Metrics } from '../metrics.ts'
import { StoreError, type MarkRow, type Store } from '../store/store.ts'
import { formatToken } from '../token.ts'

export interface AdminParts {
  readonly store: Store
  readonly fence: Fence
  readonly inflight: InFlight
  /** The lease service, where it is on. */
  readonly leases: Leases | undefined
  readonly metrics: Metrics
  readonly log: Log
  /** True from the moment the process was asked to stop. */
  stopping(): boolean
}

/** How long `/readyz` waits for a commit. */
const PROBE_TIMEOUT_MS = 2_000

/** The admin port: health, readiness, metrics and what the fence knows of its scopes. */
export function createAdmin(parts: AdminParts): FastifyInstance {
  const { store, fence, inflight, leases, metrics } = parts
  const app = fastify({
    logger: false,
    forceCloseConnections: true,
    routerOptions: { maxParamLength: 8192 },
  })

  app.setErrorHandler((error, _request, reply) => {
    const invalid = error instanceof Error && 'validation' in error
    const status = invalid ? 400 : error instanceof StoreError ? 503 : 500
    if (status === 500)
      parts.log.error({ event: 'admin_failed', err: error }, 'the admin port failed')
    const detail = status === 500 || !(error instanceof Error) ? 'See the log.' : error.message
    return reply
      .code(status)
      .type('application/problem+json')
      .send({ title: TITLES[status], status, detail })
  })
  app.setNotFoundHandler((_request, reply) =>
    reply.code(404).type('application/problem+json').send({
      title: 'Not found',
      status: 404,
      detail: 'Here are /healthz, /readyz, /metrics, /scopes and /scopes/{scope}.',
    }),
  )

  app.get('/healthz', () => ({ status: 'ok' }))

  app.get('/readyz', async (_request, reply) => {
    if (parts.stopping()) return reply.code(503).send({ status: 'stopping' })
    const late = AbortSignal.timeout(PROBE_TIMEOUT_MS)
    const timeout = new Promise<never>((_, reject) =>
      late.addEventListener('abort', () =>
        reject(new StoreError('the store did not commit in time')),
      ),
    )
    try {
      await Promise.race([store.probe(), timeout])
    } catch (error) {
      if (!(error instanceof StoreError)) throw error
      return reply.code(503).send({ status: 'the store cannot commit', detail: error.message })
    }
    return { status: 'ready' }
  })

  app.get('/metrics', async (_request, reply) => {
    return reply.type(metrics.registry.contentType).send(await metrics.registry.metrics())
  })

  const describe = ({ scope, mark, raisedAt }: MarkRow) => {
    const { inFlight, waiting, settlingMs } = inflight.state(scope)
    const lease = leases?.find(scope)
    return {
      scope,
      mark: formatToken(mark),
      raisedAt: new Date(raisedAt).toISOString(),
      inFlight,
      waiting,
      settlingUntil: settlingMs === 0 ? null : until(settlingMs),
      holder: lease?.holder,
      leasedUntil: lease && leases && until(leases.remainingMs(lease)),
    }
  }

  app.get<{ Querystring: { prefix: string; after?: string; limit: number } }>(
    '/scopes',
    {
      schema: {
        querystring: {
          type: 'object',
          additionalProperties: false,
          properties: {
            prefix: { type: 'string', default: '' },
            after: { type: 'string' },
            limit: { type: 'integer', minimum: 1, maximum: 1000, default: 100 },
          },
        },
      },
    },
    async ({ query: { prefix, after, limit } }) => {
      const rows = await store.list(prefix, after, limit)
      return {
        scopes: rows.map(describe),
        // The last scope of a full page: the next page's `after`.
        next: rows.length === limit ? (rows.at(-1)?.scope ?? null) : null,
        total: store.scopes,
        /** After an unclean stop every takeover waits for this long. */
        settlingMs: Math.ceil(fence.settlingMs),
      }
    },
  )

  // A scope holds slashes; it may stand here as it is or percent-encoded.
  app.get<{ Params: { '*': string } }>('/scopes/*', async ({ params }, reply) => {
    const named = params['*']
    const row = (await store.read(named)) ?? (await store.read(`/${named}`))
    if (row !== undefined) return describe(row)
    return reply.code(404).type('application/problem+json').send({
      title: 'No such scope',
      status: 404,
      detail: 'No mark is recorded for this scope.',
      scope: named,
    })
  })

  return app
}

/** A moment that lies `ms` ahead, for people to read. */
function until(ms: number): string {
  return new Date(Date.now() + ms).toISOString()
}

const TITLES: Record<number, string> = {
  400: 'The request is not valid',
  500: 'The admin port failed',
  503: 'The store cannot answer',
}
