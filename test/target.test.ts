import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import fc from 'fast-check'
import {
  compatibilityForm,
  fieldText,
  hostName,
  queryValue,
  readPath,
  splitTarget,
  type Flaw,
  type Path,
} from '../src/target.ts'

function accepted(target: string): Path {
  const path = readPath(target)
  if ('result' in path) assert.fail(`${target}: ${path.detail}`)
  return path
}

function segments(target: string): readonly string[] {
  const { segments, disputes } = accepted(target)
  assert.deepEqual(disputes, [])
  return segments
}

function flaw(value: Path | string | Flaw): Flaw {
  assert.ok(typeof value === 'object' && 'result' in value, JSON.stringify(value))
  assert.match(value.detail, /^[A-Z].*\.$/)
  return value
}

describe('the forms of a target', () => {
  test('origin-form is its own path', () => {
    assert.deepEqual(splitTarget('/a?b'), { path: '/a?b', authority: undefined })
    assert.deepEqual(splitTarget('//h/a'), { path: '//h/a', authority: undefined })
  })

  for (const [target, authority, path] of [
    ['http://h/a', 'h', '/a'],
    ['HTTPS://H:80/a?b#c', 'H:80', '/a?b#c'],
    ['http://h', 'h', '/'],
    ['http://h?x', 'h', '/?x'],
    ['http://u@h/a', 'u@h', '/a'],
    ['http://h//a', 'h', '//a'],
  ] as const) {
    test(`${target} gives the path ${path}`, () => {
      assert.deepEqual(splitTarget(target), { path, authority })
    })
  }

  for (const target of ['*', '', 'a', 'ftp://h/x', 'http:/h/x', 'http:h', ' /a', 'h:80', '\\a', 'http:\\\\h\\a']) {
    test(`${JSON.stringify(target)} names no path`, () => {
      assert.equal(splitTarget(target), undefined)
    })
  } // prettier-ignore
})

describe('the name of a host', () => {
  for (const [authority, name] of [
    ['h', 'h'],
    ['Example.ORG:8080', 'example.org'],
    ['example.org.', 'example.org'],
    ['example.org.:80', 'example.org'],
    ['h:', 'h'],
    ['[::1]:80', '[::1]'],
    ['127.0.0.1', '127.0.0.1'],
  ] as const) {
    test(`that of ${authority} is ${name}`, () => assert.equal(hostName(authority), name))
  }

  for (const authority of ['', ':80', 'u@h', 'u:p@h', 'h\\x', 'a,b', 'h..', '.h', 'h:80:80', '[::1', 'h x', 'h%41', 'h:x']) {
    test(`${JSON.stringify(authority)} is none`, () => assert.equal(hostName(authority), undefined))
  } // prettier-ignore
})

