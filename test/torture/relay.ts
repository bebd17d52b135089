/**
 * The network between sidecar and backend: passes bytes on, and is slow, stands still and breaks
 * when told to. A program of its own, so that nobody else's work delays it. Arguments: the history,
 * the port to listen on, the seed.
 */
import { createServer, connect, type Socket } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import { appendTo } from './history.ts'
import { Random } from './random.ts'
import { HELD_WITHIN_MS } from './settings.ts'

export type ToRelay =
  /** Where the backend is now; undefined: nowhere, connections are refused. */
  | { readonly say: 'backend'; readonly port: number | undefined }
  | { readonly say: 'weather'; readonly weather: 'fair' | 'slow' | 'still' }
  /** Every connection is reset. */
  | { readonly say: 'cut' }

const [history = '', listenPort = '', seed = ''] = process.argv.slice(2)
const append = appendTo(history)
const random = new Random(Number(seed))
const lines = new Set<Line>()
let weather: 'fair' | 'slow' | 'still' = 'fair'
let backendPort: number | undefined

type Direction = 'to backend' | 'to sidecar'

/** How long something is held now. */
async function hold(direction: Direction): Promise<void> {
  if (weather === 'slow') await delay(random.between(1, HELD_WITHIN_MS / 2))
  if (weather !== 'still') return
  // What goes to the backend may not land later than the promise is good for. Answers can wait.
  if (direction === 'to backend') await delay(random.between(1, HELD_WITHIN_MS))
  else while (isStill()) await delay(20)
}

function isStill(): boolean {
  return weather === 'still'
}

/** One connection of the sidecar with its continuation to the backend. */
class Line {
  readonly #sidecar: Socket
  readonly #backend: Socket
  #port = 0
  #isCut = false

  constructor(sidecar: Socket, port: number) {
    this.#sidecar = sidecar
    this.#backend = connect({ port, host: '127.0.0.1', allowHalfOpen: true })
    sidecar.setNoDelay()
    this.#backend.setNoDelay()
    // Nothing passes before: a write that reached the backend has come from a port that is known.
    this.#backend.once('connect', () => {
      this.#port = this.#backend.localPort ?? 0
      this.#carry(sidecar, this.#backend, 'to backend')
      this.#carry(this.#backend, sidecar, 'to sidecar')
    })
    sidecar.on('error', () => undefined)
    sidecar.on('close', () => {
      append({ kind: 'closed', port: this.#port })
      lines.delete(this)
    })
    this.#backend.on('error', () => this.cut())
  }

  /** Breaks the sidecar's connection; the backend may still get what is on its way. */
  cut(): void {
    if (this.#backend.connecting) this.#backend.destroy()
    if (this.#tellCut()) this.#sidecar.resetAndDestroy()
  }

  #tellCut(): boolean {
    if (this.#isCut || this.#sidecar.destroyed) return false
    this.#isCut = true
    append({ kind: 'cut', port: this.#port })
    return true
  }

  #carry(from: Socket, to: Socket, direction: Direction): void {
    let last = Promise.resolve()
    const inOrder = (then: () => Promise<unknown> | void) => {
      last = last.then(async () => {
        await hold(direction)
        if (!to.destroyed) await then()
      })
    }
    from.on('data', (chunk: Buffer) => {
      from.pause()
      inOrder(async () => {
        if (!to.write(chunk)) await drained(to)
        from.resume()
      })
    })
    from.once('end', () =>
      inOrder(() => {
        if (direction === 'to sidecar') this.#tellCut()
        to.end()
      }),
    )
    // After what was on its way. A connection that was reset says no more.
    from.once('close', () => {
      inOrder(() => to.destroySoon())
    })
  }
}

function drained(socket: Socket): Promise<void> {
  return new Promise((resolve) => socket.once('drain', resolve).once('close', () => resolve()))
}

const server = createServer({ allowHalfOpen: true }, (sidecar) => {
  if (backendPort === undefined) sidecar.resetAndDestroy()
  else lines.add(new Line(sidecar, backendPort))
})

// Should somebody else have the port: as soon as it is free.
server.on('error', () => setTimeout(listen, 50))

function listen(): void {
  if (backendPort !== undefined && !server.listening) server.listen(Number(listenPort), '127.0.0.1')
}

process.on('message', (told: ToRelay) => {
  switch (told.say) {
    case 'backend':
      backendPort = told.port
      if (backendPort === undefined) server.close()
      else listen()
      return
    case 'weather':
      weather = told.weather
      return
    case 'cut':
      for (const line of lines) line.cut()
      return
    default:
      told satisfies never
  }
})
process.on('disconnect', () => process.exit(0))
