import assert from 'node:assert/strict'
import { readFile, writeFile } from 'node:fs/promises'
import path from 'node:path'
import { test, type TestContext } from 'node:test'
import { Command, CommanderError } from 'commander'
import { addInjectCommand } from '../../src/inject/command.ts'
import { runInject, runInjectCheck, runInjectServe, type Outcome } from '../../src/inject/run.ts'
import { WebhookStartError } from '../../src/inject/webhook.ts'
import { createLog } from '../../src/log.ts'
import { temporaryFolder } from '../harness.ts'
import { podOf, prefixed, without } from './samples.ts'

const FENCED = JSON.stringify({ kind: 'Pod', ...podOf() })
const REFUSED = JSON.stringify({ kind: 'Pod', ...podOf({ metadata: { name: 'a', annotations: prefixed(without('scope')) } }) }) // prettier-ignore
const log = createLog('silent', { write: () => undefined })

/** Runs a command line, and answers with what it ended with. */
async function command(t: TestContext, text: string, ...args: string[]): Promise<Outcome | Error> {
  const file = path.join(await temporaryFolder(t), 'pod.yaml')
  await writeFile(file, text)
  const program = new Command('fencing-proxy').exitOverride()
  program.configureOutput({ writeErr: () => undefined, writeOut: () => undefined })
  let ended: Outcome | Error | undefined
  addInjectCommand(program, {
    version: '1.2.3',
    read: (name) => (name === '-' ? Promise.resolve(text) : readFile(name, 'utf8')),
    finish: (outcome) => (ended = outcome),
    log,
    serve: async (start) => {
      try {
        await (await start).close()
      } catch (error) {
        assert.ok(error instanceof Error)
        ended = error
      }
    },
  })
  try {
    await program.parseAsync(args.map((arg) => (arg === 'FILE' ? file : arg)), { from: 'user' }) // prettier-ignore
  } catch (error) {
    assert.ok(error instanceof CommanderError)
    ended = error
  }
  assert.ok(ended)
  return ended
}

test('inject -f writes the injected manifest, of a file or of standard input', async (t) => {
  for (const file of ['FILE', '-']) {
    const ended = await command(t, FENCED, 'inject', '-f', file, '--kubernetes-version', '1.33')
    assert.ok('code' in ended && 'output' in ended)
    assert.equal(ended.code, 0)
    assert.match(ended.output, /initContainers:\n.*- name: fence-proxy\n +image: fencing-proxy:1\.2\.3\n/s)
    assert.match(ended.messages.join(), /^Pod web: port http of app is fenced/)
  }
}) // prettier-ignore

test('inject check -f takes its flags for its own', async (t) => {
  const ended = await command(t, FENCED, 'inject', 'check', '-f', 'FILE', '--image', 'x:1')
  assert.ok('output' in ended)
  assert.equal(ended.code, 1)
  assert.match(ended.output, /^open-app-port: Pod web: port 8080 /)
})

test('a file that is not there, and flags that are missing or unknown', async (t) => {
  const missing = await command(t, '', 'inject', '-f', '/nowhere/x.yaml')
  assert.ok('output' in missing)
  assert.equal(missing.code, 2)
  assert.match(missing.messages.join(), /^-f \/nowhere\/x\.yaml: ENOENT/)
  for (const args of [[], ['check'], ['serve'], ['-f'], ['-f', 'FILE', '--nope']]) {
    assert.ok((await command(t, '', 'inject', ...args)) instanceof CommanderError, args.join(' '))
  }
  const serving = ['inject', 'serve', '--tls-cert', 'c', '--tls-key', 'k']
  const needsImage = await command(t, '', ...serving)
  assert.ok(needsImage instanceof CommanderError && needsImage.message.includes('--image'))
  assert.ok((await command(t, '', ...serving, '--image', 'x')) instanceof WebhookStartError)
})

test('the exit code tells refused from unreadable', () => {
  const flags = { image: 'fencing-proxy:1' }
  assert.equal(runInject(FENCED, flags).code, 0)
  assert.deepEqual({ ...runInject(REFUSED, flags), messages: [] }, { code: 1, output: '', messages: [] }) // prettier-ignore
  assert.deepEqual({ ...runInject('a: [', flags), messages: [] }, { code: 2, output: '', messages: [] }) // prettier-ignore
  assert.equal(runInjectCheck(REFUSED, flags).code, 1)
  assert.equal(runInjectCheck('a: [', flags).code, 2)
})

test('a check that finds nothing says how much it looked at', () => {
  const flags = { image: 'fencing-proxy:1', redirectImage: 'iptables:1' }
  const redirected = JSON.stringify({ kind: 'Pod', ...podOf({ annotations: { steering: 'redirect' } }) }) // prettier-ignore
  assert.deepEqual(runInjectCheck(redirected, flags), {
    code: 0,
    output: '',
    messages: ['1 Pod or template is fenced, and no way around shows'],
  })
  assert.deepEqual(runInjectCheck('', flags).messages, ['nothing here asks for a fence'])
})

test('the version is read as Kubernetes tools write it', () => {
  const native = (kubernetesVersion: string) =>
    runInject(FENCED, { image: 'x', kubernetesVersion }).output.includes('initContainers')
  for (const version of ['1.33', 'v1.33.2', '1.36+', 'v1.34.1-gke.100']) assert.ok(native(version))
  for (const version of ['1.32', 'v1.20.2', '1.3']) assert.ok(!native(version), version)
})

test('wrong flags are told all at once, and nothing starts', async () => {
  const flags = { image: '--x', prefix: 'Not/A/Domain', kubernetesVersion: 'latest', redirectImage: '' } // prettier-ignore
  for (const { code, messages } of [runInject(FENCED, flags), runInjectCheck(FENCED, flags)]) {
    assert.equal(code, 2)
    assert.equal(messages.length, 4)
  }
  const serving = { image: 'x', tlsCert: 'c', tlsKey: 'k' }
  for (const listen of ['8443', ':8443', 'host:', 'host:99999']) {
    await assert.rejects(runInjectServe({ ...serving, listen }, log), (error) => {
      return error instanceof WebhookStartError && error.message.startsWith(`--listen ${listen}: must be HOST:PORT`)
    })
  }
  await assert.rejects(runInjectServe({ ...serving, ...flags, listen: '[::1]:0' }, log), /--prefix/)
}) // prettier-ignore
