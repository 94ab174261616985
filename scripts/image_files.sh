#!/usr/bin/env bash
# image_files.sh operator|trainer PRESET DEST: collects what an image holds over its base: the program of build/PRESET, and
# every shared library it needs but the C library (which must be the base's).
. "$(dirname "$0")/lib.sh"
[ $# = 3 ] || die "usage: image_files.sh operator|trainer PRESET DEST"
case $1 in
  operator) program=$ROOT/build/$2/operator/cli/trireme-operator ;;
  trainer) program=$ROOT/build/$2/trainer/cli/trireme ;;
  *) die "image_files.sh: '$1' is neither operator nor trainer" ;;
esac
[ -x "$program" ] || die "$program is not built: scripts/build.sh $2 $(basename "$program")"
dest=$3
rm -rf "$dest"
mkdir -p "$dest/usr/local/bin" "$dest/usr/local/lib/trireme" "$dest/etc/ld.so.conf.d"
install -s "$program" "$dest/usr/local/bin/"
libraries=$(ldd "$program")
# A driver's library (libcuda.so.1) comes from the node; anything else must be there.
missing=$(awk '/not found/ && $1 !~ /^lib(cuda|nvidia-ml)\.so/ {print $1}' <<<"$libraries")
[ -z "$missing" ] || die "$(basename "$program") needs libraries that are not there:" $missing
awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' <<<"$libraries" | while read -r name path; do
  case $name in
    libc.so.*|libm.so.*|libdl.so.*|librt.so.*|libpthread.so.*|libutil.so.*|libresolv.so.*|libnss_*) ;;
    *) cp -L "$path" "$dest/usr/local/lib/trireme/$name" ;;
  esac
done
echo /usr/local/lib/trireme >"$dest/etc/ld.so.conf.d/trireme.conf"
if [ "$1" = trainer ]; then
  mkdir -p "$dest/opt/trireme"
  cp -R "$ROOT/configs" "$ROOT/examples" "$dest/opt/trireme/"
  # For rewards over https.
  certificates=/etc/ssl/certs/ca-certificates.crt
  [ ! -e "$certificates" ] || install -D -m 644 "$certificates" "$dest$certificates"
fi
say "$1: $(du -sm "$dest" | cut -f1) MB in $dest"
