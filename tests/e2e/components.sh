#!/usr/bin/env bash
# components.sh [NAME...]: builds or unpacks the programs of a cluster into the cache and links them in $CACHE/e2e/bin.
# A component is made again when its recipe below, its version or the Go release changes. Without names: what `make
# test-cluster` needs.
. "$(dirname "$0")/lib.sh"
KUBERNETES=v1.36.3
ETCD=v3.7.3
COREDNS=v1.15.0
KWOK=v0.8.0
KUEUE=v0.10.0
DEBIAN=bookworm

BIN=$COMPONENTS/bin
mkdir -p "$BIN"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
export GOTOOLCHAIN=local GOFLAGS="-mod=mod -buildvcs=false" CGO_ENABLED=0

# go_build OUT LDFLAGS PACKAGE...: in the module of the current folder.
go_build() { local out=$1 flags=$2; shift 2; nice -n 10 go build -trimpath -ldflags "-s -w $flags" -o "$out/" "$@"; }

# Kubernetes' modules replace their staging folders, which `go install` refuses: a module around it names the published
# ones.
recipe_kubernetes() {
  local version=$KUBERNETES out=$1 staging=v0.${KUBERNETES#v1.} mod component=k8s.io/component-base/version flags \
    packages=() name
  mod=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
  [ -f "$mod" ] || die "the Go proxy does not serve k8s.io/kubernetes@$version"
  {
    echo "module wrapper"; grep -E '^go ' "$mod"
    awk '/^godebug \(/ {p = 1} p {print} /^\)/ {if (p) exit}' "$mod"; grep -E '^godebug [a-z]' "$mod" || true
    echo "require k8s.io/kubernetes $version"
    sed -n 's#^[[:space:]]*\(k8s\.io/[a-z0-9./-]*\) => \./staging/.*#replace \1 => \1 '"$staging"'#p' "$mod"
  } >go.mod
  echo "package wrapper" >wrapper.go
  for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
    packages+=("k8s.io/kubernetes/cmd/$name")
  done
  flags="-X $component.gitVersion=$version -X $component.gitTreeState=clean"
  flags+=" -X $component.gitMajor=1 -X $component.gitMinor=$(cut -d. -f2 <<<"$version")"
  flags+=" -X $component.gitCommit=unknown -X $component.buildDate=1970-01-01T00:00:00Z"
  go_build "$out" "$flags" "${packages[@]}"
  # What keeps a pod's namespaces: the one C file of Kubernetes.
  local source; source=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)/build/pause/linux/pause.c
  gcc -Os -static -DVERSION=local -o "$out/pause" "$source"
  strip "$out/pause"
}

recipe_etcd() {
  local module=go.etcd.io/etcd part
  { printf 'module wrapper\ngo 1.26.0\nrequire %s/server/v3 %s\n' $module $ETCD
    for part in api client client/pkg pkg; do echo "replace $module/$part/v3 => $module/$part/v3 $ETCD"; done; } >go.mod
  echo "package wrapper" >wrapper.go
  go_build "$work/out" "" $module/server/v3
  mv "$work/out/v3" "$1/etcd" 2>/dev/null || mv "$work/out/server" "$1/etcd"
}

# CoreDNS with the plugins of conf/Corefile only: a tenth of the packages.
recipe_coredns() {
  printf 'module wrapper\ngo 1.26.0\nrequire github.com/coredns/coredns %s\n' $COREDNS >go.mod
  {
    echo 'package main'
    echo 'import ('
    echo '	"github.com/coredns/coredns/core/dnsserver"'
    echo '	"github.com/coredns/coredns/coremain"'
    for name in bind errors kubernetes log ready template; do
      echo "	_ \"github.com/coredns/coredns/plugin/$name\""
    done
    echo ')'
    echo 'func init() { dnsserver.Directives = []string{"bind", "ready", "errors", "log", "template", "kubernetes"} }'
    echo 'func main() { coremain.Run() }'
  } >main.go
  go_build "$work/out" "" .
  mv "$work/out/wrapper" "$1/coredns"
}

