#!/usr/bin/env bash
# A model split over two GPUs, by tensor ranks and by pipeline stages: exchanges bit for bit as they are defined, whole
# runs with no token of other bits, one rank's answers, resumes, and a rank that dies.
#   TRIREME=build/cuda/trainer/cli/trireme tests/gpu/layouts_test.sh
# PARTS="exchanges dense sharding experts refit nccl long tuning resume failures four": only these; four needs four
# GPUs and is left out where there are fewer.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
parts=${PARTS-exchanges dense sharding experts refit nccl long tuning resume failures four}
wanted() { [[ " $parts " == *" $1 "* ]]; }
"$TRIREME" init-model --out "$dir/model" --hidden 512 --layers 4 --heads 8 --kv-heads 4 --head-dim 64 \
  --intermediate 1024 >/dev/null
"$TRIREME" init-task addition --out "$dir/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null
ddp=policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy
# run NAME RANKS TP PP [overrides...]
run() {
  local name=$1 ranks=$2 tp=$3 pp=$4; shift 4
  "$TRIREME" launch --nproc-per-node "$ranks" -- $(run_args "$name" grpo.val_period=0 grpo.val_at_start=false \
    cluster.device=cuda policy.precision=bfloat16 cluster.gpus_per_node="$ranks" policy.dtensor_cfg.enabled=false \
    policy.megatron_cfg.enabled=true policy.megatron_cfg.tensor_model_parallel_size="$tp" \
    policy.megatron_cfg.pipeline_model_parallel_size="$pp" grpo.max_num_steps=4 \
    loss_fn.reference_policy_kl_penalty=0.05 cluster.collective_timeout_s=40 "$@")
}
if wanted exchanges; then
  exchange() { # exchange SHAPE: elements that differ from the definition
    "$TRIREME" launch --nproc-per-node 2 -- bench exchange --tp 2 --shape "$1" --rows 1,3,16,64,250 --large-mib 16 \
      --json "$dir/exchange.json" >"$dir/out" 2>"$dir/err" &&
      python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(sum(x["differing"] for x in r["small"] +
        r["large"]), "over memory" if r["over_memory"] else "over the communicator")' "$dir/exchange.json"
  }
  for shape in tiny llama-3.1-8b; do
    out=$(exchange $shape) || out=$(cat "$dir/err")
    [ "$out" = "0 over memory" ] && ok "exchanges of $shape: $out" || bad "exchanges of $shape: $out"
  done
  # Weights from one process's device to another's.
  refit() { # refit SHAPE [options...]
    local shape=$1; shift
    "$TRIREME" launch --nproc-per-node 2 -- bench refit --shape "$shape" --repeats 10 "$@" --json "$dir/refit.json" \
      >"$dir/out" 2>"$dir/err" &&
      python3 -c 'import json, sys
print("the same bits" if json.load(open(sys.argv[1]))["same_bits"] else "other bits")' "$dir/refit.json"
  }
  for options in "tiny" "qwen3-1.7b" "qwen3-1.7b --no-second-buffer"; do
    out=$(refit $options) || out=$(cat "$dir/err")
    [ "$out" = "the same bits" ] && ok "weights of $options: $out" || bad "weights of $options: $out"
  done
fi
if wanted dense; then
  # Samples of many lengths and few places: while one lane decodes the other has a prompt, or another number of rows.
  uneven="policy.generation.forced_lengths=synthetic:8x4:mean=7:max=12:prompt=6"
  uneven+=" policy.generation.max_running_samples=12"
  for layout in "one 1 1 1" "tp2 2 2 1" "pp2 2 1 2" "onelane 2 1 2 policy.generation.pipeline_lanes=1" \
    "virtual 2 1 2 policy.megatron_cfg.virtual_pipeline_model_parallel_size=2" \
    "uneven 2 1 2 policy.megatron_cfg.virtual_pipeline_model_parallel_size=2 $uneven" \
    "shared 2 2 1 policy.sequence_packing.share_prompts=true" \
    "cp2 2 1 1 policy.megatron_cfg.context_parallel_size=2" \
    "filters 2 2 1 policy.generation.top_k=20 policy.generation.top_p=0.9 policy.train_global_batch_size=32"; do
    set -- $layout
    check "GRPO on $1" run "$@"
    out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  done
  # Rows travel by copy engines beside products, or are awaited: six steps, the same weights and moments. Of few rows a
  # rank and of more than our own kernels take; over NCCL below.
  for pair in "tp2-six" "tp2-large policy.train_micro_batch_size=32 policy.train_global_batch_size=32"; do
    set -- $pair
    name=$1; shift
    for overlap in true false; do
      check "GRPO on $name, overlap $overlap" run "$name-$overlap" 2 2 1 grpo.max_num_steps=6 \
        policy.megatron_cfg.tp_comm_overlap=$overlap "$@"
    done
    out=$(sound "$name-true" 6) && ok "$name: $out" || bad "$name: $out"
    [ -n "$(weights "$name-true" 6)" ] && [ "$(weights "$name-true" 6)" = "$(weights "$name-false" 6)" ] &&
      ok "$name: overlap changes no bit of weights and moments" || bad "$name: overlap"
  done
  # Stages change no bit of a log-prob, so the first step has one rank's samples and loss; a tied embedding's gradient
  # is a sum of two.
  [ -n "$(first one)" ] && [ "$(first pp2)" = "$(first one)" ] &&
    ok "the first step on two stages is one rank's: $(first pp2)" ||
    bad "the first step on two stages: $(first pp2), one rank's $(first one)"
