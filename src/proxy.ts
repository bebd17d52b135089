import { randomUUID } from 'node:crypto'
import type { IncomingMessage, ServerResponse } from 'node:http'
import {
  REFUSALS,
  fail,
  fencingFields,
  refuse,
  type AnswerDetails,
  type Refusal,
  type Result,
} from './answer.ts'
import { onDeparture } from './departure.ts'
import { Fields } from './fields.ts'
import type { Decision, Fence } from './fence.ts'
import type { Ending, Exchange, Forwarder, Outgoing } from './forward.ts'
import { checkHead, type Framing } from './framing.ts'
import { Write, type InFlight, type Turn } from './inflight.ts'
import type { Log } from './log.ts'
import type { LeaseDoor } from './lease/routes.ts'
import type { Metrics } from './metrics.ts'
import { backendFields } from './outgoing.ts'
import type { CompiledRoute, Routes } from './route.ts'
import { formatToken, parseToken, type Token } from './token.ts'

/**
 * The life of a request. Everything that the proxy does to a write stands in `fenced`, in order;
 * the other parts are called from here and do not call each other.
 */

export interface ProxyParts {
  readonly routes: Routes
  readonly unmatchedWrites: 'reject' | 'pass'
  /** The field that carries the token, as configured. */
  readonly tokenHeader: string
  readonly fence: Fence
  readonly inflight: InFlight
  readonly forwarder: Forwarder
  /** Carries upgraded connections. */
  readonly tunnel: Forwarder
  /** The lease service, where it is on. */
  readonly leaseDoor: LeaseDoor | undefined
  readonly metrics: Metrics
  readonly log: Log
}

/** One request, as far as every step needs it. */
interface Request {
  readonly req: IncomingMessage
  readonly res: ServerResponse
  readonly method: string
  readonly fields: Fields
  readonly framing: Framing
  readonly id: string
  /** What came behind the head of an upgrade. */
  readonly upgrade: Outgoing['upgrade']
}

/** What is known of a write by now: in answers, logs and metrics. A `Write` is such. */
interface Known {
  /** The route's label. */
  readonly route: string
  readonly scope?: string
  readonly token?: Token
}

export class Proxy {
  readonly #parts: ProxyParts
  readonly #tokenName: string
  #stopping = false
  #active = 0
  #onQuiet: (() => void) | undefined

  constructor(parts: ProxyParts) {
    this.#parts = parts
    this.#tokenName = parts.tokenHeader.toLowerCase()
  }

