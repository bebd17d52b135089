import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import fc from 'fast-check'
import type { Route } from '../src/config.ts'
import { Fields } from '../src/fields.ts'
import { foldCase, Routes, type Covered, type Refused, type Resolution } from '../src/route.ts'

const JOBS: Route = {
  path: '/jobs/{job}/**',
  methods: undefined,
  scope: '/jobs/{job}',
  missingToken: 'reject',
  repeat: 'many',
  mode: 'enforce',
  caseInsensitive: false,
  allow: [],
}

/** Routes with what is not said taken from JOBS. */
function routes(...configs: Partial<Route>[]): Routes {
  const completed = configs.map((config) => ({ ...JOBS, ...config }))
  return new Routes({ routes: completed, tokenHeader: 'fencing-token' })
}

type Field = readonly [name: string, value: string]

interface Asked {
  method?: string
  target?: string
  fields?: readonly Field[]
  routes?: Routes
}

const ONE_ROUTE = routes({})

function resolve({
  method = 'PUT',
  target = '/jobs/17',
  fields = [],
  ...asked
}: Asked): Resolution {
  return (asked.routes ?? ONE_ROUTE).resolve(method, target, new Fields(fields.flat()))
}

function covered(asked: Asked): Covered {
  const resolution = resolve(asked)
  assert.equal(resolution.kind, 'write', JSON.stringify(resolution))
  return resolution
}

function scope(asked: Asked): string {
  return covered(asked).scope
}

function refused(asked: Asked): Refused {
  const resolution = resolve(asked)
  assert.equal(resolution.kind, 'refused', JSON.stringify(resolution))
  const { detail } = resolution
  assert.match(detail, /^[A-Z].*\.$/)
  return resolution
}

function assertResult(result: Refused['result'], asked: Asked): void {
  assert.equal(refused(asked).result, result)
}

const ambiguous = (asked: Asked) => assertResult('ambiguous', asked)
const unscoped = (asked: Asked) => assertResult('unscoped', asked)

describe('reads and writes', () => {
  for (const method of ['GET', 'HEAD', 'OPTIONS', 'TRACE']) {
    test(`${method} is a read`, () => {
      assert.deepEqual(resolve({ method }), { kind: 'read', path: '/jobs/17' })
    })
  }

  for (const method of ['PUT', 'POST', 'PATCH', 'DELETE', 'MKCOL', 'PROPFIND', 'LOCK', 'QUERY', 'get']) {
    test(`${method} is a write`, () => assert.equal(scope({ method }), '/jobs/17'))
  } // prettier-ignore

  test('a write that no route covers is unmatched, and says which method it was', () => {
    const resolution = resolve({ target: '/else' })
    assert.equal(resolution.kind, 'unmatched')
    assert.equal(resolution.path, '/else')
    assert.match(resolution.detail, /PUT/)
  })
})

describe('an upgrade', () => {
  const upgrade = (target: string, ...configs: Partial<Route>[]) =>
    routes(...configs).resolveUpgrade(target, new Fields([]))

  test('is covered by any route of its path, whatever the methods', () => {
    const place = upgrade('/jobs/17', { methods: ['PUT'] })
    assert.equal(place.kind === 'write' && place.scope, '/jobs/17')
    assert.equal(upgrade('/else', {}).kind, 'unmatched')
  })

  test('is refused for an ambiguous target, as every write', () => {
    assert.equal(upgrade('/jobs/17/../18', {}).kind, 'refused')
    assert.equal(upgrade('*', {}).kind, 'refused')
  })
})

