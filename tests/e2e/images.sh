#!/usr/bin/env bash
# images.sh: the images of operator and trainer from the programs in build/cpu, by the Dockerfile, on a Debian made by
# debootstrap; no registry.
# What lies in each must be what its bill of materials says.
# The archives lie in $CACHE/e2e/images/current and are made again when a program, the Dockerfile or a copied folder
# changes.
. "$(dirname "$0")/lib.sh"
BIN=$COMPONENTS/bin
FOLDER=$COMPONENTS/images
VERSION=$(sed -n 's/^appVersion: *"\?\([^"]*\)"\?$/\1/p' "$ROOT/charts/trireme/Chart.yaml")
for program in "$ROOT/build/cpu/trainer/cli/trireme" "$ROOT/build/cpu/operator/cli/trireme-operator"; do
  [ -x "$program" ] || die "$program is not built: make build"
done
need_packages buildah
"$E2E/components.sh" kubernetes base
mkdir -p "$FOLDER"
key=$({ cat "$0" "$ROOT/build/cpu/trainer/cli/trireme" "$ROOT/build/cpu/operator/cli/trireme-operator" \
  "$ROOT/Dockerfile" "$ROOT/scripts/image_files.sh" "$ROOT/scripts/sbom.py"
  readlink -f "$BIN/base.tar" "$BIN/pause"; find "$ROOT/configs" "$ROOT/examples" -type f -print0 | sort -z |
    xargs -0 cat; } | sha256sum | cut -c1-12)
if [ "$(cat "$FOLDER/current/key" 2>/dev/null)" = "$key" ]; then say "images: as they are ($key)"; exit 0; fi

work=$(mktemp -d "$FOLDER/work.XXXXXX")
trap 'rm -rf "$work" "$ROOT/build/image"' EXIT
b() { buildah --root "$FOLDER/storage" --runroot "$FOLDER/storage-run" --storage-driver overlay "$@"; }
bud() {
  b bud --isolation chroot --pull-never -q "$@" >>"$work/buildah.log" 2>&1 || {
    tail -20 "$work/buildah.log" >&2
    die "buildah could not build:" "$@"
  }
}
start=$SECONDS
"$ROOT/scripts/image_files.sh" operator cpu "$ROOT/build/image/operator"
"$ROOT/scripts/image_files.sh" trainer cpu "$ROOT/build/image/trainer"

mkdir "$work/base" "$work/pause"
ln "$(readlink -f "$BIN/base.tar")" "$work/base/base.tar"
base=trireme.test/base:$(basename "$(dirname "$(readlink -f "$BIN/base.tar")")")
printf 'FROM scratch\nADD base.tar /\nENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n' \
  >"$work/base/Dockerfile"
b inspect "$base" >/dev/null 2>&1 || bud -t "$base" "$work/base"
cp "$BIN/pause" "$work/pause/"
printf 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n' >"$work/pause/Dockerfile"
bud -t trireme.test/pause:1 "$work/pause"
for target in operator trainer; do
  bud --target $target --build-arg BASE="$base" --build-arg PREBUILT=build/image \
    -t "docker.io/trireme/$target:$VERSION" -f "$ROOT/Dockerfile" "$ROOT"
done
mkdir "$work/new"
for image in trireme.test/pause:1 docker.io/trireme/operator:$VERSION docker.io/trireme/trainer:$VERSION; do
  name=${image%:*}
  b push -q "$image" "docker-archive:$work/new/${name##*/}.tar:$image" >>"$work/buildah.log" 2>&1 || {
    tail -5 "$work/buildah.log" >&2
    die "buildah could not write $image"
  }
done
b inspect --type image "docker.io/trireme/operator:$VERSION" >"$work/new/operator.json"
du -sm "$ROOT/build/image/operator" | cut -f1 >"$work/new/operator.mb"
for target in operator trainer; do
  container=$(b from --pull-never "docker.io/trireme/$target:$VERSION")
  "$ROOT/scripts/sbom.py" check-image "$(b mount "$container")" >&2 ||
    die "the $target's image is not what its bill of materials says"
  b rm "$container" >/dev/null
  cp "$ROOT/build/image/$target/usr/share/doc/trireme/sbom.cdx.json" "$work/new/$target.cdx.json"
done
echo "$key" >"$work/new/key"
rm -rf "$FOLDER/current"
mv "$work/new" "$FOLDER/current"
b rmi --prune >/dev/null 2>&1 || true
say "images: made in $((SECONDS - start)) s ($(du -sm "$FOLDER/current" | cut -f1) MB)"
