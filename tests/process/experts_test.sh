#!/usr/bin/env bash
# Whole runs of mixtures of experts, whole on each rank and split: log-probs of sampler and loss with equal bits,
# resumes in other layouts, frozen and trained routers, and what cannot be.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture
for family in qwen3_moe mixtral; do
  "$TRIREME" init-model --out "$dir/$family" --family $family --hidden 64 --layers 2 --heads 4 --kv-heads 2 \
    --head-dim 16 --intermediate 64 --experts 8 --experts-per-token 2 --expert-width 32 >/dev/null
done
mv "$dir/model" "$dir/dense"; cp -r "$dir/qwen3_moe" "$dir/model"
# run NAME RANKS [overrides...]
run() {
  local name=$1 ranks=$2; shift 2
  "$TRIREME" launch --nproc-per-node "$ranks" -- $(run_args "$name" grpo.val_period=0 grpo.val_at_start=false \
    cluster.device=cpu cluster.gpus_per_node="$ranks" policy.megatron_cfg.enabled=true grpo.max_num_steps=4 \
    loss_fn.reference_policy_kl_penalty=0.05 policy.generation.max_running_samples=8 \
    policy.generation.kv_cache_tokens=400 "$@")
}
# The routers of two folders of weights: "same" or "other".
routers() {
  python3 - "$1" "$2" <<'PY'
import json, pathlib, struct, sys
def routers(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:8 + size]).items():
            if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
                begin, end = entry["data_offsets"]
                found[name] = data[8 + size + begin:8 + size + end]
    return found
first, second = routers(sys.argv[1]), routers(sys.argv[2])
print("same" if first and first == second else "other")
PY
}

check "GRPO on one rank" run one 1
out=$(sound one 4) && ok "one rank: $out" || bad "one rank: $out"
check "GRPO on two ranks" run two 2
out=$(sound two 4) && ok "two ranks: $out" || bad "two ranks: $out"
[ "$(routers "$dir/model" "$dir/two/step_4/policy/weights")" = same ] && ok "routers stay as they are" ||
  bad "frozen routers"
# Stages and context ranks change no bit of a log-prob: the first step is one rank's.
first() {
  python3 -c 'import json, sys
row = next(x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x)
print(*(f"{row[key]:.6g}" for key in ("train/reward", "train/loss", "train/grad_norm", "train/moe/expert_load",
  "train/moe/unused_experts", "train/moe/router_entropy")))' "$dir/$1-logs/train.jsonl"
}
for layout in "pp2 2 policy.megatron_cfg.pipeline_model_parallel_size=2" \
  "pp2cp2 4 policy.megatron_cfg.pipeline_model_parallel_size=2 policy.megatron_cfg.context_parallel_size=2" \
  "cp2 2 policy.megatron_cfg.context_parallel_size=2"; do
  set -- $layout
  check "GRPO on $1" run "$@"
  out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  [ -n "$(first one)" ] && [ "$(first "$1")" = "$(first one)" ] &&
    ok "$1: the first step is one rank's: $(first "$1")" ||
    bad "$1: the first step is $(first "$1"), one rank's $(first one)"
done
# Tensor ranks add up in another order, but sampler and loss in the same.
check "GRPO on tp2" run tp2 2 policy.megatron_cfg.tensor_model_parallel_size=2
out=$(sound tp2 4) && ok "tp2: $out" || bad "tp2: $out"
check "GRPO on tp2 and pp2, routers that are trained" run tp2pp2 4 policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.megatron_cfg.pipeline_model_parallel_size=2 policy.megatron_cfg.freeze_moe_router=false
out=$(sound tp2pp2 4) && ok "tp2 and pp2: $out" || bad "tp2 and pp2: $out"
[ "$(routers "$dir/model" "$dir/tp2pp2/step_4/policy/weights")" = other ] && ok "tp2 and pp2: routers change" ||
  bad "trained routers over tensor ranks"
check "two steps on tp2" run wider 2 policy.megatron_cfg.tensor_model_parallel_size=2 grpo.max_num_steps=2
cp -r "$dir/wider" "$dir/narrower"
check "the rest of them on tp2" run wider 2 policy.megatron_cfg.tensor_model_parallel_size=2
[ "$(weights wider 4)" = "$(weights tp2 4)" ] && ok "tp2 resumed: weights and moments bit for bit" ||
  bad "a resume of tp2"
