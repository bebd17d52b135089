import type { Socket } from 'node:net'

/**
 * A client that stops sending (FIN) has either left or half-closed, and nothing on the wire tells
 * which. Who half-closes does so right behind its request (`nc -N`); who leaves, later. So an end
 * that comes this soon is a half-close, and its client gets its answer.
 */
const HALF_CLOSE_MS = 2

/**
 * Calls `then` when the client leaves by ending its side while its request waits, from the call on.
 * Returns the way to stop watching.
 */
export function onDeparture(socket: Socket, then: () => void): () => void {
  let early = true
  const onEnd = () => {
    if (!early) then()
  }
  socket.once('end', onEnd)
  // What arrived within the time is read by the end of that turn of the loop, however late it is.
  const timer = setTimeout(() => setImmediate(() => (early = false)), HALF_CLOSE_MS)
  return () => {
    clearTimeout(timer)
    socket.off('end', onEnd)
  }
}
