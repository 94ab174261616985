#!/usr/bin/env bash
# check_images.sh [PRESET]: what goes into the images, without a registry or a container: the folders of image_files.sh
# for what PRESET (cpu) has built are made and hold what their bill of materials says, and trees and bills that were
# tampered with are refused.
. "$(dirname "$0")/lib.sh"
preset=${1:-cpu}
need_packages binutils python3
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
sbom=$ROOT/scripts/sbom.py
bill=usr/share/doc/trireme/sbom.cdx.json
passed=0; failed=0
ok() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); printf 'FAILED: %s\n' "$1" >&2; tail -5 "$work/log" | sed 's/^/    /' >&2; }
# check WHAT COMMAND...; refused WHAT TEXT COMMAND...: fails and says TEXT.
check() { local what=$1; shift; if "$@" >"$work/log" 2>&1; then ok; else bad "$what"; fi; }
refused() {
  local what=$1 text=$2
  shift 2
  if "$@" >"$work/log" 2>&1; then
    bad "$what was taken"
  elif grep -qF -- "$text" "$work/log"; then
    ok
  else
    bad "$what: another reason than '$text'"
  fi
}
# copy: a fresh tree to tamper with. Links to the files, so write none of them in place.
copy() { rm -rf "$work/bad"; cp -al "$tree" "$work/bad"; cp --remove-destination "$tree/$bill" "$work/bad/$bill"; }
# edit CODE: changes the bill `b` of the copy.
edit() {
  copy
  python3 \
    -c 'import json, sys; b = json.load(open(sys.argv[1])); exec(sys.argv[2]); json.dump(b, open(sys.argv[1], "w"))' \
      "$work/bad/$bill" "$1"
}

