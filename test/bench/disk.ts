import { closeSync, fdatasyncSync, ftruncateSync, openSync, writeSync } from 'node:fs'
import path from 'node:path'
import type { Site } from './site.ts'

const PAGE = Buffer.alloc(4096, 1)
const PAGES = 1000

/** How often per second the disk by itself makes one written page durable. Blocks. */
export function syncsPerSecond(site: Site, seconds: number): number {
  const file = openSync(path.join(site.newFolder(), 'pages'), 'w')
  try {
    // As in a log that is written over: the file keeps its length.
    ftruncateSync(file, PAGES * PAGE.length)
    for (let i = 0; i < PAGES; i++) writeSync(file, PAGE, 0, PAGE.length, i * PAGE.length)
    fdatasyncSync(file)
    const begun = performance.now()
    let syncs = 0
    while (performance.now() - begun < seconds * 1000) {
      writeSync(file, PAGE, 0, PAGE.length, (syncs % PAGES) * PAGE.length)
      fdatasyncSync(file)
      syncs++
    }
    return syncs / ((performance.now() - begun) / 1000)
  } finally {
    closeSync(file)
  }
}
