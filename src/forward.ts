import { EventEmitter } from 'node:events'
import { STATUS_CODES, type IncomingMessage, type ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import type { Readable } from 'node:stream'
import { Pool, type Dispatcher } from 'undici'
import { dismissBody } from './answer.ts'
import { onDeparture } from './departure.ts'
import { endToEnd, namesOf } from './fields.ts'
import type { Framing } from './framing.ts'

/**
 * One exchange with the backend, over undici's dispatch: fields, framing, timeouts, and above all
 * how it ended, told exactly once. This is the only file that knows what carries an exchange.
 *
 * Why undici's dispatch and not the http-proxy package or fetch: it frames messages itself, sends
 * each once, on one connection with nothing pipelined behind it, and its handler is told when the
 * request was sent whole and how the exchange ended. http-proxy cannot say either, and forwards a
 * chunked DELETE so that its body is executed as a second request (CVE-2026-29057).
 */

/** What to send, and for whom. */
export interface Outgoing {
  readonly req: IncomingMessage
  readonly res: ServerResponse
  /** The request target in origin-form, as it came. */
  readonly path: string
  readonly framing: Framing
  /** Fields towards the backend, names and values in turn, without hop-by-hop fields and framing. Handed over. */
  readonly fields: string[]
  /** Fields of our own on the answer, names and values in turn. */
  readonly answerFields: readonly string[]
  /**
   * A write runs on when its client leaves after the body arrived whole, since its effect is under
   * way and its end has to be known. A read is broken off.
   */
  readonly isWrite: boolean
  /** An upgrade: the connection, and what came behind the head of the request. */
  readonly upgrade: { readonly socket: Socket; readonly head: Buffer } | undefined
}

/** How an exchange ended. `unsent`: nothing of it was sent. `unknown`: something was, and no whole response came. */
export type Ending =
  | { readonly kind: 'answered'; readonly status: number }
  | {
      readonly kind: 'unsent'
      readonly why: 'unreachable' | 'overtaken' | 'left' | 'client-timeout' | 'stopping'
      readonly cause?: Error
    }
  | { readonly kind: 'unknown'; readonly why: UnknownReason; readonly cause?: Error }

export type UnknownReason =
  /** The connection broke, or the response was cut short or not HTTP. */
  | 'reset'
  /** The backend was silent for `responseTimeout`, or, once a newer owner waited, took longer in all. */
  | 'timeout'
  /** Cut off by a newer owner before it was sent whole. */
  | 'overtaken'
  /** The client left in the middle of its body. */
  | 'left'
  /** The client stopped sending in the middle of its body. */
  | 'client-timeout'
  /** An upgraded connection, which would never end by itself, was closed because the proxy stops. */
  | 'stopping'

export interface Exchange {
  /**
   * Resolves when the exchange is over, whether or not the client stayed; never rejects. The
   * response has then been passed on, or, where it did not begin, is still to be written.
   */
  readonly ended: Promise<Ending>
  /**
   * A newer owner waits. A request that is not sent whole is cut off at once; otherwise the
   * response is read as fast as the backend gives it, and for `responseTimeout` at the most.
   */
  overtake(): void
}

/** Carries exchanges. Tests put the known-bad in its place. */
export interface Forwarder {
  send(outgoing: Outgoing): Exchange
  /** Breaks off what runs and closes every connection. */
  close(): Promise<void>
}

export interface ForwardSettings {
  /** Origin of the backend: `http://host:port`. */
  readonly url: string
  readonly responseTimeoutMs: number
  readonly clientTimeoutMs: number
  readonly maxConnections: number
}

/** To reach a backend that does not answer at all must not take longer than this. */
const CONNECT_TIMEOUT_MS = 10_000

/** @throws TypeError where `url` is no origin; the configuration has checked that. */
export function createForwarder(settings: ForwardSettings): Forwarder {
  const pool = new Pool(settings.url, {
    connections: settings.maxConnections,
    pipelining: 1,
    // One timer per exchange, below, replaces undici's; its own are coarse and cannot be shared
    // with the wait for a connection.
    headersTimeout: 0,
    bodyTimeout: 0,
    connect: { timeout: Math.min(CONNECT_TIMEOUT_MS, settings.responseTimeoutMs) },
  })
  const watch = new Watch()
  return {
    send: (outgoing) => new PoolExchange(pool, outgoing, settings, watch),
    close: () => pool.destroy(),
  }
}

/**
 * One timer for the waits of all exchanges. It is set for the earliest end of one; a sign of life
 * leaves it too early, which costs a look at each, and at most one such look a `responseTimeout` for each.
 */
class Watch {
  /**
   * Not a Set: what is added and deleted all the time leaves its outgrown tables in V8's old
   * generation, and those hold on to every exchange that they name until a full collection.
   */
  readonly #exchanges: PoolExchange[] = []
  #looksAt = Infinity
  #timer: NodeJS.Timeout | undefined

  add(exchange: PoolExchange): void {
    exchange.place = this.#exchanges.push(exchange) - 1
  }

  delete(exchange: PoolExchange): void {
    const last = this.#exchanges.pop()
    if (last === undefined || last === exchange) return
    this.#exchanges[exchange.place] = last
    last.place = exchange.place
  }

  /** Looks no later than when the clock reads `end`. */
  lookBy(end: number): void {
    if (this.#looksAt <= end) return
    this.#looksAt = end
    clearTimeout(this.#timer)
    // A timer may fire up to a millisecond early. It keeps nothing alive: connections do.
    this.#timer = setTimeout(this.#look, end - performance.now() + 1).unref()
  }

  readonly #look = (): void => {
    this.#looksAt = Infinity
    const now = performance.now()
    let again = false
    for (const exchange of [...this.#exchanges]) {
      const end = exchange.look(now)
      if (end > now) this.lookBy(end)
      else again = true
    }
    // After a pause of this process, timers come before what has arrived meanwhile.
    if (again) setImmediate(this.#look)
  }
}

/** Response bytes kept for the client of an overtaken write before it counts as not reading. */
const OVERTAKEN_BUFFER = 1024 * 1024

/**
 * A body of up to this length is collected, and leaves with its head in one piece: that costs less
 * than a stream, and until then nothing was sent, so that a write whose client leaves or
 * stalls has ended and its outcome is known. Connections times this much may be held in memory.
 */
const COLLECTED_BYTES = 16 * 1024

/** What an exchange waits for, and so whose silence ends it. */
type Awaited = 'backend' | 'client-body' | 'client-read'

class PoolExchange implements Exchange, Dispatcher.DispatchHandler {
  readonly ended: Promise<Ending>
  readonly #outgoing: Outgoing
  readonly #settings: ForwardSettings
  readonly #pool: Pool
  #resolve: (ending: Ending) => void = () => undefined
  #abort: ((cause: Error) => void) | undefined
  /** Where the body comes from while it is sent in parts, or collected to be sent in one. */
  #upload: Upload | Collection | undefined
  #resumeBackend: (() => void) | undefined
  /** While queued for a connection: looks out for the client's leaving. */
  #stopWatching: (() => void) | undefined

  /** Something of the request was given to the connection; until then a stop is a clean one. */
  #begun = false
  #sentWhole = false
  #over = false
  /** The response is read and dropped. */
  #discarding = false
  #status = 0
  #bodyBegan = false

  // Signs of life only note the time; the watch looks at it.
  readonly #watch: Watch
  /** Where the watch keeps it. */
  place = 0
  #awaited: Awaited = 'backend'
  #lastSign = performance.now()
  /** At the last look there was nothing to wait for any longer. */
  #expired = false
  /** Once overtaken: the end, whatever happens. */
  #deadline = Infinity

  constructor(pool: Pool, outgoing: Outgoing, settings: ForwardSettings, watch: Watch) {
    this.#pool = pool
    this.#outgoing = outgoing
    this.#settings = settings
    this.#watch = watch
    this.ended = new Promise((resolve) => (this.#resolve = resolve))
    watch.add(this)
    watch.lookBy(this.#lastSign + settings.responseTimeoutMs)

    const { req, res, framing, fields } = outgoing
    if (req.socket.destroyed) {
      this.#finish({ kind: 'unsent', why: 'left' })
      return
    }
    res.on('close', this.#onClientClose)
    if (framing.kind === 'length' && framing.bytes > 0 && framing.bytes <= COLLECTED_BYTES) {
      this.#upload = new Collection(req, framing.bytes, this)
      return
    }
    if (framing.kind === 'length') fields.push('Content-Length', framing.bytes.toString())
    if (framing.kind === 'none' || (framing.kind === 'length' && framing.bytes === 0)) {
      this.#dispatch(null)
      return
    }
    const upload = new Upload(req, this)
    this.#upload = upload
    // eslint-disable-next-line @typescript-eslint/no-unsafe-class-instance-assignment -- see Upload
    this.#dispatch(upload as EventEmitter as Readable)
  }

  #dispatch(body: Buffer | Readable | null): void {
    const { req, path, fields } = this.#outgoing
    try {
      const exchange = { path, method: req.method ?? 'GET', headers: fields, body }
      const free = this.#pool.dispatch(exchange, this)
      if (!free && this.#abort === undefined) this.#watchQueued()
    } catch (error) {
      this.#finish({ kind: 'unsent', why: 'unreachable', cause: asError(error) })
    }
  }

  overtake(): void {
    if (this.#over) return
    if (!this.#sentWhole) {
      this.#breakOff(this.#cutShort('overtaken'))
      return
    }
    this.#deadline = performance.now() + this.#settings.responseTimeoutMs
    this.#watch.lookBy(this.#deadline)
    this.#keepUpOrDiscard()
    this.#resumeBackend?.()
  }

  // What undici tells, in this order.

  onConnect(abort: (cause?: Error) => void): void {
    this.#stopWatching?.()
    if (this.#over || this.#begun) {
      // Overtaken or left while it was queued for a connection: nothing must be sent any more. Nor
      // is anything ever sent twice.
      abort(new Error('the exchange is over'))
      return
    }
    this.#abort = abort
    this.#lastSign = performance.now()
    // The bytes leave in this very call, but where the body comes in parts: with the first of them.
    if (this.#upload === undefined) this.#begun = true
  }

  onRequestSent(): void {
    this.#sentWhole = true
    this.#upload?.destroy()
    this.#await('backend')
  }

  onHeaders(status: number, rawFields: Buffer[], resume: () => void, statusText: string): boolean {
    this.#lastSign = performance.now()
    if (this.#over || status < 200) return true
    this.#status = status
    this.#resumeBackend = resume
    const { req, res, answerFields } = this.#outgoing
    if (this.#discarding || res.destroyed) return true
    if (!this.#sentWhole) dismissBody(req, res)
    res.sendDate = false
    res.writeHead(
      status,
      phrase(status, statusText),
      answerFields.concat(passedOn(status, rawFields)),
    )
    process.nextTick(this.#passHead)
    return true
  }

  onData(chunk: Buffer): boolean {
    this.#lastSign = performance.now()
    const { res } = this.#outgoing
    this.#bodyBegan = true
    if (this.#over || this.#discarding || res.destroyed || res.write(chunk)) return true
    if (this.#deadline !== Infinity) {
      this.#keepUpOrDiscard()
      return true
    }
    this.#await('client-read')
    res.once('drain', () => {
      this.#await('backend')
      this.#resumeBackend?.()
    })
    return false
  }

  onComplete(): void {
    this.#complete()
  }

  onUpgrade(): void {
    // No upgrade was asked for; undici reports an unasked one as an error.
    this.#breakOff({ kind: 'unknown', why: 'reset' })
  }

  onError(cause: Error): void {
    // undici misses the bytes that a Content-Length of a 304 or 204 speaks of; there are none to come
    // (RFC 9112, 6.3), so with its head such an answer is whole.
    if (this.#status === 204 || this.#status === 304) {
      this.#complete()
      return
    }
    if (this.#begun) this.#finish({ kind: 'unknown', why: 'reset', cause })
    else this.#finish({ kind: 'unsent', why: 'unreachable', cause })
  }

  // What the upload or the collection tells.

  /** Whether the upload can take more from the client. */
  uploadWaits(waits: boolean): void {
    if (!this.#sentWhole) this.#await(waits ? 'client-body' : 'backend')
  }

  /** Another part of a body that is collected has come. */
  uploadGrows(): void {
    this.#lastSign = performance.now()
  }

  /** The body is here whole, and nothing of it was sent. */
  uploadCollected(body: Buffer): void {
    this.#upload = undefined
    this.#await('backend')
    this.#dispatch(body)
  }

  /** The first or a further part of the body, or its end, is about to be sent. */
  uploadSends(): void {
    this.#begun = true
    this.#lastSign = performance.now()
  }

  // What the client and the clock do.

  readonly #onClientClose = (): void => {
    if (this.#over) return
    // Its effect is under way: the exchange runs on, and its response is dropped.
    if (this.#outgoing.isWrite && this.#sentWhole) this.#discard()
    else this.#breakOff(this.#cutShort('left'))
  }

  /**
   * Node sends a head together with the first bytes of the body. Where none came with it (an event
   * stream, a long poll), the client must not have to wait for them.
   */
  readonly #passHead = (): void => {
    if (!this.#bodyBegan && !this.#over && !this.#outgoing.res.destroyed) {
      this.#outgoing.res.flushHeaders()
    }
  }

  /** A request that is queued for a connection is never sent when its client leaves. */
  #watchQueued(): void {
    this.#stopWatching = onDeparture(this.#outgoing.req.socket, () => {
      if (!this.#begun) this.#breakOff({ kind: 'unsent', why: 'left' })
    })
  }

  #await(awaited: Awaited): void {
    this.#awaited = awaited
    this.#lastSign = performance.now()
    this.#watch.lookBy(this.#lastSign + this.#allowedMs())
  }

  /** How long what is awaited may be silent. */
  #allowedMs(): number {
    const { clientTimeoutMs, responseTimeoutMs } = this.#settings
    return this.#awaited === 'backend' ? responseTimeoutMs : clientTimeoutMs
  }

  /**
   * Ends what has waited too long at two looks in turn. Returns until when it may wait; a time that
   * has passed asks for another look.
   */
  look(now: number): number {
    const expired = this.#waitsUntil <= now
    if (!expired || !this.#expired) {
      this.#expired = expired
      return this.#waitsUntil
    }
    this.#expired = false
    if (this.#deadline <= now) this.#breakOff({ kind: 'unknown', why: 'timeout' })
    else this.#onSilence()
    return this.#over ? Infinity : this.#waitsUntil
  }

  get #waitsUntil(): number {
    return Math.min(this.#lastSign + this.#allowedMs(), this.#deadline)
  }

  #onSilence(): void {
    switch (this.#awaited) {
      case 'client-body':
        this.#breakOff(this.#cutShort('client-timeout'))
        return
      case 'client-read':
        this.#discard()
        return
      case 'backend': {
        const cause = new Error('no connection in time')
        if (this.#begun) this.#breakOff({ kind: 'unknown', why: 'timeout' })
        else this.#breakOff({ kind: 'unsent', why: 'unreachable', cause })
        return
      }
      default:
        this.#awaited satisfies never
    }
  }

  #complete(): void {
    if (!this.#discarding) this.#outgoing.res.end()
    this.#finish({ kind: 'answered', status: this.#status })
  }

  #cutShort(why: 'overtaken' | 'left' | 'client-timeout'): Ending {
    return this.#begun ? { kind: 'unknown', why } : { kind: 'unsent', why }
  }

  /** The client of an overtaken write must not hold the scope by reading slowly. */
  #keepUpOrDiscard(): void {
    if (this.#outgoing.res.writableLength > OVERTAKEN_BUFFER) this.#discard()
  }

  /** The client gets no more of the response; what the backend still sends is read and dropped. */
  #discard(): void {
    if (this.#discarding) return
    this.#discarding = true
    this.#breakClient()
    this.#await('backend')
    if (this.#outgoing.isWrite) this.#resumeBackend?.()
    else this.#breakOff({ kind: 'unknown', why: 'left' })
  }

  /**
   * A response that was cut short must never look complete, not even where its end is the end of
   * the connection (HTTP/1.0): reset, do not close.
   */
  #breakClient(): void {
    this.#outgoing.req.socket.resetAndDestroy()
  }

  #breakOff(ending: Ending): void {
    this.#finish(ending)
    this.#abort?.(new Error('broken off'))
  }

  #finish(ending: Ending): void {
    if (this.#over) return
    this.#over = true
    this.#watch.delete(this)
    this.#upload?.destroy()
    this.#stopWatching?.()
    const { res } = this.#outgoing
    if (ending.kind !== 'answered' && res.headersSent) this.#breakClient()
    this.#resolve(ending)
  }
}

/**
 * The backend's reason phrase, or the standard one where it is not ASCII: undici has decoded its bytes
 * as UTF-8, so that others are lost, and what Node refuses to write must not cost an answer.
 */
function phrase(status: number, statusText: string): string {
  return /^[\t\x20-\x7e]*$/.test(statusText) ? statusText : (STATUS_CODES[status] ?? '')
}

/** The fields of the backend's answer that go on to the client, names and values in turn. */
function passedOn(status: number, rawFields: readonly Buffer[]): string[] {
  const fields = rawFields.map((field) => field.toString('latin1'))
  return endToEnd(fields, namesOf(fields), status === 204 ? isOursOrLength : isOurs)
}

/** What the proxy alone says. */
function isOurs(name: string): boolean {
  return name === 'x-request-id' || name.startsWith('fencing-')
}

/** A 204 has no length (RFC 9110, 8.6); one that came all the same must not confuse the client. */
function isOursOrLength(name: string): boolean {
  return name === 'content-length' || isOurs(name)
}

function asError(thrown: unknown): Error {
  return thrown instanceof Error ? thrown : new Error(String(thrown))
}

/**
 * A request body on its way to undici, which wants a stream and destroys it when the exchange ends
 * early. The request itself must not be destroyed then: its connection still owes an answer. So
 * this stands between, with the few parts of a Readable that undici's writer uses.
 */
class Upload extends EventEmitter {
  readonly #req: IncomingMessage
  readonly #exchange: PoolExchange
  #listens = false

  constructor(req: IncomingMessage, exchange: PoolExchange) {
    super()
    this.#req = req
    this.#exchange = exchange
  }

  resume(): this {
    if (!this.#listens) {
      this.#listens = true
      this.#req.on('data', this.#onData).on('end', this.#onEnd)
    }
    this.#exchange.uploadWaits(true)
    this.#req.resume()
    return this
  }

  pause(): this {
    this.#exchange.uploadWaits(false)
    this.#req.pause()
    return this
  }

  pipe(): never {
    throw new Error('an upload is read by its events')
  }

  destroy(): this {
    if (this.#listens) this.#req.off('data', this.#onData).off('end', this.#onEnd)
    this.#listens = false
    return this
  }

  readonly #onData = (chunk: Buffer): void => {
    this.#exchange.uploadSends()
    this.emit('data', chunk)
  }

  readonly #onEnd = (): void => {
    this.#exchange.uploadSends()
    this.emit('end')
  }
}

/** A small body of known length on its way into one piece. */
class Collection {
  readonly #req: IncomingMessage
  readonly #exchange: PoolExchange
  readonly #bytes: number
  /** One for all parts: kept one by one, parts of a byte would take a hundred times their length. */
  #body: Buffer | undefined
  #filled = 0
  #over = false

  constructor(req: IncomingMessage, bytes: number, exchange: PoolExchange) {
    this.#req = req
    this.#exchange = exchange
    this.#bytes = bytes
    // As a rule the body came right behind the head, and by the next tick it has been parsed, too.
    process.nextTick(this.#takeWhole)
  }

  destroy(): void {
    this.#over = true
    this.#req.off('data', this.#onData)
  }

  readonly #takeWhole = (): void => {
    if (this.#over) return
    if (this.#req.readableLength === this.#bytes) {
      this.#over = true
      this.#exchange.uploadCollected(this.#req.read() as Buffer)
      return
    }
    this.#exchange.uploadWaits(true)
    this.#req.on('data', this.#onData)
  }

  readonly #onData = (part: Buffer): void => {
    this.#body ??= part.length === this.#bytes ? part : Buffer.allocUnsafe(this.#bytes)
    if (this.#body !== part) part.copy(this.#body, this.#filled)
    this.#filled += part.length
    this.#exchange.uploadGrows()
    if (this.#filled < this.#bytes) return
    this.destroy()
    this.#exchange.uploadCollected(this.#body)
  }
}
