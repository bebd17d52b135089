import assert from 'node:assert/strict'
import { execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { openSync } from 'node:fs'
import { readFile, writeFile } from 'node:fs/promises'
import https from 'node:https'
import path from 'node:path'
import type { TestContext } from 'node:test'
import { promisify } from 'node:util'
import { freePort } from '../free-port.ts'
import { until } from '../harness.ts'
import type { KubernetesObject } from '../deploy/objects.ts'

/** A real API server and controller manager over a real etcd, without nodes. */
export interface ControlPlane {
  /** For helm and kubectl, as the administrator. */
  readonly kubeconfig: string
  /** Asks the API server as the administrator. `target` begins with /api or /apis. */
  ask(method: string, target: string, body?: unknown, contentType?: string): Promise<Reply>
}

export interface Reply {
  readonly status: number
  readonly body: KubernetesObject & { readonly message?: string; readonly items?: unknown[] }
  /** What a person would see beside the answer. */
  readonly warnings: readonly string[]
}

const run = promisify(execFile)

/** Starts the programs that control-plane.sh has built into `programs`. They are gone after the test. */
export async function startControlPlane(
  t: TestContext,
  programs: string,
  folder: string,
): Promise<ControlPlane> {
  await makeCertificates(folder)
  const file = (name: string) => path.join(folder, name)
  const [etcdPort, peerPort, port] = [await freePort(), await freePort(), await freePort()]
  const start = (program: string, ...args: string[]) => {
    const out = openSync(file(`${path.basename(program)}.log`), 'w')
    const child = spawn(program, args, { stdio: ['ignore', out, out] })
    const ended = once(child, 'exit')
    t.after(async () => {
      child.kill('SIGKILL')
      await ended
    })
    return async () => {
      if (child.exitCode === null && child.signalCode === null) return
      assert.fail(`${program} has ended: ${(await readFile(file(`${path.basename(program)}.log`), 'utf8')).slice(-2_000)}`) // prettier-ignore
    }
  }

  const etcd = `http://127.0.0.1:${etcdPort}`
  const peer = `http://127.0.0.1:${peerPort}`
  const etcdLives = start(
    'etcd',
    ...['--data-dir', file('etcd'), '--log-level', 'warn'],
    ...['--listen-client-urls', etcd, '--advertise-client-urls', etcd],
    ...['--listen-peer-urls', peer, '--initial-advertise-peer-urls', peer],
    ...['--initial-cluster', `default=${peer}`],
  )
  const serverLives = start(
    path.join(programs, 'kube-apiserver'),
    `--etcd-servers=${etcd}`,
    ...['--bind-address=127.0.0.1', '--advertise-address=127.0.0.1', `--secure-port=${port}`],
    '--service-cluster-ip-range=10.0.0.0/24',
    // To a Service's endpoints by itself: there is no kube-proxy here.
    '--enable-aggregator-routing=true',
    ...['--endpoint-reconciler-type=none', '--authorization-mode=RBAC'],
    `--tls-cert-file=${file('server.crt')}`,
    `--tls-private-key-file=${file('server.key')}`,
    `--client-ca-file=${file('ca.crt')}`,
    `--service-account-key-file=${file('accounts.key')}`,
    `--service-account-signing-key-file=${file('accounts.key')}`,
    '--service-account-issuer=https://kubernetes.default.svc',
  )
  const [ca, cert, key] = await Promise.all(
    ['ca.crt', 'admin.crt', 'admin.key'].map((name) => readFile(file(name), 'utf8')),
  )
  const agent = new https.Agent({ keepAlive: true })
  t.after(() => agent.destroy())
  const ask: ControlPlane['ask'] = (method, target, body, contentType = 'application/json') =>
    new Promise((resolve, reject) => {
      const request = https.request(
        {
          ...{ host: '127.0.0.1', port, method, path: target, ca, cert, key, agent },
          headers: { 'content-type': contentType, accept: 'application/json' },
        },
        (response) => {
          let text = ''
          response.setEncoding('utf8')
          response.on('data', (chunk: string) => (text += chunk))
          response.on('end', () => {
            const isJson = response.headers['content-type']?.startsWith('application/json')
            resolve({
              status: response.statusCode ?? 0,
              body: (isJson ? JSON.parse(text) : { message: text }) as Reply['body'],
              warnings: warningsIn(response.rawHeaders),
            })
          })
        },
      )
      request.on('error', reject)
      request.end(body === undefined ? undefined : JSON.stringify(body))
    })

  const kubeconfig = file('kubeconfig')
  await writeFile(kubeconfig, JSON.stringify({
    ...{ apiVersion: 'v1', kind: 'Config', 'current-context': 'here' },
    clusters: [{ name: 'here', cluster: { server: `https://127.0.0.1:${port}`, 'certificate-authority': file('ca.crt') } }],
    users: [{ name: 'admin', user: { 'client-certificate': file('admin.crt'), 'client-key': file('admin.key') } }],
    contexts: [{ name: 'here', context: { cluster: 'here', user: 'admin' } }],
  })) // prettier-ignore
  const isReady = async () => {
    await Promise.all([etcdLives(), serverLives()])
    const answered = await ask('GET', '/readyz').catch(() => undefined)
    return answered?.status === 200
  }
  await until(isReady, 'the API server is ready', 120_000)

  const managerLives = start(
    path.join(programs, 'kube-controller-manager'),
    `--kubeconfig=${kubeconfig}`,
    `--service-account-private-key-file=${file('accounts.key')}`,
    `--root-ca-file=${file('ca.crt')}`,
    ...['--leader-elect=false', '--port=0', '--bind-address=127.0.0.1'],
    `--secure-port=${await freePort()}`,
    // Pods of a node that says nothing are not taken for dead.
    ...['--controllers=*,-nodelifecycle', '--use-service-account-credentials=true'],
  )
  const works = async () => {
    await managerLives()
    return (await ask('GET', '/api/v1/namespaces/default/serviceaccounts/default')).status === 200
  }
  await until(works, 'the controller manager works', 120_000)
  return { kubeconfig, ask }
}

/** 299 - "text", with quotes and backslashes escaped (RFC 7234, section 5.5). */
function warningsIn(rawHeaders: readonly string[]): string[] {
  return rawHeaders.flatMap((name, i) => {
    if (i % 2 === 1 || name.toLowerCase() !== 'warning') return []
    const [, text = ''] = /^299 \S+ "(.*)"$/.exec(rawHeaders[i + 1] ?? '') ?? []
    return [text.replace(/\\(.)/g, '$1')]
  })
}

async function makeCertificates(folder: string): Promise<void> {
  const openssl = (...args: string[]) => run('openssl', args, { cwd: folder })
  const ec = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes']
  await openssl('req', '-x509', ...ec, ...['-subj', '/CN=ca', '-days', '2', '-keyout', 'ca.key', '-out', 'ca.crt']) // prettier-ignore
  const issue = async (name: string, subject: string, extension: string) => {
    await writeFile(path.join(folder, `${name}.ext`), extension)
    await openssl('req', ...ec, ...['-subj', subject, '-keyout', `${name}.key`, '-out', `${name}.csr`]) // prettier-ignore
    await openssl(
      ...['x509', '-req', '-in', `${name}.csr`, '-CA', 'ca.crt', '-CAkey', 'ca.key'],
      ...['-CAcreateserial', '-days', '2', '-extfile', `${name}.ext`, '-out', `${name}.crt`],
    )
  }
  await issue('server', '/CN=kube-apiserver', 'subjectAltName=IP:127.0.0.1,DNS:localhost')
  await issue('admin', '/O=system:masters/CN=admin', 'extendedKeyUsage=clientAuth')
  await openssl('genrsa', '-out', 'accounts.key', '2048')
}
