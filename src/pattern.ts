/**
 * The two small languages of a route: path patterns (`/jobs/{job}/**`) and scope templates
 * (`/jobs/{job}`). Pure: text to parts, or to what is wrong with the text.
 *
 * Patterns are written in decoded form (`/a b`, not `/a%20b`), because they are compared with
 * decoded segments.
 */

export interface PathPattern {
  readonly segments: readonly Segment[]
  /** Whether the pattern ends in `/**`: any number of further segments, none included. */
  readonly rest: boolean
}

export type Segment =
  | { readonly kind: 'literal'; readonly text: string }
  /** `{name}`: one segment, which the scope can name. */
  | { readonly kind: 'name'; readonly name: string }
  /** `*`: one segment. */
  | { readonly kind: 'any' }

export type Part =
  | { readonly kind: 'text'; readonly text: string }
  | { readonly kind: 'path'; readonly name: string }
  /** `name` in lower case. */
  | { readonly kind: 'header'; readonly name: string }
  | { readonly kind: 'query'; readonly name: string }
  | { readonly kind: 'host' }

/** Why a text is no pattern or no template, for the person who wrote it. */
export interface PatternMistake {
  readonly mistake: string
}

export function parsePath(pattern: string): PathPattern | PatternMistake {
  if (!pattern.startsWith('/')) return { mistake: 'a path begins with /' }
  if (pattern === '/') return { segments: [], rest: false }
  const texts = pattern.slice(1).split('/')
  const rest = texts.at(-1) === '**'
  if (rest) texts.pop()

  const segments: Segment[] = []
  const names = new Set<string>()
  for (const text of texts) {
    const segment = parseSegment(text)
    if ('mistake' in segment) return segment
    if (segment.kind === 'name') {
      if (names.has(segment.name)) return { mistake: `{${segment.name}} is there twice` }
      names.add(segment.name)
    }
    segments.push(segment)
  }
  return { segments, rest }
}

const NAME = /^[A-Za-z_][A-Za-z0-9_-]*$/

function parseSegment(text: string): Segment | PatternMistake {
  if (text === '*') return { kind: 'any' }
  if (text === '**') return { mistake: '** stands at the end only' }
  if (text === '') {
    return { mistake: 'there is an empty segment; a / at the end is left out: /a covers /a/ too' }
  }
  if (text.startsWith('{') && text.endsWith('}')) {
    const name = text.slice(1, -1)
    // In a scope, {host} is the host of the request.
    if (name === 'host') return { mistake: '{host} cannot name a segment; choose another name' }
    if (NAME.test(name)) return { kind: 'name', name }
    return { mistake: `${text} is no name: letters, digits, _ and -, a letter or _ first` }
  }
  if (/[{}*]/.test(text)) {
    return { mistake: `"${text}": {name} and * stand for a whole segment, not for a part of one` }
  }
  if (text === '.' || text === '..' || /[. ]$/.test(text)) {
    return { mistake: `"${text}" never matches: segments that end in a dot or a blank are refused` }
  }
  if (text.includes('%')) {
    return { mistake: `"${text}" has a %; patterns are written decoded: "a b" for a%20b` }
  }
  const character = CONTROL.exec(text)?.[0]
  if (character !== undefined) {
    return { mistake: `a control character (${codePoint(character)}) never matches` }
  }
  return { kind: 'literal', text }
}

const CONTROL = /[\u0000-\u001f\u007f-\u009f]/

/** A name of a header field (RFC 9110, 5.1). */
export const FIELD_NAME = /^[A-Za-z0-9!#$%&'*+.^_`|~-]+$/

export function parseScope(template: string): Part[] | PatternMistake {
  if (template === '') return { mistake: 'a scope is not empty' }
  const character = CONTROL.exec(template)?.[0]
  if (character !== undefined) {
    return { mistake: `a control character (${codePoint(character)}) cannot be in a scope` }
  }
  const parts: Part[] = []
  // Texts at even places, insides of braces at odd ones.
  for (const [i, text] of template.split(/\{([^{}]*)\}/).entries()) {
    if (i % 2 === 1) {
      const value = parseValue(text)
      if ('mistake' in value) return value
      parts.push(value)
    } else if (/[{}]/.test(text)) {
      return { mistake: 'a { without its }, or a } without its {' }
    } else if (text.includes('*')) {
      return { mistake: 'a * stands for nothing in a scope; give the segment a {name} in the path' }
    } else if (text !== '') parts.push({ kind: 'text', text })
  }
  return parts
}

function parseValue(text: string): Part | PatternMistake {
  if (text === 'host') return { kind: 'host' }
  if (NAME.test(text)) return { kind: 'path', name: text }
  const [, source, name = ''] = /^(header|query)\.(.+)$/.exec(text) ?? []
  if (source === 'query') return { kind: 'query', name }
  if (source === 'header' && FIELD_NAME.test(name)) {
    return { kind: 'header', name: name.toLowerCase() }
  }
  return { mistake: `{${text}} is none of {name of the path}, {header.Name}, {query.name}, {host}` }
}

function codePoint(character: string): string {
  return `U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, '0')}`
}
