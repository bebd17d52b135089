/**
 * The fencing token: its grammar and its order. Pure.
 *
 * A token is `N` or `G.N`; both are decimal integers from 0 to 9223372036854775807, and `N` means
 * `0.N`. Tokens are ordered by generation G, then by N.
 *
 * Inside, a token is one bigint, G · 2^63 + N: the order of bigints is then exactly the order of
 * tokens, over the whole range, where a float would confuse 9007199254740992 with its successor
 * and text would put 10 before 9.
 */

declare const isToken: unique symbol
export type Token = bigint & { readonly [isToken]: true }

/** The largest generation, and the largest number: 2^63 − 1, what a signed 64-bit column holds. */
export const MAX_PART = 9223372036854775807n

// No sign, no blank, no leading zero: one spelling for one token. `$` without the m flag is the very end.
const GRAMMAR = /^(?:(0|[1-9][0-9]{0,18})\.)?(0|[1-9][0-9]{0,18})$/

/** The token that `text` spells, or undefined where it spells none. */
export function parseToken(text: string): Token | undefined {
  const parts = GRAMMAR.exec(text)
  if (parts?.[2] === undefined) return undefined
  const number = BigInt(parts[2])
  if (number > MAX_PART) return undefined
  if (parts[1] === undefined) return number as Token
  const generation = BigInt(parts[1])
  return generation > MAX_PART ? undefined : joinToken(generation, number)
}

/** How a token is written in fields, answers and logs: `N` in generation 0, `G.N` in the others. */
export function formatToken(token: Token): string {
  if (token <= MAX_PART) return token.toString()
  const { generation, number } = splitToken(token)
  return `${generation}.${number}`
}

/** Both parts must lie in 0 … MAX_PART; what the store holds and what `parseToken` let through does. */
export function joinToken(generation: bigint, number: bigint): Token {
  return ((generation << 63n) | number) as Token
}

/** The smallest token above `token`: N counts up, and after the last N the next generation begins. */
export function nextToken(token: Token): Token | undefined {
  return token === LAST ? undefined : ((token + 1n) as Token)
}

export function splitToken(token: Token): { generation: bigint; number: bigint } {
  return { generation: token >> 63n, number: token & MAX_PART }
}

const LAST = joinToken(MAX_PART, MAX_PART)

/** The token of a scope's first lease. */
export const FIRST_ISSUED = joinToken(0n, 1n)
