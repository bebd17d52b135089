import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { loadConfig } from '../src/config.ts'

const CLI = fileURLToPath(new URL('../src/cli.js', import.meta.url))

const directory = mkdtempSync(join(tmpdir(), 'fencing-cli-'))
after(() => rmSync(directory, { recursive: true }))

function run(args: readonly string[], env: Record<string, string> = {}) {
  const { status, stdout, stderr } = spawnSync(process.execPath, [CLI, ...args], {
    encoding: 'utf8',
    env: { PATH: process.env['PATH'], ...env },
    timeout: 30_000,
  })
  return { status, stdout, stderr }
}

describe('help and version', () => {
  test('--version prints the version of the package and nothing else', () => {
    const { version } = JSON.parse(readFileSync('package.json', 'utf8')) as { version: string }
    assert.deepEqual(run(['--version']), { status: 0, stdout: `${version}\n`, stderr: '' })
  })

  test('--help says what it is, the commands, an example and the exit codes', () => {
    const { status, stdout, stderr } = run(['--help'])
    assert.deepEqual([status, stderr], [0, ''])
    assert.match(stdout, /fencing\s+token\s+is the newest of its scope/)
    assert.match(stdout, /serve .*run the proxy/)
    assert.match(stdout, /check .*print the complete effective configuration/)
    assert.match(stdout, /fencing-proxy serve --upstream http:\/\/127\.0\.0\.1:9000 --scope '/)
    assert.match(stdout, /Exit codes: 0 .*, 1 .*, 2 /)
    const tooLong = stdout.split('\n').filter((line) => line.length > 80)
    assert.deepEqual(tooLong, [])
  })

  test('serve --help names every flag, with the default that is in effect', () => {
    const { status, stdout } = run(['serve', '--help'])
    assert.equal(status, 0)
    for (const flag of ['config', 'upstream', 'scope', 'listen', 'admin', 'data']) {
      assert.match(stdout, new RegExp(`--${flag} <`))
    }
    assert.match(stdout, /--leases +hand out leases/)
    const { settings } = effective(['--upstream', 'http://h', '--scope', '/a'])
    assert.ok(stdout.includes(`(default: ${settings.listen ?? ''})`))
    assert.ok(stdout.includes(`(default: ${settings.admin ?? ''})`))
    assert.ok(settings.store?.path?.startsWith('data/'))
  })
})

/** What `check` with these flags prints, loaded. */
function effective(args: readonly string[], env: Record<string, string> = {}) {
  const { status, stdout, stderr } = run(['check', ...args], env)
  assert.deepEqual([status, stderr], [0, ''])
  const file = join(directory, 'printed.yaml')
  writeFileSync(file, stdout)
  const loaded = loadConfig({ file, env: {}, flags: {} })
  assert.ok(loaded.ok)
  return loaded
}

describe('check', () => {
  test('prints a configuration that says the same when it is used as a file', () => {
    for (const name of ['full', 'minimal', 'observe-first', 'webdav']) {
      const file = join('config', `${name}.yaml`)
      const loaded = loadConfig({ file, env: {}, flags: {} })
      assert.ok(loaded.ok)
      assert.deepEqual(effective(['--config', file]).config, loaded.config)
    }
  })

  test('prints what is in effect: flags over the environment over the file', () => {
    const { config } = effective(
      ['--config', 'config/full.yaml', '--scope', '/a/{x}', '--scope', '/b', '--data', 'd'],
      { FENCING_PROXY_FENCE_SETTLE: '9s', FENCING_PROXY_SCOPE: '/c' },
    )
    assert.equal(config.fence.settleMs, 9_000)
    assert.equal(config.store.path, join('d', 'fence.db'))
    assert.equal(config.leases, undefined)
    const leasing = effective(['--config', 'config/full.yaml', '--leases'])
    assert.equal(leasing.config.leases?.prefix, '/_fencing')
    assert.deepEqual(
      config.routes.map(({ scope }) => scope),
      ['/a/{x}', '/b'],
    )
  })

  test('prints every mistake on stderr, one on a line, and exits with 2', () => {
    const file = join(directory, 'mistaken.yaml')
    writeFileSync(file, 'upstream: { url: nowhere }\nroutes: [{ path: jobs }]\nfense: 1\n')
    const { status, stdout, stderr } = run(['check', '--config', file])
    assert.deepEqual([status, stdout], [2, ''])
    const [summary, ...lines] = stderr.trimEnd().split('\n')
    assert.match(summary ?? '', /3 mistakes in the configuration/)
    assert.deepEqual(
      lines.map((line) => line.trim().split(':')[0]),
      ['upstream.url', 'routes[0].path', 'fense'],
    )
  })
})

describe('wrong use', () => {
  test('serve without a backend and a path says what it needs, with an example that works', () => {
    const { status, stdout, stderr } = run(['serve'])
    assert.deepEqual([status, stdout], [2, ''])
    assert.match(stderr, /upstream\.url: .*missing/)
    assert.match(stderr, /routes: .*missing/)

    const [, example = ''] = /^ +npm start -- (.*)$/m.exec(stderr) ?? []
    effective(example.split(' ').map((arg) => arg.replaceAll("'", '')))
  })

  test('serve starts nothing on a mistaken configuration', () => {
    const args = ['serve', '--upstream', 'http://h', '--scope', '/a', '--listen', 'here']
    const { status, stdout, stderr } = run([...args, '--data', join(directory, 'data')])
    assert.deepEqual([status, stdout], [2, ''])
    assert.match(stderr, /listen: must be host:port.*\(found "here", --listen\)/)
    assert.doesNotMatch(stderr, /npm start/)
  })

  test('a file that does not exist is told in words', () => {
    const { status, stderr } = run(['serve', '--config', 'none.yaml'])
    assert.equal(status, 2)
    assert.match(stderr, /none\.yaml does not exist/)
  })

  test('an unknown command, an unknown flag, a flag without value, or no command exits with 2', () => {
    const wrong = [['sevre'], ['serve', '--lisen', 'x'], ['check', '--config'], ['serve', 'x'], []]
    for (const args of wrong) {
      const { status, stdout, stderr } = run(args)
      assert.deepEqual([status, stdout], [2, ''], args.join(' '))
      assert.notEqual(stderr, '')
    }
    assert.match(run(['serve', '--lisen', 'x']).stderr, /Did you mean --listen\?/)
  })
})
