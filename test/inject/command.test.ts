import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
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
  const remedy = 'give the path of a manifest, or - for standard input'
  for (const [file, words] of [
    ['/nowhere/x.yaml', `does not exist; ${remedy}`],
    [import.meta.filename + '/x.yaml', `does not exist; ${remedy}`],
    [import.meta.dirname, `is a directory; ${remedy}`],
  ] as const) {
    for (const args of [['inject'], ['inject', 'check']]) {
      const ended = await command(t, '', ...args, '-f', file)
      assert.deepEqual(ended, { code: 2, output: '', messages: [`-f ${file}: ${words}`] })
    }
  }
  for (const args of [[], ['check'], ['serve'], ['-f'], ['-f', 'FILE', '--nope']]) {
    assert.ok((await command(t, '', 'inject', ...args)) instanceof CommanderError, args.join(' '))
  }
  const serving = ['inject', 'serve', '--tls-cert', 'c', '--tls-key', 'k']
  const needsImage = await command(t, '', ...serving)
  assert.ok(needsImage instanceof CommanderError && needsImage.message.includes('--image'))
  assert.ok((await command(t, '', ...serving, '--image', 'x')) instanceof WebhookStartError)
})

test('text that cannot be read is told with its file, the place and a remedy', async (t) => {
  for (const args of [['inject'], ['inject', 'check']]) {
    const unreadable = async (text: string, file: string) => {
      const ended = await command(t, text, ...args, '-f', file)
      assert.ok('output' in ended)
      assert.deepEqual({ ...ended, messages: [] }, { code: 2, output: '', messages: [] })
      return ended.messages.join('\n')
    }
    const broken = `${FENCED}\n---\na: b: c`
    assert.match(await unreadable(broken, 'FILE'), /^\/\S+\/pod\.yaml: no valid YAML: .* at line 3, column 4; correct it there$/) // prettier-ignore
    assert.match(await unreadable(broken, '-'), /^standard input: no valid YAML: /)
    assert.match(await unreadable('a: 1', 'FILE'), /^\/\S+\/pod\.yaml: no object of Kubernetes: /)
  }
})

test('the image that the README injects is the one that it builds', () => {
  const readme = readFileSync('README.md', 'utf8')
  const built = /docker build -t (\S+) \. && docker push (\S+)/.exec(readme)
  assert.ok(built)
  const commands = [...readme.matchAll(/fencing-proxy inject -f [^`]*/g)].map(String)
  assert.ok(commands.length > 0)
  for (const one of [built[2], ...commands.map((text) => /--image (\S+)/.exec(text)?.[1])]) {
    assert.equal(one, built[1])
  }
})

test('the exit code tells refused from unreadable', () => {
  const flags = { image: 'fencing-proxy:1' }
  assert.equal(runInject(FENCED, flags).code, 0)
  assert.deepEqual({ ...runInject(REFUSED, flags), messages: [] }, { code: 1, output: '', messages: [] }) // prettier-ignore
  assert.deepEqual({ ...runInject('a: [', flags), messages: [] }, { code: 2, output: '', messages: [] }) // prettier-ignore
  assert.equal(runInjectCheck(REFUSED, flags).code, 1)
  assert.equal(runInjectCheck('a: [', flags).code, 2)
})

test('a check that finds nothing says how much it looked at, and what is no fence yet', () => {
  const flags = { image: 'fencing-proxy:1', redirectImage: 'iptables:1' }
  const asking = JSON.stringify({ kind: 'Pod', ...podOf({ annotations: { steering: 'redirect' } }) }) // prettier-ignore
  const fenced = runInject(asking, flags).output
  const isFenced = '1 Pod or template is fenced, and no way around shows'
  const asks = '1 Pod or template asks for a fence: it is fenced where the injector is installed, and no way around shows then' // prettier-ignore
  const cases: [documents: string[], messages: string[]][] = [
    [[], ['nothing here asks for a fence']],
    [[fenced], [isFenced]],
    [[asking], [asks]],
    [
      [asking, fenced],
      [isFenced, asks],
    ],
    [[fenced, fenced], ['2 Pods and templates are fenced, and no way around shows']],
    [[asking, asking], ['2 Pods and templates ask for a fence: they are fenced where the injector is installed, and no way around shows then']], // prettier-ignore
  ]
  for (const [documents, messages] of cases) {
    const ended = runInjectCheck(documents.join('\n---\n'), flags)
    assert.deepEqual(ended, { code: 0, output: '', messages })
  }
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
