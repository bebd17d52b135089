/** Why a Pod is refused: `reason` says what is wrong and what to do about it, in one line. */
export interface Denied {
  readonly kind: 'denied'
  readonly reason: string
}

export function deny(reason: string, remedy: string): Denied {
  return { kind: 'denied', reason: `${reason}; ${remedy}` }
}

export function isDenied(value: object): value is Denied {
  return 'kind' in value && value.kind === 'denied'
}
