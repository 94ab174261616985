#!/usr/bin/env bash
# scale.sh [JOBS [PODS_OF_A_JOB [GROUP...]]]: the operator against a real API server and kwok's nodes, compared with a
# bare loop of the same creates (`make test-scale`).
#   GROUP: many (JOBS jobs, at most 1000), wide (one job of 1000 pods), kueue (jobs in a queue of a live Kueue), made
#   (JOBS jobs posted at once), held (JOBS jobs that are there); default: all.
#   OPERATOR=FILE, OPERATOR_FLAGS: the program, and more flags for it. KEEP=1: the cluster stays; REUSE=1 uses one that
#   is up.
. "$(dirname "$0")/lib.sh"
jobs=${1:-1000} pods=${2:-4}
groups=("${@:3}")
[ "$(id -u)" = 0 ] || die "a cluster needs root: namespaces and bridges are made"
operator=${OPERATOR:-$ROOT/build/cpu/operator/cli/trireme-operator}
[ -x "$operator" ] || die "$operator is not built: make build"
need_packages python3-yaml
"$E2E/components.sh" kubernetes etcd kwok load
case " ${groups[*]:-kueue} " in *" kueue "*) "$E2E/components.sh" kueue ;; esac
trap 'code=$?; stop operator; stop kueue; stop kwok; [ -n "${KEEP:-}" ] || NODES=0 "$E2E/cluster.sh" down; exit $code' \
  EXIT
export NODES=0 GANGS=0 \
  CONTROLLER_FLAGS="--kube-api-qps=2000 --kube-api-burst=4000 --concurrent-gc-syncs=20 \
--node-monitor-grace-period=120s" \
  API_FLAGS="--max-requests-inflight=3000 --max-mutating-requests-inflight=1000" \
    SCHEDULER_FLAGS="--kube-api-qps=2000 --kube-api-burst=4000"
[ -n "${REUSE:-}" ] || "$E2E/cluster.sh" up
export STATE COMPONENTS LOGS PKI ADDRESS OPERATOR=$operator
in_control env PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 "$E2E/scale.py" "$jobs" "$pods" "${groups[@]}"