describe('targets', () => {
  const DISPUTED = [
    '/jobs//17', '//jobs/17', '/jobs/./17', '/jobs/17/../18', '/../jobs/17', '/jobs/17/%2e%2e/18',
    '/jobs/17/.%2E/18', '/jobs%2f17', '/jobs/17%2fb', '/jobs%252f17', '/jobs\\17', '/jobs/17%5cb',
    '/jobs;x=1/17', '/jobs/..;/17', '/jobs/17%3bx', '/jobs/17.', '/jobs/17%20', '/jobs/17%00',
    '/jobs/17%c0%af', '/jobs/17\xe9', '/jobs/17\xc3\xa9', '/jobs/17%', '/jobs/17%zz',
    '/jobs/17%u002f', '/jobs/17#f', '/jobs/17|b', '/jobs/17"', '/jobs/17<', '/jobs/17>',
    '/jobs/17^', '/jobs/17`', '/jobs/{17}', '/jobs/17?x#f', '/jobs/17%3fx', '/jobs/17%23x',
    '/jobs/17%EF%BC%8Fx', '//host/jobs/17', '/jobs/17\tx', '/jobs/17\x7f', '/jobs/17%85',
  ] // prettier-ignore

  for (const target of DISPUTED) {
    test(`a write to ${JSON.stringify(target)} is ambiguous, wherever it leads`, () => {
      ambiguous({ target })
      ambiguous({ target, routes: routes({ path: '/**', scope: '/' }) })
      ambiguous({ target, routes: routes({ path: '/else', scope: '/' }) })
      assert.equal(refused({ target }).path, target)
    })

    test(`a read of ${JSON.stringify(target)} passes byte for byte`, () => {
      assert.deepEqual(resolve({ method: 'GET', target }), { kind: 'read', path: target })
    })
  }

  for (const target of [
    '/jobs/17', '/jobs/17/', '/jobs/17?x', '/jobs/17/?x=;+%zz\xe9', '/jobs/%31%37', '/%6Aobs/17',
    'http://h/jobs/17', 'HTTPS://H:1/jobs/17?x', '/jobs/17/data', '/jobs/17/a/b/c/', '/jobs/17?a/../b',
  ]) {
    test(`${target} is in the scope of /jobs/17, and its own bytes go on`, () => {
      const { scope, path, route } = covered({ target })
      assert.equal(scope, '/jobs/17')
      assert.equal(path, target.replace(/^https?:\/\/[^/]*/i, ''))
      assert.equal(route.label, '/jobs/{job}/**')
    })
  } // prettier-ignore

  for (const target of ['*', 'ftp://h/jobs/17', 'jobs/17', '', 'h:80', 'http:/jobs/17']) {
    test(`${JSON.stringify(target)} names nothing that could be forwarded`, () => {
      ambiguous({ target })
      assert.equal(refused({ target }).path, undefined)
      ambiguous({ method: 'GET', target })
    })
  }

  test('OPTIONS * is a read', () => {
    assert.deepEqual(resolve({ method: 'OPTIONS', target: '*' }), { kind: 'read', path: '*' })
  })

  test('OPTIONS * that names a write is ambiguous', () => {
    ambiguous({ method: 'OPTIONS', target: '*', fields: [['X-HTTP-Method', 'PUT']] })
  })

  test('an absolute target without a path is /', () => {
    assert.equal(scope({ target: 'http://h', routes: routes({ path: '/', scope: '/' }) }), '/')
    assert.deepEqual(resolve({ method: 'GET', target: 'http://h?x' }), {
      kind: 'read',
      path: '/?x',
    })
  })

  for (const target of ['http://u@h/jobs/17', 'http://u:p@h/jobs/17', 'http:///jobs/17', 'http://a,b/jobs/17']) {
    test(`a write to ${target} is ambiguous: its authority is not a host`, () => ambiguous({ target }))
  } // prettier-ignore

  test('different resources have different scopes', () => {
    const targets = ['/jobs/a', '/jobs/A', '/jobs/a+b', '/jobs/a%20b', '/jobs/a%25', '/jobs/%e2%80%8ba', '/jobs/a%2b', '/jobs/%c3%a9'] // prettier-ignore
    const scopes = targets.map((target) => scope({ target }))
    assert.equal(new Set(scopes).size, targets.length)
  })
})

