/** Kubernetes quantities: `250m`, `0.5`, `64Mi`, `1e3`. Pure. */

const GRAMMAR = /^(\d+\.?\d*|\.\d+)(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,2}))?$/

const SCALES: Readonly<Record<string, number>> = {
  n: 1e-9, u: 1e-6, m: 1e-3, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18,
  Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40, Pi: 2 ** 50, Ei: 2 ** 60,
} // prettier-ignore

/** The amount, exact enough to compare by; undefined where `text` spells none. */
export function parseQuantity(text: string): number | undefined {
  const [, digits, suffix, exponent] = GRAMMAR.exec(text) ?? []
  if (digits === undefined) return undefined
  const scale = suffix === undefined ? 10 ** Number(exponent ?? 0) : (SCALES[suffix] ?? Number.NaN)
  return Number((Number(digits) * scale).toPrecision(15))
}
