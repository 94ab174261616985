#!/usr/bin/env bash
# cluster.sh up|down|status|stop-node N|start-node N|exec-node N COMMAND...: a Kubernetes cluster on this machine, in
# network namespaces of its own.
#   GANGS=0: without gang scheduling; NODES=0: control plane only; API_FLAGS, CONTROLLER_FLAGS, SCHEDULER_FLAGS,
#   ETCD_FLAGS: more flags.
# Nothing outside of the namespaces tre-*, the cgroups tre-node* and $TRIREME_E2E_STATE (default /var/tmp/trireme-e2e)
# is touched.
. "$(dirname "$0")/lib.sh"
BIN=$COMPONENTS/bin
[ "$(id -u)" = 0 ] || die "a cluster needs root: namespaces, bridges and cgroups are made"

# ---- keys

make_certificates() {
  rm -rf "$PKI"; mkdir -p "$PKI"; chmod 700 "$PKI"
  cd "$PKI"
  local config name i
  openssl ecparam -name prime256v1 -genkey -noout -out ca.key
  openssl req -x509 -new -key ca.key -subj /CN=trireme-e2e -days 30 -out ca.crt \
    -addext basicConstraints=critical,CA:TRUE \
    -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
  certificate() {  # NAME SUBJECT [SAN]
    openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
    {
      echo keyUsage=critical,digitalSignature
      echo extendedKeyUsage=serverAuth,clientAuth
      [ -z "${3:-}" ] || echo "subjectAltName=$3"
    } >extensions
    openssl req -new -key "$1.key" -subj "$2" | openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 \
      -extfile extensions -out "$1.crt"
  }
  local service=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc
  certificate apiserver /CN=kube-apiserver \
    "$service,DNS:kubernetes.default.svc.cluster.local,IP:10.96.0.1,IP:127.0.0.1,IP:$ADDRESS"
  certificate kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client
  certificate admin /O=system:masters/CN=admin
  certificate controller-manager /CN=system:kube-controller-manager
  certificate scheduler /CN=system:kube-scheduler
  certificate proxy /CN=system:kube-proxy
  certificate dns /O=system:masters/CN=coredns
  for i in $(seq "$NODES"); do
    certificate "node$i" "/O=system:nodes/CN=system:node:node$i" "DNS:node$i,IP:10.200.0.$((10 + i))"
  done
  openssl ecparam -name prime256v1 -genkey -noout -out accounts.key
  openssl ec -in accounts.key -pubout -out accounts.pub
  for name in admin controller-manager scheduler proxy dns $(seq -f node%g "$NODES"); do
    config=$name.kubeconfig
    cat >"$config" <<C
apiVersion: v1
kind: Config
clusters: [{name: e2e, cluster: {server: "https://$ADDRESS:6443", certificate-authority-data: $(base64 -w0 <ca.crt)}}]
users: [{name: user, user: {client-certificate-data: $(base64 -w0 <"$name.crt"),
  client-key-data: $(base64 -w0 <"$name.key")}}]
contexts: [{name: context, context: {cluster: e2e, user: user}}]
current-context: context
C
  done
  cd - >/dev/null
}

# ---- network: a bridge in the control plane's namespace, one for each node, pod networks 10.244.N.0/24 as plain routes

control() { nsenter --net=/run/netns/$CONTROL_NS -- "$@"; }
in_node() {
  local i=$1
  shift
  nsenter --net=/run/netns/tre-node"$i" -- "$@"  # not `ip netns exec`: that hides the cgroup mounts
}

