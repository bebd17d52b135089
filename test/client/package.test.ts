import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdirSync, readFileSync, readdirSync, symlinkSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { describe, test } from 'node:test'
import { temporaryFolder } from '../harness.ts'

/** The library as others get it: `fencing-proxy/client`, with its types, for Node and browsers. */

const TSC = createRequire(import.meta.url).resolve('typescript/bin/tsc')

const SAMPLE = `
import {
  FencingClient,
  LeaseError,
  LeaseHeldError,
  LeaseLostError,
  LeaseUnavailableError,
  type Lease,
  type LeaseTerms,
  type LossReason,
} from 'fencing-proxy/client'

const client = new FencingClient('http://127.0.0.1:8080', { prefix: '/_fencing', fetch })
const terms: LeaseTerms = { scope: '/jobs/17', ttl: '15s', wait: '1m', holder: undefined }

export async function work(stop: AbortSignal): Promise<number> {
  try {
    const status: number = await client.withLease({ ...terms, signal: stop }, async (lease) => {
      lease.signal.throwIfAborted()
      const token: string = lease.token
      const response = await lease.fetch('/jobs/17/state', {
        method: 'PUT',
        body: JSON.stringify({ token }),
        headers: { 'Content-Type': 'application/json' },
        signal: AbortSignal.timeout(5_000),
      })
      const { url } = await lease.fetch(new URL('http://127.0.0.1:8080/'))
      await lease.fetch(new Request(url))
      return response.status
    })
    return status
  } catch (error) {
    if (error instanceof LeaseHeldError) return error.retryAfterMs
    if (error instanceof LeaseLostError) {
      const why: LossReason = error.why
      return why === 'stale' ? Number(error.problem?.highest !== undefined) : 0
    }
    if (error instanceof LeaseUnavailableError) return error.status ?? 0
    if (error instanceof LeaseError) return error.scope.length
    throw error
  }
}

export async function scoped(): Promise<string> {
  await using lease: Lease = await client.acquire(terms)
  return lease.token
}

const result: Promise<string> = client.withLease(terms, (lease) => lease.scope)
void result

// @ts-expect-error A scope is needed.
void client.acquire({ ttl: '15s' })
// @ts-expect-error Durations have units.
void client.acquire({ scope: '/jobs/17', ttl: 15 })
// @ts-expect-error A token is text.
void client.acquire(terms).then((lease) => Math.max(lease.token))
// @ts-expect-error The token is the service's to give.
void client.acquire(terms).then((lease) => (lease.token = '7'))
`

const SURROUNDINGS = {
  'a browser’s bundle': {
    lib: ['es2022', 'dom'],
    types: [],
    module: 'esnext',
    moduleResolution: 'bundler',
  },
  Node: { lib: ['es2023'], types: ['node'], module: 'nodenext' },
  'Node with the types of browsers': {
    lib: ['es2023', 'dom', 'dom.iterable'],
    types: ['node'],
    module: 'nodenext',
  },
}

describe('fencing-proxy/client', { timeout: 120_000 }, () => {
  for (const [name, options] of Object.entries(SURROUNDINGS)) {
    test(`its types serve a program for ${name}`, async (t) => {
      const folder = await temporaryFolder(t)
      const modules = path.join(folder, 'node_modules')
      mkdirSync(modules)
      symlinkSync(process.cwd(), path.join(modules, 'fencing-proxy'))
      symlinkSync(path.resolve('node_modules/@types'), path.join(modules, '@types'))
      writeFileSync(path.join(folder, 'package.json'), '{"type":"module"}')
      writeFileSync(path.join(folder, 'sample.ts'), SAMPLE)
      const compilerOptions = {
        ...{ strict: true, exactOptionalPropertyTypes: true, target: 'es2022', noEmit: true },
        // The library's own types are looked at, too. Those of Node and of browsers disagree.
        skipLibCheck: name !== 'a browser’s bundle',
        ...options,
      }
      const config = path.join(folder, 'tsconfig.json')
      writeFileSync(config, JSON.stringify({ compilerOptions, files: ['sample.ts'] }))
      compile(config)
    })
  }

  test('its source compiles against the types of browsers alone', async (t) => {
    const config = path.join(await temporaryFolder(t), 'tsconfig.json')
    const compilerOptions = {
      ...{ lib: ['es2022', 'dom'], types: [], noEmit: true, incremental: false },
    }
    const files = [path.resolve('src/client/client.ts')]
    writeFileSync(
      config,
      JSON.stringify({
        extends: path.resolve('tsconfig.json'),
        compilerOptions,
        files,
        include: [],
      }),
    )
    compile(config)
  })

  test('it imports nothing but its own files', () => {
    const files = readdirSync('dist/client').filter((file) => file.endsWith('.js'))
    assert.ok(files.includes('client.js'))
    for (const file of files) {
      const code = readFileSync(path.join('dist/client', file), 'utf8')
      for (const [, from = ''] of code.matchAll(/(?:from|import)\s*\(?\s*['"]([^'"]+)['"]/g)) {
        assert.ok(files.includes(from.replace(/^\.\//, '')), `${file} imports ${from}`)
      }
    }
  })

  test('it is found under its name by a program in Node', () => {
    const program = `
      const { FencingClient } = await import('fencing-proxy/client')
      console.log(typeof new FencingClient('http://127.0.0.1:8080').withLease)`
    const output = execFileSync(process.execPath, ['--input-type=module', '--eval', program])
    assert.equal(output.toString().trim(), 'function')
  })
})

function compile(config: string): void {
  try {
    execFileSync(process.execPath, [TSC, '-p', config], { stdio: 'pipe' })
  } catch (error) {
    assert.fail(String((error as { stdout?: Buffer }).stdout))
  }
}