  /** Refuses every request from now on. Resolves when those under way have ended and nothing settles. */
  async stop(): Promise<void> {
    this.#stopping = true
    if (this.#active > 0) await new Promise<void>((resolve) => (this.#onQuiet = resolve))
    await this.#parts.fence.whenSettled()
  }

  /** Takes a request (or an upgrade, with what came behind its head) to its end. Never rejects. */
  async handle(req: IncomingMessage, res: ServerResponse, upgradeHead?: Buffer): Promise<void> {
    this.#active++
    try {
      // Pipelined requests are taken one after the other: they may depend on each other.
      if (res.socket === null && !(await isNext(req, res))) return
      await this.#serve(req, res, upgradeHead)
    } catch (error) {
      this.#parts.log.error(
        { event: 'request_failed', err: error },
        'a request failed in an unforeseen way',
      )
      req.socket.destroy()
    } finally {
      this.#active--
      if (this.#active === 0) this.#onQuiet?.()
    }
  }

  /** Answers at once, or returns when it will have. */
  #serve(
    req: IncomingMessage,
    res: ServerResponse,
    upgradeHead?: Buffer,
  ): Promise<void> | undefined {
    const { routes } = this.#parts
    const fields = new Fields(req.rawHeaders)
    const id = requestId(fields)
    const method = req.method ?? ''
    const framing = checkHead(req.httpVersion, req.url ?? '', fields)
    if (framing.kind === 'refused') {
      this.#count('none', 'refused')
      res.shouldKeepAlive = false
      fail(req, res, framing.problem, { requestId: id, detail: framing.detail })
      return undefined
    }
    const upgrade = upgradeHead && { socket: req.socket, head: upgradeHead }
    if (upgrade !== undefined && framing.kind !== 'none') {
      // Its body would be taken for the first bytes of the new protocol.
      this.#count('none', 'refused')
      fail(req, res, 'bad-request', { requestId: id, detail: 'An upgrade has no body.' })
      return undefined
    }
    const request: Request = { req, res, method, fields, framing, id, upgrade }
    if (this.#answeredHere(request)) return undefined
    const target = req.url ?? ''
    if (this.#parts.leaseDoor?.covers(target) === true) return this.#toLeases(request)
    const named =
      upgrade === undefined
        ? routes.resolve(method, target, fields)
        : routes.resolveUpgrade(target, fields)
    if (this.#stopping) {
      res.shouldKeepAlive = false
      if (named.kind === 'read') fail(req, res, 'stopping', { requestId: id })
      else this.#refuse(request, 'unavailable', { route: 'none' })
      return undefined
    }
    switch (named.kind) {
      case 'read':
        return this.#forwardRead(request, named.path)
      case 'write':
        return this.#fenced(request, named.path, named.route, named.scope)
      case 'unmatched':
        if (this.#parts.unmatchedWrites === 'reject') {
          this.#refuse(request, 'unmatched', { route: 'none' }, { detail: named.detail })
          return undefined
        }
        return this.#forward(request, named.path, { route: 'none' }, 'unmatched')
      case 'refused': {
        const known = { route: named.route?.label ?? 'none' }
        if (named.path !== undefined && this.#onlyObserves(named.route)) {
          return this.#forward(request, named.path, known, named.result)
        }
        this.#refuse(request, named.result, known, { detail: named.detail })
        return undefined
      }
      default:
        return named satisfies never
    }
  }

  /** What is for the lease service and not for the backend. */
  async #toLeases({ req, res, id, fields, upgrade }: Request): Promise<void> {
    this.#count('none', 'lease')
    if (this.#stopping) {
      res.shouldKeepAlive = false
      fail(req, res, 'stopping', { requestId: id })
    } else if (upgrade !== undefined) {
      fail(req, res, 'bad-request', { requestId: id, detail: 'Leases know no upgrade.' })
    } else {
      if (fields.has('expect') && req.httpVersion === '1.1') res.writeContinue()
      await this.#parts.leaseDoor?.handle(req, res, id)
    }
  }

  /** One write, in order. */
  async #fenced(
    request: Request,
    path: string,
    route: CompiledRoute,
    scope: string,
  ): Promise<void> {
    const { fence, inflight } = this.#parts
    const { label } = route
    const observes = route.config.mode === 'observe'

    // 1. Its scope is named. 2. Read the token.
    const token = this.#readToken(request.fields)
    if (typeof token === 'string') {
      const passes = observes || (token === 'missing' && route.config.missingToken === 'pass')
      const known = { route: label, scope }
      if (passes) return this.#forward(request, path, known, token)
      const detail = `${REFUSALS[token].detail} The field is ${this.#parts.tokenHeader}.`
      this.#refuse(request, token, known, { detail })
      return
    }

    // 3. Decide and record: no answer below before the mark is on disk.
    const write = new Write(scope, token, label, route.config.repeat === 'once')
    const deciding = observes ? fence.observe(write) : fence.decide(write)
    const decision =
      deciding instanceof Promise ? await this.#wait(request, write, deciding, 'commit') : deciding
    if (decision.verdict === 'stale' || decision.verdict === 'unissued') {
      this.#reportToken(request, path, route, write, decision)
    }
    if (decision.verdict === 'left') {
      this.#count(label, 'left')
      return
    }
    if (observes) {
      const result = decision.verdict === 'admitted' ? 'accepted' : decision.verdict
      return this.#forward(request, path, write, result)
    }
    if (decision.verdict !== 'admitted') {
      const highest = 'highest' in decision ? decision.highest : undefined
      this.#refuse(request, decision.verdict, write, { highest })
      return
    }

    // 4. Barrier: older writes end first.
    const turning = inflight.turn(write)
    const turn =
      turning instanceof Promise ? await this.#wait(request, write, turning, 'barrier') : turning
    if (turn !== 'go') {
      fence.giveBack(write)
      this.#refuseTurn(request, write, turn)
      return
    }

    // 5. Forward, once. 6. End, when the exchange with the backend is over.
    const meter = this.#parts.metrics.of(label)
    meter.inFlight++
    let ending: Ending = { kind: 'unknown', why: 'reset' }
    try {
      // The mark is looked at once more: it may have risen since the barrier opened.
      if (write.overtakenBy === undefined) {
        const began = performance.now()
        const exchange = this.#send(request, path, write, 'accepted')
        // By a name of its own: V8 puts a function literal that is assigned to a property straight
        // into the old generation, and with it all that the exchange holds, until a full collection.
        const overtake = () => exchange.overtake()
        write.onOvertaken = overtake
        ending = await exchange.ended
        this.#measure(request, label, began, ending)
      } else ending = { kind: 'unsent', why: 'overtaken' }
    } finally {
      write.onOvertaken = undefined
      meter.inFlight--
      inflight.end(write, ending.kind === 'unknown' ? 'unknown' : 'known')
      if (ending.kind === 'unsent') fence.giveBack(write)
    }
    this.#reportEnding(request, write, ending)
  }