describe('routes', () => {
  test('the first that matches counts', () => {
    const both = routes({ path: '/jobs/{job}/logs', scope: 'logs' }, {})
    assert.equal(scope({ target: '/jobs/17/logs', routes: both }), 'logs')
    assert.equal(scope({ target: '/jobs/17/log', routes: both }), '/jobs/17')
  })

  for (const [path, matching, other] of [
    ['/', ['/'], ['/a']],
    ['/**', ['/', '/a', '/a/b/c'], []],
    ['/a', ['/a', '/a/'], ['/', '/b', '/a/b', '/A']],
    ['/a/**', ['/a', '/a/', '/a/b', '/a/b/c'], ['/', '/b', '/ab']],
    ['/a/*', ['/a/b', '/a/c/'], ['/a', '/a/b/c']],
    ['/a/*/c', ['/a/b/c'], ['/a/b', '/a/b/d', '/a/b/c/d']],
    ['/a/{x}/**', ['/a/b', '/a/b/c'], ['/a', '/a/']],
    ['/é b', ['/%c3%a9%20b', '/e%cc%81%20b'], ['/e%20b']],
    ['/e\u0301', ['/%c3%a9', '/e%cc%81'], ['/e']],
  ] as const) {
    test(`${path} covers ${matching.join(' ')}, not ${other.join(' ')}`, () => {
      const only = routes({ path, scope: 's' })
      for (const target of matching) assert.equal(scope({ target, routes: only }), 's')
      for (const target of other) assert.equal(resolve({ target, routes: only }).kind, 'unmatched')
    })
  }

  test('methods narrow a route', () => {
    const narrow = routes({ methods: ['PUT'], scope: 'put' }, { methods: ['POST'], scope: 'post' })
    assert.equal(scope({ routes: narrow }), 'put')
    assert.equal(scope({ method: 'POST', routes: narrow }), 'post')
    assert.equal(resolve({ method: 'DELETE', routes: narrow }).kind, 'unmatched')
  })

  test('a pattern or template that is none, or names what is not there, is no route', () => {
    assert.throws(() => routes({ path: 'jobs' }), /path jobs/)
    assert.throws(() => routes({ scope: '/{job' }), /scope/)
    assert.throws(() => routes({ scope: '/{other}' }), /\{other\}/)
  })

  test('caseInsensitive folds the case of literals and scopes, and no other route', () => {
    const folding = routes({ caseInsensitive: true })
    for (const target of ['/jobs/AB', '/JOBS/ab', '/Jobs/Ab', '/jobs/%41b', '/jobs/%EF%BC%A1b']) {
      assert.equal(scope({ target, routes: folding }), '/jobs/ab')
    }
    assert.equal(resolve({ target: '/JOBS/ab' }).kind, 'unmatched')
    assert.equal(scope({ target: '/jobs/AB' }), '/jobs/AB')
  })

  test('folding case brings together whatever Unicode pairs', () => {
    for (let code = 0; code <= 0x10ffff; code++) {
      if (code >= 0xd800 && code <= 0xdfff) continue
      const text = String.fromCodePoint(code)
      const folded = foldCase(text)
      for (const other of [text.toLowerCase(), text.toUpperCase(), folded]) {
        assert.equal(foldCase(other), folded, `U+${code.toString(16)}`)
      }
    }
  })
})

describe('allow', () => {
  const allowing = routes({ allow: [';'] })

  test('lets a character through as part of its segment, raw or encoded', () => {
    assert.equal(scope({ target: '/jobs/17;x=1', routes: allowing }), '/jobs/17;x=1')
    assert.equal(scope({ target: '/jobs/17%3Bx=1/', routes: allowing }), '/jobs/17;x=1')
    assert.equal(scope({ target: '/jobs/17/a;b', routes: allowing }), '/jobs/17')
    assert.equal(covered({ target: '/jobs/17%3bx', routes: allowing }).path, '/jobs/17%3bx')
  })

  for (const [character, target, expected] of [
    ['/', '/jobs/a%2fb', '/jobs/a/b'],
    ['\\', '/jobs/a\\b', '/jobs/a\\b'],
    ['?', '/jobs/a%3fb', '/jobs/a?b'],
    ['#', '/jobs/a%23b', '/jobs/a#b'],
    ['%', '/jobs/a%2541', '/jobs/a%41'],
    ['|', '/jobs/a|b', '/jobs/a|b'],
    ['"', '/jobs/a"b', '/jobs/a"b'],
  ] as const) {
    test(`lets ${character} through`, () => {
      ambiguous({ target })
      assert.equal(scope({ target, routes: routes({ allow: [character] }) }), expected)
    })
  }

  test('is not the remedy for what can be percent-encoded', () => {
    assert.match(refused({ target: '/jobs/a|b' }).detail, /Percent-encode/)
    assert.equal(scope({ target: '/jobs/a%7Cb' }), '/jobs/a|b')
    assert.match(refused({ target: '/jobs/a|b;c' }).detail, /; \|, .* allow/)
  })

  test('lets no other character through', () => {
    ambiguous({ target: '/jobs/17%2fx', routes: allowing })
    ambiguous({ target: '/jobs/17;a%2fx', routes: allowing })
  })

  test('lets nothing through that is read as another segment', () => {
    const all = routes({ allow: Array.from('/\\;?#%"<>[]^`{|}') })
    for (const end of ['/..;/18', '/..%2f18', '/%2e%2e%5c18', '/x%2f..%2f..', '/%252e%252e', '/;x', '/%2f', '/..%23', '/..%3f', '#x']) {
      ambiguous({ target: `/jobs/17${end}`, routes: all })
    }
  }) // prettier-ignore

  test('counts only where no earlier route may have been meant', () => {
    const logsFirst = routes({ path: '/jobs/{job}/logs', scope: 'logs' }, { allow: [';'] })
    assert.equal(scope({ target: '/jobs/17/a;b', routes: logsFirst }), '/jobs/17')
    ambiguous({ target: '/jobs/17/logs;b', routes: logsFirst })
    assert.equal(scope({ target: '/jobs/17;b/data', routes: logsFirst }), '/jobs/17;b')
    ambiguous({ target: '/jobs/17;b/logs', routes: logsFirst })
  })

  test('counts only up to the route that matches', () => {
    const logsLast = routes({ allow: [';'] }, { path: '/jobs/{job}/logs', scope: 'logs' })
    assert.equal(scope({ target: '/jobs/17/logs;b', routes: logsLast }), '/jobs/17')
  })

  test('asks no route that no reading leads to', () => {
    const deeper = routes({ path: '/jobs/{job}/{part}', scope: 'p' }, { allow: [';'] })
    assert.equal(scope({ target: '/jobs/17;b', routes: deeper }), '/jobs/17;b')
    const after = routes({ allow: ['/'] }, { path: '/jobs/{job}/logs', scope: 'logs' })
    assert.equal(scope({ target: '/jobs/17%2flogs', routes: after }), '/jobs/17/logs')
  })

  test('counts for no route after it that another reading leads to', () => {
    const later = routes({ path: '/{x}/b', scope: 's', allow: ['#'] }, { path: '/a', scope: 'a' })
    assert.equal(scope({ target: '/c%23/b', routes: later }), 's')
    ambiguous({ target: '/a%23/b', routes: later })
    const deep = routes(
      { path: '/a/{x}/b/**', scope: 's', allow: ['/'] },
      { path: '/a/**', scope: 'a' },
    )
    ambiguous({ target: '/a/x%2fy/b', routes: deep })
  })

  test('looks at routes for the method alone', () => {
    const post = routes({ path: '/jobs/**', methods: ['POST'], scope: 's' }, { allow: [';'] })
    assert.equal(scope({ target: '/jobs/17;b', routes: post }), '/jobs/17;b')
    ambiguous({ method: 'POST', target: '/jobs/17;b', routes: post })
  })

  test('a refusal names a route that enforces, where one may have been meant', () => {
    const mixed = routes({ path: '/jobs/{job}/logs', mode: 'observe', scope: 'logs' }, {})
    assert.equal(refused({ target: '/jobs/1/logs;x', routes: mixed }).route?.config.mode, 'enforce')
    const observing = routes({ mode: 'observe' })
    assert.equal(refused({ target: '/jobs/1;x', routes: observing }).route?.config.mode, 'observe')
    assert.equal(refused({ target: '/else;x', routes: observing }).route, undefined)
  })
})

