/** What several rounds came to. */
export interface Spread {
  readonly median: number
  readonly min: number
  readonly max: number
}

/** Undefined where there is not a number for every round. */
export function spreadOf(values: readonly (number | undefined)[]): Spread | undefined {
  const sorted = values.filter((value) => value !== undefined).sort((a, b) => a - b)
  const [min] = sorted
  const max = sorted.at(-1)
  if (min === undefined || max === undefined || sorted.length < values.length) return undefined
  const half = sorted.length / 2
  const low = sorted[Math.ceil(half) - 1] ?? min
  const high = sorted[Math.floor(half)] ?? max
  return { median: (low + high) / 2, min, max }
}
