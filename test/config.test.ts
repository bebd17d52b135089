import assert from 'node:assert/strict'
import { chmodSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, describe, test } from 'node:test'
import fc from 'fast-check'
import { parse, stringify } from 'yaml'
import { loadConfig, type Config, type Loaded } from '../src/config.ts'
import { formatDuration, MAX_DURATION_MS, parseDuration } from '../src/duration.ts'
import { formatMistake, type Mistake } from '../src/mistake.ts'
import { parsePath, parseScope } from '../src/pattern.ts'
import type { Sources } from '../src/sources.ts'

const directory = mkdtempSync(join(tmpdir(), 'fencing-config-'))
after(() => rmSync(directory, { recursive: true }))

let files = 0

/** A new file with this text, or with these settings as YAML. */
function file(content: unknown): string {
  const path = join(directory, `${++files}.yaml`)
  writeFileSync(path, typeof content === 'string' ? content : stringify(content))
  return path
}

const NEEDED = { upstream: { url: 'http://127.0.0.1:9000' }, routes: [{ path: '/jobs/{job}/**' }] }
const FLAGS = { upstream: 'http://127.0.0.1:9000', scope: ['/jobs/{job}/**'] }

function load(content: unknown, others: Partial<Sources> = {}): Loaded {
  return loadConfig({ file: file(content), env: {}, flags: {}, ...others })
}

function configOf(loaded: Loaded): Config {
  assert.ok(loaded.ok, loaded.ok ? '' : loaded.mistakes.map(formatMistake).join('\n'))
  return loaded.config
}

function mistakesOf(loaded: Loaded): readonly Mistake[] {
  assert.ok(!loaded.ok, 'no mistake was found')
  return loaded.mistakes
}

/** The one mistake of these settings. */
function mistakeOf(loaded: Loaded): Mistake {
  const [mistake, ...others] = mistakesOf(loaded)
  assert.ok(mistake !== undefined)
  assert.deepEqual(others.map(formatMistake), [])
  return mistake
}

describe('defaults', () => {
  test('a backend and a path are enough, and everything else has the documented default', () => {
    assert.deepEqual(configOf(loadConfig({ env: {}, flags: FLAGS })), {
      listen: { host: '0.0.0.0', port: 8080 },
      admin: { host: '127.0.0.1', port: 9901 },
      clientTimeoutMs: 30_000,
      shutdownTimeoutMs: 30_000,
      upstream: { url: 'http://127.0.0.1:9000', responseTimeoutMs: 60_000, maxConnections: 256 },
      token: { header: 'Fencing-Token' },
      store: { type: 'sqlite', path: 'data/fence.db', create: true },
      fence: { takeoverTimeoutMs: 30_000, settleMs: 5_000, maxWaiting: 1024 },
      leases: undefined,
      routes: [
        {
          path: '/jobs/{job}/**',
          methods: undefined,
          scope: '/jobs/{job}',
          missingToken: 'reject',
          repeat: 'many',
          mode: 'enforce',
          caseInsensitive: false,
          allow: [],
        },
      ],
      unmatchedWrites: 'reject',
      log: { level: 'info' },
    })
  })

  test('the default scope is the path without its final /**', () => {
    const scopes = ['/**', '/jobs', '/jobs/{job}', '/jobs/{job}/**', '/'].map((path) => {
      const [route] = configOf(load({ ...NEEDED, routes: [{ path }] })).routes
      return route?.scope
    })
    assert.deepEqual(scopes, ['/', '/jobs', '/jobs/{job}', '/jobs/{job}', '/'])
  })
})

describe('precedence', () => {
  const content = {
    ...NEEDED,
    listen: '127.0.0.1:1',
    upstream: { url: 'http://file:1', maxConnections: 7 },
    fence: { settle: '1s', maxWaiting: 5 },
  }
  const env = {
    FENCING_PROXY_UPSTREAM_URL: 'http://env:2',
    FENCING_PROXY_FENCE_SETTLE: '2s',
    FENCING_PROXY_LISTEN: '127.0.0.1:2',
  }

  test('the environment goes over the file, and leaves its other keys', () => {
    const config = configOf(load(content, { env }))
    assert.equal(config.upstream.url, 'http://env:2')
    assert.equal(config.upstream.maxConnections, 7)
    assert.deepEqual(config.fence, { takeoverTimeoutMs: 30_000, settleMs: 2_000, maxWaiting: 5 })
  })

  test('a flag goes over the environment', () => {
    const flags = { upstream: 'http://flag:3', listen: '127.0.0.1:3', admin: '[::1]:0', data: 'd' }
    const config = configOf(load(content, { env, flags }))
    assert.equal(config.upstream.url, 'http://flag:3')
    assert.deepEqual(config.listen, { host: '127.0.0.1', port: 3 })
    assert.deepEqual(config.admin, { host: '::1', port: 0 })
    assert.equal(config.store.path, join('d', 'fence.db'))
  })

  test('--scope takes the place of every route of the file and of the environment', () => {
    const paths = (others: Partial<Sources>) =>
      configOf(load(content, others)).routes.map(({ path }) => path)
    const FENCING_PROXY_SCOPE = '/a/{x}, /b'
    assert.deepEqual(paths({ env: { FENCING_PROXY_SCOPE } }), ['/a/{x}', '/b'])
    const flags = { scope: ['/c', '/d/**'] }
    assert.deepEqual(paths({ env: { FENCING_PROXY_SCOPE }, flags }), ['/c', '/d/**'])
  })

  test('FENCING_PROXY_CONFIG names the file where no flag does', () => {
    const FENCING_PROXY_CONFIG = file(content)
    const config = configOf(loadConfig({ env: { FENCING_PROXY_CONFIG }, flags: {} }))
    assert.equal(config.upstream.url, 'http://file:1')
    assert.equal(configOf(load(NEEDED, { env: { FENCING_PROXY_CONFIG } })).fence.settleMs, 5_000)
  })

  test('a relative file is looked up from the given directory', () => {
    const name = file(content).slice(directory.length + 1)
    configOf(loadConfig({ file: name, env: {}, flags: {}, cwd: directory }))
  })
})