describe('scopes', () => {
  const HOST: Field = ['Host', 'h']
  const byHeader = routes({ scope: '{header.Tenant}/{job}' })
  const byQuery = routes({ scope: '{job}?{query.part}' })
  const byHost = routes({ scope: '{host}/{job}' })

  test('are put together from what the template names', () => {
    const all = routes({ path: '/{a}/x/{b}', scope: '{b}-{a}:{header.T}.{query.q}@{host}' })
    const fields: Field[] = [['T', 't'], HOST]
    assert.equal(scope({ target: '/1/x/2?q=3', fields, routes: all }), '2-1:t.3@h')
  })

  test('may have 1024 bytes of UTF-8', () => {
    assert.equal(Buffer.byteLength(scope({ target: `/jobs/${'a'.repeat(1018)}` })), 1024)
    unscoped({ target: `/jobs/${'a'.repeat(1019)}` })
    assert.equal(Buffer.byteLength(scope({ target: `/jobs/${'%E2%82%AC'.repeat(339)}a` })), 1024)
    unscoped({ target: `/jobs/${'%E2%82%AC'.repeat(339)}aa` })
  })

  test('with a field need it once, with one value', () => {
    assert.equal(scope({ fields: [['tenant', 'T1']], routes: byHeader }), 'T1/17')
    assert.equal(scope({ fields: [['Tenant', 'caf\xc3\xa9']], routes: byHeader }), 'café/17')
    for (const fields of [[], [['Tenant', '']], [['Tenant', 'a'], ['tenant', 'a']], [['Tenant', 'a, b']]] as Field[][]) {
      unscoped({ fields, routes: byHeader })
    }
  }) // prettier-ignore

  test('with a field refuse one that the backend may not see so', () => {
    const tenant: Field = ['X-Tenant', 'a']
    const twinned = routes({ scope: '{header.X-Tenant}' })
    assert.equal(scope({ fields: [tenant], routes: twinned }), 'a')
    ambiguous({ fields: [tenant, ['X_Tenant', 'b']], routes: twinned })
    ambiguous({ fields: [['X_Tenant', 'b']], routes: twinned })
    ambiguous({ fields: [tenant, ['Connection', 'close, x-tenant']], routes: twinned })
    for (const value of ['a b', '\xe9', '\xc2\x85', 'a\tb']) {
      ambiguous({ fields: [['X-Tenant', value]], routes: twinned })
    }
  })

  test('with a part of the query need it once', () => {
    assert.equal(scope({ target: '/jobs/17?part=a%2Fb', routes: byQuery }), '17?a/b')
    for (const query of ['', '?', '?part', '?part=', '?part=1&part=1', '?part=1&Part=2', '?p=1']) {
      unscoped({ target: `/jobs/17${query}`, routes: byQuery })
    }
    for (const query of ['?part=a+b', '?part=a;b', '?part=1&x=\xe9', '?part=%zz', '?part=%252f']) {
      ambiguous({ target: `/jobs/17${query}`, routes: byQuery })
    }
  })

  test('with a host take the one of Host, or of an absolute target', () => {
    for (const host of ['example.org', 'Example.ORG:80', 'example.org.', 'example.org.:8080']) {
      assert.equal(scope({ fields: [['Host', host]], routes: byHost }), 'example.org/17')
    }
    assert.equal(scope({ target: 'http://A:1/jobs/17', fields: [HOST], routes: byHost }), 'a/17')
    unscoped({ routes: byHost })
    unscoped({ fields: [['Host', '']], routes: byHost })
    unscoped({ fields: [HOST, HOST], routes: byHost })
    ambiguous({ fields: [['Host', 'u@h']], routes: byHost })
  })

  test('with a host refuse another that a backend may believe in', () => {
    const agreeing: Field[] = [HOST, ['X-Forwarded-Host', 'H:80'], ['Forwarded', 'for=x;host="h"']]
    assert.equal(scope({ fields: agreeing, routes: byHost }), 'h/17')
    for (const field of [['X-Forwarded-Host', 'other'], ['X-Forwarded-Host', 'h, other'], ['X_Forwarded_Host', 'other'], ['Forwarded', 'for=x;Host=other']] as Field[]) {
      ambiguous({ fields: [HOST, field], routes: byHost })
      assert.equal(scope({ fields: [HOST, field] }), '/jobs/17', 'where the scope has no host')
    }
  }) // prettier-ignore

  test('a refusal for want of a value names its route and its path', () => {
    const { route, path } = refused({ target: '/jobs/17?x', routes: byHeader })
    assert.equal(route, byHeader.all[0])
    assert.equal(path, '/jobs/17?x')
  })
})

