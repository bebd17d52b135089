import assert from 'node:assert/strict'
import { readFileSync, readdirSync } from 'node:fs'
import path from 'node:path'
import { decide, type Decision, type Injected } from '../../src/inject/patch.ts'
import { findContainer, readPod, type Container, type Pod } from '../../src/inject/pod.ts'
import type { Injector } from '../../src/inject/settings.ts'
import { applyPatch } from './rfc6902.ts'

export const INJECTOR: Injector = {
  image: 'example/fence-proxy:2',
  redirectImage: 'example/iptables:1',
  prefix: 'fencing-proxy.io',
  kubernetesMinor: 33,
}

export function parsePod(value: unknown): Pod {
  const read = readPod(value)
  assert.ok('pod' in read, JSON.stringify(read))
  return read.pod
}

export type Annotations = Record<string, string>

/** Enough for a fence, in a Pod that has the volume `data`. */
export const ENOUGH: Annotations = {
  inject: 'true',
  scope: '/jobs/{job}/**',
  'store-volume': 'data',
}

export const APP = {
  name: 'app',
  image: 'example/app:1',
  ports: [{ name: 'http', containerPort: 8080, protocol: 'TCP' }],
}

export interface Parts {
  readonly annotations?: Annotations
  readonly metadata?: Record<string, unknown>
  readonly spec?: Record<string, unknown>
  readonly containers?: readonly Record<string, unknown>[]
}

/** A Pod that gets a fence, but for what `parts` changes. Annotations are without their prefix. */
export function podOf({ annotations = {}, metadata, spec, containers = [APP] }: Parts = {}): Pod {
  return parsePod({
    apiVersion: 'v1',
    kind: 'Pod',
    metadata: { name: 'web', annotations: prefixed({ ...ENOUGH, ...annotations }), ...metadata },
    spec: {
      securityContext: { fsGroup: 65532 },
      volumes: [{ name: 'data', persistentVolumeClaim: { claimName: 'data-web' } }],
      containers,
      ...spec,
    },
  })
}

export function prefixed(annotations: Annotations): Annotations {
  return Object.fromEntries(
    Object.entries(annotations).map(([key, value]) => [`fencing-proxy.io/${key}`, value]),
  )
}

export function without(key: string, annotations: Annotations = ENOUGH): Annotations {
  return Object.fromEntries(Object.entries(annotations).filter(([name]) => name !== key))
}

/** Injects, and sees that the patch, applied by the letter of RFC 6902, does what it says. */
export function inject(pod: Pod, injector: Partial<Injector> = {}): Injected {
  const decision = decide(pod, { ...INJECTOR, ...injector })
  assert.equal(decision.kind, 'injected', JSON.stringify(decision))
  assert.deepEqual(applyPatch(pod, decision.patch), decision.pod)
  return decision
}

/** The reason of a denial, which is one line. */
export function denial(pod: Pod, injector: Partial<Injector> = {}): string {
  const decision: Decision = decide(pod, { ...INJECTOR, ...injector })
  assert.equal(decision.kind, 'denied', JSON.stringify(decision))
  assert.doesNotMatch(decision.reason, /\n/)
  return decision.reason
}

export function containerOf(pod: Pod, name: string): Container {
  const placed = findContainer(pod, name)
  assert.ok(placed, `no container ${name}`)
  return placed.container
}

const FOLDER = path.resolve('test/inject/admissionreviews')

export interface Review {
  readonly file: string
  readonly body: {
    readonly request: { readonly uid: string; readonly dryRun: boolean; object: unknown }
  }
}

/** Requests as an API server 1.36.2 sent them. */
export function reviews(): Review[] {
  return readdirSync(FOLDER)
    .sort()
    .map((file) => ({
      file,
      body: JSON.parse(readFileSync(path.join(FOLDER, file), 'utf8')) as Review['body'],
    }))
}

/** The Pod of a real request. */
export function realPod(file: string, annotations: Annotations = {}): Pod {
  const review = reviews().find((one) => one.file === `v1.36.2-${file}.json`)
  assert.ok(review, file)
  const pod = parsePod(review.body.request.object)
  pod.metadata ??= {}
  pod.metadata.annotations = { ...pod.metadata.annotations, ...prefixed(annotations) }
  return pod
}

/** What turns the annotations of the real requests, which only ask, into enough for a fence. */
export const REAL_ENOUGH: Annotations = { scope: '/jobs/{job}/**', 'allow-ephemeral-store': 'true' }