fi
if wanted sharding; then
  # Shared gradients and weights over two replicas, and over two context ranks: whole weights for generation at their
  # addresses, so that graphs hold; a resume; the losses of shared optimizer state.
  for layout in "optim 2 1 1 $ddp=optim" "grads 2 1 1 $ddp=optim_grads" "params 2 1 1 $ddp=optim_grads_params" \
    "params-cp2 2 1 1 $ddp=optim_grads_params policy.megatron_cfg.context_parallel_size=2"; do
    set -- $layout
    check "GRPO on $1" run "$@"
    out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  done
  for name in grads params; do
    [ -n "$(first optim)" ] && [ "$(first $name)" = "$(first optim)" ] &&
      ok "the first step of $name is that of optim: $(first $name)" ||
      bad "the first step of $name: $(first $name), of optim $(first optim)"
  done
  check "two steps on params" run params-again 2 1 1 $ddp=optim_grads_params grpo.max_num_steps=2
  check "the rest of them" run params-again 2 1 1 $ddp=optim_grads_params
  [ "$(weights params-again 4)" = "$(weights params 4)" ] && ok "resumed on params: weights and moments bit for bit" ||
    bad "a resume on params"
fi
# A mixture of experts over stages and over context ranks.
"$TRIREME" init-model --out "$dir/mixture" --family qwen3_moe --hidden 512 --layers 4 --heads 8 --kv-heads 4 \
  --head-dim 64 --intermediate 1024 --experts 8 --experts-per-token 2 --expert-width 256 >/dev/null
experts="policy.megatron_cfg.expert_model_parallel_size=2"
width="policy.megatron_cfg.expert_tensor_parallel_size=2"
if wanted experts; then
  for layout in "moe 1 1 1" "moe-pp2 2 1 2" "moe-cp2 2 1 1 policy.megatron_cfg.context_parallel_size=2" \
    "moe-tp2 2 2 1" "moe-ep2 2 1 1 $experts" "moe-tp2ep2 2 2 1 $experts" "moe-etp2 2 1 1 $width" \
    "moe-tp2etp2 2 2 1 $width"; do
    set -- $layout
    check "GRPO on $1" run "$@" policy.model_name="$dir/mixture"
    out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  done
  # Experts over ranks: as one rank; without peers' memory; two steps, then the rest; a trained router.
  [ "$(first moe-ep2)" = "$(first moe)" ] && ok "the first step of moe-ep2 is one rank's: $(first moe-ep2)" ||
    bad "the first step of moe-ep2: $(first moe-ep2), one rank's $(first moe)"
  NCCL_P2P_DISABLE=1 check "GRPO on moe-ep2 over NCCL" run moe-ep2-nccl 2 1 1 $experts policy.model_name="$dir/mixture"
  out=$(sound moe-ep2-nccl 4) && ok "moe-ep2 over NCCL: $out" || bad "moe-ep2 over NCCL: $out"
  # Decode steps send rows there as training does, over peer memory all ranks gather them: the same bits.
  NCCL_P2P_DISABLE=1 check "GRPO on moe-etp2 over NCCL" run moe-etp2-nccl 2 1 1 $width policy.model_name="$dir/mixture"
  out=$(sound moe-etp2-nccl 4) && ok "moe-etp2 over NCCL: $out" || bad "moe-etp2 over NCCL: $out"
  [ -n "$(first moe-etp2)" ] && [ "$(first moe-etp2-nccl)" = "$(first moe-etp2)" ] &&
    ok "the first step of moe-etp2 over NCCL is that over peer memory: $(first moe-etp2)" ||
    bad "the first step of moe-etp2: $(first moe-etp2), over NCCL $(first moe-etp2-nccl)"
  check "two steps on moe-ep2" run moe-again 2 1 1 $experts policy.model_name="$dir/mixture" grpo.max_num_steps=2
  check "the rest of them" run moe-again 2 1 1 $experts policy.model_name="$dir/mixture"
  [ "$(weights moe-again 4)" = "$(weights moe-ep2 4)" ] && ok "resumed on moe-ep2: weights and moments bit for bit" ||
    bad "a resume on moe-ep2"
  check "a trained router on moe-ep2" run moe-router 2 1 1 $experts policy.model_name="$dir/mixture" \
    policy.megatron_cfg.freeze_moe_router=false policy.megatron_cfg.moe_router_load_balancing_type=aux_loss \
    policy.megatron_cfg.moe_aux_loss_coeff=0.01
  out=$(sound moe-router 4) && ok "moe-router: $out" || bad "moe-router: $out"