describe('environment variables', () => {
  test('every key but the routes has one, and numbers and booleans are read as such', () => {
    const config = configOf(
      loadConfig({
        flags: {},
        env: {
          FENCING_PROXY_LISTEN: 'localhost:1',
          FENCING_PROXY_ADMIN: 'localhost:2',
          FENCING_PROXY_CLIENT_TIMEOUT: '3s',
          FENCING_PROXY_SHUTDOWN_TIMEOUT: '4s',
          FENCING_PROXY_UPSTREAM_URL: 'https://five',
          FENCING_PROXY_UPSTREAM_RESPONSE_TIMEOUT: '6m',
          FENCING_PROXY_UPSTREAM_MAX_CONNECTIONS: '7',
          FENCING_PROXY_TOKEN_HEADER: 'Eight',
          FENCING_PROXY_STORE_TYPE: 'sqlite',
          FENCING_PROXY_STORE_PATH: '9',
          FENCING_PROXY_STORE_CREATE: 'false',
          FENCING_PROXY_FENCE_TAKEOVER_TIMEOUT: '10h',
          FENCING_PROXY_FENCE_SETTLE: '11ms',
          FENCING_PROXY_FENCE_MAX_WAITING: '12',
          FENCING_PROXY_LEASES_PREFIX: '/13',
          FENCING_PROXY_LEASES_MIN_TTL: '14ms',
          FENCING_PROXY_LEASES_MAX_TTL: '15s',
          FENCING_PROXY_LEASES_DEFAULT_TTL: '1s',
          FENCING_PROXY_LEASES_MAX_WAITING: '17',
          FENCING_PROXY_SCOPE: '/thirteen',
          FENCING_PROXY_UNMATCHED_WRITES: 'pass',
          FENCING_PROXY_LOG_LEVEL: 'silent',
        },
      }),
    )
    const { routes, ...others } = config
    assert.deepEqual(
      routes.map(({ path }) => path),
      ['/thirteen'],
    )
    assert.deepEqual(others, {
      listen: { host: 'localhost', port: 1 },
      admin: { host: 'localhost', port: 2 },
      clientTimeoutMs: 3_000,
      shutdownTimeoutMs: 4_000,
      upstream: { url: 'https://five', responseTimeoutMs: 360_000, maxConnections: 7 },
      token: { header: 'Eight' },
      store: { type: 'sqlite', path: '9', create: false },
      fence: { takeoverTimeoutMs: 36_000_000, settleMs: 11, maxWaiting: 12 },
      leases: {
        prefix: '/13',
        minTtlMs: 14,
        maxTtlMs: 15_000,
        defaultTtlMs: 1_000,
        maxWaiting: 17,
      },
      unmatchedWrites: 'pass',
      log: { level: 'silent' },
    })
  })

  test('an unknown one is a mistake that names the one that was meant', () => {
    const meant = (name: string) => mistakeOf(load(NEEDED, { env: { [name]: '1' } })).allowed
    assert.match(meant('FENCING_PROXY_LISTNE'), /did you mean FENCING_PROXY_LISTEN\?/)
    assert.match(meant('FENCING_PROXY_SETTLE'), /did you mean FENCING_PROXY_FENCE_SETTLE\?/)
    assert.match(meant('FENCING_PROXY_SCOPES'), /did you mean FENCING_PROXY_SCOPE\?/)
    assert.match(meant('FENCING_PROXY_PORT'), /known are FENCING_PROXY_LISTEN, .*FENCING_PROXY_CONFIG/) // prettier-ignore
  })

  test('a wrong value is a mistake that names the variable, an empty one included', () => {
    const env = { FENCING_PROXY_FENCE_SETTLE: 'soon', FENCING_PROXY_LISTEN: '' }
    assert.deepEqual(mistakesOf(load(NEEDED, { env })).map(formatMistake), [
      'listen: must be host:port, such as 127.0.0.1:8080, [::1]:8080, or 0.0.0.0:8080 for every address (found "", environment variable FENCING_PROXY_LISTEN)',
      'fence.settle: must be a duration such as 500ms, 5s, 2m or 1h, from 0s to 596h (found "soon", environment variable FENCING_PROXY_FENCE_SETTLE)',
    ])
  })

  test('FENCING_PROXY_LEASES=true turns leases on, as --leases does, and keeps what is said of them', () => {
    const leases = (content: unknown, env: NodeJS.ProcessEnv, flags = {}) =>
      configOf(load(content, { env, flags })).leases
    const said = { ...NEEDED, leases: { prefix: '/locks' } }
    const on = { FENCING_PROXY_LEASES: 'true' }
    const off = { FENCING_PROXY_LEASES: 'false' }
    assert.deepEqual(leases(NEEDED, on), leases(NEEDED, {}, { leases: true }))
    assert.equal(leases(said, on)?.prefix, '/locks')
    assert.equal(leases(NEEDED, { ...on, FENCING_PROXY_LEASES_PREFIX: '/l' })?.prefix, '/l')

    assert.equal(leases(NEEDED, off), undefined)
    assert.equal(leases(said, off), undefined)
    assert.equal(leases(said, { ...off, FENCING_PROXY_LEASES_PREFIX: '/l' }), undefined)
    assert.equal(leases(said, off, { leases: true })?.prefix, '/locks')
  })

  test('FENCING_PROXY_LEASES is true or false', () => {
    for (const text of ['yes', '1', '', 'TRUE']) {
      const mistake = mistakeOf(load(NEEDED, { env: { FENCING_PROXY_LEASES: text } }))
      assert.equal(
        formatMistake(mistake),
        `leases: must be true or false (found "${text}", environment variable FENCING_PROXY_LEASES)`,
      )
    }
  })

  test('what Kubernetes sets for a Service called fencing-proxy is ignored', () => {
    const address = 'tcp://10.96.0.7:8080'
    configOf(
      load(NEEDED, {
        env: {
          FENCING_PROXY_SERVICE_HOST: '10.96.0.7',
          FENCING_PROXY_SERVICE_PORT: '8080',
          FENCING_PROXY_SERVICE_PORT_HTTP: '8080',
          FENCING_PROXY_PORT: address,
          FENCING_PROXY_PORT_8080_TCP: address,
          FENCING_PROXY_PORT_8080_TCP_PROTO: 'tcp',
          FENCING_PROXY_PORT_8080_TCP_PORT: '8080',
          FENCING_PROXY_PORT_8080_TCP_ADDR: '10.96.0.7',
          FENCING_PROXY_ADMIN_SERVICE_HOST: '10.96.0.8',
          FENCING_PROXY_ADMIN_PORT: address,
        },
      }),
    )
  })
})

