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

test('the Kubernetes manifest names ports that exist, keeps the marks and gives the stop its time', () => {
  const text = readFileSync('deploy/kubernetes/statefulset.yaml', 'utf8')
  interface Manifest {
    kind: string
    spec: {
      ports?: { targetPort: string }[]
      replicas?: number
      template?: {
        spec: {
          terminationGracePeriodSeconds: number
          initContainers: {
            args: string[]
            ports: { name: string; containerPort: number }[]
            volumeMounts: { name: string; mountPath: string }[]
          }[]
        }
      }
      volumeClaimTemplates?: { metadata: { name: string } }[]
    }
  }
  const objects = parseAllDocuments(text).map((document) => {
    assert.deepEqual(document.errors, [])
    return document.toJS() as Manifest
  })
  assert.deepEqual(
    objects.map(({ kind }) => kind),
    ['Service', 'StatefulSet', 'NetworkPolicy'],
  )
  const [service, set] = objects
  const pod = set?.spec.template?.spec
  const sidecar = pod?.initContainers[0]
  const config = configOf(sidecar?.args ?? [])
  const portOf = (name: string) => sidecar?.ports.find((port) => port.name === name)?.containerPort
  assert.equal(portOf(service?.spec.ports?.[0]?.targetPort ?? ''), config.listen.port)
  assert.equal(portOf('fence-admin'), config.admin.port)
  assert.equal(set?.spec.replicas, 1)
  const [mount] = sidecar?.volumeMounts ?? []
  assert.ok(config.store.path.startsWith(`${mount?.mountPath ?? '?'}/`))
  assert.equal(set.spec.volumeClaimTemplates?.[0]?.metadata.name, mount?.name)
  assert.ok((pod?.terminationGracePeriodSeconds ?? 0) * 1000 > config.shutdownTimeoutMs)
})