check "the rest of them on one rank" run narrower 1
[ -d "$dir/narrower/step_4" ] && ok "one rank went on with what two tensor ranks had" || bad "tp2 to one rank"
check "two steps on pp2" run deeper 2 policy.megatron_cfg.pipeline_model_parallel_size=2 grpo.max_num_steps=2
check "the rest of them on one rank" run deeper 1
[ -d "$dir/deeper/step_4" ] && ok "one rank went on with what two stages had" || bad "one rank went on"
check "routers that are trained" run routed 2 policy.megatron_cfg.freeze_moe_router=false
[ "$(routers "$dir/model" "$dir/routed/step_4/policy/weights")" = other ] && ok "and then they change" ||
  bad "trained routers"
out=$(sound routed 4) && ok "trained routers: $out" || bad "trained routers: $out"
# What the routers of NAME did: values that a mixture of 8 experts can have, and with a balancing loss a fuller expert
# than the mean costs more than 1, Switch's value of even shares, times its weight.
balance() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" <<'PY'
import json, math, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
weight = float(sys.argv[2])
for x in rows:
    assert 1 <= x["train/moe/expert_load"] <= x["train/moe/expert_load_max"] <= 8 / 2, x
    assert 0 <= x["train/moe/unused_experts"] <= 2 * 6 and 0 < x["train/moe/router_entropy"] <= math.log(8), x
    losses = [x[name] for name in x if name.endswith("load_balancing_loss")]
    assert len(losses) == (weight > 0) and all(0.99 * weight <= loss <= 4 * weight for loss in losses), x
last = rows[-1]
print(f"{len(rows)} steps, load {rows[0]['train/moe/expert_load']:.3f} to {last['train/moe/expert_load']:.3f}")
PY
}
out=$(balance routed 0) && ok "what routers do is in the log: $out" || bad "router metrics: $out"
for kind in aux_loss seq_aux_loss; do
  check "$kind" run "$kind" 2 policy.megatron_cfg.freeze_moe_router=false \
    policy.megatron_cfg.moe_router_load_balancing_type=$kind policy.megatron_cfg.moe_aux_loss_coeff=0.5
  out=$(balance "$kind" 0.5) && ok "$kind: $out" || bad "$kind: $out"
done
# On two nodes of one rank each, as they are started.
spanning() { # spanning NAME [overrides...]: what rank 0 says is in $dir/out
  local name=$1 port=$((20000 + RANDOM % 10000)) other code; shift
  local command="$TRIREME launch --nproc-per-node 1 --nnodes 2 --master-addr 127.0.0.1 --master-port $port"
  local arguments
  arguments=$(run_args "$name" grpo.val_period=0 grpo.val_at_start=false cluster.device=cpu cluster.num_nodes=2 \
    cluster.gpus_per_node=1 policy.megatron_cfg.enabled=true grpo.max_num_steps=4 \
    loss_fn.reference_policy_kl_penalty=0.05 policy.generation.max_running_samples=8 \
    policy.generation.kv_cache_tokens=400 "$@")
  $command --node-rank 1 -- $arguments >/dev/null 2>&1 & other=$!
  $command --node-rank 0 -- $arguments >"$dir/out" 2>&1; code=$?
  wait $other && return $code
}
spanning balanced_ep policy.megatron_cfg.freeze_moe_router=false \
  policy.megatron_cfg.moe_router_load_balancing_type=seq_aux_loss policy.megatron_cfg.moe_aux_loss_coeff=0.5 \
  policy.megatron_cfg.expert_model_parallel_size=2 &&
  ok "seq_aux_loss over expert parallel ranks" || bad "seq_aux_loss over expert parallel ranks" "$(cat "$dir/out")"
[ "$(grep -c "etp 1 x ep 2 spans nodes of 1 GPUs" "$dir/out")" = 1 ] && ok "a group that spans nodes is told once" ||
  bad "nothing is said of a group that spans nodes" "$(cat "$dir/out")"
out=$(balance balanced_ep 0.5) && ok "over expert parallel ranks: $out" || bad "over expert parallel ranks: $out"
# Ranks that share a micro-batch count its tokens together: the first loss is that of one rank, within rounding.
check "aux_loss on one rank" run alone_balanced 1 policy.megatron_cfg.freeze_moe_router=false \
  policy.megatron_cfg.moe_router_load_balancing_type=aux_loss policy.megatron_cfg.moe_aux_loss_coeff=0.5
check "aux_loss over tensor and context ranks" run shared_balanced 4 policy.megatron_cfg.freeze_moe_router=false \
  policy.megatron_cfg.moe_router_load_balancing_type=aux_loss policy.megatron_cfg.moe_aux_loss_coeff=0.5 \
  policy.megatron_cfg.tensor_model_parallel_size=2 policy.megatron_cfg.context_parallel_size=2
