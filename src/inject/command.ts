/** The subcommand `inject`. What belongs to the process is the host's: streams, signals, exit codes. */
import type { Command } from 'commander'
import { runInject, runInjectCheck, runInjectServe, type InjectorFlags, type Outcome, type ServeFlags } from './run.ts' // prettier-ignore
import { DEFAULT_PREFIX } from './settings.ts'
import type { RunningWebhook } from './webhook.ts'
import type { Log } from '../log.ts'

export interface Host {
  /** Of this program, and so of the image that is injected unless a flag names another. */
  readonly version: string
  /** The text of a file, or of standard input for `-`. Rejects where it cannot be read. */
  read(file: string): Promise<string>
  /** Writes what a command has to say, and ends with its code. */
  finish(outcome: Outcome): void
  readonly log: Log
  /** Resolves when the process was asked to stop and the webhook is closed. */
  serve(start: Promise<RunningWebhook>): Promise<void>
}

const afterHelp = (image: string) => `
Examples:
  fencing-proxy inject -f deployment.yaml --image registry.example.com/${image} | kubectl apply -f -
  kubectl get pods,services,networkpolicies,endpointslices -A -o json | fencing-proxy inject check -f -
Exit codes: 0 done (check: no way around the fence shows), 1 refused (check: there is one), 2 usage.`

type FileFlags = InjectorFlags & { readonly file: string }

export function addInjectCommand(program: Command, host: Host): void {
  const image = `fencing-proxy:${host.version}`
  // Flags after `check` and `serve` are theirs, also those that `inject` has too. Commander then has
  // to be told so from the top on.
  program.enablePositionalOptions()
  const inject = withInjector(
    program
      .command('inject')
      .description('write manifests with the sidecar in every Pod whose annotations ask for it')
      .enablePositionalOptions()
      // Not a required option: commander would ask for it after `serve` too.
      .option('-f, --file <file>', 'YAML or JSON; - is standard input')
      .option('--image <image>', 'the image of the sidecar, as the nodes can pull it', image)
      .addHelpText('after', afterHelp(image)),
  ).action(async ({ file, ...flags }: Partial<FileFlags> & InjectorFlags) => {
    if (file === undefined)
      return inject.error("error: required option '-f, --file <file>' not specified")
    host.finish(await over(file, host, (text) => runInject(text, flags, file)))
  })

  withInjector(
    inject
      .command('check')
      .description('print every way around the fence; over manifests, or objects of a cluster')
      .requiredOption('-f, --file <file>', 'YAML or JSON; - is standard input')
      .option('--image <image>', 'the image of the sidecar', image),
  ).action(async ({ file, ...flags }: FileFlags) =>
    host.finish(await over(file, host, (text) => runInjectCheck(text, flags, file))),
  )

  withInjector(
    inject
      .command('serve')
      .description('run the admission webhook: /mutate, /validate, /healthz, /metrics over TLS')
      .requiredOption('--image <image>', 'the image of the sidecar')
      .requiredOption('--tls-cert <file>', 'its certificate, in PEM; read again when it changes')
      .requiredOption('--tls-key <file>', 'the key of it')
      .option('--listen <host:port>', 'where it listens', '0.0.0.0:8443'),
  ).action((flags: ServeFlags) => host.serve(runInjectServe(flags, host.log)))
}

function withInjector(command: Command): Command {
  return command
    .option('--redirect-image <image>', 'an image with iptables, for steering: redirect')
    .option('--prefix <domain>', 'of annotations and labels', DEFAULT_PREFIX)
    .option(
      '--kubernetes-version <version>',
      'of the server or of the oldest kubelet, the older one;\nnative sidecars are used from 1.33 on, and not where nobody says',
    )
}

async function over(
  file: string,
  host: Host,
  command: (text: string) => Outcome,
): Promise<Outcome> {
  let text: string
  try {
    text = await host.read(file)
  } catch (error) {
    return { code: 2, output: '', messages: [`-f ${file}: ${reasonOf(error)}`] }
  }
  return command(text)
}

function reasonOf(error: unknown): string {
  const remedy = 'give the path of a manifest, or - for standard input'
  const code = error instanceof Error && 'code' in error ? error.code : undefined
  switch (code) {
    case 'ENOENT':
    case 'ENOTDIR':
      return `does not exist; ${remedy}`
    case 'EISDIR':
      return `is a directory; ${remedy}`
    case 'EACCES':
      return 'may not be read by this user; give it the right to, or pipe it in with -f -'
    default:
      return `cannot be read: ${error instanceof Error ? error.message : String(error)}`
  }
}
