/**
 * The certificate of the webhook, read again when it changes: cert-manager renews it, and
 * Kubernetes then swaps the mounted files. They are looked at in turn, because a change of the
 * symbolic link above them gives no event on them.
 */
import { X509Certificate } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { createSecureContext } from 'node:tls'

export interface Certificate {
  readonly cert: string
  readonly key: string
  /** In seconds since 1970. */
  readonly expiresAt: number
}

export interface CertificateFiles {
  readonly cert: string
  readonly key: string
}

/** Rejects where the files cannot be read, or do not belong together (one of them is newer). */
export async function readCertificate(files: CertificateFiles): Promise<Certificate> {
  const [cert, key] = await Promise.all([readFile(files.cert, 'utf8'), readFile(files.key, 'utf8')])
  createSecureContext({ cert, key })
  return { cert, key, expiresAt: Date.parse(new X509Certificate(cert).validTo) / 1000 }
}

export interface Watch {
  changed(certificate: Certificate): void
  /** The files are of no use just now; what was read before still holds. Told once for each reason. */
  failed(error: Error): void
}

/** Looks at the files every `everyMs`, until the returned function is called. */
export function watchCertificate(
  files: CertificateFiles,
  current: Certificate,
  everyMs: number,
  watch: Watch,
): () => void {
  let known = current
  let told = ''
  let reading = false
  const look = async () => {
    if (reading) return
    reading = true
    try {
      const certificate = await readCertificate(files)
      told = ''
      if (certificate.cert !== known.cert || certificate.key !== known.key)
        watch.changed(certificate)
      known = certificate
    } catch (error) {
      const reason = error instanceof Error ? error : new Error(String(error))
      if (reason.message !== told) watch.failed(reason)
      told = reason.message
    } finally {
      reading = false
    }
  }
  const timer = setInterval(() => void look(), everyMs)
  timer.unref()
  return () => clearInterval(timer)
}
