#!/usr/bin/env bash
# setup.sh cpu|cuda|operator: everything a build needs on this machine. Safe to run again; does only what is missing.
. "$(dirname "$0")/lib.sh"
flavour=${1:-cpu}
RUST_WANTED=1.85

need_packages build-essential cmake ninja-build ccache pkg-config git curl ca-certificates unzip procps python3 python3-pip \
  libcpp-httplib-dev nlohmann-json3-dev prometheus-cpp-dev libyaml-cpp-dev libgtest-dev libgmock-dev libspdlog-dev libfmt-dev \
  libcli11-dev libssl-dev zlib1g-dev libre2-dev

have=$(cargo --version 2>/dev/null | awk '{print $2}' || true)
if [ -z "$have" ] || ! version_at_least "$have" "$RUST_WANTED"; then
  say "installing Rust (have ${have:-none}, need $RUST_WANTED or newer)"
  curl -fsS --proto '=https' --tlsv1.2 https://sh.rustup.rs -o /tmp/rustup-init.$$ 2>/dev/null \
    || die "Rust $RUST_WANTED or newer is needed and its installer cannot be reached; install it from https://rustup.rs and run this again"
  sh /tmp/rustup-init.$$ -y -q --profile minimal --no-modify-path >/dev/null || die "the Rust installer failed"
  rm -f /tmp/rustup-init.$$
fi

[ "$flavour" = operator ] || "$ROOT/scripts/get_torch.sh" "$flavour"
