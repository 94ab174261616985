#!/usr/bin/env bash
# run.sh [GROUP...]: operator and trainer on a real cluster that is made for it and taken down afterwards
# (`make test-cluster`). Groups: README.md; without one, all but layouts, roles and examples.
#   KEEP=1: the cluster stays; then REUSE=1 uses it again. ONLY=PATTERN: checks whose name matches.
. "$(dirname "$0")/lib.sh"
began=$SECONDS
[ "$(id -u)" = 0 ] || die "a cluster needs root: namespaces, bridges and cgroups are made"
need_packages python3-yaml
go_tool helm "$HELM"
mkdir -p "$COMPONENTS/bin"
ln -sfn "$(command -v helm)" "$COMPONENTS/bin/helm"
"$E2E/images.sh"
if [ -z "${REUSE:-}" ]; then
  # Images first, so that nodes import them as they start.
  trap 'code=$?; [ -n "${KEEP:-}" ] || "$E2E/cluster.sh" down; exit $code' EXIT
  "$E2E/cluster.sh" up
else
  "$E2E/cluster.sh" import-images
fi
# Out here: the control plane's namespace has no way to a registry.
{
  if command -v npm >/dev/null; then
    "$E2E/board_schema.sh"
  else
    echo "npm is missing: not checked"
  fi
} >"$STATE/board_schema" 2>&1 || true
python=/usr/bin/python3
PROMETHEUS=$(command -v prometheus || true)
[ -n "$PROMETHEUS" ] || { "$E2E/components.sh" prometheus; PROMETHEUS=$COMPONENTS/bin/prometheus; }
export PROMETHEUS STATE COMPONENTS HELM_CACHE_HOME=$STATE/helm HELM_CONFIG_HOME=$STATE/helm HELM_DATA_HOME=$STATE/helm
in_control env PYTHONDONTWRITEBYTECODE=1 "$python" "$E2E/checks.py" "$@" && code=0 || code=$?
say "test-cluster: $((SECONDS - began)) s"
exit "$code"
