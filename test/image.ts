import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { copyFile, cp, mkdir, readdir, rm, symlink, writeFile } from 'node:fs/promises'
import path from 'node:path'
import { promisify } from 'node:util'
import { Copy, DockerfileParser, From, type Instruction } from 'dockerfile-ast'

/**
 * The Dockerfile acted out in folders, as there is no container engine here: what each COPY lets
 * in, the very commands of each RUN, and what the image says about how it runs. An absolute path
 * is one below the folder that stands for the root file system; the base image is Node.js as it is
 * installed here.
 */

const run = promisify(execFile)

export interface Image {
  /** The folder that stands for its root file system. */
  readonly root: string
  readonly base: string
  readonly env: NodeJS.ProcessEnv
  readonly workingFolder: string
  readonly user: string
  readonly command: readonly string[]
  readonly healthcheck: readonly string[]
}

export interface Circumstances {
  /** The checkout: the build context, less what .dockerignore keeps out. */
  readonly context: string
  /** An empty folder. */
  readonly folder: string
  /** Whether `npm ci` really runs; without it, node_modules of the checkout is taken. */
  readonly installs: boolean
}

/** Builds the image of the last stage. */
export async function buildImage(circumstances: Circumstances): Promise<Image> {
  const text = readFileSync(path.join(circumstances.context, 'Dockerfile'), 'utf8')
  const args: Record<string, string> = {}
  const stages = new Map<string, Stage>()
  let stage: Stage | undefined
  for (const instruction of DockerfileParser.parse(text).getInstructions()) {
    if (instruction instanceof From) {
      const name = instruction.getBuildStage() ?? stages.size.toString()
      const base = (instruction.getImage() ?? '').replace(
        /\$\{(\w+)\}/,
        (_, arg: string) => args[arg] ?? '',
      )
      stage = new Stage(circumstances, stages, path.join(circumstances.folder, name), base)
      stages.set(name, stage)
      await stage.begin()
    } else if (stage === undefined) {
      assert.equal(instruction.getKeyword(), 'ARG')
      const [name = '', value = ''] = argumentsOf(instruction).split('=')
      args[name] = value
    } else await stage.take(instruction)
  }
  assert.ok(stage, 'a Dockerfile has a stage')
  return stage
}

class Stage implements Image {
  readonly root: string
  readonly base: string
  readonly env: NodeJS.ProcessEnv = {}
  readonly #circumstances: Circumstances
  readonly #earlier: ReadonlyMap<string, Stage>
  workingFolder = '/'
  user = ''
  healthcheck: readonly string[] = []
  #entrypoint: readonly string[] = []
  #cmd: readonly string[] = []

  constructor(
    circumstances: Circumstances,
    earlier: ReadonlyMap<string, Stage>,
    root: string,
    base: string,
  ) {
    this.#circumstances = circumstances
    this.#earlier = earlier
    this.root = root
    this.base = base
  }

