#!/usr/bin/env bash
# get_sysroot.sh arm64: this system's packages of the libraries that a build needs, for another machine, unpacked under
# build/deps/arm64 (a link into the cache) for a cross compiler, with a database that dpkg-query reads (DPKG_ADMINDIR).
# Nothing of the system itself changes: apt works in folders of its own, with the archive's signatures.
. "$(dirname "$0")/lib.sh"
arch=${1:-}
[ "$arch" = arm64 ] || die "get_sysroot.sh: there is no sysroot for '$arch', only for arm64"
[ "$(dpkg --print-architecture 2>/dev/null)" != "$arch" ] ||
  die "this machine is $arch itself: take the preset operator"
command -v apt-get >/dev/null || die "get_sysroot.sh takes packages with apt (Debian 12 or Ubuntu 24.04)"
system=$(. /etc/os-release && echo "$ID $VERSION_CODENAME")
release=${system#* }
case $system in
  debian\ *)
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    sources="deb [signed-by=$keys] http://deb.debian.org/debian $release $release-updates main
deb [signed-by=$keys] http://deb.debian.org/debian-security $release-security main" ;;
  ubuntu\ *)
    keys=/usr/share/keyrings/ubuntu-archive-keyring.gpg
    sources="deb [signed-by=$keys] http://ports.ubuntu.com/ubuntu-ports $release main universe
deb [signed-by=$keys] http://ports.ubuntu.com/ubuntu-ports $release-updates main universe
deb [signed-by=$keys] http://ports.ubuntu.com/ubuntu-ports $release-security main universe" ;;
  *) die "get_sysroot.sh knows Debian 12 and Ubuntu 24.04, not $system" ;;
esac
dest=$CACHE/sysroot-$arch-$({ cat "$0"; echo "$system $LIBRARIES"; } | sha256sum | cut -c1-12)
if [ ! -e "$dest/.complete" ]; then
  say "fetching the libraries of $system for $arch (23 MB)"
  rm -rf "$dest.tmp"
  apt=$dest.tmp/apt root=$dest.tmp/root
  dpkg=$root/var/lib/dpkg
  mkdir -p "$apt"/{lists/partial,archives/partial} "$root"/usr/{bin,lib,sbin} "$dpkg/info"
  for folder in bin lib sbin; do ln -s usr/$folder "$root/$folder"; done
  printf '%s\n' "$sources" >"$apt/sources.list"
  : >"$apt/status"
  get() {
    apt-get -q -y --no-install-recommends -o APT::Architecture="$arch" -o APT::Sandbox::User=root \
      -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::State::lists="$apt/lists" \
      -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" -o APT::Keep-Downloaded-Packages=true \
      -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Debug::NoLocking=1 "$@"
  }
  { get update && get --download-only install libc6-dev $LIBRARIES; } >"$apt/log" 2>&1 || {
    tail -5 "$apt/log" >&2
    die "apt-get could not fetch the packages of $system for $arch: no network?"
  }
  echo 1 >"$dpkg/info/format"
  { dpkg --print-architecture; echo "$arch"; } >"$dpkg/arch"
  for file in "$apt"/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$file" | tar -x --keep-directory-symlink --no-same-owner -C "$root"
    name=$(dpkg-deb -f "$file" Package)
    [ "$(dpkg-deb -f "$file" Multi-Arch)" != same ] || name+=:$(dpkg-deb -f "$file" Architecture)
    { dpkg-deb -f "$file" | sed '1a Status: install ok installed'; echo; } >>"$dpkg/status"
    dpkg-deb --fsys-tarfile "$file" | tar -t | sed 's,^\.,,; s,/$,,; s,^$,/.,' >"$dpkg/info/$name.list"
    dpkg-deb --ctrl-tarfile "$file" | tar -xO ./md5sums >"$dpkg/info/$name.md5sums" 2>/dev/null || true
  done
  # A linker follows a link from the folder that it lies in, not from the sysroot.
  find "$root" -type l -lname '/*' | while read -r link; do ln -sfnr "$root$(readlink "$link")" "$link"; done
  mv "$root"/* "$dest.tmp/"
  rm -rf "$apt" "$root"
  touch "$dest.tmp/.complete"
  rm -rf "$dest"; mv "$dest.tmp" "$dest"
fi
mkdir -p "$ROOT/build/deps"
ln -sfn "$dest" "$ROOT/build/deps/$arch"