describe('fields that change what a request is', () => {
  for (const name of ['X-HTTP-Method-Override', 'X-HTTP-Method', 'X-Method-Override', 'X_HTTP_Method_Override', 'X.HTTP.Method', 'x-method_override']) {
    test(`a read whose ${name} names a write is that write`, () => {
      const methods = routes({ methods: ['PUT'] })
      for (const method of ['GET', 'HEAD', 'OPTIONS']) {
        assert.equal(scope({ method, fields: [[name, 'put']], routes: methods }), '/jobs/17')
        ambiguous({ method, target: '/jobs/17/../18', fields: [[name, 'PUT']], routes: methods })
      }
      const deleting = resolve({ method: 'GET', fields: [[name, 'DELETE']], routes: methods })
      assert.equal(deleting.kind, 'unmatched')
    })

    test(`a ${name} that names no method, or two, is ambiguous`, () => {
      for (const method of ['GET', 'PUT']) {
        for (const value of ['', 'PUT, GET', 'P@T', 'PUT DELETE', '\xe9']) {
          ambiguous({ method, fields: [[name, value]] })
        }
        ambiguous({ method, fields: [[name, 'PUT'], [name, 'PUT']] })
        ambiguous({ method, fields: [[name, 'GET'], [name.toLowerCase().replaceAll(/[-.]/g, '_'), 'PUT']] })
      }
    })

    test(`a ${name} that names a read leaves a request what it is`, () => {
      assert.equal(resolve({ method: 'GET', fields: [[name, 'head']] }).kind, 'read')
      assert.equal(scope({ fields: [[name, 'GET']] }), '/jobs/17')
    })
  } // prettier-ignore

  test('several overrides have to agree', () => {
    const agreeing: Field[] = [['X-HTTP-Method', 'PUT'], ['X-Method-Override', 'put']] // prettier-ignore
    assert.equal(scope({ method: 'GET', fields: agreeing }), '/jobs/17')
    for (const other of ['DELETE', 'GET']) {
      ambiguous({
        method: 'GET',
        fields: [
          ['X-HTTP-Method', 'PUT'],
          ['X-Method-Override', other],
        ],
      })
    }
  })

  test('three names that CGI takes for one are seen, all of them', () => {
    const fields: Field[] = [['X_HTTP_Method', 'GET'], ['X.HTTP.Method', 'PUT']] // prettier-ignore
    ambiguous({ method: 'GET', fields })
  })

  test('a write has the same route and scope as what its override names', () => {
    const fields: Field[] = [['X-HTTP-Method-Override', 'PATCH']]
    assert.equal(scope({ method: 'POST', fields }), '/jobs/17')
    const one = { methods: ['POST'] }
    const other = { methods: ['PATCH'] }
    ambiguous({ method: 'POST', fields, routes: routes(one) })
    ambiguous({ method: 'POST', fields, routes: routes(other) })
    ambiguous({ method: 'POST', fields, routes: routes(one, other) })
    ambiguous({ method: 'POST', fields, routes: routes({ ...one, scope: 's' }, other) })
    assert.equal(
      resolve({ method: 'POST', fields, routes: routes({ methods: ['PUT'] }) }).kind,
      'unmatched',
    )
  })

  test('what a write lacks under both methods is what it is refused for', () => {
    const byHeader = routes({ scope: '{header.Tenant}' })
    unscoped({ method: 'POST', fields: [['X-HTTP-Method', 'PATCH']], routes: byHeader })
  })

  test('a refusal for two methods names a route that enforces, where there is one', () => {
    const fields: Field[] = [['X-HTTP-Method-Override', 'PATCH']]
    const observed = { methods: ['POST'], mode: 'observe' } as const
    const asked = { method: 'POST', fields, routes: routes(observed, { methods: ['PATCH'] }) }
    assert.equal(refused(asked).route?.config.mode, 'enforce')
    assert.equal(refused({ ...asked, routes: routes(observed) }).route?.config.mode, 'observe')
  })

  for (const name of ['X-Original-URL', 'X-Rewrite-URL', 'x_original_url', 'X.Rewrite.URL', 'SCRIPT_NAME', 'Script-Name']) {
    test(`a write with ${name} is ambiguous, a read passes`, () => {
      const fields: Field[] = [[name, '/jobs/18']]
      ambiguous({ fields })
      ambiguous({ target: '/else', fields })
      assert.equal(refused({ fields }).route, undefined)
      assert.equal(resolve({ method: 'GET', fields }).kind, 'read')
    })
  } // prettier-ignore

  for (const field of [['Connection', 'Fencing-Token'], ['Connection', 'close, fencing-token'], ['Fencing_Token', '7'], ['fencing.token', '7']] as Field[]) {
    test(`a write with ${field.join(': ')} is ambiguous, a read passes`, () => {
      ambiguous({ fields: [['Fencing-Token', '7'], field] })
      assert.equal(refused({ fields: [field] }).route?.label, '/jobs/{job}/**')
      assert.equal(resolve({ method: 'GET', fields: [field] }).kind, 'read')
    })
  } // prettier-ignore

  test('an ordinary request has nothing of the kind', () => {
    const fields: Field[] = [['Fencing-Token', '7'], ['Connection', 'keep-alive'], ['X_Other', 'x'], ['Host', 'h']] // prettier-ignore
    assert.equal(scope({ fields }), '/jobs/17')
  })
})

