#!/usr/bin/env bash
# setup.sh cpu|cuda|operator|operator-arm64: everything a build needs on this machine. Safe to run again; does only what
# is missing.
. "$(dirname "$0")/lib.sh"
flavour=${1:-cpu}
RUST_WANTED=1.85
# What is installed where there is none: the installer by version and SHA-256; it checks the toolchain by the sums of
# its release.
RUSTUP=1.28.2
RUST_TAKEN=1.95.0

need_packages build-essential cmake ninja-build ccache pkg-config git curl ca-certificates unzip procps python3 \
  python3-pip $LIBRARIES

have=$(cargo --version 2>/dev/null | awk '{print $2}' || true)
if [ -z "$have" ] || ! version_at_least "$have" "$RUST_WANTED"; then
  say "installing Rust (have ${have:-none}, need $RUST_WANTED or newer)"
  case $(uname -m) in
    x86_64) sum=20a06e644b0d9bd2fbdbfd52d42540bdde820ea7df86e92e533c073da0cdd43c ;;
    aarch64) sum=e3853c5a252fca15252d07cb23a1bdd9377a8c6f3efa01531109281ae47f841c ;;
    *) die "no Rust installer is known for $(uname -m); install Rust $RUST_WANTED or newer and run this again" ;;
  esac
  installer=$(mktemp -d)/rustup-init
  curl -fsS --proto '=https' --tlsv1.2 \
    "https://static.rust-lang.org/rustup/archive/$RUSTUP/$(uname -m)-unknown-linux-gnu/rustup-init" -o "$installer" \
      2>/dev/null \
    || die "Rust $RUST_WANTED or newer is needed and its installer cannot be reached; install it from https://rustup.rs"
  echo "$sum  $installer" | sha256sum --check --status ||
    die "the Rust installer $RUSTUP has another SHA-256 than it should have; nothing was run"
  chmod +x "$installer"
  "$installer" -y -q --profile minimal --no-modify-path --default-toolchain "$RUST_TAKEN" >/dev/null ||
    die "the Rust installer failed"
  rm -r "$(dirname "$installer")"
fi

case $flavour in
  operator) ;;
  operator-arm64)
    need_packages g++-aarch64-linux-gnu
    "$ROOT/scripts/get_sysroot.sh" arm64 ;;
  *) "$ROOT/scripts/get_torch.sh" "$flavour" ;;
esac
