/** What an answer of the sidecar may hold: a hundred times what it does hold. */
const MOST_BYTES = 64 * 1024

/**
 * The body of an answer as text. Rejects with the reason of `ending` where that is aborted before
 * the body's end, and with a `RangeError` where the body is too long.
 *
 * The signal that `fetch` was given does not do this: in Node (undici 6 and 7) a request holds the
 * controller behind it only weakly, so that it may be collected once the head is there, and the
 * body of a silent server is then waited for without an end.
 */
export async function readText(response: Response, ending: AbortSignal): Promise<string> {
  // The types of Node leave open what the chunks are.
  const body: ReadableStream<Uint8Array> | null = response.body
  if (body === null) return ''
  const reader = body.getReader()
  // This ends a `read` that is under way, too.
  const leave = () => void reader.cancel().catch(() => undefined)
  ending.addEventListener('abort', leave)
  try {
    const decoder = new TextDecoder()
    let text = ''
    let length = 0
    for (;;) {
      ending.throwIfAborted()
      const { done, value } = await reader.read()
      ending.throwIfAborted()
      if (done) return text + decoder.decode()
      length += value.byteLength
      if (length > MOST_BYTES) throw new RangeError(`an answer of more than ${MOST_BYTES} bytes`)
      text += decoder.decode(value, { stream: true })
    }
  } finally {
    ending.removeEventListener('abort', leave)
    leave()
  }
}
