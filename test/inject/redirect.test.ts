import assert from 'node:assert/strict'
import { execFile, spawn, spawnSync, type ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { describe, test, type TestContext } from 'node:test'
import { promisify } from 'node:util'
import { redirectRules, redirectScript } from '../../src/inject/redirect.ts'
import { until } from '../harness.ts'

const run = promisify(execFile)

test('the rules redirect one TCP port', () => {
  assert.equal(
    redirectRules(8080, 15080),
    '*nat\n:FENCE_INBOUND - [0:0]\n-A FENCE_INBOUND -p tcp --dport 8080 -j REDIRECT --to-ports 15080\nCOMMIT\n',
  )
})

test('the script fails where iptables is not there or fails', () => {
  const script = redirectScript(8080, 15080)
  const { status } = spawnSync('/bin/sh', ['-c', script], { env: { PATH: '/nowhere' } })
  assert.notEqual(status, 0)
})

/** Why this machine cannot show it, or false. */
function missing(): string | false {
  if (process.platform !== 'linux' || process.getuid?.() !== 0) return 'needs root on Linux'
  for (const tool of ['ip', 'iptables-restore', 'ip6tables-restore']) {
    if (spawnSync(tool, ['-V']).error !== undefined) return `needs ${tool}`
  }
  const tried = spawnSync('ip', ['netns', 'add', `fence-try-${process.pid}`])
  if (tried.status !== 0) return `ip netns add fails: ${tried.stderr.toString()}`
  spawnSync('ip', ['netns', 'delete', `fence-try-${process.pid}`])
  return false
}

const skip = missing()
if (skip !== false)
  process.stderr.write(`NOT TESTED: redirection in a network namespace: ${skip}\n`)

/** Prints its own port and the address that each connection came to. */
const SERVER = `
  require('node:net').createServer((socket) => socket.end('port ' + process.argv[1]))
    .listen(Number(process.argv[1]), '::', () => console.log('listening'))`

const CLIENT = `
  const socket = require('node:net').connect(Number(process.argv[2]), process.argv[1])
  socket.on('data', (data) => process.stdout.write(data))
  socket.on('error', (error) => process.stdout.write(error.code))`

describe('redirection in a network namespace', { skip }, () => {
  const pod = `fence-pod-${process.pid}`
  const node = `fence-node-${process.pid}`
  const inNamespace = async (namespace: string, ...command: string[]) =>
    (await run('ip', ['netns', 'exec', namespace, ...command])).stdout
  const connect = (from: string, address: string, port: number) =>
    inNamespace(from, process.execPath, '-e', CLIENT, address, String(port))

  /** Two namespaces with a cable between them: the Pod's, and the one that its clients are in. */
  async function startPod(t: TestContext, ports: readonly number[]): Promise<void> {
    const servers: ChildProcess[] = []
    t.after(async () => {
      for (const server of servers) {
        server.kill()
        if (server.exitCode === null && server.signalCode === null) await once(server, 'exit')
      }
      for (const namespace of [pod, node]) await run('ip', ['netns', 'delete', namespace])
    })
    for (const namespace of [pod, node]) await run('ip', ['netns', 'add', namespace])
    await run('ip', ['-n', pod, 'link', 'add', 'eth0', 'type', 'veth', 'peer', 'eth0', 'netns', node])
    for (const [namespace, host] of [[pod, 2], [node, 1]] as const) {
      await run('ip', ['-n', namespace, 'address', 'add', `10.99.0.${host}/24`, 'dev', 'eth0'])
      await run('ip', ['-n', namespace, 'address', 'add', `fd99::${host}/64`, 'dev', 'eth0', 'nodad'])
      for (const link of ['lo', 'eth0']) await run('ip', ['-n', namespace, 'link', 'set', link, 'up'])
    }
    for (const port of ports) {
      const server = spawn('ip', ['netns', 'exec', pod, process.execPath, '-e', SERVER, String(port)])
      servers.push(server)
      let output = ''
      server.stdout.on('data', (chunk: Buffer) => (output += chunk.toString()))
      await until(() => output.includes('listening'), `port ${port} listens`)
    }
  } // prettier-ignore

  test('what comes from outside reaches the proxy, what the proxy sends reaches the app', async (t) => {
    await startPod(t, [8080, 8081, 15080])
    assert.equal(await connect(node, '10.99.0.2', 8080), 'port 8080')

    await inNamespace(pod, '/bin/sh', '-c', redirectScript(8080, 15080))
    assert.equal(await connect(node, '10.99.0.2', 8080), 'port 15080')
    assert.equal(await connect(node, 'fd99::2', 8080), 'port 15080')
    assert.equal(await connect(node, '10.99.0.2', 15080), 'port 15080')
    assert.equal(await connect(node, '10.99.0.2', 8081), 'port 8081', 'other ports are left alone')
    assert.equal(await connect(pod, '127.0.0.1', 8080), 'port 8080', 'the way of the proxy')
    assert.equal(await connect(pod, '10.99.0.2', 8080), 'port 8080', 'the way around that remains')
  })

  test('a second run leaves what the first one left, and other rules stay', async (t) => {
    await startPod(t, [8080, 15080])
    const foreign = ['-t', 'nat', '-A', 'PREROUTING', '-p', 'tcp', '--dport', '9', '-j', 'ACCEPT']
    await inNamespace(pod, 'iptables', ...foreign)
    const save = async () => (await inNamespace(pod, 'iptables-save', '-t', 'nat')).split('\n').filter((line) => line.startsWith('-A')) // prettier-ignore
    await inNamespace(pod, '/bin/sh', '-c', redirectScript(8080, 15080))
    const first = await save()
    await inNamespace(pod, '/bin/sh', '-c', redirectScript(8080, 15080))
    assert.deepEqual(await save(), first)
    assert.ok(first.some((rule) => rule.includes('--dport 9 ')))
    assert.equal(await connect(node, '10.99.0.2', 8080), 'port 15080')
  })

  test('where the proxy does not listen nothing gets through to the app', async (t) => {
    await startPod(t, [8080])
    await inNamespace(pod, '/bin/sh', '-c', redirectScript(8080, 15080))
    assert.equal(await connect(node, '10.99.0.2', 8080), 'ECONNREFUSED')
  })
})
