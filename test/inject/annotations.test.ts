import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { describe, test } from 'node:test'
import { loadConfig } from '../../src/config.ts'
import { decide } from '../../src/inject/patch.ts'
import { KEYS } from '../../src/inject/settings.ts'
import { ENOUGH, INJECTOR, APP, containerOf, denial, inject, podOf, prefixed, realPod, without, type Annotations } from './samples.ts' // prettier-ignore

/** Exactly these annotations, none of the usual ones. */
function only(annotations: Annotations) {
  return podOf({ metadata: { annotations: prefixed(annotations) } })
}

describe('who asks for a fence', () => {
  test('a Pod without annotations is let through as it is', () => {
    for (const pod of [realPod('pod-first'), realPod('pod-dryrun-first')]) {
      if (pod.metadata) delete pod.metadata.annotations
      assert.deepEqual(decide(pod, INJECTOR), { kind: 'ignored', warning: undefined })
    }
    const bare = podOf({ metadata: { annotations: null } })
    assert.equal(decide(bare, INJECTOR).kind, 'ignored')
    delete bare.metadata
    assert.equal(decide(bare, INJECTOR).kind, 'ignored')
  })

  test('inject: "false" is let through as it is, whatever else is asked', () => {
    assert.equal(decide(podOf({ annotations: { inject: 'false', scope: 'x' } }), INJECTOR).kind, 'ignored') // prettier-ignore
  })

  test('a status that somebody wrote asks for nothing', () => {
    assert.equal(decide(realPod('pod-reinvoked'), INJECTOR).kind, 'ignored')
  })

  test('a label that asks without the annotation is refused', () => {
    const labels = { 'fencing-proxy.io/inject': 'true' }
    assert.match(denial(podOf({ metadata: { annotations: null, labels } })), /add the annotation/)
    inject(podOf({ metadata: { labels } }))
    const off = podOf({ metadata: { labels }, annotations: {} })
    const annotations = prefixed({ ...ENOUGH, inject: 'false' })
    assert.equal(decide({ ...off, metadata: { labels, annotations } }, INJECTOR).kind, 'ignored')
  })

  test('a misspelt inject is refused, not overlooked', () => {
    const reason = denial(only({ ...without('inject'), injct: 'true' }))
    assert.match(reason, /fencing-proxy\.io\/injct: unknown key \(did you mean inject\?\)/)
  })

  for (const value of ['True', 'True ', 'yes', '1', '', 'true,b=c', ' true', 'TRUE']) {
    test(`inject: ${JSON.stringify(value)} is refused with what is valid`, () => {
      const reason = denial(podOf({ annotations: { inject: value } }))
      assert.ok(reason.includes(`fencing-proxy.io/inject: ${JSON.stringify(value)}: valid: "true", "false"`), reason) // prettier-ignore
    })
  }

  test('another prefix is read, and ours then means nothing', () => {
    const injector = { prefix: 'fence.example.org' }
    assert.equal(decide(podOf(), { ...INJECTOR, ...injector }).kind, 'ignored')
    const annotations = Object.fromEntries(Object.entries(ENOUGH).map(([k, v]) => [`fence.example.org/${k}`, v])) // prettier-ignore
    const { pod } = inject(podOf({ metadata: { annotations } }), injector)
    assert.equal(pod.metadata?.labels?.['fence.example.org/fenced'], 'true')
  })
})

