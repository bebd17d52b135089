import { Agent, request, type ClientRequest, type IncomingMessage } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'
import { CONDUCT_FIELD, type Conduct } from './conduct.ts'
import type { Happened } from './history.ts'
import { SILENCE_SECONDS } from './settings.ts'

/** A write as its worker plans it. */
export interface Plan {
  readonly id: string
  readonly scope: string
  readonly token: string
  readonly method: 'PUT' | 'POST' | 'PATCH' | 'DELETE'
  readonly chunked: boolean
  /** The body's parts, in bytes, with a pause before each. */
  readonly parts: readonly number[]
  readonly pauseMs: number
  /** After how many parts the client goes away, and how long after. Undefined: it stays. */
  readonly leaves: { readonly afterParts: number; readonly afterMs: number } | undefined
  readonly conduct: Conduct
  readonly faults: readonly string[]
}

export interface Told {
  readonly status: number
  readonly result: string
}

/** Writes to the sidecar and notes what comes of it. */
export class Client {
  readonly #port: number
  readonly #append: (happened: Happened) => void
  readonly #agent = new Agent({ keepAlive: true, maxSockets: 16 })

  constructor(port: number, append: (happened: Happened) => void) {
    this.#port = port
    this.#append = append
  }

  /** Resolves with the answer, or with undefined where none came or nobody waited for it. */
  async write(plan: Plan): Promise<Told | undefined> {
    const { id, scope, token, method, parts, chunked } = plan
    const bytes = parts.reduce((sum, part) => sum + part, 0)
    const framing = chunked ? { 'Transfer-Encoding': 'chunked' } : { 'Content-Length': bytes }
    this.#append({
      kind: 'sent',
      write: id,
      scope,
      token,
      bytes,
      how: inWords(plan, bytes),
      faults: plan.faults,
    })
    const req = request({
      host: '127.0.0.1',
      port: this.#port,
      method,
      path: `${scope}/state`,
      agent: this.#agent,
      headers: {
        'Fencing-Token': token,
        'X-Request-Id': id,
        [CONDUCT_FIELD]: JSON.stringify(plan.conduct),
        ...framing,
      },
    })
    const answer = this.#answerOf(req, id)
    void this.#send(req, plan, answer)
    return answer.told
  }

  close(): void {
    this.#agent.destroy()
  }

  async #send(req: ClientRequest, plan: Plan, answer: AnswerToCome): Promise<void> {
    const { id, parts, pauseMs, leaves } = plan
    req.flushHeaders()
    for (const [index, part] of parts.entries()) {
      if (leaves?.afterParts === index) return this.#leave(req, id, leaves.afterMs, answer)
      await delay(pauseMs)
      if (req.destroyed) return
      req.write(Buffer.alloc(part, 'w'))
    }
    req.end()
    if (leaves !== undefined) await this.#leave(req, id, leaves.afterMs, answer)
  }

  async #leave(
    req: ClientRequest,
    id: string,
    afterMs: number,
    answer: AnswerToCome,
  ): Promise<void> {
    await delay(afterMs)
    if (answer.isOver) return
    answer.end({ kind: 'left', write: id })
    req.destroy()
  }

  #answerOf(req: ClientRequest, id: string): AnswerToCome {
    let resolve: (told: Told | undefined) => void = () => undefined
    const told = new Promise<Told | undefined>((settle) => (resolve = settle))
    const silence = afterSeconds(SILENCE_SECONDS, () => {
      end({ kind: 'silent', write: id })
      req.destroy()
    })
    const end = (happened: Happened, told?: Told) => {
      if (answer.isOver) return
      answer.isOver = true
      silence.cancel()
      this.#append(happened)
      resolve(told)
    }
    const answer: AnswerToCome = { told, isOver: false, end }
    req.on('error', (error) => end({ kind: 'broken', write: id, why: error.message }))
    req.on('close', () => end({ kind: 'broken', write: id, why: 'closed' }))
    req.on('response', (res) => {
      let body = ''
      res.on('data', (chunk: Buffer) => {
        if (body.length < LONGEST_PROBLEM) body += chunk.toString()
      })
      res.on('error', () => undefined)
      res.on('end', () => {
        if (!res.complete) return
        const told = { status: res.statusCode ?? 0, result: resultOf(res) }
        end({ kind: 'answered', write: id, ...told, highest: highestIn(res, body) }, told)
        // What was answered before its body was sent is not continued.
        if (!req.writableEnded) req.destroy()
      })
    })
    return answer
  }
}

/** What comes of a write, as far as its worker gets to know. */
interface AnswerToCome {
  readonly told: Promise<Told | undefined>
  isOver: boolean
  /** Notes the end, if it is the first. */
  end(happened: Happened, told?: Told): void
}

const LONGEST_PROBLEM = 4_096

function resultOf(res: IncomingMessage): string {
  return String(res.headers['fencing-result'])
}

function highestIn(res: IncomingMessage, body: string): string | undefined {
  if (res.headers['content-type'] !== 'application/problem+json') return undefined
  return (JSON.parse(body) as { highest?: string }).highest
}

/** Counts seconds in which this process ran: it may be paused for longer, which is nobody's silence. */
function afterSeconds(seconds: number, then: () => void): { cancel: () => void } {
  let left = seconds
  const timer = setInterval(() => {
    left--
    if (left === 0) then()
  }, 1_000)
  return { cancel: () => clearInterval(timer) }
}

function inWords({ method, parts, chunked, leaves, conduct }: Plan, bytes: number): string {
  const framing = chunked ? 'chunked' : 'with length'
  const upload = `${method}, ${bytes} bytes ${framing} in ${parts.length} parts`
  const stay = leaves === undefined ? '' : `; leaves after ${leaves.afterParts} of them`
  const asked = `; asks to be applied after ${conduct.applyMs} ms, answered ${conduct.answer} after ${conduct.answerMs} ms`
  return `${upload}${stay}${asked}`
}
