/**
 * From a Pod and settings to a patch, or to why the Pod is refused. Pure.
 *
 * A Pod that asks for a fence gets all of it or does not start: every doubt is a denial. A Pod that
 * was injected before is planned as it was before that; where it is as planned already, the patch
 * is empty. No annotation is believed about an earlier injection, since anybody can write one: what
 * counts are the containers.
 */
import { isDeepStrictEqual } from 'node:util'
import type { AppPort } from './app-port.ts'
import { deny, isDenied, type Denied } from './denial.ts'
import { Draft, type Operation } from './jsonpatch.ts'
import { planFence, type Plan } from './plan.ts'
import { findContainer, type Container, type ContainerList, type Placed, type Pod } from './pod.ts'
import { readAnnotations, type Injector } from './settings.ts'
import { REDIRECT, rewrite } from './sidecar.ts'

export type Decision =
  /** Nobody asks for a fence here; or, with a warning, it cannot be given to this kind of Pod. */
  { readonly kind: 'ignored'; readonly warning: string | undefined } | Injected | Denied

export interface Injected {
  readonly kind: 'injected'
  /** The Pod with the patch applied. */
  readonly pod: Pod
  /** JSON Patch (RFC 6902); empty where the Pod is as it should be. */
  readonly patch: readonly Operation[]
  readonly warning: string
}

const MIRROR = 'kubernetes.io/config.mirror'
const DEFAULT_CONTAINER = 'kubectl.kubernetes.io/default-container'

/**
 * `claimTemplates` are the volumes that a StatefulSet is going to add to the Pods that it makes of
 * the template `pod`; a Pod already has them.
 */
export function decide(
  pod: Pod,
  injector: Injector,
  claimTemplates: readonly string[] = [],
): Decision {
  const annotations = pod.metadata?.annotations ?? {}
  const asked = readAnnotations(annotations, injector.prefix)
  if (asked.kind === 'no') return checkLabel(pod, injector.prefix)
  if (MIRROR in annotations) return { kind: 'ignored', warning: STATIC }
  if (asked.kind === 'mistaken') return { kind: 'denied', reason: asked.mistakes.join('; ') }
  const plan = planFence(pod, asked.wanted, injector, claimTemplates)
  if (isDenied(plan)) return plan

  const draft = new Draft(pod)
  renameAppPort(draft, plan.app)
  placeContainers(draft, plan)
  for (const volume of plan.newVolumes) {
    draft.ensure(['spec', 'volumes'], [])
    draft.append(['spec', 'volumes'], volume)
  }
  markFenced(draft, plan.app.container.name, injector.prefix)
  return { kind: 'injected', pod: draft.pod, patch: draft.operations, warning: plan.warning }
}

/** Servers before 1.28 call a webhook by label only; who set it there means to be fenced. */
function checkLabel(pod: Pod, prefix: string): Decision {
  const key = `${prefix}/inject`
  const { labels, annotations } = pod.metadata ?? {}
  if (labels?.[key] !== 'true' || annotations?.[key] !== undefined) {
    return { kind: 'ignored', warning: undefined }
  }
  return deny(
    `the label ${key} asks for a fence, and no annotation says which`,
    `add the annotation ${key}: "true"`,
  )
}

const STATIC =
  'not fenced: a static Pod is what its file on the node says; put the sidecar into that file'

/** Renames the port, and what names it: probes and hooks of its container. */
function renameAppPort(draft: Draft, app: AppPort): void {
  const { container, originalName, newName } = app
  const presentName = app.port.name ?? ''
  const path = ['spec', 'containers', app.containerIndex]
  const name = [...path, 'ports', app.portIndex, 'name']
  if (presentName === '' && newName !== '') draft.set(name, newName)
  else if (presentName !== newName) draft.swap(name, presentName, newName)
  const actions = [
    { at: ['livenessProbe'], action: container.livenessProbe },
    { at: ['readinessProbe'], action: container.readinessProbe },
    { at: ['startupProbe'], action: container.startupProbe },
    { at: ['lifecycle', 'postStart'], action: container.lifecycle?.postStart },
    { at: ['lifecycle', 'preStop'], action: container.lifecycle?.preStop },
  ]
  for (const { at, action } of actions) {
    for (const kind of ['httpGet', 'tcpSocket'] as const) {
      const port = action?.[kind]?.port
      if (typeof port !== 'string' || port === newName) continue
      if (port !== originalName && port !== presentName) continue
      draft.swap([...path, ...at, kind, 'port'], port, newName)
    }
  }
}

function placeContainers(draft: Draft, { sidecar, native, redirect }: Plan): void {
  // A native sidecar stands first, to be there for the user's init containers too; any other last:
  // some tools take the first container for the app.
  if (native) place(draft, sidecar, 'initContainers', 0)
  else place(draft, sidecar, 'containers', draft.pod.spec.containers.length)
  if (redirect !== undefined) {
    place(draft, redirect, 'initContainers', native ? 1 : 0)
    return
  }
  // Left by an injection with another steering.
  const left = findContainer(draft.pod, REDIRECT)
  if (left !== undefined) remove(draft, left)
}

/** Puts `ours` into the Pod at `index`, or in the place of what stands under its name. */
function place(draft: Draft, ours: Container, list: ContainerList, index: number): void {
  const present = findContainer(draft.pod, ours.name)
  const container = present === undefined ? ours : rewrite(present.container, ours)
  if (present?.list === list) {
    if (isDeepStrictEqual(present.container, container)) return
    const path = ['spec', list, present.index]
    draft.test([...path, 'name'], ours.name)
    draft.set(path, container)
    return
  }
  if (present !== undefined) remove(draft, present)
  draft.ensure(['spec', list], [])
  draft.insert(['spec', list], index, container)
}

function remove(draft: Draft, { list, index, container }: Placed): void {
  draft.test(['spec', list, index, 'name'], container.name)
  draft.remove(['spec', list], index)
}

function markFenced(draft: Draft, appContainer: string, prefix: string): void {
  draft.set(['metadata', 'annotations', `${prefix}/status`], 'injected')
  if (draft.pod.metadata?.annotations?.[DEFAULT_CONTAINER] === undefined) {
    draft.set(['metadata', 'annotations', DEFAULT_CONTAINER], appContainer)
  }
  draft.ensure(['metadata', 'labels'], {})
  draft.set(['metadata', 'labels', `${prefix}/fenced`], 'true')
}