balanced() {
  python3 -c 'import json, sys
row = next(x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x)
print("{:.3g}".format(row["train/moe/load_balancing_loss"]))' "$dir/$1-logs/train.jsonl"
}
out=$(balance shared_balanced 0.5) && ok "over tensor and context ranks: $out" || bad "over shared micro-batches: $out"
[ -n "$(balanced alone_balanced)" ] && [ "$(balanced shared_balanced)" = "$(balanced alone_balanced)" ] &&
  ok "the first balancing loss is one rank's: $(balanced alone_balanced)" ||
  bad "the first balancing loss is $(balanced shared_balanced), one rank's $(balanced alone_balanced)"
# A back-end that is off says nothing about routers.
check "a Megatron section that is off" run off 1 policy.megatron_cfg.enabled=false grpo.max_num_steps=1 \
  policy.megatron_cfg.freeze_moe_router=false policy.megatron_cfg.moe_router_load_balancing_type=aux_loss
[ "$(routers "$dir/model" "$dir/off/step_1/policy/weights")" = same ] && ok "its routers stay as they are" ||
  bad "routers of a section that is off"
check "Mixtral" run mixtral 2 policy.model_name="$dir/mixtral" policy.megatron_cfg.moe_router_dtype=fp32
out=$(sound mixtral 4) && ok "Mixtral: $out" || bad "Mixtral: $out"
echo '{"prompt": "1+2="}' | "$TRIREME" generate --model "$dir/two/step_4/policy/weights" --temperature 0 \
  >"$dir/out" 2>"$dir/err" && ok "the saved weights are a model" || bad "the saved weights" "$(cat "$dir/err")"

check "two steps" run again 2 grpo.max_num_steps=2
cp -r "$dir/again" "$dir/alone"
check "the rest of them" run again 2
[ "$(weights again 4)" = "$(weights two 4)" ] && ok "resumed: weights and moments bit for bit" || bad "a resume"
check "the rest of them on one rank" run alone 1
[ -d "$dir/alone/step_4" ] && ok "one rank went on with what two had" || bad "another number of ranks"

# Experts split over ranks: the same bits of sampler and loss, each other's checkpoints, a whole model at the end.
check "EP2" run ep2 2 policy.megatron_cfg.expert_model_parallel_size=2
out=$(sound ep2 4) && ok "EP2: $out" || bad "EP2: $out"
# Experts and all else shared by the ranks that hold the same of them.
check "EP2 on four ranks, gradients and weights shared" run ep2dp4 4 \
  policy.megatron_cfg.expert_model_parallel_size=2 \
  policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy=optim_grads_params
out=$(sound ep2dp4 4) && ok "EP2 on four ranks: $out" || bad "EP2 on four ranks: $out"
check "EP2 of the other back-end" run dtensor 2 policy.megatron_cfg.enabled=false policy.dtensor_cfg.enabled=true \
  policy.dtensor_cfg.expert_parallel_size=2 grpo.max_num_steps=2 checkpointing.enabled=false
out=$(sound dtensor 2) && ok "EP2 of the other back-end: $out" || bad "EP2 of the other back-end: $out"
check "EP4 with trained routers" run ep4 4 policy.megatron_cfg.expert_model_parallel_size=4 \
  policy.megatron_cfg.freeze_moe_router=false
out=$(sound ep4 4) && ok "EP4: $out" || bad "EP4: $out"
[ "$(routers "$dir/model" "$dir/ep4/step_4/policy/weights")" = other ] && ok "EP4: routers change" ||
  bad "trained routers under EP4"
echo '{"prompt": "1+2="}' | "$TRIREME" generate --model "$dir/ep2dp4/step_4/policy/weights" --temperature 0 \
  >"$dir/out" 2>"$dir/err" && ok "EP2 saves a whole model" || bad "weights of EP2" "$(cat "$dir/err")"
check "two steps of EP2" run epagain 2 grpo.max_num_steps=2 policy.megatron_cfg.expert_model_parallel_size=2
cp -r "$dir/epagain" "$dir/epalone"
check "the rest of them" run epagain 2 policy.megatron_cfg.expert_model_parallel_size=2
[ "$(weights epagain 4)" = "$(weights ep2 4)" ] && ok "EP2 resumed: weights and moments bit for bit" ||
  bad "a resume of EP2"
check "the rest of them on one rank" run epalone 1
[ -d "$dir/epalone/step_4" ] && ok "one rank went on with what EP2 had" || bad "EP2 to one rank"

