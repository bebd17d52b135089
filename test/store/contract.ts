import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import fc from 'fast-check'
import { StoreError, type LeaseTerms, type MarkRow, type Store } from '../../src/store/store.ts'
import {
  FIRST_ISSUED,
  formatToken,
  joinToken,
  MAX_PART,
  nextToken,
  parseToken,
  type Token,
} from '../../src/token.ts'

/** What every store does. `open` makes a fresh, empty one. */
export function storeContract(engine: string, open: () => Promise<Store>): void {
  describe(`a store: ${engine}`, () => {
    /** A fresh store for `use`, closed afterwards. */
    const withStore = (use: (store: Store) => Promise<void>) => async () => {
      const store = await open()
      try {
        await use(store)
      } finally {
        await store.close(true)
      }
    }

    test(
      'a scope without a mark takes any token, 0 too, and has it as its mark',
      withStore(async (store) => {
        assert.equal(await store.read('/jobs/1'), undefined)
        const before = Date.now()
        assert.deepEqual(await store.raise('/jobs/1', token('0'), false), {
          mark: token('0'),
          from: undefined,
          overlapping: false,
        })
        const row = await store.read('/jobs/1')
        assert.equal(row?.scope, '/jobs/1')
        assert.equal(row.mark, token('0'))
        assert.ok(row.raisedAt >= before && row.raisedAt <= Date.now(), 'raised just now')
      }),
    )

    test(
      'a higher token raises the mark and learns the earlier one; a lower or equal one changes nothing',
      withStore(async (store) => {
        await store.raise('s', token('41'), false)
        assert.deepEqual(await store.raise('s', token('42'), false), {
          mark: token('42'),
          from: token('41'),
          overlapping: false,
        })
        const row = await store.read('s')
        for (const low of ['42', '41', '0']) {
          assert.deepEqual(await store.raise('s', token(low), false), {
            mark: token('42'),
            from: token('42'),
            overlapping: false,
          })
        }
        assert.deepEqual(await store.read('s'), row)
      }),
    )

    test(
      'a mark keeps whether it was raised over writes under way; a first mark was not',
      withStore(async (store) => {
        const overlapping = async (text: string, given: boolean) =>
          (await store.raise('s', token(text), given)).overlapping
        assert.equal(await overlapping('1', true), false, 'a first mark')
        assert.equal(await overlapping('2', true), true)
        assert.equal(await overlapping('2', false), true, 'the same token again')
        assert.equal(await overlapping('1', false), true, 'a stale token')
        assert.equal(await overlapping('3', false), false)
        assert.equal(await overlapping('3', true), false, 'the same token again')
      }),
    )

    const ascending = [
      '0',
      '9007199254740991',
      '9007199254740992',
      '9007199254740993',
      '9223372036854775806',
      '9223372036854775807',
      '1.0',
      '1.4100',
      '2.1',
      '9007199254740993.0',
      '9223372036854775807.9223372036854775806',
      '9223372036854775807.9223372036854775807',
    ]
    test(
      'tokens are ordered exactly, by generation first, up to the largest of both',
      withStore(async (store) => {
        for (const [i, text] of ascending.entries()) {
          const earlier = ascending[i - 1]
          const { mark, from } = await store.raise('s', token(text), false)
          assert.equal(formatToken(mark), text)
          assert.equal(from, earlier === undefined ? undefined : token(earlier))
          if (earlier === undefined) continue
          assert.equal((await store.raise('s', token(earlier), false)).mark, mark)
          assert.equal((await store.read('s'))?.mark, mark)
        }
        const largest = joinToken(MAX_PART, MAX_PART)
        assert.equal((await store.list('', undefined, 9))[0]?.mark, largest)
      }),
    )

    test(
      'raises of one scope take effect in the order of the calls, also within one commit',
      withStore(async (store) => {
        const raised = await Promise.all(
          ['5', '7', '6', '7', '9'].map((text) => store.raise('s', token(text), false)),
        )
        assert.deepEqual(
          raised.map(({ mark, from }) => [mark, from]),
          [
            [5n, undefined],
            [7n, 5n],
            [7n, 7n],
            [7n, 7n],
            [9n, 7n],
          ],
        )
      }),
    )

    test(
      'a mark never goes back under 1000 concurrent calls with mixed tokens',
      withStore(async (store) => {
        const scopes = ['a', 'b', 'c']
        const highest = new Map<string, bigint>()
        const calls = Array.from({ length: 1000 }, (_, i) => {
          const scope = scopes[i % scopes.length] as string
          const tokenOfCall = joinToken(0n, BigInt((i * 7919) % 1009))
          const before = highest.get(scope)
          const after = before === undefined || tokenOfCall > before ? tokenOfCall : before
          highest.set(scope, after)
          return store.raise(scope, tokenOfCall, false).then(({ mark, from }) => {
            assert.deepEqual([mark, from], [after, before])
          })
        })
        await Promise.all(calls)
        for (const scope of scopes) {
          assert.equal((await store.read(scope))?.mark, highest.get(scope))
        }
      }),
    )

    test(
      'a grant raises the mark to the next token and keeps the lease',
      withStore(async (store) => {
        const before = Date.now()
        assert.deepEqual(await store.grant('s', terms('one'), true), {
          mark: token('1'),
          from: undefined,
          overlapping: false,
        })
        const [row, ...others] = await store.leases(undefined, 10_000)
        assert.deepEqual(others, [])
        assert.ok(row !== undefined)
        const { grantedAt, ...rest } = row
        assert.ok(grantedAt >= before && grantedAt <= Date.now(), 'granted just now')
        assert.deepEqual(rest, { scope: 's', token: token('1'), ...terms('one') })
        assert.equal((await store.read('s'))?.mark, token('1'))
        assert.equal(store.scopes, 1)

        assert.deepEqual(await store.grant('s', terms('two'), true), {
          mark: token('2'),
          from: token('1'),
          overlapping: true,
        })
        assert.deepEqual(
          (await store.leases(undefined, 10_000)).map(({ id }) => id),
          ['two'],
          'in its place',
        )
        assert.equal((await store.read('s'))?.overlapping, true)
      }),
    )

    test(
      'the token of a grant is the smallest above the mark, into the next generation if need be',
      withStore(async (store) => {
        const granted = async (from: string) => {
          await store.raise(from, token(from), false)
          return formatToken((await store.grant(from, terms(from), false)).mark)
        }
        assert.equal(await granted('0'), '1')
        assert.equal(await granted('1000'), '1001')
        assert.equal(await granted('9007199254740992'), '9007199254740993')
        assert.equal(await granted('9223372036854775807'), '1.0')
        assert.equal(await granted('7.41'), '7.42')
        const last = '9223372036854775807.9223372036854775807'
        await assert.rejects(
          granted(last),
          (error) => error instanceof StoreError && error.message === `the scope ${last} has used up its tokens`, // prettier-ignore
        )
        assert.equal((await store.read(last))?.mark, token(last))
        assert.equal((await store.leases(undefined, 10_000)).length, 5)
      }),
    )

    test(
      'a lease is forgotten by its token only; its mark and its sequence stay',
      withStore(async (store) => {
        await store.grant('s', terms('one'), false)
        await store.grant('t', terms('other'), false)
        await store.grant('s', terms('two'), false)
        const ids = async () => (await store.leases(undefined, 10_000)).map(({ id }) => id).sort()
        await store.forget('s', token('1'))
        await store.forget('s', token('3'))
        await store.forget('nowhere', token('1'))
        assert.deepEqual(await ids(), ['other', 'two'])
        await store.forget('s', token('2'))
        await store.forget('s', token('2'))
        assert.deepEqual(await ids(), ['other'])
        assert.equal((await store.read('s'))?.mark, token('2'))
        assert.equal((await store.grant('s', terms('three'), false)).mark, token('3'))
        assert.deepEqual(await ids(), ['other', 'three'])
      }),
    )

    test(
      'leases come in pages, in the order of their scopes',
      withStore(async (store) => {
        for (const scope of ['c', 'a', '\u{1f512}', 'b', '\uffff']) await store.grant(scope, terms(scope), false) // prettier-ignore
        const pages: string[][] = []
        for (let after: string | undefined; ;) {
          const page = (await store.leases(after, 2)).map(({ scope }) => scope)
          pages.push(page)
          if (page.length < 2) break
          after = page.at(-1)
        }
        assert.deepEqual(pages, [['a', 'b'], ['c', '\uffff'], ['\u{1f512}']])
      }),
    )

    test(
      'a mark from elsewhere ends the lease below it, also within one commit; an equal or lower one does not',
      withStore(async (store) => {
        await store.grant('a', terms('a'), false)
        await store.grant('b', terms('b'), false)
        await Promise.all([store.raise('a', token('9'), false), store.raise('b', token('1'), false)]) // prettier-ignore
        assert.deepEqual(
          (await store.leases(undefined, 10_000)).map(({ id }) => id),
          ['b'],
        )
        await Promise.all([store.grant('c', terms('c'), false), store.raise('c', token('9'), false)]) // prettier-ignore
        assert.deepEqual(
          (await store.leases(undefined, 10_000)).map(({ id }) => id),
          ['b'],
        )
      }),
    )

    test(
      'grants of one scope take effect in the order of the calls, also within one commit; the last lease stays',
      withStore(async (store) => {
        const raised = await Promise.all([
          store.grant('s', terms('one'), false),
          store.raise('s', token('7'), false),
          store.grant('s', terms('two'), false),
          store.raise('s', token('3'), false),
          store.grant('s', terms('three'), false),
        ])
        assert.deepEqual(
          raised.map(({ mark, from }) => [mark, from]),
          [
            [1n, undefined],
            [7n, 1n],
            [8n, 7n],
            [8n, 8n],
            [9n, 8n],
          ],
        )
        assert.deepEqual(
          (await store.leases(undefined, 10_000)).map(({ id }) => id),
          ['three'],
        )
      }),
    )

    test(
      'what is kept of a lease is what was agreed on, whatever its texts',
      withStore(async (store) => {
        const text = fc.string({ unit: 'grapheme', maxLength: 20 })
        let run = 0
        await fc.assert(
          fc.asyncProperty(text, text, fc.nat(2 ** 31), async (scope, holder, ttlMs) => {
            const [name, id] = [`${run++}/${scope}`, `${run}'"\0`]
            await store.grant(name, { id, holder, ttlMs }, false)
            const row = (await store.leases(undefined, 10_000)).find(
              (lease) => lease.scope === name,
            )
            const { grantedAt } = row ?? {}
            assert.deepEqual(row, { scope: name, token: token('1'), id, holder, ttlMs, grantedAt })
            await store.forget(name, token('1'))
          }),
          { numRuns: 50 },
        )
        assert.deepEqual(await store.leases(undefined, 10_000), [])
      }),
    )

    test(
      'any interleaving of calls agrees with a plain map',
      withStore(async (store) => {
        const step = fc.oneof(
          { weight: 4, arbitrary: fc.record({ do: fc.constant('raise' as const), scope: scopeOfFew, token: anyToken, overlapping: fc.boolean() }) }, // prettier-ignore
          { weight: 3, arbitrary: fc.record({ do: fc.constant('grant' as const), scope: scopeOfFew, overlapping: fc.boolean() }) }, // prettier-ignore
          { weight: 2, arbitrary: fc.record({ do: fc.constant('forget' as const), scope: scopeOfFew, back: fc.bigInt(0n, 1n) }) }, // prettier-ignore
          {
            weight: 2,
            arbitrary: fc.record({ do: fc.constant('read' as const), scope: scopeOfFew }),
          },
          { weight: 1, arbitrary: fc.record({ do: fc.constant('await' as const) }) },
        )
        let run = 0
        await fc.assert(
          fc.asyncProperty(fc.array(step, { maxLength: 40 }), async (steps) => {
            const prefix = `${run++}/`
            const model = new Map<string, { mark: Token; overlapping: boolean }>()
            const leases = new Map<string, { id: string; token: Token }>()
            let underway: Promise<void>[] = []
            for (const [i, each] of steps.entries()) {
              if (each.do === 'await' || each.do === 'forget') {
                // Who forgets a lease knows it: its grant was answered before.
                await Promise.all(underway)
                underway = []
              }
              if (each.do === 'await') continue
              const scope = prefix + each.scope
              const before = model.get(scope)
              if (each.do === 'raise') {
                const rises = before === undefined || each.token > before.mark
                const after = rises
                  ? { mark: each.token, overlapping: each.overlapping && before !== undefined }
                  : before
                model.set(scope, after)
                underway.push(
                  store.raise(scope, each.token, each.overlapping).then((raised) => {
                    assert.deepEqual(raised, { ...after, from: before?.mark })
                  }),
                )
              } else if (each.do === 'grant') {
                const next = before === undefined ? FIRST_ISSUED : nextToken(before.mark)
                const granted = store.grant(scope, terms(`${i}`), each.overlapping)
                if (next === undefined) {
                  underway.push(assert.rejects(granted, StoreError))
                  continue
                }
                const after = {
                  mark: next,
                  overlapping: each.overlapping && before !== undefined,
                }
                model.set(scope, after)
                leases.set(scope, { id: `${i}`, token: next })
                underway.push(
                  granted.then((raised) => {
                    assert.deepEqual(raised, { ...after, from: before?.mark })
                  }),
                )
              } else if (each.do === 'forget') {
                const lease = leases.get(scope)
                if (lease === undefined) continue
                const forgotten = (lease.token - each.back) as Token
                if (lease.token === forgotten) leases.delete(scope)
                underway.push(store.forget(scope, forgotten))
              } else {
                // Calls made later may be seen already: they may have shared the commit.
                underway.push(
                  store.read(scope).then((row) => {
                    if (before !== undefined)
                      assert.ok(row !== undefined && row.mark >= before.mark)
                    const latest = model.get(scope)
                    if (row !== undefined)
                      assert.ok(latest !== undefined && row.mark <= latest.mark)
                  }),
                )
              }
            }
            await Promise.all(underway)
            const listed = await store.list(prefix, undefined, 1000)
            assert.deepEqual(
              new Map(listed.map(({ scope, mark }) => [scope, mark])),
              new Map([...model].map(([scope, { mark }]) => [scope, mark])),
            )
            const kept = (await store.leases(undefined, 10_000)).filter(({ scope }) =>
              scope.startsWith(prefix),
            )
            assert.deepEqual(
              kept.map(({ scope, id }) => `${scope} ${id}`).sort(),
              [...leases]
                .filter(([scope, lease]) => lease.token === model.get(scope)?.mark)
                .map(([scope, { id }]) => `${scope} ${id}`)
                .sort(),
            )
          }),
        )
      }),
    )

    test(
      'the list agrees with sorting and filtering, for any prefix, start and limit',
      withStore(async (store) => {
        const text = fc.string({ unit: fc.constantFrom(...ODD_CHARACTERS), maxLength: 3 })
        let run = 0
        await fc.assert(
          fc.asyncProperty(
            fc.uniqueArray(text, { maxLength: 12 }),
            text,
            fc.option(text, { nil: undefined }),
            fc.integer({ min: 0, max: 15 }),
            async (scopes, prefix, after, limit) => {
              const root = `${run++}/`
              await Promise.all(scopes.map((scope) => store.raise(root + scope, token('1'), false)))
              const start = after === undefined ? undefined : root + after
              const expected = scopes
                .map((scope) => root + scope)
                .filter((scope) => scope.startsWith(root + prefix))
                .filter((scope) => start === undefined || compareBytes(scope, start) > 0)
                .sort(compareBytes)
                .slice(0, limit)
              assert.deepEqual(
                (await store.list(root + prefix, start, limit)).map(scopeOf),
                expected,
              )
            },
          ),
        )
      }),
    )

    test(
      'the list begins with the empty scope and ends with the last character of Unicode',
      withStore(async (store) => {
        const scopes = ['', 'a', '\u{ffff}', '\u{10000}', '\u{10ffff}', '\u{10ffff}x']
        await Promise.all(scopes.map((scope) => store.raise(scope, token('1'), false)))
        assert.deepEqual((await store.list('', undefined, 10)).map(scopeOf), scopes)
        assert.deepEqual((await store.list('', '', 2)).map(scopeOf), ['a', '\u{ffff}'])
        assert.deepEqual((await store.list('\u{10ffff}', undefined, 10)).map(scopeOf), [
          '\u{10ffff}',
          '\u{10ffff}x',
        ])
        assert.deepEqual(await store.list('b', undefined, 10), [])
      }),
    )

    test(
      'it knows how many scopes have a mark',
      withStore(async (store) => {
        assert.equal(store.scopes, 0)
        await Promise.all(['1', '2', '3'].map((text) => store.raise('a', token(text), false)))
        assert.equal(store.scopes, 1)
        await Promise.all(['b', 'c', 'a'].map((scope) => store.raise(scope, token('9'), false)))
        assert.equal(store.scopes, 3)
      }),
    )

    test(
      'a probe finds that it can commit',
      withStore(async (store) => {
        await store.probe()
        await Promise.all([store.probe(), store.raise('a', token('1'), false), store.probe()])
      }),
    )

    test('closing ends what was asked before, refuses what comes after, and can be repeated', async () => {
      const store = await open()
      const raised = store.raise('a', token('1'), false)
      const closed = store.close(true)
      assert.equal(store.close(false), closed)
      const refused = [
        store.raise('a', token('2'), false),
        store.grant('a', terms('a'), false),
        store.forget('a', token('1')),
        store.leases(undefined, 10_000),
        store.read('a'),
        store.list('', undefined, 1),
        store.probe(),
      ]
      for (const call of refused) await assert.rejects(call, isClosed)
      assert.equal((await raised).mark, token('1'))
      await closed
      await assert.rejects(store.read('a'), isClosed)
    })
  })
}

