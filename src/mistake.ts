/** One wrong setting, as the person who wrote it needs to see it. */
export interface Mistake {
  /** Which setting: `routes[2].scope`; empty where it concerns a source as a whole. */
  readonly path: string
  /** Where it was given: `fencing.yaml:12:5`, `--listen`, …; empty where it was given nowhere. */
  readonly from: string
  /** What was found there; empty where `allowed` says it all. */
  readonly found: string
  /** What is allowed, or why this is not. */
  readonly allowed: string
}

/** One line. */
export function formatMistake({ path, from, found, allowed }: Mistake): string {
  const setting = path === '' ? '' : `${path}: `
  const details = [found, from].filter((detail) => detail !== '').join(', ')
  return details === '' ? `${setting}${allowed}` : `${setting}${allowed} (${details})`
}

export const MISSING = 'missing'

/** A value that was found, short and on one line. What may be a password in a URL is left out. */
export function describeFound(value: unknown): string {
  if (value === undefined) return MISSING
  if (value === null) return 'found nothing'
  if (Array.isArray(value)) return 'found a list'
  if (typeof value === 'object') return 'found keys'
  const text = JSON.stringify(value).replace(/\/\/.*@/, '//…@')
  return `found ${text.length > 80 ? `${text.slice(0, 80)}…` : text}`
}

export function formatPath(path: readonly PropertyKey[]): string {
  return path
    .map((key) => (typeof key === 'number' ? `[${key}]` : `.${String(key)}`))
    .join('')
    .replace(/^\./, '')
}

/** The one of `names` that `name` was probably meant to be: one that ends with it, or differs little. */
export function nearest(name: string, names: readonly string[]): string | undefined {
  const meant = name.toLowerCase()
  const ending = names.find((known) => /[._]/.test(known) && endsInWord(known.toLowerCase(), meant))
  const [closest] = names
    .map((known) => ({ known, distance: editDistance(meant, known.toLowerCase()) }))
    .filter(({ distance }) => distance <= Math.max(1, Math.floor(meant.length / 3)))
    .sort((a, b) => a.distance - b.distance)
  return closest?.known ?? ending
}

function endsInWord(text: string, word: string): boolean {
  return text.endsWith(`.${word}`) || text.endsWith(`_${word}`)
}

/** How many letters have to be added, removed or replaced to make `b` of `a`. */
function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i)
  for (let i = 0; i < a.length; i++) {
    const next = [i + 1]
    for (let j = 1; j <= b.length; j++) {
      const replaced = (row[j - 1] ?? 0) + (a[i] === b[j - 1] ? 0 : 1)
      next.push(Math.min(replaced, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1))
    }
    row = next
  }
  return row[b.length] ?? 0
}
