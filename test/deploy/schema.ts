import assert from 'node:assert/strict'
import path from 'node:path'
import ts from 'typescript'
import type { KubernetesObject } from './objects.ts'

/**
 * Holds objects against the API of Kubernetes as it is published, in the types of the package
 * kubernetes-models. Its own validators let a field pass that they do not know; the compiler knows
 * an excess property for what it is, at any depth.
 */

/** Kinds that are not Kubernetes' own, with the fields that we give them. */
const FOREIGN: Readonly<Record<string, string>> = {
  'cert-manager.io/v1 Issuer': '{ selfSigned: {} }',
  'cert-manager.io/v1 Certificate':
    '{ secretName: string; dnsNames: string[]; privateKey: { algorithm: "ECDSA"; rotationPolicy: "Always" }; issuerRef: { name: string; kind?: "Issuer" | "ClusterIssuer"; group?: string } }',
  'monitoring.coreos.com/v1 ServiceMonitor':
    '{ selector: { matchLabels: Record<string, string> }; endpoints: { port: string; scheme: "https"; interval: string; tlsConfig: { serverName: string; ca: { secret: { name: string; key: string } } | { configMap: { name: string; key: string } } } }[] }',
}

/** Fails with every mistake in every object: unknown, missing and mistyped fields. */
export function assertValid(objects: readonly KubernetesObject[]): void {
  assert.ok(objects.length > 0, 'there is something to hold against the API')
  const source = objects.map((object, i) => `const object${i}: ${typeOf(object)} = ${JSON.stringify(object, null, 2)}`) // prettier-ignore
  const mistakes = compile(`${source.join('\n')}\n`)
  assert.deepEqual(mistakes, [], JSON.stringify(objects.map(({ kind, metadata }) => `${kind} ${metadata.name}`))) // prettier-ignore
}

function typeOf({ apiVersion, kind }: KubernetesObject): string {
  const spec = FOREIGN[`${apiVersion} ${kind}`]
  if (spec === undefined) return `import('kubernetes-models/${apiVersion}/${kind}').I${kind}`
  const metadata = `import('kubernetes-models/v1/Pod').IPod['metadata']`
  return `{ apiVersion: string; kind: string; metadata: ${metadata}; spec: ${spec} }`
}

function compile(text: string): string[] {
  // It only needs to be where the packages are found from.
  const file = path.resolve('test/deploy/objects-of-this-test.ts')
  const options: ts.CompilerOptions = {
    module: ts.ModuleKind.NodeNext,
    target: ts.ScriptTarget.ES2022,
    strict: true,
    skipLibCheck: true,
    noEmit: true,
    types: [],
  }
  const host = ts.createCompilerHost(options)
  const { fileExists, getSourceFile } = host
  host.fileExists = (name) => name === file || fileExists(name)
  host.getSourceFile = (name, target, ...rest) =>
    name === file ? ts.createSourceFile(file, text, target) : getSourceFile(name, target, ...rest)
  const program = ts.createProgram([file], options, host)
  return ts
    .getPreEmitDiagnostics(program)
    .map(({ messageText }) => ts.flattenDiagnosticMessageText(messageText, ' '))
}