fi
if wanted refit; then
  wanted dense || check "GRPO on pp2" run pp2 2 1 2
  # Generation in a layout of its own: folded stages have the run in place, other tensor ranks are said.
  for layout in "folded 2 1 2 policy.generation.fold_pipeline=true" "dp2 2 1 1" \
    "dp2-tp2 2 1 1 policy.generation.tensor_parallel_size=2" \
    "tp2-tp1 2 2 1 policy.generation.tensor_parallel_size=1"; do
    set -- $layout
    check "GRPO on $1" run "$@"
  done
  for name in folded dp2; do out=$(sound $name 4) && ok "$name: $out" || bad "$name: $out"; done
  # Sampled with other sums: near, as a copy of other weights would not be.
  for name in dp2-tp2 tp2-tp1; do
    out=$(python3 -c 'import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
print(len(rows), max(x["train/token_mult_prob_error"] for x in rows))' "$dir/$name-logs/train.jsonl")
    python3 -c 'import sys; sys.exit(0 if sys.argv[1] == "4" and 1 < float(sys.argv[2]) < 1.05 else 1)' $out &&
      ok "$name: log-probs are near: $out" || bad "$name: log-probs: $out"
  done
  [ "$(weights folded 4)" = "$(weights pp2 4)" ] && ok "folded: weights and moments of pp2" || bad "folded against pp2"
fi
if wanted nccl; then
  # Where devices may not map each other's memory NCCL carries all of it.
  export NCCL_P2P_DISABLE=1
  for layout in "nccl-tp2 2 2 1" "nccl-pp2 2 1 2"; do
    set -- $layout
    check "GRPO on $1" run "$@"
    out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  done
  check "GRPO on nccl-tp2, exchanges awaited" run nccl-tp2-awaited 2 2 1 policy.megatron_cfg.tp_comm_overlap=false
  [ "$(weights nccl-tp2-awaited 4)" = "$(weights nccl-tp2 4)" ] && ok "nccl-tp2: overlap changes no bit" ||
    bad "nccl-tp2: overlap"
  unset NCCL_P2P_DISABLE
fi
if wanted long; then
  # Long sequences, cut over context ranks: the bits of the log-probs are one rank's.
  logprobs() { # logprobs NAME RANKS [options...]
    local name=$1 ranks=$2; shift 2
    "$TRIREME" launch --nproc-per-node "$ranks" -- bench train --shape llama-3.1-8b --layers 2 --repeats 1 \
      --no-optimizer --json "$dir/$name.json" "$@" >"$dir/out" 2>&1 &&
      python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["logprobs_fingerprint"])' "$dir/$name.json"
  }
  long="--tokens 4096 --sequences 2 --micro-batches 1"
  one=$(logprobs one 1 $long) && two=$(logprobs two 2 --cp 2 $long) && [ "$one" = "$two" ] &&
    ok "log-probs of long sequences on two context ranks are one rank's: $two" ||
    bad "log-probs of long sequences on two context ranks: $two, one rank's $one" "$(cat "$dir/out")"
  # Rows of 128 MiB between stages, twice what a mailbox holds, several under way.
  large="--tokens 16384 --sequences 4 --micro-batches 3"
  one=$(logprobs one 1 $large) && two=$(logprobs two 2 --pp 2 $large) && [ "$one" = "$two" ] &&
    ok "messages larger than a mailbox: log-probs of two stages are one rank's: $two" ||
    bad "messages larger than a mailbox: $two, one rank's $one" "$(cat "$dir/out")"
