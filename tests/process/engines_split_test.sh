#!/usr/bin/env bash
# Generation in processes of its own, of policies that ranks share, of whole runs: engines of one device get a part of
# the weights from each rank. Where training's sums are those of one device a run in turn has the bits of the run on the
# same devices; of tensor ranks previous log-probs have a pass of their own, and the run has the bits of one that
# generates on one device each. Engines that are killed or cut off between the parts, ranks that are killed.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_split_fixture
make_mixture
apart="policy.generation.colocated.enabled=false"
one_device="policy.generation.tensor_parallel_size=1"
steps=4
common="cluster.device=cpu grpo.max_num_steps=$steps grpo.val_period=2 policy.megatron_cfg.enabled=true"
m=policy.megatron_cfg
layouts=(  # NAME RANKS OVERRIDES
  "pp2 2 $m.pipeline_model_parallel_size=2"
  "uneven 2 $m.pipeline_model_parallel_size=2 $m.num_layers_in_first_pipeline_stage=3"
  "cp2 2 $m.context_parallel_size=2"
  "ep2 2 $m.expert_model_parallel_size=2 policy.model_name=$dir/mixture"
  "tp2 2 $m.tensor_model_parallel_size=2 $one_device"
  "tp2pp2 4 $m.tensor_model_parallel_size=2 $m.pipeline_model_parallel_size=2 $one_device"
)

# In turn with training.
for layout in "${layouts[@]}"; do
  set -- $layout
  name=$1
  in_turn "$name" "$2" "$apart" "${@:3}"
  said="generation has tp 1, training tp 2: .* a previous-log-prob pass runs every step"
  if [[ "$*" == *tensor_model* ]]; then
    check "turn-$name: other bits, and near" near "turn-$name" $steps
    grep -q "$said" <<<"$out" && ok "$name: says why log-probs have a pass of their own" || bad "$name: says why" "$out"
  else
    without_pass "$name"
  fi
done
# More engines than one read from the same ranks, each in its own order.
check "tp2pp2, three engines" "$TRIREME" launch --nproc-per-node 4 --engines 3 -- $(split_args three 4 $apart \
  $m.tensor_model_parallel_size=2 $m.pipeline_model_parallel_size=2)
equal three tp2pp2 $steps
strategy=$m.distributed_data_parallel_config.data_parallel_sharding_strategy
check "tensor ranks, weights that data parallel ranks share" "$TRIREME" launch --nproc-per-node 4 --engines 2 -- \
  $(split_args shared 4 $apart $m.tensor_model_parallel_size=2 $strategy=optim_grads_params)
check "the same on the same devices" "$TRIREME" launch --nproc-per-node 4 -- \
  $(split_args shared-here 4 $one_device $m.tensor_model_parallel_size=2 $strategy=optim_grads_params)
equal shared shared-here $steps

# Exact versions: a run is repeatable. In flight: no token is older than it may be, and each has its weights' bits.
async="$apart policy.generation.max_running_samples=4 grpo.async_grpo.enabled=true
  loss_fn.use_importance_sampling_correction=true"
pp2="$m.pipeline_model_parallel_size=2"
check "exact versions, stages" "$TRIREME" launch --nproc-per-node 2 --engines 2 -- $(split_args exact 2 $async $pp2)
check "again, with one engine" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args again 2 $async $pp2)
equal again exact $steps
check "exact: ages" ages exact
check "in flight, stages" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args flight 2 $async $pp2 \
  grpo.async_grpo.in_flight_weight_updates=true)
check "in flight: ages" ages flight
check "in flight: equal bits" no_other_bits flight
check "in flight, tensor ranks" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(split_args flight-tp 2 $async \
  $m.tensor_model_parallel_size=2 grpo.async_grpo.in_flight_weight_updates=true)
check "in flight, tensor ranks: ages" ages flight-tp

# PPO, the critic in the actor's layout or in another one.
ppo_run() {  # NAME RANKS COMMAND_OPTIONS... -- overrides...
  local name=$1 ranks=$2 options=(); shift 2
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  "$TRIREME" launch --nproc-per-node "$ranks" "${options[@]}" -- $(ppo_args "$name" cluster.device=cpu \
    cluster.gpus_per_node="$ranks" $m.enabled=true ppo.max_num_steps=4 policy.train_global_batch_size=32 "$@")
}
check "PPO, stages, on the same devices" ppo_run ppo-pp2 2 -- $pp2
check "PPO, stages, an engine" ppo_run ppo-turn-pp2 2 --engines 1 -- $apart $pp2
equal ppo-turn-pp2 ppo-pp2 4
check "PPO, tensor ranks, on one device each" ppo_run ppo-tp2 2 -- $m.tensor_model_parallel_size=2 $one_device
check "PPO, tensor ranks, an engine" ppo_run ppo-turn-tp2 2 --engines 1 -- $apart $m.tensor_model_parallel_size=2
equal ppo-turn-tp2 ppo-tp2 4

# The only engine dies, or its transfer is cut, between the parts: phases are counted from its start, and each transfer
# has one beginning. The run needs what it had, and the one that is started again.
for fault in kill@2:fetching kill@2:transfer kill@2:applying kill@3:generation cut@2; do
  name="fault-${fault//[@:]/-}"
  out=$(TRIREME_ENGINE_FAULT=$fault "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
    $(split_args "$name" 2 $apart $pp2) 2>&1) && ok "$fault: the run goes on" || bad "$fault" "$out"
  grep -q "on purpose" <<<"$out" && ok "$fault: it happened" || bad "$fault: nothing happened" "$out"
  equal "$name" pp2 $steps
done
# A rank that sends dies: its code, and the engine leaves by itself; then the run goes on.
for rank in 0 1; do
  name="rank-$rank-killed"
  out=$(TRIREME_FAULT="kill@2:$rank:training" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
    $(split_args "$name" 2 $apart $pp2 $far_deadline) 2>&1)
  code=$?
  [ $code = 137 ] && grep -q "rank $rank failed first (signal 9" <<<"$out" && ok "rank $rank is killed" ||
    bad "rank $rank is killed: code $code" "$out"
  check "and the run goes on" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
    $(split_args "$name" 2 $apart $pp2)
  equal "$name" pp2 $steps
done
finish