describe('mistakes', () => {
  test('all are found at once, each with its path, its place, what was found and what is allowed', () => {
    const content = `listen: 8080
fense: { settle: 5s }
fence:
  settle: 5
upstream:
  url: http://127.0.0.1:9000/api
  responseTimeout: 0s
routes:
  - path: 5
  - path: /jobs/{job}
    scope: /jobs/{jbo}
    methods: [PUT, get]
    mode: observed
    alow: [";"]
`
    const path = file(content)
    const env = { FENCING_PROXY_LOG_LEVEL: 'loud', FENCING_PROXY_X: '' }
    const mistakes = mistakesOf(loadConfig({ file: path, env, flags: { admin: 'x' } }))
    const summary = mistakes.map(({ path, from, found }) => [path, from, found].join('|'))
    assert.deepEqual(summary.sort(), [
      'FENCING_PROXY_X||',
      'admin|--admin|found "x"',
      `fence.settle|${path}:4:11|found 5`,
      `fense|${path}:2:8|`,
      `listen|${path}:1:9|found 8080`,
      'log.level|environment variable FENCING_PROXY_LOG_LEVEL|found "loud"',
      `routes[0].path|${path}:9:11|found 5`,
      `routes[1].alow|${path}:14:11|`,
      `routes[1].methods[1]|${path}:12:20|found "get"`,
      `routes[1].mode|${path}:13:11|found "observed"`,
      `routes[1].scope|${path}:11:12|found "/jobs/{jbo}"`,
      `upstream.responseTimeout|${path}:7:20|found "0s"`,
      `upstream.url|${path}:6:8|found "http://127.0.0.1:9000/api"`,
    ])
    const allowed = new Map(mistakes.map((mistake) => [mistake.path, mistake.allowed]))
    assert.match(allowed.get('fense') ?? '', /did you mean fence\? known here are listen, admin, /)
    assert.match(allowed.get('routes[1].alow') ?? '', /did you mean allow\?/)
    assert.match(allowed.get('routes[1].scope') ?? '', /\{jbo\} is no name of the path, which has \{job\}/) // prettier-ignore
    assert.equal(allowed.get('routes[1].mode'), 'must be enforce or observe')
  })

  test('what is required and missing is said, however much else is given', () => {
    const missing = (content: unknown) =>
      mistakesOf(load(content)).map(({ path, found }) => `${path} ${found}`)
    assert.deepEqual(missing(''), ['upstream.url missing', 'routes missing'])
    assert.deepEqual(missing({ upstream: {}, routes: [{}] }), [
      'upstream.url missing',
      'routes[0].path missing',
    ])
    assert.deepEqual(missing({ ...NEEDED, routes: [] }), ['routes found a list'])
  })

  test('a key with nothing after it is a mistake', () => {
    for (const key of ['listen', 'fence', 'token', 'leases', 'log', 'routes']) {
      const mistake = mistakeOf(load({ ...NEEDED, [key]: null }))
      assert.equal(`${mistake.path} ${mistake.found}`, `${key} found nothing`)
    }
    assert.match(mistakeOf(load({ ...NEEDED, tenants: null })).allowed, /unknown key/)
  })

  test('something else in the place of a mapping is reported, also where a flag gives a key of it', () => {
    const content = { ...NEEDED, upstream: 'http://127.0.0.1:9000' }
    const mistake = mistakeOf(load(content, { flags: { upstream: 'http://h' } }))
    assert.match(formatMistake(mistake), /^upstream: must have keys: url, .* \(found "http/)
    assert.equal(mistakesOf(load('[1, 2]'))[0]?.found, 'found a list')
    assert.equal(mistakesOf(load('just words'))[0]?.found, 'found "just words"')
  })

  test('an unknown key that stands at the wrong level is pointed to the right one', () => {
    assert.match(
      mistakeOf(load({ ...NEEDED, settle: '5s' })).allowed,
      /did you mean fence.settle\?/,
    )
    assert.match(mistakeOf(load(`${stringify(NEEDED)}__proto__: { listen: x }`)).allowed, /unknown key/) // prettier-ignore
  })

  test('a password in a URL is not repeated', () => {
    for (const url of ['http://user:secret@h:1', 'http://user:se/secret@h:1', 'h://u:secret@h']) {
      const text = formatMistake(mistakeOf(load({ ...NEEDED, upstream: { url } })))
      assert.doesNotMatch(text, /secret/)
    }
  })
})

describe('files', () => {
  test('a syntax error is told with line and column', () => {
    const name = file('listen: 127.0.0.1:1\nroutes: [\n  - a\n')
    const [first] = mistakesOf(loadConfig({ file: name, env: {}, flags: {} }))
    assert.match(first?.from ?? '', /\.yaml:[23]:\d+$/)
  })

  test('a wrong indentation is one mistake, which names the line that is wrong and what to do', () => {
    const wrong: [string, RegExp][] = [
      ['upstream:\n  url: http://h\n routes:\n  - path: /a\n', /^line 3 is not indented as .*column.*:3:2\)$/],
      ['upstream:\n    url: http://h\n  responseTimeout: 3s\n', /^line 3 is not indented as .*:3:3\)$/],
      ['  listen: h:1\nadmin: h:2\n', /^line 2 is not indented as .*:2:1\)$/],
      ['routes:\n  - path: /a\n   scope: /a\n', /^line 3 is not indented as .*dashes.*:3:4\)$/],
      ['routes:\n  - path: /a\n - path: /b\n', /^line 3 is not indented as .*:3:2\)$/],
      ['routes:\n  path: /a\n  - path: /b\n', /^line 3 is not indented as .*:3:3\)$/],
      ['routes:\n- path: /a\n  # why\n\n   mode: observe\n', /^line 5 is not indented as .*:5:4\)$/],
      ['routes:\n- path: /a\n\n   mode: observe\n', /^line 4 is indented as if it belonged to line 2, which has a value already; .*:4:4\)$/],
      ['listen: h:1\n  admin: h:2\nfence:\n  settle: 1s\n    maxWaiting: 1\n', /^line 2 is indented as if it belonged to line 1, .*:2:3\)$/],
      ['upstream:\n\turl: http://h\n', /^line 2 is indented by a tab; .*blanks.*:2:2\)$/],
    ] // prettier-ignore
    for (const [text, words] of wrong) {
      const path = file(text)
      const mistake = formatMistake(mistakeOf(loadConfig({ file: path, env: {}, flags: {} })))
      assert.match(mistake.replace(path, ''), words, text)
    }
  })

  test('any other slip in the syntax is one mistake with its line and a remedy, too', () => {
    const wrong: [string, RegExp][] = [
      ['routes: [\n  a\n', /bracket, brace or quote that was opened before line \d is not closed/],
      ['upstream: {url: "http://h}\n', /bracket, brace or quote .* not closed/],
      ['routes:\n- path: /a\n  scope: {job}/x\n', /^line 3 .*put quotes around the whole value/],
      ['listen: @h\n', /^line 1 .*put quotes around the whole value/],
      ['listen: a: b\n', /^line 1 has two colons; put quotes/],
      ['listen:1\nadmin: h:2\n', /^line 1 .*put a colon and a blank/],
    ] // prettier-ignore
    for (const [text, words] of wrong) assert.match(formatMistake(mistakeOf(load(text))), words, text) // prettier-ignore
  })

  test('a key given twice is a mistake', () => {
    const mistake = mistakeOf(load(`${stringify(NEEDED)}upstream: { url: "http://other" }\n`))
    assert.match(formatMistake(mistake), /unique .*:5:1\)/)
  })

  test('a second document, an unknown tag, a merge key and an alias without anchor are mistakes', () => {
    const needed = stringify(NEEDED)
    for (const content of [`${needed}---\n${needed}`, `${needed}listen: !x 127.0.0.1:1\n`]) {
      mistakeOf(load(content))
    }
    assert.match(mistakeOf(load(`${needed}<<: { listen: a }`)).allowed, /unknown key/)
    assert.match(mistakeOf(load(`${needed}listen: *a`)).allowed, /alias/)
  })

  test('aliases that unfold into gigabytes, and endless nesting, are mistakes and take no time', () => {
    const levels = Array.from({ length: 30 }, (_, i) => `k${i + 1}: &k${i + 1} [*k${i}, *k${i}]`)
    assert.match(mistakeOf(load(['k0: &k0 [x]', ...levels].join('\n'))).allowed, /alias/)
    assert.notEqual(mistakesOf(load('['.repeat(20_000))).length, 0)
  })

  test('a JSON file works', () => {
    const content = JSON.stringify({ ...NEEDED, fence: { settle: '7s' } }, null, '\t')
    assert.equal(configOf(load(content)).fence.settleMs, 7_000)
  })

  test('a file that cannot be read is told in words', () => {
    const reason = (name: string) => mistakeOf(loadConfig({ file: name, env: {}, flags: {} })).allowed // prettier-ignore
    assert.match(reason(join(directory, 'none.yaml')), /none\.yaml does not exist$/)
    assert.match(reason(directory), /is a directory$/)
    const closed = file(NEEDED)
    chmodSync(closed, 0)
    // Root reads it all the same.
    if (process.getuid?.() !== 0) assert.match(reason(closed), /may not be read by this user$/)
  })
})