describe('a value that cannot be read is refused with its key, itself and what is valid', () => {
  const cases: [key: string, value: string, valid: RegExp][] = [
    ['app-port', 'HTTP', /the name or the number of a port/],
    ['app-port', '0', /the name or the number of a port/],
    ['app-port', 'a-name-of-16-char', /the name or the number of a port/],
    ['container', 'My App', /the name of a container/],
    ['steering', 'iptables', /"named-port", "redirect", "none"/],
    ['proxy-port', '80', /a number from 1024 to 65535/],
    ['proxy-port', '65536', /a number from 1024 to 65535/],
    ['proxy-port', '15080.5', /a number from 1024 to 65535/],
    ['admin-port', 'admin', /a number from 1024 to 65535/],
    ['admin-port', '15080', /another port than proxy-port/],
    ['store', 'redis', /"sqlite", with one replica/],
    ['store', 'etcd', /"sqlite", with one replica; no other store yet/],
    ['store-volume', 'Data', /the name of a volume/],
    ['store-claim', '_', /the name of a PersistentVolumeClaim/],
    ['allow-ephemeral-store', 'yes', /"true"/],
    ['config', '', /the name of a ConfigMap/],
    ['scope', 'jobs/{job}', /path patterns such as .*a path begins with \//],
    ['scope', '/jobs/*', /has a \*, which has no name/],
    ['scope', '', /path patterns/],
    ['scope', '/a,,/b', /path patterns/],
    ['native-sidecar', 'yes', /"auto", "true", "false"/],
    ['cpu-request', '100 m', /a quantity above 0, such as 100m/],
    ['cpu-request', '2', /at most cpu-limit, which is 1/],
    ['cpu-limit', '-1', /a quantity above 0/],
    ['memory-request', '64MB', /a quantity above 0, such as 64Mi/],
    ['memory-request', '1Gi', /at most memory-limit, which is 512Mi/],
    ['memory-limit', '0', /a quantity above 0/],
    ['image', 'not an image', /an image reference/],
    ['log-level', 'verbose', /"trace", "debug", "info"/],
    ['shutdown-grace-seconds', '0', /a number from 1 to 3600/],
    ['shutdown-grace-seconds', '10s', /a number from 1 to 3600/],
  ] // prettier-ignore
  for (const [key, value, valid] of cases) {
    test(`${key}: ${JSON.stringify(value)}`, () => {
      const reason = denial(podOf({ annotations: { [key]: value } }))
      assert.ok(reason.includes(`fencing-proxy.io/${key}: ${JSON.stringify(value)}: `), reason)
      assert.match(reason, valid)
    })
  }

  test('an unknown key is refused, with the keys there are', () => {
    const reason = denial(podOf({ annotations: { 'store-volumes': 'data' } }))
    assert.match(reason, /store-volumes: unknown key \(did you mean store-volume\?\); valid: inject, app-port/) // prettier-ignore
  })

  test('the keys there are stand in the README, and no others', () => {
    const [, section = ''] = readFileSync('README.md', 'utf8').split('### Annotations\n')
    const [table = ''] = section.split('\n### ')
    const named = [...table.matchAll(/^\| (`[^|]+`) \|/gm)].flatMap(([, keys = '']) =>
      [...keys.matchAll(/`([a-z-]+)`/g)].map(([, key]) => key),
    )
    assert.deepEqual(named.sort(), [...KEYS].sort())
  })

  test('all mistakes are told at once', () => {
    const reason = denial(podOf({ annotations: { 'proxy-port': '1', 'log-level': 'x', oops: '' } }))
    for (const key of ['proxy-port', 'log-level', 'oops']) assert.ok(reason.includes(`/${key}: `))
  })

  test('a very long value is told in part', () => {
    assert.ok(denial(podOf({ annotations: { steering: 'x'.repeat(5_000) } })).length < 300)
  })
})

describe('what does not go together is refused', () => {
  const cases: [Annotations, RegExp][] = [
    [{ ...ENOUGH, 'store-claim': 'marks' }, /store-claim: "marks": there is a store-volume too/],
    [{ ...ENOUGH, config: 'fence' }, /scope: "\/jobs\/{job}\/\*\*": the routes are in the ConfigMap/], // prettier-ignore
    [without('scope'), /scope: what is to be fenced is not said/],
  ]
  for (const [annotations, reason] of cases) {
    test(reason.source, () => assert.match(denial(only(annotations)), reason))
  }
})

/** The sidecar's command line and environment, as the product itself reads them. */
function configOf(annotations: Annotations) {
  const { pod } = inject(only(annotations))
  const { args = [], env = [] } = containerOf(pod, 'fence-proxy')
  const values = (flag: string) => (args ?? []).filter((_, i) => args?.[i - 1] === flag)
  const loaded = loadConfig({
    env: Object.fromEntries((env ?? []).map(({ name, value }) => [name, String(value)])),
    flags: {
      upstream: values('--upstream')[0],
      listen: values('--listen')[0],
      admin: values('--admin')[0],
      data: values('--data')[0],
      scope: values('--scope').map((pattern) => pattern.replaceAll('$$', '$')),
    },
  })
  assert.ok(loaded.ok, JSON.stringify(loaded))
  return { config: loaded.config, args, pod }
}

describe('what an annotation asks for, the sidecar gets', () => {
  test('the defaults of the table', () => {
    const { config, args } = configOf(ENOUGH)
    assert.equal(args?.[0], 'serve')
    assert.deepEqual(config.listen, { host: '0.0.0.0', port: 15080 })
    assert.deepEqual(config.admin, { host: '0.0.0.0', port: 15081 })
    assert.equal(config.upstream.url, 'http://127.0.0.1:8080')
    assert.equal(config.store.path, '/var/lib/fencing-proxy/fence.db')
    assert.deepEqual(config.routes.map(({ path }) => path), ['/jobs/{job}/**']) // prettier-ignore
    assert.equal(config.shutdownTimeoutMs, 25_000)
    assert.equal(config.log.level, 'info')
  })

  test('ports, scopes, log level and shutdown', () => {
    const { config } = configOf({
      ...ENOUGH,
      'proxy-port': '2000',
      'admin-port': '2001',
      scope: '/jobs/{job}/**, /files/**,/$(HOME)/{x}',
      'log-level': 'debug',
      'shutdown-grace-seconds': '7',
    })
    assert.equal(config.listen.port, 2000)
    assert.equal(config.admin.port, 2001)
    assert.deepEqual(config.routes.map(({ path }) => path), ['/jobs/{job}/**', '/files/**', '/$(HOME)/{x}']) // prettier-ignore
    assert.equal(config.log.level, 'debug')
    assert.equal(config.shutdownTimeoutMs, 7_000)
  })

  test('a pattern with $(NAME) reaches the sidecar unexpanded', () => {
    const { args } = configOf({ ...ENOUGH, scope: '/$(HOME)/{x}' })
    assert.ok(args?.includes('/$$(HOME)/{x}'))
  })

  test('config mounts the ConfigMap, in the place of scopes', () => {
    const { pod } = inject(only({ ...without('scope'), config: 'fence' }))
    const sidecar = containerOf(pod, 'fence-proxy')
    assert.deepEqual(sidecar.args?.slice(-2), ['--config', '/etc/fencing-proxy/config.yaml'])
    assert.equal(sidecar.args.includes('--scope'), false)
    assert.ok(sidecar.args.includes('--data'))
    const mount = sidecar.volumeMounts?.find(({ mountPath }) => mountPath === '/etc/fencing-proxy')
    assert.equal(mount?.readOnly, true)
    const volume = pod.spec.volumes?.find(({ name }) => name === mount.name)
    assert.deepEqual(volume?.configMap, { name: 'fence' })
  })

  test('requests, limits and image', () => {
    const { pod } = inject(
      podOf({
        annotations: {
          'cpu-request': '10m',
          'cpu-limit': '0.25',
          'memory-request': '32Mi',
          'memory-limit': '1e8',
          image: 'registry.example.org:5000/fence@sha256:00',
        },
      }),
    )
    const { resources, image } = containerOf(pod, 'fence-proxy')
    assert.deepEqual(resources, {
      requests: { cpu: '10m', memory: '32Mi' },
      limits: { cpu: '0.25', memory: '1e8' },
    })
    assert.equal(image, 'registry.example.org:5000/fence@sha256:00')
  })

  test('container chooses between two owners of the number', () => {
    const second = { name: 'second', image: 'x', ports: [{ name: 'web', containerPort: 9090 }] }
    const annotations = { container: 'second' }
    const { pod } = inject(podOf({ annotations, containers: [APP, second] }))
    assert.equal(containerOf(pod, 'second').ports?.[0]?.name, 'web-app')
    assert.equal(containerOf(pod, 'app').ports?.[0]?.name, 'http')
  })
})