describe('MOVE and COPY', () => {
  const to = (value: string): Field => ['Destination', value]

  for (const method of ['MOVE', 'COPY']) {
    for (const value of ['/jobs/17/b', 'http://h/jobs/17/b', '/jobs/%31%37/', 'https://other/jobs/17?x']) {
      test(`${method} to ${value} stays in its scope`, () => {
        assert.equal(scope({ method, target: '/jobs/17/a', fields: [to(value)] }), '/jobs/17')
      })
    } // prettier-ignore

    for (const value of ['/jobs/18/b', '/jobs/17/../18', '/else', '', 'jobs/17', 'ftp://h/jobs/17', '//jobs/17', 'http://u@h/jobs/17', '/jobs/17;x', '/jobs/17#x', '/jobs/17 b', '*']) {
      test(`${method} to ${JSON.stringify(value)} is ambiguous`, () => {
        ambiguous({ method, target: '/jobs/17/a', fields: [to(value)] })
      })
    } // prettier-ignore

    test(`${method} from outside into a scope is ambiguous`, () => {
      ambiguous({ method, target: '/else', fields: [to('/jobs/17')] })
      const other = routes({ methods: ['PUT'] })
      ambiguous({ method, target: '/else', fields: [to('/jobs/17')], routes: other })
      assert.equal(resolve({ method, target: '/else', fields: [to('/other')] }).kind, 'unmatched')
    })

    test(`${method} with two Destinations is ambiguous, with none it is the backend's to refuse`, () => {
      ambiguous({ method, fields: [to('/jobs/17/b'), to('/jobs/17/b')] })
      assert.equal(scope({ method }), '/jobs/17')
    })

    test(`${method} through an override is looked at in the same way`, () => {
      const override: Field = ['X-HTTP-Method-Override', method]
      for (const plain of ['GET', 'POST']) {
        ambiguous({ method: plain, fields: [override, to('/jobs/18')] })
        assert.equal(scope({ method: plain, fields: [override, to('/jobs/17')] }), '/jobs/17')
      }
    })
  }

  test('the host of a Destination counts where the scope has it', () => {
    const byHost = routes({ scope: '{host}/{job}' })
    const fields = (value: string): Field[] => [['Host', 'h'], to(value)]
    const asked = { method: 'MOVE', routes: byHost }
    assert.equal(scope({ ...asked, fields: fields('/jobs/17/b') }), 'h/17')
    assert.equal(scope({ ...asked, fields: fields('http://h:80/jobs/17/b') }), 'h/17')
    ambiguous({ ...asked, fields: fields('http://other/jobs/17/b') })
  })

  test('a refusal names a route that enforces, on either side', () => {
    const observed = { path: '/drafts/{draft}', scope: 'd', mode: 'observe' } as const
    const both = routes({}, observed)
    for (const [target, value] of [
      ['/jobs/17', '/drafts/1'],
      ['/drafts/1', '/jobs/17'],
    ] as const) {
      const { route } = refused({ method: 'MOVE', target, fields: [to(value)], routes: both })
      assert.equal(route?.config.mode, 'enforce')
    }
    const away = { method: 'MOVE', target: '/drafts/1', routes: both }
    assert.equal(refused({ ...away, fields: [to('/else')] }).route?.config.mode, 'observe')
    assert.equal(refused({ ...away, fields: [to('/jobs/../x')] }).route, undefined)
  })

  test('other methods have no Destination', () => {
    assert.equal(scope({ method: 'PUT', fields: [to('/jobs/18')] }), '/jobs/17')
  })
})

