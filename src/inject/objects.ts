/** YAML and JSON as kubectl reads them. Pure. */
import { Document, isScalar, parseAllDocuments, type Tags } from 'yaml'

/**
 * kubectl reads YAML 1.1: 0644 is octal, yes is true. Unlike YAML 1.1 it takes dates and times of
 * day (12:30:45, a number to base 60) for text.
 */
const READING = {
  version: '1.1',
  customTags: (tags: Tags) =>
    tags.filter((tag) => {
      if (typeof tag === 'string') return true
      return (
        tag.tag !== 'tag:yaml.org,2002:timestamp' && !('format' in tag && tag.format === 'TIME')
      )
    }),
} as const

export type Documents =
  | { readonly documents: readonly Document.Parsed[] }
  /** One line each. */
  | { readonly mistakes: readonly string[] }

export function parseDocuments(text: string): Documents {
  const parsed = parseAllDocuments(text, READING)
  // No document at all, in yaml's own words.
  if (!Array.isArray(parsed)) return { documents: [] }
  const mistakes = parsed.flatMap(({ errors }) =>
    errors.map(({ message }) => {
      // Below it yaml draws the place.
      const [sentence = ''] = message.split('\n')
      return `no valid YAML: ${sentence.replace(/:$/, '')}; correct it there`
    }),
  )
  if (mistakes.length > 0) return { mistakes }
  const isEmpty = ({ contents }: Document.Parsed) => isScalar(contents) && contents.value === null
  return { documents: parsed.filter((document) => !isEmpty(document)) }
}

/** Text that old and new readers of YAML agree on: "yes", "0644" and "12:30" are quoted. */
export function printObject(object: unknown): string {
  return new Document(object, { version: '1.2', compat: 'yaml-1.1' }).toString({ lineWidth: 0 })
}
