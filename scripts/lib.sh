# Shared by the project's scripts: source it. Prints one line a step and fails with one sentence.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${TRIREME_CACHE:-$HOME/.cache/trireme}
export PATH="$HOME/.cargo/bin:/usr/local/go/bin:$PATH"

# Debian and Ubuntu packages of the libraries that a build needs.
LIBRARIES="nlohmann-json3-dev prometheus-cpp-dev libyaml-cpp-dev libgtest-dev libgmock-dev libspdlog-dev libfmt-dev \
libcli11-dev libssl-dev zlib1g-dev libzstd-dev libre2-dev"

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "need root or sudo to run: $*"; fi
}

# need_packages NAME...: installs the missing Debian or Ubuntu packages.
need_packages() {
  command -v dpkg-query >/dev/null ||
    die "this script installs packages with apt (Debian 12 or Ubuntu 24.04); install the equivalents of: $*"
  local missing=() name
  for name in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${#missing[@]} packages: ${missing[*]}"
  local log; log=$(mktemp)
  # Whoever installs at the same time is waited for.
  local install="apt-get install -y -q -o DPkg::Lock::Timeout=300 --no-install-recommends"
  as_root env DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -q && $install ${missing[*]}" >"$log" 2>&1 \
    || { tail -20 "$log" >&2; die "apt-get could not install: ${missing[*]}"; }
  rm -f "$log"
}

# version_at_least HAVE WANT
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -1)" = "$2" ]; }

HELM=helm.sh/helm/v3/cmd/helm@v3.18.4
# go_tool NAME PACKAGE: found on PATH, or built into the cache.
go_tool() {
  export PATH="$CACHE/bin:$PATH"
  command -v "$1" >/dev/null && return
  command -v go >/dev/null || die "$1 is missing and there is no Go to build it with: install $1 or Go"
  say "building $1 (minutes)"
  local made; made=$(mktemp -d)
  mkdir -p "$CACHE/bin"
  GOBIN=$made GOFLAGS=-mod=mod go install "$2" >"$made/log" 2>&1 || {
    tail -5 "$made/log" >&2
    die "go install $2 failed"
  }
  rm "$made/log"
  mv "$made"/* "$CACHE/bin/$1"
  rm -rf "$made"
}
