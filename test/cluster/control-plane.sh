#!/usr/bin/env bash
# Compiles kube-apiserver and kube-controller-manager 1.20.2 from Debian bookworm's source package,
# the newest that Debian has, and puts them into the folder given. Needs no root, installs nothing,
# takes about four minutes on two cores, and nothing where they are there already.
set -euo pipefail
folder=${1:?usage: control-plane.sh FOLDER}
programs=(kube-apiserver kube-controller-manager)
for program in "${programs[@]}"; do
  [ -x "$folder/$program" ] || missing=yes
done
[ -n "${missing:-}" ] || exit 0

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d "$folder/build.XXXXXX")
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT

# Debian's archive as this machine is told to find it, with its sources, in lists of our own.
mkdir -p "$work"/{lists/partial,cache/archives/partial,sources,debs}
if [ -e /etc/apt/sources.list.d/debian.sources ]; then
  sed 's/^Types:.*/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources >"$work/sources/debian.sources"
else
  sed -n 's/^deb \(.*\)/deb \1\ndeb-src \1/p' /etc/apt/sources.list >"$work/sources/debian.list"
fi
debian() {
  apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources" \
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
debian update
cd "$work/debs"
debian download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
debian source --download-only kubernetes
for package in ./*.deb; do dpkg -x "$package" "$work/root"; done

export GOROOT="$work/root/usr/lib/go-1.19" GOPATH="$work/go" GOCACHE="$work/gocache"
export GO111MODULE=off GOFLAGS='' GOPROXY=off CGO_ENABLED=0
PATH=$GOROOT/bin:$PATH
# Debian's Go keeps its sources elsewhere, behind relative links that hold in this folder too.
source=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$source"
tar -xf kubernetes_*.orig.tar.* -C "$source" --strip-components=1
# The vendored reflect2 reads the runtime's memory as no Go since 1.18 lays it out, and crashes.
reflect2=vendor/github.com/modern-go/reflect2
rm -rf "${source:?}/$reflect2"
cp -rL "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$source/$reflect2"
rm -f "$source/$reflect2"/*_test.go
cd "$source"

# The API's description is generated code that the source package does not carry.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rlE '^// \+k8s:openapi-gen=' --include='*.go' pkg cmd plugin staging/src/k8s.io |
  xargs -n1 dirname | sort -u | grep -vE '_examples|sample-|/testdata|code-generator' |
  sed -e 's#^staging/src/#vendor/#' -e 's#^#k8s.io/kubernetes/#' | paste -sd,)
"$work/openapi-gen" --input-dirs "$packages" --output-package k8s.io/kubernetes/pkg/generated/openapi \
  --output-file-base zz_generated.openapi --report-filename "$work/violations" \
  --go-header-file hack/boilerplate/boilerplate.generatego.txt

flags='-s -w'
# What the server answers at /version, and what the programs say of themselves.
for version in client-go/pkg/version component-base/version; do
  package=k8s.io/kubernetes/vendor/k8s.io/$version
  flags+=" -X $package.gitVersion=v1.20.2 -X $package.gitMajor=1 -X $package.gitMinor=20"
done
mkdir "$work/bin"
go build -o "$work/bin/" -ldflags "$flags" "${programs[@]/#/./cmd/}"
mv "$work"/bin/* "$folder/"