  /**
   * Waits for a commit or at the barrier, with an eye on the client: one that leaves is not waited
   * for any longer, and its write is never sent.
   */
  async #wait<T>(
    { req, res }: Request,
    write: Write,
    outcome: Promise<T>,
    where: 'commit' | 'barrier',
  ): Promise<T> {
    const { inflight, metrics } = this.#parts
    const leave = () => inflight.leave(write)
    res.once('close', leave)
    const stopWatching = onDeparture(req.socket, leave)
    const meter = metrics.of(write.route)
    const since = performance.now()
    meter.waiting++
    try {
      return await outcome
    } finally {
      meter.waiting--
      if (where === 'barrier') metrics.barrierWait.observe((performance.now() - since) / 1000)
      res.off('close', leave)
      stopWatching()
    }
  }

  /** A write that admission let in and the barrier did not let through. */
  #refuseTurn(request: Request, write: Write, turn: Exclude<Turn, 'go'>): void {
    switch (turn) {
      case 'stale':
        this.#refuse(request, 'stale', write, { highest: write.overtakenBy })
        return
      case 'busy':
        this.#parts.log.warn(
          { event: 'barrier_timeout', ...logged(write), requestId: request.id },
          'older writes of the scope did not end in time',
        )
        this.#refuse(request, 'busy', write)
        return
      case 'left':
        this.#count(write.route, 'left')
        return
      default:
        turn satisfies never
    }
  }

  /** Sends a request to the backend, once: a read, or a write of which the fence made `result`. */
  #send(request: Request, path: string, write?: Known, result?: Result): Exchange {
    const { forwarder, tunnel, tokenHeader } = this.#parts
    const { req, res, id, framing, upgrade, fields } = request
    // HTTP/1.0 knows no 100 (RFC 9110, 10.1.1).
    if (fields.has('expect') && req.httpVersion === '1.1') res.writeContinue()
    const said = result === undefined ? [] : fencingFields(result, write?.scope)
    return (upgrade === undefined ? forwarder : tunnel).send({
      req,
      res,
      path,
      framing,
      fields: backendFields(req, fields, {
        requestId: id,
        tokenHeader,
        token: write?.token,
        scope: write?.scope,
      }),
      answerFields: ['X-Request-Id', id, ...said],
      isWrite: write !== undefined,
      upgrade,
    })
  }

  /** What there is to say of an exchange, whatever it carried. */
  #measure({ id }: Request, route: string, began: number, ending: Ending): void {
    if (ending.kind === 'unsent' && ending.why === 'unreachable') {
      this.#parts.log.warn(
        { event: 'backend_unreachable', requestId: id, err: ending.cause },
        'no connection to the backend',
      )
    }
    const code = ending.kind === 'answered' ? ending.status.toString() : ending.why
    this.#parts.metrics.of(route).exchanged(code, (performance.now() - began) / 1000)
  }

  async #forwardRead(request: Request, path: string): Promise<void> {
    const began = performance.now()
    const exchange = this.#send(request, path)
    const ending = await exchange.ended
    this.#measure(request, 'none', began, ending)
    this.#count('none', 'read')
    if (ending.kind === 'answered' || ending.why === 'left') return
    fail(request.req, request.res, READ_PROBLEMS[ending.why], { requestId: request.id })
  }

  /** A write that configuration lets through without the barrier, whatever the fence said. */
  async #forward(request: Request, path: string, known: Known, result: Result): Promise<void> {
    const began = performance.now()
    const exchange = this.#send(request, path, known, result)
    const ending = await exchange.ended
    this.#measure(request, known.route, began, ending)
    if (ending.kind === 'answered') this.#count(known.route, result)
    else this.#answerEnding(request, ending, known)
  }

  /** Tells the client, the log and the metrics how a fenced write ended. */
  #reportEnding(request: Request, write: Write, ending: Ending): void {
    const { log, metrics } = this.#parts
    const { route } = write
    if (ending.kind === 'answered') {
      this.#count(route, 'accepted')
      return
    }
    if (ending.kind === 'unknown') {
      metrics.unknownOutcomes.inc({ route, reason: ending.why })
      log.warn(
        {
          event: 'outcome_unknown',
          ...logged(write),
          reason: ending.why,
          requestId: request.id,
          err: ending.cause,
        },
        'nobody knows whether the backend applied this write; newer owners wait until it has settled',
      )
    }
    if (ending.why === 'overtaken') {
      log.info(
        {
          event: 'superseded',
          ...logged(write),
          highest: write.overtakenBy === undefined ? undefined : formatToken(write.overtakenBy),
          requestId: request.id,
        },
        'a write was cut off by a newer owner before it was sent whole',
      )
    }
    this.#answerEnding(request, ending, write, write.overtakenBy)
  }

  #answerEnding(
    request: Request,
    ending: Exclude<Ending, { kind: 'answered' }>,
    known: Known,
    highest?: Token,
  ): void {
    switch (ending.why) {
      case 'left':
        this.#count(known.route, 'left')
        return
      case 'overtaken':
        this.#refuse(request, 'superseded', known, { highest })
        return
      case 'unreachable':
        this.#refuse(request, 'unreachable', known)
        return
      case 'stopping':
        this.#refuse(request, 'unavailable', known)
        return
      case 'reset':
        this.#refuse(request, 'unknown', known)
        return
      case 'timeout':
        this.#refuse(request, 'unknown', known, { status: 504 })
        return
      case 'client-timeout':
        if (ending.kind === 'unsent') this.#refuse(request, 'incomplete', known)
        else this.#refuse(request, 'unknown', known, { status: 408 })
        return
      default:
        ending satisfies never
    }
  }

  /** A token that is not the scope's: an old owner's, or an invented one. */
  #reportToken(
    { req, id }: Request,
    path: string,
    route: CompiledRoute,
    write: Write,
    { verdict, highest }: Extract<Decision, { verdict: 'stale' | 'unissued' }>,
  ): void {
    const { mode } = route.config
    if (verdict === 'stale') this.#parts.metrics.staleWrites.inc({ route: route.label, mode })
    this.#parts.log.warn(
      {
        event: `${verdict}_write`,
        mode,
        ...logged(write),
        highest: highest === undefined ? undefined : formatToken(highest),
        method: req.method,
        path: path.replace(/[?#].*/s, ''),
        requestId: id,
        remote: req.socket.remoteAddress,
      },
      mode === 'observe'
        ? `a write with ${OF_TOKEN[verdict]} token was forwarded: this route only observes`
        : `a write with ${OF_TOKEN[verdict]} token was refused`,
    )
  }

  /** What is answered here because it is not for the backend. */
  #answeredHere(request: Request): boolean {
    const { req, res, method, fields, id } = request
    const expectation = fields.all('expect')
    if (expectation.length > 1 || (expectation[0] ?? CONTINUE).toLowerCase() !== CONTINUE) {
      fail(req, res, 'expectation-failed', { requestId: id })
    } else if (method === 'CONNECT') {
      fail(req, res, 'connect-refused', { requestId: id })
    } else if (method === 'OPTIONS' && (req.url === '*' || fields.all('max-forwards')[0] === '0')) {
      // RFC 9110, 7.6.2 and 9.3.7: the last recipient answers, for the server as a whole.
      res.writeHead(204, ['X-Request-Id', id])
      res.end()
    } else if (method === 'TRACE' && fields.all('max-forwards')[0] === '0') {
      fail(req, res, 'trace-refused', { requestId: id })
    } else return false
    this.#count('none', 'answered')
    return true
  }

  /** The one token of the request, or why there is none. */
  #readToken(fields: Fields): Token | 'missing' | 'malformed' {
    const values = fields.all(this.#tokenName)
    if (values.length === 0) return 'missing'
    if (values.length > 1) return 'malformed'
    return parseToken(values[0] as string) ?? 'malformed'
  }

  /** Spelling refusals do not break traffic where no route enforces anything yet. */
  #onlyObserves(route: CompiledRoute | undefined): boolean {
    if (route !== undefined) return route.config.mode === 'observe'
    return this.#parts.routes.all.every(({ config }) => config.mode === 'observe')
  }

  #refuse(
    { req, res, id }: Request,
    refusal: Refusal,
    { route, scope, token }: Known,
    { detail, status, highest }: Pick<AnswerDetails, 'detail' | 'status' | 'highest'> = {},
  ): void {
    this.#count(route, refusal)
    refuse(req, res, refusal, { requestId: id, scope, token, detail, status, highest })
  }

  #count(route: string, result: Outcomes): void {
    this.#parts.metrics.of(route).count(result)
  }
}