describe('values', () => {
  const accepts = (content: object) => {
    const loaded = load({ ...NEEDED, ...content })
    if (!loaded.ok) mistakeOf(loaded)
    return loaded.ok
  }

  test('addresses are host:port with a port from 0 to 65535', () => {
    for (const listen of ['127.0.0.1:0', 'localhost:65535', '[::1]:8080', '[::]:1', 'a-b.c:80']) {
      assert.ok(accepts({ listen }), listen)
    }
    const wrong = ['8080', ':8080', 'h:', 'h:65536', 'h:08', '::1:80', '[::1]', '[h]:1', '1.2.3:4', '999.1.1.1:80', 'h:1 ', 'http://h:1', '*:80'] // prettier-ignore
    for (const listen of wrong) assert.ok(!accepts({ listen }), listen)
  })

  test('the data port and the admin port cannot be the same', () => {
    assert.ok(!accepts({ listen: '127.0.0.1:1', admin: '127.0.0.1:1' }))
    assert.ok(accepts({ listen: '127.0.0.1:0', admin: '127.0.0.1:0' }))
  })

  test('the upstream is an origin, in one spelling', () => {
    const url = (url: string) => configOf(load({ ...NEEDED, upstream: { url } })).upstream.url
    assert.equal(url('HTTP://Example.org:80/'), 'http://example.org')
    assert.equal(url('https://[::1]:9000'), 'https://[::1]:9000')
    const wrong = ['h:9000', 'ftp://h', 'http://', 'http://h/a', 'http://h?', 'http://h/?a', 'http://h#f', 'http://u@h', 'http://h:0', 'http://h:99999', 'http:h', 'unix:/s'] // prettier-ignore
    for (const url of wrong) assert.ok(!accepts({ upstream: { url } }), url)
  })

  test('durations are a whole number with a unit, no longer than a timer holds', () => {
    for (const settle of ['0s', '0ms', '1ms', '5s', '2m', '1h', '596h']) assert.ok(accepts({ fence: { settle } }), settle) // prettier-ignore
    const wrong = ['5', '5 s', '1.5s', '-1s', '+1s', '05s', '1m30s', '5S', '597h', '9999999999h', '5d', ''] // prettier-ignore
    for (const settle of wrong) assert.ok(!accepts({ fence: { settle } }), settle)
    assert.ok(!accepts({ clientTimeout: '0s' }))
  })

  test('every duration survives being printed', () => {
    fc.assert(
      fc.property(fc.integer({ min: 0, max: MAX_DURATION_MS }), (ms) => {
        assert.equal(parseDuration(formatDuration(ms)), ms)
      }),
    )
    assert.deepEqual([90_000, 60_000, 3_600_000, 1].map(formatDuration), ['90s', '1m', '1h', '1ms'])
  })

  test('numbers are whole and bounded', () => {
    for (const maxConnections of [0, -1, 1.5, '256', 1e9]) {
      assert.ok(!accepts({ upstream: { ...NEEDED.upstream, maxConnections } }))
    }
    assert.ok(accepts({ fence: { maxWaiting: 0 } }))
  })

  test('leases are off unless they are asked for, and nothing has to be said of them', () => {
    assert.equal(configOf(load(NEEDED)).leases, undefined)
    const defaults = {
      prefix: '/_fencing',
      minTtlMs: 100,
      maxTtlMs: 86_400_000,
      defaultTtlMs: 15_000,
      maxWaiting: 1024,
    }
    assert.deepEqual(configOf(load({ ...NEEDED, leases: {} })).leases, defaults)
    const flags = { ...FLAGS, leases: true }
    assert.deepEqual(configOf(loadConfig({ env: {}, flags })).leases, defaults)
    const { leases } = configOf(load({ ...NEEDED, leases: { maxWaiting: 0 } }, { flags }))
    assert.deepEqual(leases, { ...defaults, maxWaiting: 0 }, 'the flag changes nothing in the file')
  })

  test('what leases last by default lies between the shortest and the longest', () => {
    const mistaken = (leases: object) => formatMistake(mistakeOf(load({ ...NEEDED, leases })))
    assert.match(mistaken({ minTtl: '1h', maxTtl: '1m' }), /^leases\.minTtl: must not be above maxTtl, which is 1m/) // prettier-ignore
    for (const leases of [{ minTtl: '16s' }, { maxTtl: '14s' }, { defaultTtl: '99ms' }]) {
      assert.match(mistaken(leases), /^leases\.defaultTtl: must lie from minTtl to maxTtl: /)
    }
    assert.ok(accepts({ leases: { minTtl: '15s', maxTtl: '15s' } }))
    for (const minTtl of ['0s', '-1s', 5, '', '597h']) {
      assert.match(mistaken({ minTtl }), /^leases\.minTtl: must be a duration such as /)
    }
    assert.match(mistaken({ ttl: '5s' }), /^leases\.ttl: /)
  })

  test('the prefix of leases is a path that every server reads in one way', () => {
    for (const prefix of ['/x', '/_fencing', '/a/b.c/~d-1', '/...']) {
      assert.ok(accepts({ leases: { prefix } }), prefix)
    }
    const wrong = ['', '/', 'x', '/x/', '//x', '/x//y', '/.', '/x/..', '/../x', '/a b', '/a%20b', '/a?b', '/a#b', '/é', '/:x', '/*', '/x\n'] // prettier-ignore
    for (const prefix of [...wrong, 5, null]) {
      const mistake = formatMistake(mistakeOf(load({ ...NEEDED, leases: { prefix } })))
      assert.match(mistake, /^leases\.prefix: must be a path such as \/_fencing/, String(prefix))
    }
  })

  test('the token is in a field that has no other meaning', () => {
    assert.ok(accepts({ token: { header: 'X-Lease_Epoch' } }))
    for (const header of [
      '',
      'a b',
      'Täg',
      'host',
      'Connection',
      'Content-Length',
      'fencing-scope',
      'Via',
    ]) {
      // prettier-ignore
      assert.ok(!accepts({ token: { header } }), header)
    }
  })

  test('a store that ends with the process is refused', () => {
    for (const path of ['', ' ', ':memory:']) assert.ok(!accepts({ store: { path } }), path)
  })

  test('methods are writes that the parser knows, in any case', () => {
    const methods = ['put', 'MKCOL', 'M-SEARCH']
    const { routes } = configOf(load({ ...NEEDED, routes: [{ path: '/a', methods }] }))
    assert.deepEqual(routes[0]?.methods, ['PUT', 'MKCOL', 'M-SEARCH'])
    for (const method of ['GET', 'head', 'OPTIONS', 'TRACE', 'CONNECT', 'FROB', 'PUT ', 5]) {
      assert.ok(!accepts({ routes: [{ path: '/a', methods: [method] }] }), String(method))
    }
    assert.ok(!accepts({ routes: [{ path: '/a', methods: [] }] }))
  })

  test('allow takes single characters that would else be refused', () => {
    assert.ok(accepts({ routes: [{ path: '/a', allow: [';', '/', '\\', '?', '#', '%', '|'] }] }))
    for (const allow of [['a'], [';;'], [''], ['.'], ['\0'], ';']) {
      assert.ok(!accepts({ routes: [{ path: '/a', allow }] }), String(allow))
    }
  })
})

