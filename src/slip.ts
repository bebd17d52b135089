/**
 * Slips in the syntax of a YAML file, in the words of whoever wrote it: the parser tells what it
 * wanted at the point where it noticed, which is often a line before the one that is wrong.
 */
import type { ErrorCode } from 'yaml'

/** Where to look, and what to do there; `line` and `col` count from 1. */
export interface Slip {
  readonly line: number
  readonly col: number
  readonly words: string
}

/** What the parser says of itself, and where it was. */
interface Noticed {
  readonly code: ErrorCode
  readonly message: string
  readonly line: number
  readonly col: number
}

/** Errors behind which the rest of the file still means what it says. */
const HARMLESS: readonly ErrorCode[] = ['DUPLICATE_KEY', 'TAG_RESOLVE_FAILED']

/** Those worth telling of all that were noticed: one slip in the structure makes many errors. */
export function tellable<T extends { readonly code: ErrorCode }>(noticed: readonly T[]): T[] {
  const slip = noticed.find(({ code }) => !HARMLESS.includes(code))
  return slip === undefined ? noticed.slice(0, 5) : [slip]
}

const SAME_COLUMN =
  'begin the keys of one mapping, and the dashes of one list, in the same column, with blanks'

export function slipOf(text: string, noticed: Noticed): Slip {
  const lines = text.split('\n')
  const { code, message, line, col } = noticed
  const here = (words: string): Slip => ({ line, col, words })
  const atIndent = (number: number, words: string): Slip => {
    const indent = /^[ \t]*/.exec(lines[number - 1] ?? '')?.[0].length ?? 0
    return { line: number, col: indent + 1, words: `line ${number} ${words}` }
  }
  const beginsLine = (lines[line - 1] ?? '').slice(0, col - 1).trim() === ''

  if (code === 'TAB_AS_INDENT') {
    return atIndent(line, 'is indented by a tab; YAML takes blanks only')
  }
  if (/^Flow |^Missing closing/.test(message) || code === 'BLOCK_IN_FLOW') {
    return here(`a bracket, brace or quote that was opened before line ${line} is not closed there`)
  }
  if (code === 'DUPLICATE_KEY') {
    return here(
      'a key must be unique in its mapping; this one is there already: leave one of the two',
    )
  }
  if (code === 'MULTIPLE_DOCS') {
    return here('a second document begins; take the line --- away, and what does not belong here')
  }
  if (code === 'BLOCK_AS_IMPLICIT_KEY' || code === 'MULTILINE_IMPLICIT_KEY') {
    const deeper = deeperBelow(lines, line)
    if (!beginsLine && deeper !== undefined) {
      const words = `is indented as if it belonged to line ${line}, which has a value already; ${SAME_COLUMN}`
      return atIndent(deeper, words)
    }
    if (!beginsLine) return here(`line ${line} has two colons; put quotes around the value`)
    if (!/:(\s|$)/.test(lines[line - 1] ?? '') && !/^\s*-/.test(lines[line - 1] ?? '')) {
      return here(`line ${line} is no key with a value; put a colon and a blank between them`)
    }
  }
  const indented = ['BAD_INDENT', 'BLOCK_AS_IMPLICIT_KEY', 'MISSING_CHAR', 'UNEXPECTED_TOKEN']
  if (beginsLine && indented.includes(code)) {
    // The parser may have stopped at a comment above.
    const wrong = contentBelow(lines, line - 1) ?? line
    return atIndent(wrong, `is not indented as the lines to which it belongs; ${SAME_COLUMN}`)
  }
  if (code === 'UNEXPECTED_TOKEN' || code === 'BAD_SCALAR_START') {
    return here(`line ${line} has a character that means something in YAML; put quotes around the whole value`) // prettier-ignore
  }
  return here(`line ${line} is no YAML: ${message}`)
}

/** The next line below `number` with something on it, if it is indented deeper than the key on `number`. */
function deeperBelow(lines: readonly string[], number: number): number | undefined {
  const column = (at: number) => /^ *(- +)*/.exec(lines[at - 1] ?? '')?.[0].length ?? 0
  const next = contentBelow(lines, number)
  return next !== undefined && column(next) > column(number) ? next : undefined
}

/** The next line below `number` that is neither empty nor a comment. */
function contentBelow(lines: readonly string[], number: number): number | undefined {
  const next = lines.findIndex((line, i) => i >= number && !/^\s*(#|$)/.test(line))
  return next === -1 ? undefined : next + 1
}
