import { once } from 'node:events'
import net from 'node:net'
import { listenOn } from './harness.ts'

/** A port for a program that cannot say which one it chose itself. */
export async function freePort(): Promise<number> {
  const server = net.createServer()
  const port = await listenOn(server)
  server.close()
  await once(server, 'close')
  return port
}
