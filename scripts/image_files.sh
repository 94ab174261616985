#!/usr/bin/env bash
# image_files.sh operator|trainer PRESET DEST: collects what an image holds over its base: the program of build/PRESET,
# and every shared library it needs but the C library (which must be the base's), with the metadata and licences of the
# packages and wheels they come from, where scanners of images look for them; and the bill of materials of all that
# (sbom.py), checked. Of a preset for another machine libraries, records and licences are those of its sysroot.
#   IMAGE_BASE  the base image, to be written into the bill
. "$(dirname "$0")/lib.sh"
[ $# = 3 ] || die "usage: image_files.sh operator|trainer PRESET DEST"
case $1 in
  operator) program=$ROOT/build/$2/operator/cli/trireme-operator ;;
  trainer) program=$ROOT/build/$2/trainer/cli/trireme ;;
  *) die "image_files.sh: '$1' is neither operator nor trainer" ;;
esac
[ -x "$program" ] || die "$program is not built: scripts/build.sh $2 $(basename "$program")"
sysroot="" strip=strip
case $2 in
  *-arm64)
    sysroot=$(realpath "$ROOT/build/deps/arm64") strip=aarch64-linux-gnu-strip
    export DPKG_ADMINDIR=$sysroot/var/lib/dpkg ;;
esac
dest=$3
rm -rf "$dest"
libs=$dest/usr/local/lib/trireme
mkdir -p "$dest/usr/local/bin" "$libs" "$dest/etc/ld.so.conf.d" "$dest/usr/share/doc/trireme" \
  "$dest/var/lib/dpkg/status.d"

# copyright_folder PACKAGE: the name of the package in whose folder its copyright file is. Packages of one source share
# one, by a link, which slim images leave out: then it is that of one of its source that it depends on.
copyright_folder() {
  local name=${1%%:*} source mate
  if [ -L "$sysroot/usr/share/doc/$name" ]; then readlink "$sysroot/usr/share/doc/$name"; return; fi
  if [ -e "$sysroot/usr/share/doc/$name/copyright" ]; then echo "$name"; return; fi
  source=$(dpkg-query -W -f '${source:Package}' "$1")
  for mate in $(dpkg-query -W -f '${Depends}' "$1" | tr ',|' '\n\n' | awk '{print $1}'); do
    [ "$(dpkg-query -W -f '${source:Package}' "$mate" 2>/dev/null)" != "$source" ] ||
      [ ! -e "$sysroot/usr/share/doc/$mate/copyright" ] || {
      echo "$mate"
      return
    }
  done
  die "$sysroot/usr/share/doc/$name/copyright is missing: this system's dpkg leaves licences out"
}
# keep_package NAME: its record as dpkg has it (read by scanners from status.d, which dpkg itself does not use) and its
# copyright file.
keep_package() {
  local name=${1%%:*} folder
  [ ! -e "$dest/var/lib/dpkg/status.d/$name" ] || return 0
  dpkg-query -s "$1" >"$dest/var/lib/dpkg/status.d/$name"
  folder=$(copyright_folder "$1")
  if [ "$folder" != "$name" ]; then
    ln -s "$folder" "$dest/usr/share/doc/$name"
    keep_package "$folder"
  else
    install -D -m 644 "$sysroot/usr/share/doc/$name/copyright" "$dest/usr/share/doc/$name/copyright"
  fi
}
# keep_package_of FILE: dpkg knows it by the path it was installed under, /lib/... or /usr/lib/....
keep_package_of() {
  local real path owner
  real=$(realpath "$1")
  real=${real#"$sysroot"}
  for path in "$real" "${real#/usr}" "/usr$real"; do
    owner=$(dpkg-query -S "$path" 2>/dev/null | grep -v '^diversion' | head -1) || true
    [ -z "$owner" ] || { keep_package "${owner%: /*}"; return; }
  done
  die "$1 is of no Debian package and of no wheel: it cannot be part of an image"
}
# keep_wheel FOLDER: of a dist-info folder what says who it is, and its licences.
keep_wheel() {
  local to; to=$libs/$(basename "$1")
  [ ! -e "$to" ] || return 0
  [ -e "$1/METADATA" ] || die "$1 has no METADATA: an older get_torch.sh fetched it; run scripts/get_torch.sh again"
  mkdir -p "$to"
  cp -R "$1/METADATA" "$1/licenses" "$to/"
}

# foreign_libraries FILE: what ldd says of a program that cannot run here: "NAME => PATH" of all that it needs, but for
# the loader, which is the base's.
foreign_libraries() {
  local waiting=("$1") seen=" " name path
  while [ ${#waiting[@]} -gt 0 ]; do
    set -- "${waiting[@]}"
    waiting=("${@:2}")
    for name in $(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]$/\1/p'); do
      case $seen$name in *" $name "*|*" ld-linux"*) continue ;; esac
      seen+="$name "
      path=$(find -L "$sysroot/usr/lib" -maxdepth 2 -name "$name" -print -quit)
      echo "$name => ${path:-not found}"
      [ -z "$path" ] || waiting+=("$path")
    done
  done
}

install -s --strip-program=$strip "$program" "$dest/usr/local/bin/"
if [ -n "$sysroot" ]; then libraries=$(foreign_libraries "$program"); else libraries=$(ldd "$program"); fi
# A driver's library (libcuda.so.1) comes from the node; anything else must be there.
missing=$(awk '/not found/ && $1 !~ /^lib(cuda|nvidia-ml)\.so/ {print $1}' <<<"$libraries")
[ -z "$missing" ] || die "$(basename "$program") needs libraries that are not there:" $missing
wheels=$(realpath -m "$ROOT/build/deps/$2")
while read -r name path; do
  case $name in
    libc.so.*|libm.so.*|libdl.so.*|librt.so.*|libpthread.so.*|libutil.so.*|libresolv.so.*|libnss_*) continue ;;
  esac
  cp -L "$path" "$libs/$name"
  real=$(realpath "$path")
  if [ "${real#"$wheels"/}" != "$real" ]; then
    record=$(grep -lF "${real#"$wheels"/}," "$wheels"/*.dist-info/RECORD) || die "$real is in no wheel's RECORD"
    keep_wheel "$(dirname "$record")"
  else
    keep_package_of "$path"
  fi
done < <(awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' <<<"$libraries")
# Headers that are compiled in.
for name in nlohmann-json3-dev libcli11-dev; do keep_package "$name"; done
[ "$1/$2" != trainer/cuda ] || for folder in "$ROOT"/build/deps/flashinfer/*.dist-info; do keep_wheel "$folder"; done
echo /usr/local/lib/trireme >"$dest/etc/ld.so.conf.d/trireme.conf"
if [ "$1" = trainer ]; then
  mkdir -p "$dest/opt/trireme"
  cp -R "$ROOT/configs" "$ROOT/examples" "$dest/opt/trireme/"
  # For rewards over https.
  certificates=/etc/ssl/certs/ca-certificates.crt
  if [ -e "$certificates" ]; then
    install -D -m 644 "$certificates" "$dest$certificates"
    keep_package ca-certificates
  fi
fi
"$ROOT/scripts/sbom.py" make "$1" "$2" "$dest" || die "no bill of materials for the $1's image"
say "$1: $(du -sm "$dest" | cut -f1) MB in $dest"