recipe_kwok() {
  printf 'module wrapper\ngo 1.26.0\nrequire sigs.k8s.io/kwok %s\n' $KWOK >go.mod
  echo "package wrapper" >wrapper.go
  go_build "$1" "" sigs.k8s.io/kwok/cmd/kwok
  local stages; stages=$(go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage
  mkdir "$1/kwok-stages"
  cp "$stages"/node/fast/node-initialize.yaml "$stages"/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml \
    "$stages"/pod/fast/pod-ready.yaml "$stages"/pod/fast/pod-delete.yaml "$1/kwok-stages/"
  chmod -R u+w "$1/kwok-stages"
}

recipe_load() {
  cp "$E2E"/load/* .
  CGO_ENABLED=0 go build -trimpath -o "$1/load" .
}

recipe_kueue() {
  printf 'module wrapper\ngo 1.26.0\nrequire sigs.k8s.io/kueue %s\n' $KUEUE >go.mod
  echo "package wrapper" >wrapper.go
  go_build "$1" "" sigs.k8s.io/kueue/cmd/kueue
  cp -r "$(go list -m -f '{{.Dir}}' sigs.k8s.io/kueue)/config" "$1/kueue-config"
  chmod -R u+w "$1/kueue-config"
}

# Debian's packages, unpacked and not installed: installing would start daemons.
recipe_debian() {
  (cd "$work" && {
    apt-get download -q containerd runc containernetworking-plugins || {
      as_root apt-get update -q && apt-get download -q containerd runc containernetworking-plugins
    }
  })
  for package in "$work"/*.deb; do dpkg -x "$package" "$1/root"; done
  mv "$1"/root/usr/bin/{containerd,containerd-shim-runc-v2,ctr} "$1"/root/usr/sbin/runc "$1/"
  mv "$1/root/usr/lib/cni" "$1/cni"
  rm -rf "$1/root"
}

recipe_prometheus() {
  (cd "$work" && {
    apt-get download -q prometheus || { as_root apt-get update -q && apt-get download -q prometheus; }
  })
  dpkg -x "$work"/prometheus_*.deb "$work/root"
  mv "$work"/root/usr/bin/{prometheus,promtool} "$1/"
}

# The images' base: a minimal Debian.
recipe_base() {
  need_packages debootstrap
  local mirror
  mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
  [ -n "$mirror" ] || mirror=$(awk '$1 == "deb" {for (i = 2; i <= NF; i++) if ($i ~ /^http/) {print $i; exit}}' \
    /etc/apt/sources.list)
  debootstrap --variant=minbase $DEBIAN "$work/rootfs" "$mirror"
  rm -rf "$work"/rootfs/var/cache/apt/archives/*.deb "$work"/rootfs/var/lib/apt/lists/* \
    "$work"/rootfs/usr/share/{doc,man,locale}/*
  tar -C "$work/rootfs" -cf "$1/base.tar" .
}

go_components=" kubernetes etcd coredns kwok kueue load "
# component NAME: links it, makes it first where the cache has none of this recipe.
component() {
  local name=$1 key folder log start=$SECONDS
  declare -F "recipe_$name" >/dev/null || die "components.sh: no recipe '$name'"
  key=$({ declare -f "recipe_$name" go_build
    echo "$KUBERNETES $ETCD $COREDNS $KWOK $KUEUE $DEBIAN" | tr ' ' '\n' | grep -n . | case $name in
      kubernetes) sed -n 1p ;; etcd) sed -n 2p ;; coredns) sed -n 3p ;; kwok) sed -n 4p ;; kueue) sed -n 5p ;;
      *) sed -n 6p ;;
    esac
    [ $name != load ] || cat "$E2E/load/main.go"
    case $go_components in *" $name "*) go version ;; esac; } | sha256sum | cut -c1-12)
  folder=$COMPONENTS/$name-$key
  if [ ! -d "$folder" ]; then
    case $go_components in
      *" $name "*)
        command -v go >/dev/null || die "$name is built with Go, which is missing: install Go 1.26 or newer" ;;
    esac
    say "$name: making it (the first time takes minutes)"
    log=$COMPONENTS/$name.log
    rm -rf "$work"; mkdir -p "$work/module" "$work/made"
    local code=0
    set +e  # not `( ... ) || die`: bash would go on after an error inside
    (set -e; cd "$work/module"; "recipe_$name" "$work/made") >"$log" 2>&1
    code=$?
    set -e
    [ $code = 0 ] || { tail -5 "$log" >&2; die "$name could not be made; all of its output: $log"; }
    mv "$work/made" "$folder.$$"
    mv -T "$folder.$$" "$folder"
    say "$name: made in $((SECONDS - start)) s"
  fi
  for file in "$folder"/*; do ln -sfn "$file" "$BIN/$(basename "$file")"; done
}

[ $# -gt 0 ] || set -- kubernetes etcd coredns debian base
for name in "$@"; do
  exec 8>"$COMPONENTS/$name.lock"
  flock 8
  component "$name"
done
