import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import { parseArgs } from 'node:util'
import { parseAllDocuments } from 'yaml'
import { loadConfig } from '../src/config.ts'

/** The manifests under deploy/ start the program as it is: their arguments make a configuration. */

function configOf(args: readonly string[]) {
  assert.equal(args[0], 'serve')
  const text = { type: 'string' } as const
  const { values } = parseArgs({
    args: args.slice(1),
    options: {
      upstream: text,
      scope: { ...text, multiple: true },
      listen: text,
      admin: text,
      data: text,
    },
  })
  const { upstream = '', scope = [], data = '', listen, admin } = values
  const loaded = loadConfig({
    env: {},
    flags: { upstream, scope, data, ...(listen && { listen }), ...(admin && { admin }) },
  })
  assert.ok(loaded.ok, JSON.stringify(loaded))
  return loaded.config
}

test('the systemd unit starts the proxy with a store that outlives the service', () => {
  const unit = readFileSync('deploy/systemd/fencing-proxy.service', 'utf8')
  const command = /^ExecStart=\S+ (.*)$/m.exec(unit)?.[1] ?? ''
  const config = configOf(command.split(' '))
  assert.equal(config.store.path, '/var/lib/fencing-proxy/fence.db')
  assert.match(unit, /^StateDirectory=fencing-proxy$/m)
  const stop = Number(/^TimeoutStopSec=(\d+)$/m.exec(unit)?.[1])
  assert.ok(stop * 1000 > config.shutdownTimeoutMs)
})

interface Manifest {
  kind: string
  metadata: { name: string }
  spec: {
    ports?: { targetPort: string }[]
    replicas?: number
    template?: {
      spec: {
        terminationGracePeriodSeconds: number
        initContainers?: Container[]
        containers: Container[]
        volumes?: { name: string; persistentVolumeClaim: { claimName: string } }[]
      }
    }
    volumeClaimTemplates?: { metadata: { name: string } }[]
    ingress?: { ports: { port: number }[] }[]
  }
}

interface Container {
  name: string
  args: string[]
  restartPolicy?: string
  ports: { name: string; containerPort: number }[]
  volumeMounts: { name: string; mountPath: string }[]
}

/** What holds of the proxy beside an API, by whatever kind of object. */
function checkFence(file: string) {
  const text = readFileSync(file, 'utf8')
  const objects = parseAllDocuments(text).map((document) => {
    assert.deepEqual(document.errors, [])
    return document.toJS() as Manifest
  })
  const ofKind = (kind: string) => objects.find((object) => object.kind === kind)
  const [service, policy] = [ofKind('Service'), ofKind('NetworkPolicy')]
  const workload = ofKind('StatefulSet') ?? ofKind('Deployment')
  const pod = workload?.spec.template?.spec
  const all = [...(pod?.initContainers ?? []), ...(pod?.containers ?? [])]
  const sidecar = all.find(({ name }) => name === 'fencing-proxy')
  const config = configOf(sidecar?.args ?? [])
  const portOf = (name: string) => sidecar?.ports.find((port) => port.name === name)?.containerPort
  assert.equal(portOf(service?.spec.ports?.[0]?.targetPort ?? ''), config.listen.port)
  assert.equal(portOf('fence-admin'), config.admin.port)
  const open = policy?.spec.ingress?.flatMap(({ ports }) => ports.map(({ port }) => port))
  assert.deepEqual(open, [config.listen.port, config.admin.port])
  assert.equal(workload?.spec.replicas, 1)
  const mount = sidecar?.volumeMounts.find(({ mountPath }) =>
    config.store.path.startsWith(`${mountPath}/`),
  )
  assert.ok((pod?.terminationGracePeriodSeconds ?? 0) * 1000 > config.shutdownTimeoutMs)
  // On loopback only: otherwise it is a way around.
  const app = pod?.containers.find(({ name }) => name !== 'fencing-proxy')
  assert.deepEqual(app?.args, [`--listen=${new URL(config.upstream.url).host}`])
  return { objects, workload, pod, mount, sidecar }
}

test('the StatefulSet names ports that exist, keeps the marks and gives the stop its time', () => {
  const { workload, pod, mount, sidecar } = checkFence('deploy/kubernetes/statefulset.yaml')
  assert.equal(workload.spec.volumeClaimTemplates?.[0]?.metadata.name, mount?.name)
  assert.equal(pod?.initContainers?.[0], sidecar)
  assert.equal(sidecar?.restartPolicy, 'Always', 'native')
})

test('so does the Deployment for older servers', () => {
  const { objects, workload, pod, mount } = checkFence('deploy/kubernetes/deployment-classic.yaml')
  const [volume] = pod?.volumes ?? []
  assert.equal(volume?.name, mount?.name)
  const claim = objects.find(({ kind }) => kind === 'PersistentVolumeClaim')
  assert.equal(claim?.metadata.name, volume?.persistentVolumeClaim.claimName)
  assert.deepEqual(Object(workload.spec), { ...workload.spec, strategy: { type: 'Recreate' } })
  assert.equal(pod?.initContainers, undefined)
})