# With the other splits: expert groups of tensor ranks of one replica, and of several; of context ranks; of a stage.
for layout in "tp2ep2 2 policy.megatron_cfg.tensor_model_parallel_size=2" \
  "tp2ep2dp2 4 policy.megatron_cfg.tensor_model_parallel_size=2" \
  "cp2ep2 2 policy.megatron_cfg.context_parallel_size=2" \
  "pp2ep2 4 policy.megatron_cfg.pipeline_model_parallel_size=2"; do
  set -- $layout policy.megatron_cfg.expert_model_parallel_size=2
  check "GRPO on $1" run "$@"
  out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
done
# ep changes no bit of a log-prob: the first step is that of whole experts, but for the order of gradients' sums.
near() { first "$1" | awk '{ $3 = sprintf("%.3g", $3); print }'; }
for pair in "tp2ep2 tp2" "cp2ep2 one" "pp2ep2 two"; do
  set -- $pair
  [ -n "$(near "$2")" ] && [ "$(near "$1")" = "$(near "$2")" ] && ok "$1: the first step is that of $2: $(near "$2")" ||
    bad "$1: the first step is $(near "$1"), that of $2 $(near "$2")"
done
check "two steps of tp2ep2" run mixed 4 grpo.max_num_steps=2 policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.megatron_cfg.expert_model_parallel_size=2
cp -r "$dir/mixed" "$dir/unmixed"
check "the rest of them" run mixed 4 policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.megatron_cfg.expert_model_parallel_size=2
[ "$(weights mixed 4)" = "$(weights tp2ep2dp2 4)" ] && ok "tp2ep2 resumed: weights and moments bit for bit" ||
  bad "a resume of tp2ep2"
check "the rest of them under EP4" run unmixed 4 policy.megatron_cfg.expert_model_parallel_size=4
[ -d "$dir/unmixed/step_4" ] && ok "EP4 went on with what tp2ep2 had" || bad "tp2ep2 to EP4"
# Experts that ranks share by their width: other bits, of sampler and loss alike.
check "ETP2" run etp2 2 policy.megatron_cfg.expert_tensor_parallel_size=2
out=$(sound etp2 4) && ok "ETP2: $out" || bad "ETP2: $out"
check "two steps of ETP2 EP2 PP2" run cut 8 grpo.max_num_steps=2 policy.megatron_cfg.expert_tensor_parallel_size=2 \
  policy.megatron_cfg.expert_model_parallel_size=2 policy.megatron_cfg.pipeline_model_parallel_size=2
out=$(sound cut 2) && ok "ETP2 EP2 PP2: $out" || bad "ETP2 EP2 PP2: $out"
check "the rest of them under TP2 EP2" run cut 2 policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.megatron_cfg.expert_model_parallel_size=2
[ -d "$dir/cut/step_4" ] && ok "TP2 EP2 went on with what ETP2 EP2 PP2 had" || bad "ETP2 EP2 PP2 to TP2 EP2"
echo '{"prompt": "1+2="}' | "$TRIREME" generate --model "$dir/etp2/step_4/policy/weights" --temperature 0 \
  >"$dir/out" 2>"$dir/err" && ok "ETP2 saves a whole model" || bad "weights of ETP2" "$(cat "$dir/err")"
# What configs/qwen3_30b_a3b.yaml says, but for EP4 instead of 8: TP2 on eight processes.
check "the recipe's splits on eight processes" run recipe 8 policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.megatron_cfg.expert_model_parallel_size=4 policy.megatron_cfg.expert_tensor_parallel_size=1 \
  policy.megatron_cfg.sequence_parallel=true policy.megatron_cfg.activation_checkpointing=true \
  policy.megatron_cfg.freeze_moe_router=true policy.megatron_cfg.moe_router_dtype=fp64
out=$(sound recipe 4) && ok "the recipe's splits: $out" || bad "the recipe's splits: $out"
# What ranks stand still for rows of experts is a part of what they do for all exchanges.
waits() { # waits NAME: steps that say so, or "none"
  python3 -c 'import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
told = [(x["performance/expert_exchange_s"], x["performance/exposed_exchange_s"]) for x in rows
        if "performance/expert_exchange_s" in x]
assert all(0 < experts <= all_ * 1.000001 for experts, all_ in told), told
print(len(told) if told else "none")' "$dir/$1-logs/train.jsonl"
}
for name in ep2 tp2ep2dp2 etp2; do
  out=$(waits $name 2>&1)
  [ "$out" = 4 ] && ok "$name: what is waited for experts is in the log" || bad "$name: waits for experts: $out"
