import { execFileSync } from 'node:child_process'
import { mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'

/** What can be wrong with a disk; see disk.c. */
export type DiskFault = 'eio-fsync' | 'enospc-write' | { readonly slowFsyncMs: number }

export interface FaultyDisk {
  /** For a child process: its files whose path contains the word lie on the faulty disk. */
  readonly env: NodeJS.ProcessEnv
  /** From now on, in a running child too. */
  fail(fault: DiskFault): void
  heal(): void
  /** Removes what was built; the children must have ended. */
  remove(): void
}

/** Why faults cannot be injected here; false where they can. For the `skip` of a test. */
export const noFaultyDisk: string | false = whyNot()

/** Compiles disk.c (from the project's root, where tests run) and starts without a fault. */
export function createFaultyDisk(word: string): FaultyDisk {
  const folder = mkdtempSync(join(tmpdir(), 'faulty-disk-'))
  const library = join(folder, 'disk.so')
  const control = join(folder, 'control')
  execFileSync('cc', ['-shared', '-fPIC', '-O1', '-Wall', '-o', library, resolve('test/faults/disk.c'), '-ldl']) // prettier-ignore
  const write = (text: string) => {
    writeFileSync(`${control}.new`, text)
    renameSync(`${control}.new`, control) // never seen half written
  }
  return {
    env: {
      ...process.env,
      LD_PRELOAD: library,
      DISK_FAULT_WORD: word,
      DISK_FAULT_CONTROL: control,
    },
    fail: (fault) => write(typeof fault === 'string' ? fault : `slow-fsync ${fault.slowFsyncMs}`),
    heal: () => write(''),
    remove: () => rmSync(folder, { recursive: true, force: true }),
  }
}

function whyNot(): string | false {
  if (process.platform !== 'linux') return 'LD_PRELOAD and /proc are of Linux'
  try {
    execFileSync('cc', ['--version'], { stdio: 'ignore' })
    return false
  } catch {
    return 'there is no C compiler'
  }
}