describe('the segments of a path', () => {
  for (const [target, ...expected] of [
    ['/'],
    ['/?a'],
    ['/a', 'a'],
    ['/a/', 'a'],
    ['/a?/b/../c', 'a'],
    ['/a/?x', 'a'],
    ['/%61/b%2D', 'a', 'b-'],
    ['/a%2Bb+c', 'a+b+c'],
    ["/!$&'()*+,=:@-._~0", "!$&'()*+,=:@-._~0"],
    ['/a%20b', 'a b'],
    ['/.a/..b/a..b', '.a', '..b', 'a..b'],
    ['/%2ea', '.a'],
    ['/a%7Cb%22%3c%3E%5e', 'a|b"<>^'],
    ['/%c3%a9', 'é'],
    ['/e%cc%81', 'é'],
    ['/%F0%9F%91%A9%E2%80%8D%F0%9F%9A%80', '👩‍🚀'],
    // A % that begins nothing is the same to those who decode twice.
    ['/100%25', '100%'],
    ['/%25zz/%254', '%zz', '%4'],
  ] as const) {
    test(`of ${target} are ${JSON.stringify(expected)}`, () => {
      assert.deepEqual(segments(target), expected)
    })
  }

  for (const target of [
    // Empty segments, raw or as some servers make them.
    '//', '//a', '/a//', '/a//b', '/a/%20/b', '/;x/b', '/%2fa',
    // Dot segments.
    '/.', '/..', '/a/.', '/a/./b', '/a/../b', '/../b', '/a/%2e/b', '/a/%2E%2e/b', '/a/.%2E/b',
    '/a/..;/b', '/a/..;x=1/b', '/a/.;/b', '/a/..%2f', '/a/x%2f..%2fb', '/a/x%2f%2e%2e', '/a/..%5cb',
    '/a/x\\..\\b', '/a/..%3fx', '/a/..%23x', '/a/...', '/a/%2e%20', '/a/..%00', '/a/%252e%252e/b',
    // Ends that file systems drop.
    '/a.', '/a%2e', '/a%20', '/a./b', '/a%20.', '/a../b',
    // Control characters.
    '/a%00', '/a%0d%0ab', '/a%7f', '/a%c2%85', '/a\tb', '/a\0', '/a b',
    // Not text.
    '/a%', '/a%2', '/a%zz', '/a%u002f', '/a%c0%af', '/a%c0%ae%c0%ae', '/a%ff', '/a%ed%a0%80', '/a%e2%80',
    '/a\xe9', '/a\xc3\xa9',
    // A fragment.
    '/a#f', '/a?b#c', '/#',
    // Encoded twice, to something that no route can mean.
    '/a%2500', '/a%25c0%25af', '/a%25u002f', '/a%25252f', '/a%252541',
    // As a Windows code page or NFKC has it.
    '/a/%EF%BC%8E%EF%BC%8E/b', '/a%EF%BC%8E', '/a/%E2%80%A5/b', '/a%C2%A0', '/a/x%EF%BC%8F..',
  ]) {
    test(`of ${JSON.stringify(target)} are read in more than one way, whatever a route allows`, () => {
      assert.equal(flaw(readPath(target)).result, 'ambiguous')
    })
  } // prettier-ignore

  for (const [target, characters, prefix, shifts] of [
    ['/a;x=1', ';', 'a', false],
    ['/a%3bx', ';', 'a', false],
    ['/a%2fb', '/', 'a', true],
    ['/a%5Cb', '\\', 'a', true],
    ['/a\\b', '\\', 'a', true],
    ['/a%3Fb', '?', 'a', true],
    ['/a%23b', '#', 'a', true],
    ['/a%252fb', '%', 'a', true],
    ['/a%2541', '%', 'a', true],
    ['/a|b', '|', 'a', false],
    ['/ab"<>^`{}[]', '"<>^`{}[]', 'ab', false],
    ['/a%EF%BC%8Fb', '/', 'a', true],
    ['/a%E2%88%95b', '/', 'a', true],
    ['/a%EF%BC%BCb', '\\', 'a', true],
    ['/a%C2%A5b', '\\', 'a', true],
    ['/a%CD%BEb', ';', 'a', false],
    ['/a%EF%BC%8541', '%', 'a', true],
    ['/a%E2%84%80b', '/', 'aa', true],
    ['/a<%CC%B8', '<', '', false],
  ] as const) {
    test(`a route has to allow ${characters} for ${target}`, () => {
      const [dispute, ...others] = accepted(target).disputes
      assert.deepEqual(others, [])
      assert.deepEqual(dispute, { place: 0, prefix, characters: Array.from(characters), shifts })
    })
  }

  test('a refusal says what is wrong', () => {
    assert.match(flaw(readPath('/a/../b')).detail, /"\.\."/)
    assert.match(flaw(readPath('/a/b.')).detail, /ends in a dot/)
  })

  test('a dispute names the place of its segment', () => {
    const places = accepted('/a/b;/c/d%2fe/').disputes.map(({ place }) => place)
    assert.deepEqual(places, [1, 3])
  })

  test('an absurdly long path takes no absurd time', () => {
    const began = performance.now()
    for (const text of ['.', '/', '%25', '%2525', ' ', '%20', ';', '%2f', 'a.', '%EF%BC%8F', '/.a', '|']) {
      for (const end of ['', 'x', '%', '.']) readPath(`/${text.repeat(16_000)}${end}`)
    }
    assert.ok(performance.now() - began < 2_000)
  }) // prettier-ignore
})

const piece = fc.oneof(
  { weight: 4, arbitrary: fc.constantFrom('/', '/', '.', '%2e', '%2E', 'a', 'B', '%41', '%') },
  { weight: 2, arbitrary: fc.constantFrom(';', '%3b', '\\', '%5c', '%2f', '%25', '2f', '?', '#', ' ', '%20', '%00', '|', '"') },
  { weight: 2, arbitrary: fc.constantFrom('\t', '\n', '\xe9', '%c3%a9', 'e%cc%81', '%ef%bc%8f', '%ef%bc%8e', '%c0%ae', '%ff', '@', ':', '%E2%80%8B') },
  { weight: 1, arbitrary: fc.string({ unit: 'binary' }) },
) // prettier-ignore
const anyTarget = fc.array(piece, { maxLength: 12 }).map((pieces) => `/${pieces.join('')}`)