network_up() {
  local i j
  ip netns add $CONTROL_NS
  control ip link set lo up
  control ip link add bridge0 type bridge
  control ip addr add "$ADDRESS/24" dev bridge0
  control ip link set bridge0 up
  control sysctl -qw net.ipv4.ip_forward=1
  for i in $(seq "$NODES"); do
    ip netns add "tre-node$i"
    ip link add eth0 netns "tre-node$i" type veth peer name "node$i" netns $CONTROL_NS
    control ip link set "node$i" master bridge0 up
    in_node "$i" ip link set lo up
    in_node "$i" ip addr add "10.200.0.$((10 + i))/24" dev eth0
    in_node "$i" ip link set eth0 up
    in_node "$i" ip route add default via "$ADDRESS"
    in_node "$i" sysctl -qw net.ipv4.ip_forward=1
    control ip route add "10.244.$i.0/24" via "10.200.0.$((10 + i))"
    for j in $(seq "$NODES"); do
      [ "$i" = "$j" ] || in_node "$i" ip route add "10.244.$j.0/24" via "10.200.0.$((10 + j))"
    done
  done
}

# ---- control plane

control_plane_up() {
  local gates=()
  mkdir -p "$STATE/etcd"; chmod 700 "$STATE/etcd"
  # Nothing of a test needs to survive the machine: no fsync.
  start etcd nsenter --net=/run/netns/$CONTROL_NS -- "$BIN/etcd" --name e2e --data-dir "$STATE/etcd" --unsafe-no-fsync \
    --quota-backend-bytes=8589934592 \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls \
      http://127.0.0.1:2380 \
    --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster e2e=http://127.0.0.1:2380 ${ETCD_FLAGS:-}
  wait_for 180 "etcd" control curl -sf http://127.0.0.1:2379/health
  start_apiserver
  [ "${GANGS:-1}" = 0 ] || gates=(--feature-gates=GenericWorkload=true,GangScheduling=true)
  start controller-manager nsenter --net=/run/netns/$CONTROL_NS -- "$BIN/kube-controller-manager" \
    --kubeconfig="$PKI/controller-manager.kubeconfig" \
    --authentication-kubeconfig="$PKI/controller-manager.kubeconfig" \
      --authorization-kubeconfig="$PKI/controller-manager.kubeconfig" --bind-address=127.0.0.1 \
    --service-account-private-key-file="$PKI/accounts.key" --root-ca-file="$PKI/ca.crt" \
      --use-service-account-credentials=true --leader-elect=false \
    --allocate-node-cidrs=false --node-monitor-grace-period=10s --node-monitor-period=1s "${gates[@]}" \
      ${CONTROLLER_FLAGS:-}
  start scheduler nsenter --net=/run/netns/$CONTROL_NS -- "$BIN/kube-scheduler" \
    --kubeconfig="$PKI/scheduler.kubeconfig" \
    --authentication-kubeconfig="$PKI/scheduler.kubeconfig" --authorization-kubeconfig="$PKI/scheduler.kubeconfig" \
      --bind-address=127.0.0.1 \
    --leader-elect=false "${gates[@]}" ${SCHEDULER_FLAGS:-}
  wait_for 120 "the controller manager" control curl -skf https://127.0.0.1:10257/healthz
  wait_for 120 "the scheduler" control curl -skf https://127.0.0.1:10259/healthz
  wait_for 120 "the default service account" kubectl get serviceaccount default -n default
  if [ "$NODES" -gt 0 ]; then
    DNS_ADDRESS=$ADDRESS DNS_KUBECONFIG=$PKI/dns.kubeconfig start coredns nsenter --net=/run/netns/$CONTROL_NS \
      -- "$BIN/coredns" -conf "$E2E/conf/Corefile"
    wait_for 180 "CoreDNS" control curl -sf http://127.0.0.1:8181/ready
  fi
}

start_apiserver() {
  local gates=()
  [ "${GANGS:-1}" = 0 ] || gates=(--feature-gates=GenericWorkload=true,GangScheduling=true \
    --runtime-config=scheduling.k8s.io/v1alpha2=true)
  start apiserver nsenter --net=/run/netns/$CONTROL_NS -- "$BIN/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 \
    --bind-address="$ADDRESS" --advertise-address="$ADDRESS" \
    --service-cluster-ip-range=10.96.0.0/16 --tls-cert-file="$PKI/apiserver.crt" \
      --tls-private-key-file="$PKI/apiserver.key" --client-ca-file="$PKI/ca.crt" \
    --service-account-issuer=https://kubernetes.default.svc --service-account-signing-key-file="$PKI/accounts.key" \
      --service-account-key-file="$PKI/accounts.pub" \
    --kubelet-client-certificate="$PKI/kubelet-client.crt" --kubelet-client-key="$PKI/kubelet-client.key" \
      --kubelet-certificate-authority="$PKI/ca.crt" \
    --kubelet-preferred-address-types=InternalIP --authorization-mode=Node,RBAC \
      --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --enable-aggregator-routing=true "${gates[@]}" ${API_FLAGS:-}
  wait_for 120 "the API server" kubectl get --raw /readyz
}

