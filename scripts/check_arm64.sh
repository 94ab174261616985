#!/usr/bin/env bash
# check_arm64.sh: the operator for arm64, made and tried on any machine of this project: built by a cross compiler, what
# goes into its image with its bill of materials (check_images.sh), and its program and tests run by qemu. What the
# image holds lies in build/image/arm64/operator afterwards, for the Dockerfile's PREBUILT.
#   TESTS   unit tests to run (api): also kube controller webhook, which take long under qemu
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
preset=operator-arm64
scripts/setup.sh $preset
need_packages qemu-user-static
tests=() names=""
for area in ${TESTS:-api}; do tests+=("${area}_test"); names+=${names:+|}${area}_test; done
scripts/build.sh $preset trireme-operator "${tests[@]}"
program=build/$preset/operator/cli/trireme-operator
qemu=(qemu-aarch64-static -L build/deps/arm64)
help=$("${qemu[@]}" "$program" --help) || die "$program does not run"
[[ $help == *--network-policies* ]] || die "$program --help says: $help"
say "it runs; tests: $names"
ctest --test-dir "build/$preset" --output-on-failure -R "^($names)\$" --timeout 3600
scripts/check_images.sh $preset
scripts/image_files.sh operator $preset build/image/arm64/operator