export function token(text: string): Token {
  const parsed = parseToken(text)
  assert.ok(parsed !== undefined, `${text} is a token`)
  return parsed
}

export function terms(id: string): LeaseTerms {
  return { id, holder: `holder of ${id}`, ttlMs: 15_000 }
}

const part = fc.oneof(
  fc.bigInt({ min: 0n, max: 20n }),
  fc.bigInt({ min: 2n ** 53n - 2n, max: 2n ** 53n + 2n }),
  fc.bigInt({ min: MAX_PART - 2n, max: MAX_PART }),
)
const anyToken = fc
  .tuple(fc.oneof({ weight: 3, arbitrary: fc.constant(0n) }, part), part)
  .map(([generation, number]) => joinToken(generation, number))
const scopeOfFew = fc.constantFrom('', '/jobs/1', 'a\0b', '\u{1f512}')

/** Those that mean something to SQL's LIKE and GLOB, to UTF-16 and to C. */
const ODD_CHARACTERS = ['a', 'b', '/', '%', '_', '*', '[', "'", '\\', '\0', '\x7f', 'é', '\ud7ff', '\ue000', '\uffff', '\u{10000}', '\u{10ffff}'] // prettier-ignore

function scopeOf({ scope }: MarkRow): string {
  return scope
}

function compareBytes(a: string, b: string): number {
  return Buffer.compare(Buffer.from(a), Buffer.from(b))
}

function isClosed(error: unknown): boolean {
  return error instanceof StoreError && error.message === 'the store is closed'
}