for kind in operator trainer; do
  case $kind in operator) program=operator/cli/trireme-operator ;; trainer) program=trainer/cli/trireme ;; esac
  if [ ! -x "$ROOT/build/$preset/$program" ]; then
    [[ $kind/$preset == trainer/operator* ]] ||
      die "build/$preset/$program is not built: scripts/build.sh $preset $(basename "$program")"
    continue
  fi
  tree=$work/$kind
  say "$kind"
  check "image_files.sh $kind" "$ROOT/scripts/image_files.sh" "$kind" "$preset" "$tree"
  check "the bill of the $kind's image" "$sbom" check "$tree"
  machine=$(readelf -h /proc/self/exe | sed -n 's/^ *Machine: *//p')
  [[ $preset != *-arm64 ]] || machine=AArch64
  check "every program and library of the $kind's image is for $machine" bash -c \
    '[ "$(find "$1" -type f -exec readelf -h {} + 2>/dev/null | sed -n "s/^ *Machine: *//p" | sort -u)" = "$2" ]' - \
    "$tree" "$machine"
  cp "$tree/$bill" "$work/first"
  check "the same tree has the same bill" bash -c '"$1" make "$2" "$3" "$4" && cmp "$4/$5" "$6"' - "$sbom" $kind \
    "$preset" "$tree" $bill "$work/first"
  library=usr/local/lib/trireme/$(ls "$tree/usr/local/lib/trireme" | grep -m 1 '\.so')

  copy; cp "$(type -P true)" "$work/bad/usr/local/lib/trireme/libextra.so"
  refused "a library of nobody" "libextra.so: of no component" "$sbom" check "$work/bad"
  refused "a library of nobody, in a new bill" "libextra.so: is of no package or wheel" "$sbom" make $kind "$preset" \
    "$work/bad"
  copy; cp "$(type -P true)" "$work/bad/usr/local/bin/helper"
  refused "a second program of ours" "usr/local/bin/helper: is of no package or wheel" "$sbom" make $kind "$preset" \
    "$work/bad"
  copy; cp "$(type -P true)" "$work/bad/usr/share/doc/zlib1g/true"
  refused "a program among the licences" "usr/share/doc/zlib1g/true: is of no package or wheel" "$sbom" make $kind \
    "$preset" "$work/bad"
  copy; { cat "$tree/$library"; echo; } >"$work/changed"; mv "$work/changed" "$work/bad/$library"
  refused "a library with one byte more" "$library: has another content" "$sbom" check "$work/bad"
  refused "a library with one byte more, in a new bill" "$library: is of no package or wheel" "$sbom" make $kind \
    "$preset" "$work/bad"
  copy; mkdir -p "$work/bad/usr/bin"; cp "$(type -P true)" "$work/bad/usr/bin/true"
  check "a program of the base, in an image" "$sbom" check-image "$work/bad"
  copy; rm "$work/bad/$library"
  refused "a library that is gone from an image" "$library: in the bill, not in the image" "$sbom" check-image \
    "$work/bad"
  refused "a library that is gone" "$library: in the bill, not in the image" "$sbom" check "$work/bad"
  copy; rm "$work/bad/usr/share/doc/zlib1g/copyright"
  refused "a licence that is gone" "usr/share/doc/zlib1g/copyright is missing" "$sbom" check "$work/bad"
  copy; rm "$work/bad/var/lib/dpkg/status.d/zlib1g"
  refused "a package without its record" "status.d/zlib1g is missing" "$sbom" check "$work/bad"
  copy; ln -s /bin/true "$work/bad/usr/local/bin/link"
  refused "a link out of the image" "usr/local/bin/link: a link to /bin/true" "$sbom" check "$work/bad"
  copy; rm "$work/bad/$bill"
  refused "no bill" "$bill is missing" "$sbom" check "$work/bad"
  copy; head -c 1000 "$tree/$bill" >"$work/bad/$bill"
  refused "half a bill" "is no JSON" "$sbom" check "$work/bad"
  edit 'del b["components"][0]["version"]'
  refused "a component without a version" "no version" "$sbom" check "$work/bad"
  edit 'b["components"][0]["licenses"] = []'
  refused "a component without a licence" "no licence" "$sbom" check "$work/bad"
  edit 'c = b["components"][0]; c.pop("purl"); c.pop("hashes", None)'
  refused "a component without a source" "neither a purl nor a hash" "$sbom" check "$work/bad"
  edit 'c = [c for c in b["components"] if c.get("components")]; c[0]["components"].append(c[1]["components"][0])'
  refused "a file of two components" "of 2 components" "$sbom" check "$work/bad"
  edit 'b["components"].append(b["components"][0])'
  refused "a component twice" "2 components" "$sbom" check "$work/bad"
  if [ $kind = trainer ]; then
    edit 'next(c for c in b["components"] if c["purl"].startswith("pkg:cargo/"))["hashes"] = []'
    refused "a crate without its sum" "no hash of what was fetched" "$sbom" check "$work/bad"
    copy; rm -r "$work"/bad/usr/local/lib/trireme/torch-*.dist-info
    refused "a wheel without its metadata" "libtorch_cpu.so: is of no package or wheel" "$sbom" make $kind "$preset" \
      "$work/bad"
  fi
done

say "base"
sum=sha256:$(printf '0%.0s' $(seq 64))
base=$ROOT/scripts/check_base.sh
check "a base by digest" "$base" debian:12-slim $sum
check "a base with its digest" "$base" debian:12-slim@$sum ""
refused "a base by tag" "has a tag, which may move" "$base" debian:12-slim ""
refused "half a digest" "not sha256: and 64" "$base" debian:12-slim sha256:1234
refused "two digests" "is another" "$base" debian:12-slim@$sum $sum
check "the Dockerfile takes BASE_DIGEST and asks for it" python3 - "$ROOT/Dockerfile" <<'P'
import re, sys
text = open(sys.argv[1]).read()
first = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.M)
by_digest = [name for image, name in first if image == "${BASE}${BASE_DIGEST:+@$BASE_DIGEST}"]
assert by_digest == ["base"], f"one stage is made of BASE and BASE_DIGEST, not {by_digest}"
stages = {name for _, name in first}
assert all(image in stages for image, name in first if name != "base"), f"every other stage stands on one of {stages}"
asks = r'RUN \[ -z "\$RELEASE" \] \|\| \S*check_base\.sh "\$BASE" "\$BASE_DIGEST"'
assert re.search(asks, text), "RELEASE asks check_base.sh"
commands = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
assert not re.search(r"x86_64|amd64", commands), "no machine is named"
P

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
