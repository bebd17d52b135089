import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { test } from 'node:test'
import { REFUSALS } from '../src/answer.ts'
import { createMetrics } from '../src/metrics.ts'
import { portOf, startBackend, temporaryFolder, until } from './harness.ts'

/** What the README says is true: its commands run, its samples are the files, its tables are complete. */

const readme = readFileSync('README.md', 'utf8')

function blocks(language: string): string[] {
  const fences = new RegExp(`^\`\`\`${language}[^\\n]*\\n([^]*?)^\`\`\`$`, 'gm')
  return [...readme.matchAll(fences)].map((match) => match[1] ?? '')
}

test('the configuration that the README shows is the sample file', () => {
  assert.equal(blocks('yaml')[0], readFileSync('config/full.yaml', 'utf8'))
})

test('every file that the README links to is there', () => {
  for (const [, target = ''] of readme.matchAll(/\]\(([^)#:]+)\)/g)) {
    assert.ok(existsSync(target), target)
  }
})

test('the README names every result with its status, and every metric', async () => {
  const rows = [...readme.matchAll(/^\| [^|]+ \| ([^|]+) \| `([a-z]+)` \|/gm)]
  for (const [result, { status }] of Object.entries(REFUSALS)) {
    assert.ok(
      rows.some((row) => row[2] === result && row[1] === String(status)),
      `${result} ${status}`,
    )
  }
  const metrics = createMetrics({
    scopes: () => 0,
    settlingScopes: () => 0,
    leases: { active: () => 0, oldestMs: () => 0 },
  })
  for (const { name } of await metrics.registry.getMetricsAsJSON()) {
    if (name.startsWith('fencing_')) assert.ok(readme.includes(`\`${name}`), name)
  }
})

test('its first commands work: npm start in front of an API, and the two writes of the example', async (t) => {
  const [, start = '', writes = ''] = blocks('sh').map((block) => block.trim())
  assert.match(start, /^npm start -- --upstream http:\/\/127\.0\.0\.1:9000 /)
  const backend = await startBackend(t)
  const folder = await temporaryFolder(t)
  const child = spawn('bash', ['-c', `exec ${start.replace('9000', String(backend.port))}`], {
    env: {
      ...process.env,
      FENCING_PROXY_LISTEN: '127.0.0.1:0',
      FENCING_PROXY_ADMIN: '127.0.0.1:0',
      FENCING_PROXY_STORE_PATH: `${folder}/fence.db`,
    },
    stdio: ['ignore', 'pipe', 'inherit'],
    detached: true,
  })
  const gone = new Promise((resolve) => child.once('exit', resolve))
  t.after(async () => {
    if (child.pid !== undefined) process.kill(-child.pid, 'SIGTERM')
    await gone
  })
  let output = ''
  child.stdout.on('data', (chunk: Buffer) => (output += chunk.toString()))
  await until(() => output.includes('"started"'), 'started', 60_000)
  const line = output.split('\n').find((text) => text.includes('"started"')) ?? ''
  const port = portOf((JSON.parse(line) as { data: string }).data)
  const answers: string[] = []
  for (const curl of writes.split('\n')) {
    const [command = ''] = curl.replace('8080', String(port)).split('#')
    const run = spawn('bash', ['-c', `${command} -s -i`])
    let text = ''
    run.stdout.on('data', (chunk: Buffer) => (text += chunk.toString()))
    await new Promise((resolve) => run.once('close', resolve))
    answers.push(text)
  }
  assert.match(answers[0] ?? '', /^HTTP\/1\.1 200 [^]*Fencing-Result: accepted/)
  assert.match(answers[1] ?? '', /^HTTP\/1\.1 409 [^]*a newer owner/i)
})

test('npm start without arguments says in words what it needs', async () => {
  const child = spawn('npm', ['start'], { stdio: ['ignore', 'pipe', 'pipe'] })
  let stderr = ''
  child.stderr.on('data', (chunk: Buffer) => (stderr += chunk.toString()))
  await new Promise((resolve) => child.once('close', resolve))
  assert.match(stderr, /npm start -- --upstream/)
  assert.doesNotMatch(stderr, /\n\s+at /)
})