describe('routes', () => {
  const mistaken = (route: object) => {
    const mistake = mistakeOf(load({ ...NEEDED, routes: [route] }))
    return `${mistake.path}: ${mistake.allowed}`
  }

  test('a path that is no pattern is a mistake', () => {
    const wrong: [string, RegExp][] = [
      ['jobs', /begins with \//],
      ['', /begins with \//],
      ['/a//b', /empty segment/],
      ['/a/', /\/a covers \/a\/ too/],
      ['/**/a', /\*\* stands at the end only/],
      ['/a**', /whole segment/],
      ['/a*', /whole segment/],
      ['/{a}.json', /whole segment/],
      ['/{a', /whole segment/],
      ['/{}', /no name/],
      ['/{a b}', /no name/],
      ['/{1}', /no name/],
      ['/{host}', /choose another name/],
      ['/{a}/{a}', /\{a\} is there twice/],
      ['/a/../b', /never matches/],
      ['/a./b', /never matches/],
      ['/a%20b', /written decoded/],
      ['/a\tb', /control character \(U\+0009\)/],
      ['/a;b', /never matches: a target with ;/],
      ['/a?b', /never matches: a target with \?/],
      ['/a\\b', /never matches: a target with \\/],
    ]
    for (const [path, reason] of wrong) {
      const text = mistaken({ path, scope: '/x' })
      assert.match(text, /^routes\[0\]\.path: /)
      assert.match(text, reason)
    }
    configOf(load({ ...NEEDED, routes: [{ path: '/a;b', allow: [';'] }] }))
  })

  test('a scope that is no template, or that names what the path has not, is a mistake', () => {
    const wrong: [string, RegExp][] = [
      ['', /not empty/],
      ['/{job', /without its/],
      ['/job}', /without its/],
      ['/{{job}}', /without its/],
      ['/{}', /none of/],
      ['/{header.}', /none of/],
      ['/{header.a b}', /none of/],
      ['/{query.}', /none of/],
      ['/{cookie.a}', /none of/],
      ['/{jbo}', /no name of the path, which has \{job\}/],
      ['/jobs/**', /stands for nothing/],
      ['/\u0007', /control character/],
      ['/{header.fencing-token}', /made of the token/],
    ]
    for (const [scope, reason] of wrong) {
      const text = mistaken({ path: '/jobs/{job}', scope })
      assert.match(text, /^routes\[0\]\.scope: /)
      assert.match(text, reason)
    }
  })

  test('a path with a * needs a scope, because nothing says which part of it owns what', () => {
    assert.match(mistaken({ path: '/a/*' }), /^routes\[0\]\.scope: must be given/)
    configOf(load({ ...NEEDED, routes: [{ path: '/a/*', scope: '/a' }] }))
  })

  test('a route that an earlier one with the same path hides is a mistake', () => {
    const hidden = (first: object, second: object) =>
      !load({
        ...NEEDED,
        routes: [
          { path: '/a/{x}', ...first },
          { path: '/a/{y}', ...second },
        ],
      }).ok
    assert.ok(hidden({}, {}))
    assert.ok(hidden({}, { methods: ['PUT'] }))
    assert.ok(hidden({ methods: ['PUT', 'POST'] }, { methods: ['POST'] }))
    assert.ok(!hidden({ methods: ['PUT'] }, { methods: ['POST'] }))
    assert.ok(!hidden({ methods: ['PUT'] }, {}))
    assert.ok(!hidden({}, { caseInsensitive: true }))
  })

  test('patterns and templates come apart as they are written', () => {
    assert.deepEqual(parsePath('/a b/{x-1}/*/**'), {
      segments: [{ kind: 'literal', text: 'a b' }, { kind: 'name', name: 'x-1' }, { kind: 'any' }],
      rest: true,
    })
    assert.deepEqual(parsePath('/**'), { segments: [], rest: true })
    assert.deepEqual(parsePath('/'), { segments: [], rest: false })
    assert.deepEqual(parseScope('t:{header.X-Tenant}/{job}{query.a.b}@{host}'), [
      { kind: 'text', text: 't:' },
      { kind: 'header', name: 'x-tenant' },
      { kind: 'text', text: '/' },
      { kind: 'path', name: 'job' },
      { kind: 'query', name: 'a.b' },
      { kind: 'text', text: '@' },
      { kind: 'host' },
    ])
  })
})

describe('samples', () => {
  const names = readdirSync('config')

  test('each loads', () => {
    assert.ok(names.length >= 4)
    for (const name of names)
      configOf(loadConfig({ file: join('config', name), env: {}, flags: {} }))
  })

  test('full.yaml has every key, and its values are the defaults', () => {
    const full = readFileSync('config/full.yaml', 'utf8')
    const loaded = loadConfig({ file: 'config/full.yaml', env: {}, flags: {} })
    assert.deepEqual(configOf(loaded), configOf(loadConfig({ env: {}, flags: FLAGS })))

    // Without its comments on lines of keys that have no value by default: methods and leases.
    const everyKey: unknown = parse(full.replace(/^( *)# ((methods|leases|  \w+): ?.*)$/gm, '$1$2'))
    const route = { ...NEEDED.routes[0], methods: ['PUT'] }
    const complete = load({ ...NEEDED, leases: {}, routes: [route] })
    assert.ok(complete.ok)
    assert.deepEqual(keysIn(everyKey), keysIn(complete.settings))
    const { leases } = everyKey as { leases: unknown }
    assert.deepEqual(leases, (parse(stringify(complete.settings)) as { leases: unknown }).leases)
  })
})

/** The path of every key in `value`, once. */
function keysIn(value: unknown, path = ''): string[] {
  const below = Array.isArray(value)
    ? value.flatMap((item) => keysIn(item, `${path}[]`))
    : typeof value === 'object' && value !== null
      ? Object.entries(value).flatMap(([key, inner]) => keysIn(inner, `${path}.${key}`))
      : []
  return [...new Set([path, ...below])].sort()
}

test('any valid configuration is the same after it was printed and loaded again', () => {
  const maybe = <T>(arbitrary: fc.Arbitrary<T>) => fc.option(arbitrary, { nil: undefined })
  const durations = fc.integer({ min: 1, max: MAX_DURATION_MS }).map(formatDuration)
  const addresses = fc
    .tuple(
      fc.oneof(
        fc.domain(),
        fc.ipV4(),
        fc.ipV6().map((ip) => `[${ip}]`),
      ),
      fc.integer({ min: 1, max: 65535 }),
    ) // prettier-ignore
    .map(([host, port]) => `${host}:${port}`)
  const segments = fc.oneof(
    fc.stringMatching(/^[A-Za-z0-9_~:@!$&'()+,="|é日 -]{0,8}[a-z0-9'":-]$/),
    fc.constantFrom('true', 'null', '5', '~', '- a', '| c', 'é'),
  )
  const routes = fc.record({
    segments: fc.array(segments, { maxLength: 3 }),
    rest: fc.boolean(),
    methods: maybe(fc.subarray(['PUT', 'POST', 'MKCOL'], { minLength: 1 })),
    scope: maybe(fc.constantFrom('/{id}', 'x: {header.X} # y', '{query.a}', '{host}', "'{id}'")),
    missingToken: maybe(fc.constantFrom('reject', 'pass')),
    repeat: maybe(fc.constantFrom('many', 'once')),
    mode: maybe(fc.constantFrom('enforce', 'observe')),
    caseInsensitive: maybe(fc.boolean()),
    allow: maybe(fc.subarray([';', '#', '%', '"', '\\', '|', '{'])),
  })
  const settings = fc.record({
    listen: maybe(addresses),
    clientTimeout: maybe(durations),
    shutdownTimeout: maybe(durations),
    upstream: fc.record({
      url: addresses.map((address) => `http://${address}`),
      responseTimeout: maybe(durations),
      maxConnections: maybe(fc.integer({ min: 1, max: 1_000_000 })),
    }),
    token: maybe(fc.record({ header: fc.constantFrom('X-Epoch', "a'b", '~', 'null', '5') })),
    store: maybe(
      fc.record({
        path: fc.string({ minLength: 1, unit: 'grapheme' }).filter((path) => path.trim() !== ''),
        create: maybe(fc.boolean()),
      }),
    ),
    fence: maybe(fc.record({ settle: maybe(durations), maxWaiting: maybe(fc.nat(1_000_000)) })),
    leases: maybe(
      fc.record({
        prefix: maybe(fc.constantFrom('/_fencing', '/a/b', '/x.y~z-1')),
        maxTtl: maybe(fc.integer({ min: 15_000, max: MAX_DURATION_MS }).map(formatDuration)),
        maxWaiting: maybe(fc.nat(1_000_000)),
      }),
    ),
    // The index keeps one from hiding another.
    routes: fc.array(routes, { minLength: 1, maxLength: 4 }).map((all) =>
      all.map(({ segments, rest, ...route }, i) => ({
        ...route,
        path: `/{id}/${[...segments, String(i)].join('/')}${rest ? '/**' : ''}`,
      })),
    ),
    unmatchedWrites: maybe(fc.constantFrom('reject', 'pass')),
    log: maybe(fc.record({ level: fc.constantFrom('trace', 'silent') })),
  })
  fc.assert(
    fc.property(settings, (content) => {
      const first = load(content)
      const config = configOf(first)
      assert.ok(first.ok)
      const again = load(stringify(first.settings, { lineWidth: 0 }))
      assert.deepEqual(configOf(again), config)
      assert.ok(again.ok)
      assert.deepEqual(again.settings, first.settings)
    }),
  )
})
