import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdir, writeFile } from 'node:fs/promises'
import https from 'node:https'
import path from 'node:path'
import { createInterface } from 'node:readline'
import type { TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'
import { portOf, until } from '../harness.ts'
import { at, ofKind, type KubernetesObject } from './objects.ts'

const CLI = fileURLToPath(new URL('../../src/cli.js', import.meta.url))

/** The injector of rendered objects as a process of this machine. */
export interface Injector {
  readonly port: number
  /** The CA by which the API server knows it, in PEM. */
  readonly ca: string
  /** The name by which the API server calls it. */
  readonly serverName: string
  /** Its log so far. */
  readonly log: Record<string, unknown>[]
  ask(method: 'GET' | 'POST', target: string, body?: unknown): Promise<Answer>
  stop(): Promise<number | null>
}

export interface Answer {
  readonly status: number
  readonly text: string
}

/** Starts what the Deployment says, with the certificate that was made with it. */
export async function startInjector(
  t: TestContext,
  objects: readonly KubernetesObject[],
  folder: string,
  listen = '127.0.0.1:0',
): Promise<Injector> {
  const deployment = ofKind(objects, 'Deployment')
  const secret = ofKind(objects, 'Secret')
  const where = 'spec.template.spec'
  const mounted = at(deployment, `${where}.volumes.0.secret.secretName`)
  assert.equal(mounted, secret.metadata.name, 'the Deployment mounts the Secret')
  const mountPath = String(at(deployment, `${where}.containers.0.volumeMounts.0.mountPath`))
  await mkdir(folder, { recursive: true })
  for (const [name, data] of Object.entries(at(secret, 'data') as Record<string, string>)) {
    await writeFile(path.join(folder, name), Buffer.from(data, 'base64'))
  }
  const containerPort = Number(at(deployment, `${where}.containers.0.ports.0.containerPort`))
  const args = (at(deployment, `${where}.containers.0.args`) as string[]).map((arg) =>
    arg.replace(`=0.0.0.0:${containerPort}`, `=${listen}`).replace(`=${mountPath}/`, `=${folder}/`),
  )

  const child = spawn(process.execPath, [CLI, ...args], { stdio: ['ignore', 'pipe', 'pipe'] })
  const ended = once(child, 'close') as Promise<[number | null]>
  let stderr = ''
  child.stderr.on('data', (chunk: Buffer) => (stderr += chunk.toString()))
  const log: Injector['log'] = []
  createInterface(child.stdout).on('line', (line) => log.push(JSON.parse(line) as Injector['log'][number])) // prettier-ignore
  const stop = async () => {
    child.kill('SIGTERM')
    const [code] = await ended
    return code
  }
  t.after(stop)
  const started = () => log.find(({ event }) => event === 'started')
  await until(() => {
    assert.equal(child.exitCode, null, stderr)
    return started() !== undefined
  }, 'the injector starts')

  const service = at(ofKind(objects, 'MutatingWebhookConfiguration'), 'webhooks.0.clientConfig')
  const ca = Buffer.from(String(at(service, 'caBundle')), 'base64').toString()
  const serverName = `${String(at(service, 'service.name'))}.${String(at(service, 'service.namespace'))}.svc`
  const injector = { port: portOf(String(started()?.['address'])), ca, serverName }
  return {
    ...injector,
    log,
    stop,
    ask: (method, target, body) =>
      new Promise((resolve, reject) => {
        const request = https.request(
          {
            ...{
              host: listen.replace(/:\d+$/, ''),
              port: injector.port,
              servername: serverName,
              ca,
              agent: false,
            },
            ...{ method, path: target },
            headers: { 'content-type': 'application/json' },
          },
          (response) => {
            let text = ''
            response.setEncoding('utf8')
            response.on('data', (chunk: string) => (text += chunk))
            response.on('end', () => resolve({ status: response.statusCode ?? 0, text }))
          },
        )
        request.on('error', reject)
        request.end(body === undefined ? '' : JSON.stringify(body))
      }),
  }
}