# ---- nodes: a network namespace and, in it, mount, pid and uts namespaces with containerd, kubelet and kube-proxy

cgroup_folders() {
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    echo /sys/fs/cgroup
  else
    find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d ! -name unified
  fi
}

cgroups_up() {
  local folder file
  for folder in $(cgroup_folders); do
    mkdir -p "$folder/tre-node$1"
    for file in cpuset.cpus cpuset.mems; do
      [ ! -e "$folder/tre-node$1/$file" ] || [ -n "$(cat "$folder/tre-node$1/$file")" ] ||
        cat "$folder/$file" >"$folder/tre-node$1/$file"
    done
  done
}

cgroups_down() {
  local folder left
  for _ in $(seq 100); do
    left=0
    for folder in $(cgroup_folders) /sys/fs/cgroup/unified; do  # runc makes some there, too
      [ -d "$folder/tre-node$1" ] || continue
      find "$folder/tre-node$1" -depth -type d -exec rmdir {} + 2>/dev/null || true
      [ ! -d "$folder/tre-node$1" ] || left=1
    done
    [ $left = 1 ] || return 0
    sleep 0.1
  done
  say "cgroups of node$1 are still busy"
}

start_node() {
  local i=$1 folder=$STATE/nodes/node$1
  [ -e "/run/netns/tre-node$i" ] || die "there is no node$i; cluster.sh up makes $NODES"
  mkdir -p "$folder/cni"
  : >"$folder/resolv.conf"
  cat >"$folder/cni/10-bridge.conflist" <<C
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.$i.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
C
  # restrict_oom_score_adj: a machine without CAP_SYS_RESOURCE may not lower it, and no sandbox would start.
  cat >"$folder/containerd.toml" <<C
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "trireme.test/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$(readlink -f "$BIN/cni")"
    conf_dir = "$folder/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
C
  cat >"$folder/kubelet.yaml" <<C
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/node$i.crt
tlsPrivateKeyFile: $PKI/node$i.key
cgroupDriver: cgroupfs
cgroupRoot: /tre-node$i
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: ["$ADDRESS"]
clusterDomain: cluster.local
resolvConf: $folder/resolv.conf
nodeStatusUpdateFrequency: 2s
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
C
  cat >"$folder/proxy.yaml" <<C
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: 10.244.0.0/16
hostnameOverride: node$i
clientConnection: {kubeconfig: $PKI/proxy.kubeconfig}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
C
  cgroups_up "$i"
  start "node$i" nsenter --net="/run/netns/tre-node$i" -- unshare --mount --uts --pid --fork --mount-proc \
    --kill-child=KILL --propagation private \
    "$BASH" "$E2E/node.sh" "$i"
}