// Properties

const name = fc
  .oneof(
    fc.string({ minLength: 1, maxLength: 8, unit: 'grapheme' }),
    fc.stringMatching(/^[a-z0-9._~-]+$/),
  )
  .filter((text) => resolve({ target: `/jobs/${encodeURIComponent(text)}` }).kind === 'write')

/** `text` percent-encoded, and more of it than is needed, in digits of either case. */
function spellings(text: string): fc.Arbitrary<string> {
  const bytes = [...Buffer.from(text)].map((byte) => {
    const hex = byte.toString(16).padStart(2, '0')
    const encoded = [`%${hex}`, `%${hex.toUpperCase()}`]
    const plain = /[\w.~!$&'()*+,=:@-]/.test(String.fromCharCode(byte))
    return fc.constantFrom(...encoded, ...(plain ? [String.fromCharCode(byte)] : []))
  })
  return fc.tuple(...bytes).map((parts) => parts.join(''))
}

const spelledName = name.chain((text) => fc.tuple(fc.constant(text), spellings(text)))

test('harmless spellings of a resource share one scope', () => {
  const before = fc.constantFrom('', 'http://h', 'HTTP://h:80', 'https://other.example')
  const after = fc.constantFrom('', '/', '?', '/?a=b', '?/../x', '/x', '/x/%79/')
  fc.assert(
    fc.property(spelledName, spellings('jobs'), before, after, ([text, spelled], jobs, ...ends) => {
      const target = `${ends[0]}/${jobs}/${spelled}${ends[1]}`
      assert.equal(scope({ target }), scope({ target: `/jobs/${encodeURIComponent(text)}` }))
      assert.equal(scope({ target }), `/jobs/${text.normalize('NFC')}`)
    }),
    { numRuns: 2_000 },
  )
})

const piece = fc.oneof(
  { weight: 6, arbitrary: fc.constantFrom('/', '/', 'jobs', '17', '.', '..', '%2e', '%6aobs', '%31') },
  { weight: 3, arbitrary: fc.constantFrom(';', '%3b', '\\', '%5c', '%2f', '%25', '2f', '?', '#', '|', '%3F', '%23') },
  { weight: 2, arbitrary: fc.constantFrom('%c3%a9', '%00', '%20', '\xe9', '%ef%bc%8f', '%c0%ae', '%') },
  { weight: 1, arbitrary: fc.string({ unit: 'binary' }) },
) // prettier-ignore
const anyTarget = fc.array(piece, { maxLength: 10 }).map((pieces) => pieces.join(''))
const jobTarget = anyTarget.map((text) => `/jobs/1${text}`)

test('whatever a target is, it is refused, or its scope is the one that a strict reader gives it', () => {
  const all = routes({}, { path: '/{x}/**', scope: 'x/{x}' })
  fc.assert(
    fc.property(fc.oneof(anyTarget, jobTarget), (target) => {
      const resolution = resolve({ target, routes: all })
      if (resolution.kind !== 'write') return
      const { pathname } = new URL(`http://h${resolution.path}`)
      const [first = '', second = ''] = pathname
        .slice(1)
        .split('/')
        .map((text) => decodeURIComponent(text).normalize('NFC'))
      const expected = first === 'jobs' && second !== '' ? `/jobs/${second}` : `x/${first}`
      assert.equal(resolution.scope, expected)
    }),
    { numRuns: 20_000 },
  )
})

test('a read of whatever target passes as it is, or names nothing', () => {
  fc.assert(
    fc.property(anyTarget, (target) => {
      const resolution = resolve({ method: 'GET', target })
      const expected = target.startsWith('/') ? target : undefined
      assert.equal(resolution.path, expected)
    }),
  )
})

test('what a route allows never leads past a route that does not allow it, in any reading', () => {
  /** Every way in which servers are known to read a path: as segments, once it is decoded. */
  const readings = (path: string): string[][] => {
    // U+E000 is a / that was one on the wire.
    const wire = decodeURIComponent(path.replace(/\?.*/s, '').replaceAll('/', '\ue000'))
    const steps: ((text: string) => string)[] = [
      (text) => text.replace(/%([0-9a-f]{2})/gi, (_, hex: string) => String.fromCharCode(parseInt(hex, 16))),
      (text) => text.replaceAll('\\', '/'),
      (text) => text.replace(/[?#].*/s, ''),
      (text) => text.replace(/;[^/\ue000]*/g, ''),
      (text) => text.replaceAll('/', '\ue000'),
    ] // prettier-ignore
    let texts = [wire]
    for (const step of steps) texts = [...new Set(texts.flatMap((text) => [text, step(text)]))]
    return texts.map((text) => text.split('\ue000').filter((segment) => segment !== ''))
  }
  const matches = ({ path }: Route, segments: string[]) => {
    const wanted = path.replace('/**', '').split('/').slice(1)
    const enough = path.endsWith('**') ? segments.length >= wanted.length : segments.length === wanted.length
    return enough && wanted.every((text, i) => text.startsWith('{') || text === segments[i])
  } // prettier-ignore

  const allow = fc.subarray<Route['allow'][number]>([';', '/', '\\', '?', '#', '%'])
  const path = fc.constantFrom('/a', '/a/**', '/a/{x}', '/a/{x}/b', '/a/{x}/b/**', '/a/b/{x}/**', '/{x}/b', '/{x}/**', '/a/a/**', '/b/{x}') // prettier-ignore
  const config = fc.record({ path, allow }).map((some): Route => ({ ...JOBS, ...some, scope: 's' }))
  const segment = fc.array(fc.constantFrom('a', 'b', 'a', 'b', ';', '%2f', '\\', '%3f', '%23', '%25', '61', '%2562', '%252f', '%'), { minLength: 1, maxLength: 4 }) // prettier-ignore
  const target = fc
    .array(segment, { minLength: 1, maxLength: 4 })
    .map((segments) => `/${segments.map((pieces) => pieces.join('')).join('/')}`)

  let accepted = 0
  fc.assert(
    fc.property(fc.array(config, { minLength: 1, maxLength: 4 }), target, (configs, target) => {
      const resolution = resolve({ target, routes: routes(...configs) })
      if (resolution.kind !== 'write') return
      const used = Array.from(decodeURIComponent(target.replaceAll('/', 'x'))).filter((c) => ';/\\?#'.includes(c)) // prettier-ignore
      if (used.length > 0) accepted++
      for (const segments of readings(target)) {
        const first = configs.find((config) => matches(config, segments))
        const allowed = first === undefined || used.every((c) => first.allow.some((a) => a === c))
        assert.ok(allowed, `${JSON.stringify(segments)} is in ${first?.path}`)
      }
    }),
    { numRuns: 30_000 },
  )
  assert.ok(accepted > 100, `${accepted} disputed targets were accepted`)
})