  get command(): readonly string[] {
    return [...this.#entrypoint, ...this.#cmd]
  }

  /** What the base image has of Node.js. */
  async begin(): Promise<void> {
    const local = path.join(this.root, 'usr/local')
    const npm = path.join(local, 'lib/node_modules/npm/bin')
    await Promise.all(
      ['bin', 'lib/node_modules/npm/bin'].map((name) =>
        mkdir(path.join(local, name), { recursive: true }),
      ),
    )
    await mkdir(path.join(this.root, 'opt/yarn-v1.22.22'), { recursive: true })
    await mkdir(path.join(this.root, 'var/lib'), { recursive: true })
    await symlink(process.execPath, path.join(local, 'bin/node'))
    await symlink(path.resolve(process.execPath, '../../include'), path.join(local, 'include'))
    for (const name of ['npm', 'npx']) {
      await writeFile(path.join(npm, `${name}-cli.js`), '')
      await symlink(`../lib/node_modules/npm/bin/${name}-cli.js`, path.join(local, 'bin', name))
    }
  }

  async take(instruction: Instruction): Promise<void> {
    const given = argumentsOf(instruction)
    if (instruction instanceof Copy) return this.#copy(instruction, given.split(/\s+/))
    switch (instruction.getKeyword()) {
      case 'WORKDIR':
        this.workingFolder = given
        await mkdir(this.#inside(given), { recursive: true })
        return
      case 'ENV':
        for (const [, name = '', value = ''] of given.matchAll(/(\w+)=(\S+)/g)) {
          this.env[name] = value
        }
        return
      case 'RUN':
        return this.#run(given)
      case 'USER':
        this.user = given
        return
      case 'ENTRYPOINT':
        this.#entrypoint = JSON.parse(given) as string[]
        return
      case 'CMD':
        this.#cmd = JSON.parse(given) as string[]
        return
      case 'HEALTHCHECK':
        this.healthcheck = JSON.parse(given.replace(/^.*?CMD\s+/s, '')) as string[]
        return
      case 'LABEL':
      case 'VOLUME':
      case 'EXPOSE':
        return
      default:
        assert.fail(`nothing here knows how to act out ${instruction.getKeyword()}`)
    }
  }

  async #copy(copy: Copy, names: readonly string[]): Promise<void> {
    const stage = copy.getFromFlag()?.getValue()
    const target = path.resolve(this.#inside(this.workingFolder), names.at(-1) ?? '')
    for (const name of names.slice(0, -1)) {
      const source = this.#source(stage, name)
      const into = names.at(-1)?.endsWith('/') ? path.join(target, path.basename(name)) : target
      await cp(source, into, { recursive: true, verbatimSymlinks: true })
    }
  }

  #source(stage: string | null | undefined, name: string): string {
    if (typeof stage === 'string') {
      const from = this.#earlier.get(stage)
      assert.ok(from, `there is a stage ${stage}`)
      return from.#inside(name)
    }
    const { context } = this.#circumstances
    assert.ok(admitted(context).has(name), `.dockerignore lets ${name} in`)
    return path.join(context, name)
  }

  async #run(command: string): Promise<void> {
    if (command.startsWith('npm ci ') && !this.#circumstances.installs) {
      await this.#takeModules()
      return
    }
    const owner = process.getuid?.() === 0 ? command : command.replace(/ -o \d+ -g \d+/, '')
    const mapped = owner.replace(/(^|[\s=])\/(?=\w)/g, `$1${this.root}/`)
    await run('sh', ['-ec', mapped], {
      cwd: this.#inside(this.workingFolder),
      env: { PATH: process.env['PATH'], HOME: process.env['HOME'], ...this.env },
      maxBuffer: 64 * 1024 * 1024,
    })
  }

  /** Installed from the same lock file before; hard links, since nothing here writes into these files. */
  async #takeModules(): Promise<void> {
    const { context } = this.#circumstances
    const from = path.join(context, 'node_modules')
    const here = path.join(this.#inside(this.workingFolder), 'node_modules')
    // What is linked would be pruned at the place that it links to.
    const entries = await readdir(from, { withFileTypes: true })
    assert.ok(!entries.some((entry) => entry.isSymbolicLink()), 'node_modules holds no links')
    const locked = versions(path.join(context, 'package-lock.json'))
    for (const [name, version] of versions(path.join(from, '.package-lock.json'))) {
      assert.equal(version, locked.get(name), `npm ci installed ${name}`)
    }
    await mkdir(here)
    await run('cp', ['-al', `${from}/.`, here]).catch(async () => {
      // Another file system.
      await rm(here, { recursive: true })
      await mkdir(here)
      await run('cp', ['-a', `${from}/.`, here])
    })
    // But for this one, which npm prune writes.
    const installed = path.join(here, '.package-lock.json')
    await rm(installed)
    await copyFile(path.join(from, '.package-lock.json'), installed)
  }

  #inside(name: string): string {
    return path.join(this.root, path.resolve('/', this.workingFolder, name))
  }
}

/** Names at the top of the build context that .dockerignore lets in. */
function admitted(context: string): ReadonlySet<string> {
  const [first, ...lines] = readFileSync(path.join(context, '.dockerignore'), 'utf8')
    .trim()
    .split('\n')
  assert.equal(first, '*', '.dockerignore keeps everything out, and names what it lets in')
  return new Set(
    lines.map((line) => {
      assert.match(line, /^![\w.-]+$/)
      assert.ok(existsSync(path.join(context, line.slice(1))), `${line.slice(1)} exists`)
      return line.slice(1)
    }),
  )
}

/** The version of each package in a lock file, by its folder. */
function versions(lockFile: string): ReadonlyMap<string, string | undefined> {
  const { packages } = JSON.parse(readFileSync(lockFile, 'utf8')) as {
    packages: Record<string, { readonly version?: string }>
  }
  return new Map(Object.entries(packages).map(([name, { version }]) => [name, version]))
}

function argumentsOf(instruction: Instruction): string {
  return instruction.getArgumentsContent() ?? ''
}

/** Every file below `folder`, relative to it. */
export async function filesBelow(folder: string): Promise<string[]> {
  const entries = await readdir(folder, { recursive: true, withFileTypes: true })
  return entries
    .filter((entry) => !entry.isDirectory())
    .map((entry) => path.relative(folder, path.join(entry.parentPath, entry.name)))
}