fi
if wanted tuning; then
  # Fine-tuning needs no samples: the losses are one rank's within bfloat16's rounding.
  sft() {
    local name=$1 ranks=$2 tp=$3 pp=$4; shift 4
    "$TRIREME" launch --nproc-per-node "$ranks" -- train --config configs/quickstart_sft.yaml \
      policy.model_name="$dir/model" data.train.data_path="$dir/task/warm_start.jsonl" \
      data.train.split_validation_size=10 checkpointing.enabled=false logger.log_dir="$dir/$name-logs" \
      logger.prometheus.enabled=false logger.report=false cluster.device=cuda policy.precision=bfloat16 \
      cluster.gpus_per_node="$ranks" policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true \
      policy.megatron_cfg.tensor_model_parallel_size="$tp" policy.megatron_cfg.pipeline_model_parallel_size="$pp" \
      sft.max_num_steps=6 "$@"
  }
  check "fine-tuning on one rank" sft sft-one 1 1 1
  check "fine-tuning on tp2" sft sft-tp2 2 2 1
  check "fine-tuning on pp2" sft sft-pp2 2 1 2
  check "fine-tuning on cp2" sft sft-cp2 2 1 1 policy.megatron_cfg.context_parallel_size=2
  near() {
    python3 - "$dir/$1-logs/train.jsonl" "$dir/sft-one-logs/train.jsonl" <<'PY'
import json, sys
own, one = ([x["train/loss"] for x in map(json.loads, open(p)) if "train/loss" in x] for p in sys.argv[1:])
furthest = max((abs(a - b) / abs(b) for a, b in zip(own, one)), default=1)
print(f"{len(own)} losses, at most {furthest:.1e} from one rank's")
sys.exit(0 if len(own) == len(one) == 6 and furthest < 0.01 else 1)
PY
  }
  for name in sft-tp2 sft-pp2 sft-cp2; do out=$(near $name) && ok "$name: $out" || bad "$name: $out"; done
fi
if wanted resume; then
  wanted dense || check "GRPO on tp2" run tp2 2 2 1
  # Two steps, then the rest, in the same layout bit for bit and in another at all.
  check "two steps on tp2" run again 2 2 1 grpo.max_num_steps=2
  cp -r "$dir/again" "$dir/stages"
  check "the rest of them" run again 2 2 1
  [ "$(weights again 4)" = "$(weights tp2 4)" ] && ok "resumed on tp2: weights and moments bit for bit" ||
    bad "a resume on tp2"
  check "the rest of them on pp2" run stages 2 1 2
  [ -d "$dir/stages/step_4" ] && ok "pp2 went on with what tp2 had" || bad "pp2 went on"