done
out=$(waits tp2 2>&1)
[ "$out" = none ] && ok "without experts over ranks there is no such number" || bad "tp2: waits for experts: $out"

# A rank that dies is named with its place and its signal, by whoever waits for its rows, in any phase that has some.
kills() { # kills PHASE RANK PLACE RANKS [overrides...]: in the second step
  local phase=$1 rank=$2 place=$3 ranks=$4 code; shift 4
  SECONDS=0
  TRIREME_FAULT="kill@2:$rank:$phase" run "killed-$phase-$rank" "$ranks" $far_deadline "$@" >"$dir/out" 2>&1; code=$?
  if [ $code = 137 ] && [ $SECONDS -le $soon ] && grep -q "rank $rank failed first (signal 9" "$dir/out" &&
    grep -q "rank $rank ($place) has died.*signal 9 (Killed)" "$dir/out"
  then ok "rank $rank of an expert group killed in phase $phase: named, $SECONDS s"
  else bad "rank $rank of an expert group killed in phase $phase: code $code, $SECONDS s" "$(cat "$dir/out")"; fi
}
for phase in generation training; do
  kills $phase 1 "dp 1, ep 1" 2 policy.megatron_cfg.expert_model_parallel_size=2
  kills $phase 0 "tp 0, dp 0, ep 0" 4 policy.megatron_cfg.tensor_model_parallel_size=2 \
    policy.megatron_cfg.expert_model_parallel_size=4
done
check "what a killed rank of an expert group left goes on" run killed-training-1 2 \
  policy.megatron_cfg.expert_model_parallel_size=2
[ "$(weights killed-training-1 4)" = "$(weights ep2 4)" ] && ok "to the weights and moments of the undisturbed run" ||
  bad "a run that goes on behind a killed rank"
run killed 4 policy.megatron_cfg.tensor_model_parallel_size=2 policy.megatron_cfg.expert_model_parallel_size=4 \
  grpo.max_num_steps=200 $far_deadline >"$dir/out" 2>&1 & launcher=$!
await 240 test -d "$dir/killed/step_2"
victim=$(pgrep -f "logger.log_dir=$dir/killed-logs" | while read -r pid; do
  grep -qz "^RANK=3\$" "/proc/$pid/environ" 2>/dev/null && echo "$pid"; done | head -1)
kill -9 "$victim"; SECONDS=0; wait $launcher
[ $SECONDS -le $soon ] && grep -q "rank 3 (tp 1, dp 1, ep 3)" "$dir/out" && ok "a killed rank of a group is named" ||
  bad "a killed rank of an expert group ($SECONDS s)" "$(tail -5 "$dir/out")"

# What cannot be, in one sentence before any weight is read.
refused() {
  local name=$1 words=$2; shift 2
  run refused "$@" >"$dir/out" 2>&1 && { bad "$name was not refused"; return; }
  grep -qF "$words" "$dir/out" && ok "$name is refused" || bad "$name" "$(tail -3 "$dir/out")"
}
refused "ep that does not divide the blocks" "ep 4 does not divide the 2 blocks" 4 \
  policy.megatron_cfg.expert_model_parallel_size=4 policy.moe_combine_blocks=2
for axis in expert_model expert_tensor; do
  short=ep; [ $axis = expert_tensor ] && short=etp
  refused "$short of a dense model" "$short 2 for a model without experts; $short must be 1" 2 \
    policy.model_name="$dir/dense" policy.megatron_cfg.${axis}_parallel_size=2
done
refused "blocks that do not divide" "policy.moe_combine_blocks is 3, which does not divide the model's" 1 \
  policy.moe_combine_blocks=3
refused "a balancing loss with frozen routers" "freeze_moe_router keeps routers from being trained" 1 \
  policy.megatron_cfg.moe_router_load_balancing_type=aux_loss
refused "a bias of the loss-free kind" "experts are chosen without a bias" 1 \
  policy.megatron_cfg.moe_router_bias_update_rate=0.001
# A dense model has no routers: keys of a balancing loss get one warning, and the run goes on.
run balanced_dense 2 policy.model_name="$dir/dense" policy.megatron_cfg.moe_router_load_balancing_type=aux_loss \
  policy.megatron_cfg.moe_aux_loss_coeff=0.01 grpo.max_num_steps=1 >"$dir/out" 2>&1; code=$?
[ $code = 0 ] && [ "$(grep -c "has no experts to balance" "$dir/out")" = 1 ] &&
  ok "a balancing loss of a dense model is warned of once" || bad "a dense model's balancing loss: $code" \
  "$(tail -5 "$dir/out")"
finish