/** Values of the label `result` of `fencing_requests_total`. */
type Outcomes =
  | Result
  /** Passed unfenced, as reads do. */
  | 'read'
  /** For the lease service. */
  | 'lease'
  /** The client left before there was anything to answer. */
  | 'left'
  /** Not well formed; refused before anything else. */
  | 'refused'
  /** Answered by the proxy itself, such as `OPTIONS *`. */
  | 'answered'

const READ_PROBLEMS = {
  unreachable: 'read-unreachable',
  overtaken: 'read-failed',
  reset: 'read-failed',
  timeout: 'read-timeout',
  'client-timeout': 'client-timeout',
  stopping: 'stopping',
} as const

const OF_TOKEN = { stale: 'a stale', unissued: 'an unissued' } as const

const CONTINUE = '100-continue'

/** The client's request id where it can be one, else a new one. */
function requestId(fields: Fields): string {
  const ids = fields.all('x-request-id')
  const [id = ''] = ids
  return ids.length === 1 && /^[\x21-\x7e]{1,128}$/.test(id) ? id : randomUUID()
}

/** Resolves when the answers to earlier requests on the connection are written; false if it closed before. */
function isNext(req: IncomingMessage, res: ServerResponse): Promise<boolean> {
  return new Promise((resolve) => {
    res.once('socket', () => resolve(true))
    req.once('close', () => resolve(false))
  })
}

function logged({ route, scope, token }: Write): { route: string; scope: string; token: string } {
  return { route, scope, token: formatToken(token) }
}