test('whatever a target is, it is refused, or read as the URL Standard and one decoding read it', () => {
  fc.assert(
    fc.property(anyTarget, (target) => {
      const path = readPath(target)
      if ('result' in path || path.disputes.length > 0) return
      const { pathname, hash } = new URL(`http://h${target}`)
      const spelled = pathname.replace(/\/$/, '').split('/').slice(1)
      assert.deepEqual(
        path.segments,
        spelled.map((text) => decodeURIComponent(text).normalize('NFC')),
      )
      assert.equal(hash, '')
    }),
    { numRuns: 20_000 },
  )
})

test('segments that are accepted can be spelt canonically, and are read the same then', () => {
  fc.assert(
    fc.property(anyTarget, (target) => {
      const path = readPath(target)
      if ('result' in path || path.disputes.length > 0) return
      assert.deepEqual(
        segments(`/${path.segments.map(encodeURIComponent).join('/')}`),
        path.segments,
      )
    }),
    { numRuns: 5_000 },
  )
})

describe('a value in a query', () => {
  for (const [query, value] of [
    ['job=17', '17'],
    ['a=1&job=17&b', '17'],
    ['&&job=17&', '17'],
    ['%6Aob=1%37', '17'],
    ['job=a=b', 'a=b'],
    ['job=a%2Bb%3Bc', 'a+b;c'],
    ['job=%c3%a9', 'é'],
    ['job=100%25', '100%'],
    ['other=%252f&job=1', '1'],
    ['job=a/b?c', 'a/b?c'],
  ] as const) {
    test(`that of ?${query} is ${value}`, () => assert.equal(queryValue(query, 'job'), value))
  }

  for (const query of [undefined, '', 'a=1', 'job', 'job=', 'job=1&job=1', 'job=1&job=2', 'job=1&%6aob=2', 'job=1&JOB=2', 'Job=1', 'job=1&job[]=2', 'job[]=1', 'job=1&job[x]=1', 'job=1&%20job=2', 'job=1&job', 'job=1&%EF%BD%8Aob=2']) {
    test(`is missing or not alone in ${JSON.stringify(query)}`, () => {
      assert.equal(flaw(queryValue(query, 'job')).result, 'unscoped')
    })
  } // prettier-ignore

  for (const query of ['job=a+b', 'job=1;job=2', 'job=1&x=a+b', 'job=1;x', 'job=%zz', 'x=%ff&job=1', 'job=%', '%=1&job=1', 'job=\xe9', 'job=a\tb', 'job=a%00', 'job=%252541', 'job=%2541', '%256aob=2&job=1', 'job%00=2&job=1', 'job=1&x=\0', 'job=%c0%af', 'job=%u0031']) {
    test(`is read in more than one way in ${JSON.stringify(query)}`, () => {
      assert.equal(flaw(queryValue(query, 'job')).result, 'ambiguous')
    })
  } // prettier-ignore

  test('names that PHP cannot tell apart are one name', () => {
    assert.equal(queryValue('a.b=1', 'a.b'), '1')
    assert.equal(flaw(queryValue('a.b=1&a_b=2', 'a.b')).result, 'unscoped')
  })

  test('whatever the query, a value that is found is the one that URLSearchParams finds', () => {
    const text = fc.array(fc.constantFrom('job', '=', '&', '%6a', 'ob', '1', '%', '+', ';', '%3d', '%26', 'é', '%c3%a9', '[]'), { maxLength: 10 }) // prettier-ignore
    fc.assert(
      fc.property(text, (pieces) => {
        const query = pieces.join('')
        const value = queryValue(query, 'job')
        if (typeof value === 'object') return
        assert.deepEqual(new URLSearchParams(query).getAll('job'), [value])
      }),
      { numRuns: 20_000 },
    )
  })
})

describe('the text of a field', () => {
  test('is visible ASCII or UTF-8, in NFC', () => {
    assert.equal(fieldText('a/b;c'), 'a/b;c')
    assert.equal(fieldText('\xc3\xa9'), 'é')
    assert.equal(fieldText('e\xcc\x81'), 'é')
  })

  for (const value of ['a b', 'a\tb', 'a\0', '\x7f', '\xe9', '\xc0\xaf', '\xed\xa0\x80', '\xc2\x85', 'é\u0100']) {
    test(`is not ${JSON.stringify(value)}`, () => assert.equal(fieldText(value), undefined))
  } // prettier-ignore
})

test('the compatibility form keeps ASCII', () => {
  fc.assert(
    fc.property(fc.string({ unit: 'grapheme-ascii' }), (text) => {
      assert.equal(compatibilityForm(text), text)
    }),
  )
})