fi
if wanted failures; then
  # A rank that dies, or stands still.
  for layout in "2 1" "1 2"; do
    set -- $layout; name="tp$1 pp$2"
    : >"$dir/out"
    run killed 2 "$1" "$2" grpo.max_num_steps=100000 checkpointing.enabled=false cluster.collective_timeout_s=900 \
      >"$dir/out" 2>"$dir/err" & pid=$!
    for _ in $(seq 1 1200); do grep -q "step 2/" "$dir/out" && break; sleep 0.1; done
    grep -q "step 2/" "$dir/out" || bad "a run on $name takes two steps" "$(cat "$dir/err")"
    for launcher in $(children_of $pid); do for child in $(children_of "$launcher"); do
      tr '\0' '\n' <"/proc/$child/environ" | grep -q '^RANK=1$' && kill -9 "$child"
    done; done
    SECONDS=0; wait $pid; code=$?
    [ $code = 137 ] && [ $SECONDS -le 30 ] && grep -q "rank 0 .*rank 1 .*has died in phase .*: signal 9" "$dir/err" &&
      ok "kill -9 on $name: code $code, $SECONDS s" ||
      bad "kill -9 on $name: code $code, $SECONDS s" "$(cat "$dir/err")"
  done
  # Ranks that share experts step together in generation, in graphs whose kernels wait for each other: one that dies
  # there, and one whose process is stopped there.
  mixture_until_it_fails() { # mixture_until_it_fails NAME [overrides...]: its process is $pid
    local name=$1; shift
    : >"$dir/out"
    run "$name" 2 1 1 $experts policy.model_name="$dir/mixture" grpo.max_num_steps=100000 checkpointing.enabled=false \
      "$@" >"$dir/out" 2>"$dir/err" & pid=$!
  }
  TRIREME_FAULT=kill@2:1:generation mixture_until_it_fails moe-killed cluster.collective_timeout_s=900
  for _ in $(seq 1 2400); do grep -q "step 1/" "$dir/out" && break; sleep 0.1; done
  SECONDS=0; wait $pid; code=$?
  [ $code = 137 ] && [ $SECONDS -le 60 ] &&
    grep -q "rank 0 .*rank 1 .*has died in phase generation: signal 9" "$dir/err" &&
    ok "kill -9 of an expert rank in generation: code $code, $SECONDS s after step 1" ||
    bad "kill -9 of an expert rank in generation: code $code, $SECONDS s" "$(cat "$dir/err")"
  # Long responses: half a second after a step the next one generates.
  "$TRIREME" init-model --out "$dir/mixture" --family qwen3_moe --hidden 512 --layers 4 --heads 8 --kv-heads 4 \
    --head-dim 64 --intermediate 1024 --experts 8 --experts-per-token 2 --expert-width 256 --context 2048 >/dev/null
  mixture_until_it_fails moe-stopped cluster.collective_timeout_s=20 policy.max_total_sequence_length=2048 \
    policy.generation.kv_cache_tokens=70000 policy.generation.max_new_tokens=1900 \
    policy.generation.forced_lengths=synthetic:8x4:mean=1800:max=1900:prompt=6
  victim=""
  for _ in $(seq 1 2400); do grep -q "step 1/" "$dir/out" && break; sleep 0.1; done
  sleep 0.5
  for launcher in $(children_of $pid); do for child in $(children_of "$launcher"); do
    tr '\0' '\n' <"/proc/$child/environ" | grep -q '^RANK=1$' && victim=$child
  done; done
  kill -STOP "$victim"
  SECONDS=0; wait $pid; code=$?
  [ $code = 20 ] && [ $SECONDS -le 90 ] &&
    grep -q "rank 1 .*on .* has not come (last seen at number .*, phase generation)" "$dir/err" &&
    ok "an expert rank that is stopped in generation: code $code, $SECONDS s" ||
    bad "an expert rank that is stopped in generation: code $code, $SECONDS s" "$(cat "$dir/err")"
fi
if wanted four && [ "$(nvidia-smi -L | wc -l)" -ge 4 ]; then
  # Two split axes at once, replicas of a split model, middle stages, sums over four.
  cp=policy.megatron_cfg.context_parallel_size=2
  for layout in "four-one 1 1 1" "tp2pp2 4 2 2" "tp2dp2 4 2 1" "pp2dp2 4 1 2" "tp4 4 4 1" "pp4 4 1 4" \
    "pp4-onelane 4 1 4 policy.generation.pipeline_lanes=1" "tp2cp2 4 2 1 $cp" "pp2cp2 4 1 2 $cp" \
    "tp2dp2-params 4 2 1 $ddp=optim_grads_params" "folded4 4 2 2 policy.generation.fold_pipeline=true"; do
    set -- $layout
    check "GRPO on $1" run "$@"
    out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  done
  for name in pp4 pp2dp2 pp2cp2; do
    [ "$(first $name)" = "$(first four-one)" ] && ok "the first step of $name is one rank's: $(first $name)" ||
      bad "the first step of $name: $(first $name), one rank's $(first four-one)"
  done
  for layout in "moe4 1 1 1" "moe-ep2dp2 4 1 1 $experts" \
    "moe-ep4 4 1 1 policy.megatron_cfg.expert_model_parallel_size=4" "moe-tp2ep2dp2 4 2 1 $experts" \
    "moe-tp2ep4 4 2 1 policy.megatron_cfg.expert_model_parallel_size=4"; do
    set -- $layout
    check "GRPO on $1" run "$@" policy.model_name="$dir/mixture"
    out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
  done
  for name in moe-ep4 moe-ep2dp2; do
    [ "$(first $name)" = "$(first moe4)" ] && ok "the first step of $name is one rank's: $(first $name)" ||
      bad "the first step of $name: $(first $name), one rank's $(first moe4)"
  done
fi
finish