node_ready() {
  kubectl get --raw "/api/v1/nodes/node$1/proxy/healthz" >/dev/null 2>&1 &&
    [ "$(kubectl get node "node$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')" = True ]
}

# The whole pid namespace goes with its first process: kubelet, containerd and pods at once, as in a power cut.
stop_node() { stop "node$1" KILL; cgroups_down "$1"; }

# ---- verbs

up() {
  local began=$SECONDS i
  need_packages iproute2 nftables conntrack procps curl openssl util-linux
  "$E2E/components.sh" kubernetes etcd $([ "$NODES" = 0 ] || echo coredns debian)
  down
  mkdir -p "$STATE" "$LOGS"
  # From here on whatever goes wrong takes everything down again.
  trap 'code=$?; [ $code = 0 ] || { say "the cluster did not come up; logs stay in $LOGS"; down; }; exit $code' EXIT
  # Images, unpacked three times, are gigabytes: in memory where there is enough of it.
  mkdir -p "$STATE/nodes"
  if [ "$NODES" -gt 0 ] && [ "$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)" -ge 14 ]; then
    mount -t tmpfs -o size=8g tre-nodes "$STATE/nodes"
  fi
  make_certificates >"$LOGS/certificates.log" 2>&1 || die "openssl could not make the keys; see $LOGS/certificates.log"
  network_up
  control_plane_up
  say "control plane: $((SECONDS - began)) s"
  for i in $(seq "$NODES"); do start_node "$i"; done
  for i in $(seq "$NODES"); do wait_for 180 "node$i" node_ready "$i"; done
  # Plain folders of this machine as ReadWriteMany volumes: every node sees them.
  mkdir -p "$STATE/volumes"
  [ "$NODES" = 0 ] ||
    say "cluster of $NODES nodes: $((SECONDS - began)) s; KUBECONFIG=$KUBECONFIG," \
      "inside nsenter --net=/run/netns/$CONTROL_NS"
}

down() {
  local file name pids
  for file in "$STATE"/*.pid; do [ ! -e "$file" ] || stop "$(basename "$file" .pid)" KILL; done
  for name in $(ip netns list 2>/dev/null | awk '/^tre-/ {print $1}'); do
    for _ in $(seq 50); do
      pids=$(ip netns pids "$name")
      [ -n "$pids" ] || break
      kill -KILL $pids 2>/dev/null || true
      sleep 0.1
    done
    ip netns delete "$name"
  done
  for folder in $(cgroup_folders) /sys/fs/cgroup/unified; do
    for name in "$folder"/tre-node*; do
      [ ! -d "$name" ] || cgroups_down "${name##*tre-node}"
    done
  done
  while mountpoint -q "$STATE/nodes"; do
    umount "$STATE/nodes" 2>/dev/null || {
      sleep 0.5
      umount -l "$STATE/nodes"
    }
  done
  if [ -d "$STATE" ]; then
    for file in "$STATE"/* ; do
      case $(basename "$file") in
        logs) rm -rf "$LOGS.old"; mv "$LOGS" "$LOGS.old" ;;
        logs.old | results) ;;
        *) rm -rf "$file" 2>/dev/null || { sleep 1; rm -rf "$file"; } ;;
      esac
    done
    [ ! -d "$LOGS.old" ] || mv -T "$LOGS.old" "$LOGS"
  fi
}

status() {
  [ -e /run/netns/$CONTROL_NS ] || { echo "no cluster"; return 1; }
  local file pid
  for file in "$STATE"/*.pid; do
    pid=$(cat "$file" 2>/dev/null) || continue
    if kill -0 "$pid" 2>/dev/null; then
      echo "$(basename "$file" .pid): pid $pid, $(($(ps -o rss= -p "$pid") / 1024)) MB"
    else
      echo "$(basename "$file" .pid): dead"
    fi
  done
  [ "$NODES" = 0 ] || kubectl get nodes
}

case ${1:-} in
  up) up ;;
  down) down ;;
  status) status ;;
  start-apiserver) start_apiserver ;;
  stop-apiserver) stop apiserver KILL ;;
  stop-node) stop_node "${2:?which node?}" ;;
  start-node) start_node "${2:?which node?}"; wait_for 180 "node$2" node_ready "$2" ;;
  exec-node)
    i=${2:?which node?}
    shift 2
    exec nsenter -t "$(pgrep -P "$(cat "$STATE/node$i.pid")")" -m -n -p -u -- "$@" ;;
  import-images)
    for i in $(seq "$NODES"); do
      "$0" exec-node "$i" "$BASH" -c '. "$1/lib.sh"; import_images "$2"' import "$E2E" "$i"
    done ;;
  *)
    die "usage: cluster.sh up|down|status|stop-node N|start-node N|exec-node N COMMAND...|" \
      "stop-apiserver|start-apiserver|import-images" ;;
esac
