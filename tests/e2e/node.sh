#!/usr/bin/env bash
# node.sh N: the first process of a node, started by cluster.sh in the node's namespaces: containerd, images, kubelet,
# kube-proxy.
. "$(dirname "$0")/lib.sh"
set +e
i=$1 folder=$STATE/nodes/node$1
export PATH=$COMPONENTS/bin:/usr/sbin:/sbin:$PATH
hostname "node$i"
mount --make-rshared /
for path in var/lib/kubelet var/lib/containerd var/log/pods var/log/containers var/lib/cni; do
  mkdir -p "$folder/$path" "/$path"
  mount --bind "$folder/$path" "/$path"
done
# As after a reboot: no old socket, no old pod namespaces.
mkdir -p /run/containerd && mount -t tmpfs tmpfs /run/containerd
mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns
containerd --config "$folder/containerd.toml" >>"$LOGS/node$i-containerd.log" 2>&1 &
for _ in $(seq 1200); do ctr version >/dev/null 2>&1 && break; sleep 0.1; done
import_images "$i"
kubelet --config "$folder/kubelet.yaml" --kubeconfig "$PKI/node$i.kubeconfig" --hostname-override "node$i" --node-ip \
  "10.200.0.$((10 + i))" --v=2 \
  >>"$LOGS/node$i-kubelet.log" 2>&1 &
kube-proxy --config "$folder/proxy.yaml" >>"$LOGS/node$i-proxy.log" 2>&1 &
while :; do sleep 3600 & wait $!; done
