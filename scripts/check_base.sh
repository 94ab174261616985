#!/usr/bin/env bash
# check_base.sh BASE DIGEST: refuses a base image that is not named by its content (the Dockerfile asks, with
# RELEASE=1). DIGEST may be empty when BASE ends with one. Needs nothing but a shell: it runs before any package is
# there.
set -euo pipefail
base=${1:-} digest=${2:-}
refuse() {
  printf 'error: %s; build a release with --build-arg BASE_DIGEST=sha256:... (docker buildx imagetools inspect %s)\n' \
    "$1" "${base%%@*}" >&2
  exit 1
}
case $base in
  *@*) [ -z "$digest" ] || refuse "BASE=$base has a digest and BASE_DIGEST=$digest is another"; digest=${base##*@} ;;
esac
[ -n "$digest" ] || refuse "the base image $base has a tag, which may move, and no digest"
[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] ||
  refuse "the base image's digest is '$digest', not sha256: and 64 hexadecimal digits"
