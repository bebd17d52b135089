import type { Happening } from './happening.ts'

/** Draws happenings as columns of text, at most 100 wide. Pure. */

const SIDE = 24
const MIDDLE = 38

type Colour = 'red' | 'green' | 'yellow' | 'bold' | 'dim'

const CODES: Record<Colour, number> = { red: 31, green: 32, yellow: 33, bold: 1, dim: 2 }

/** Wraps text in a colour, or leaves it plain. */
export type Paint = (colour: Colour, text: string) => string

export function painter(coloured: boolean): Paint {
  return (colour, text) => (coloured ? `\x1b[${CODES[colour]}m${text}\x1b[0m` : text)
}

/** What one happening puts into each column. */
interface Row {
  readonly a?: string
  readonly middle?: string
  readonly b?: string
  readonly colour?: Colour
}

/** `middle` names what stands between the workers. */
export function drawTimeline(
  happenings: readonly Happening[],
  middle: string,
  paint: Paint,
): string[] {
  const ordered = happenings.toSorted((one, other) => one.at - other.at)
  const start = ordered[0]?.at ?? 0
  const lines = [
    paint('bold', line('time', { a: 'worker A', middle, b: 'worker B' })),
    paint('dim', line('─'.repeat(7), { a: rule(SIDE), middle: rule(MIDDLE), b: rule(SIDE) })),
  ]
  const paused = { A: false, B: false }
  for (const happening of ordered) {
    const row = rowOf(happening)
    if (row === undefined) continue
    if (happening.kind === 'resumed') paused[happening.worker] = false
    const asleep = { ...(paused.A && { a: '  ┊' }), ...(paused.B && { b: '  ┊' }) }
    if (happening.kind === 'paused') paused[happening.worker] = true
    const time = `${((happening.at - start) / 1000).toFixed(3)} s`
    const drawn = line(time, { ...asleep, ...row })
    lines.push(row.colour === undefined ? drawn : paint(row.colour, drawn))
  }
  return lines
}

function line(time: string, { a = '', middle = '', b = '' }: Row): string {
  const cells = [time.padStart(7), a.padEnd(SIDE), middle.padEnd(MIDDLE), b]
  return cells.join('  ').trimEnd()
}

function rule(width: number): string {
  return '─'.repeat(width)
}

/** A message from a worker to the middle, or from there to the worker. */
function arrow(worker: 'A' | 'B', to: 'middle' | 'worker', words: string): Row {
  const shaft = '─'.repeat(SIDE - words.length - 2)
  if (worker === 'A') return { a: to === 'middle' ? `${words} ${shaft}▶` : `${words} ◀${shaft}` }
  return { b: to === 'middle' ? `◀${shaft} ${words}` : `${shaft}▶ ${words}` }
}

function cell(worker: 'A' | 'B', words: string): Row {
  return worker === 'A' ? { a: words } : { b: words }
}

/** Undefined for what a reader does not need to see. */
function rowOf(happening: Happening): Row | undefined {
  switch (happening.kind) {
    case 'leased':
      return cell(happening.worker, `gets lease ${happening.token}`)
    case 'paused':
      return { ...cell(happening.worker, 'is PAUSED (SIGSTOP)'), colour: 'yellow' }
    case 'resumed':
      return { ...cell(happening.worker, 'WAKES (SIGCONT)'), colour: 'yellow' }
    case 'expired':
      return { middle: `lease ${happening.token} runs out: not renewed` }
    case 'sent':
      return arrow(happening.worker, 'middle', `writes with ${happening.token}`)
    case 'answered': {
      const { worker, status, result = '', token, highest } = happening
      const refused = status >= 300
      return {
        ...arrow(worker, 'worker', refused ? `${status} ${result}` : `${status} OK`),
        ...(highest !== undefined && { middle: `sidecar: ${token} < ${highest}, not forwarded` }),
        ...(refused && { colour: 'green' }),
      }
    }
    case 'checked':
      return { middle: `proxy: ${happening.token} is the highest, forwards it` }
    case 'marked':
      return { middle: `sidecar: has recorded ${happening.mark} on disk` }
    case 'takeover':
      return { middle: `sidecar: records ${happening.to}, above ${happening.from}` }
    case 'waiting':
      return { middle: "sidecar: B waits, A's is in flight", colour: 'green' }
    case 'received':
      return happening.slow ? { middle: `API: receives ${happening.result}, is slow` } : undefined
    case 'stored':
      return { middle: `API: stores ${happening.result}` }
    default:
      return happening satisfies never
  }
}
