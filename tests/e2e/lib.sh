# Shared by the scripts of this folder: source it. Names of everything the cluster makes, processes with a log and a pid
# file, waits with a deadline.
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"
E2E=$ROOT/tests/e2e
COMPONENTS=$CACHE/e2e                              # what is built or unpacked once, a folder for each content hash
STATE=${TRIREME_E2E_STATE:-/var/tmp/trireme-e2e}   # what one cluster writes: keys, logs, etcd, containers
LOGS=$STATE/logs
PKI=$STATE/pki
NODES=${NODES:-3}
CONTROL_NS=tre-control                             # network namespace of the control plane; nodes have tre-node1, ...
ADDRESS=10.200.0.1                                 # of the control plane on the bridge inside that namespace
export KUBECONFIG=$PKI/admin.kubeconfig

seconds_since() { awk -v now="$(date +%s.%N)" -v then="$1" 'BEGIN { printf "%.1f", now - then }'; }

# start NAME COMMAND...: in the background, in a session of its own; output in $LOGS/NAME.log, pid in $STATE/NAME.pid.
start() {
  local name=$1; shift
  mkdir -p "$LOGS"
  setsid "$@" >>"$LOGS/$name.log" 2>&1 </dev/null &
  echo $! >"$STATE/$name.pid"
}

# stop NAME [SIGNAL]: ends what `start NAME` began; SIGKILL after ten seconds.
stop() {
  local file=$STATE/$1.pid pid
  [ -f "$file" ] || return 0
  pid=$(cat "$file")
  rm -f "$file"
  kill -"${2:-TERM}" "$pid" 2>/dev/null || return 0
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null || true
}

# wait_for SECONDS WHAT COMMAND...: polls; dies naming WHAT.
wait_for() {
  local limit=$1 what=$2 end; shift 2
  end=$((SECONDS + limit))
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "$what: not within $limit s (logs: $LOGS)"
    sleep 0.2
  done
}

# import_images N: inside of node N; what it does not have yet of $COMPONENTS/images/current.
import_images() {
  local image mark
  for image in "$COMPONENTS"/images/current/*.tar; do
    mark=$STATE/nodes/node$1/imported-$(basename "$image")
    [ -e "$image" ] || continue
    [ ! "$mark" -nt "$image" ] || continue
    "$COMPONENTS/bin/ctr" -n k8s.io images import "$image" >>"$LOGS/node$1-import.log" 2>&1 && touch "$mark"
  done
}

in_control() { nsenter --net=/run/netns/$CONTROL_NS -- "$@"; }
# Inside or outside of the control plane's namespace alike.
kubectl() { in_control "$COMPONENTS/bin/kubectl" "$@"; }
