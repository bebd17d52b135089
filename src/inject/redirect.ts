/**
 * Steering by redirection: rules in the Pod's own network namespace. Pure.
 *
 * PREROUTING sees what comes from outside the Pod, by whatever name or address, and sends it to
 * the proxy. What the proxy sends to the app over loopback leaves by OUTPUT, which has no rule:
 * so does every other connection from inside the Pod, which stays a way around the fence.
 */
const CHAIN = 'FENCE_INBOUND'

/** Input for iptables-restore and ip6tables-restore, with --noflush. */
export function redirectRules(appPort: number, proxyPort: number): string {
  return [
    '*nat',
    // Naming the chain empties it, so that a second run leaves what the first one left.
    `:${CHAIN} - [0:0]`,
    `-A ${CHAIN} -p tcp --dport ${appPort} -j REDIRECT --to-ports ${proxyPort}`,
    'COMMIT',
    '',
  ].join('\n')
}

/** Fails where one of the rules cannot be set: the Pod must not start without them. */
export function redirectScript(appPort: number, proxyPort: number): string {
  return `set -eu
redirect() {
  printf '%s' '${redirectRules(appPort, proxyPort)}' | "$1-restore" --noflush
  # First, before what another mesh may have put there.
  "$1" -t nat -C PREROUTING -j ${CHAIN} 2>/dev/null || "$1" -t nat -I PREROUTING 1 -j ${CHAIN}
}
redirect iptables
# Empty or missing where there is no IPv6. (Its size is 0 in either case.)
if [ -r /proc/net/if_inet6 ] && read -r _ </proc/net/if_inet6; then redirect ip6tables; fi
`
}
