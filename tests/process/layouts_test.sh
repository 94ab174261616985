#!/usr/bin/env bash
# Whole runs of a model that is split over tensor ranks and pipeline stages: log-probs of sampler and loss with equal
# bits, resumes, other layouts going on, a rank that dies, and what cannot be split.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_split_fixture
run() { run_split "$@"; }

for layout in "tp2 2 2 1" "tp4 4 4 1" "tp2dp2 4 2 1 logger.dump_steps=[2]" "pp2 2 1 2" \
  "pp4 4 1 4 logger.dump_steps=[2]" "tp2pp2 4 2 2" \
  "virtual 2 1 2 policy.megatron_cfg.virtual_pipeline_model_parallel_size=2" \
  "cp2 2 1 1 policy.megatron_cfg.context_parallel_size=2" \
  "tp2pp2cp2 8 2 2 policy.megatron_cfg.context_parallel_size=2 policy.sequence_packing.share_prompts=true \
logger.dump_steps=[2]"; do
  set -- $layout
  check "GRPO on $1" run "$@"
  out=$(sound "$1" 4) && ok "$1: $out" || bad "$1: $out"
done
# What configs/ asks of more ranks, on eight: Llama-3.1-70B's TP4 PP4 and Qwen3-32B's TP4 PP2. TP4 PP4 CP2 is above.
for layout in "tp2pp4 8 2 4" "tp4pp2 8 4 2"; do
  set -- $layout
  check "GRPO on $1" run "$@" grpo.max_num_steps=2 checkpointing.save_period=2 policy.train_global_batch_size=32
  out=$(sound "$1" 2) && ok "$1: $out" || bad "$1: $out"
done
# One copy of the weights trains and generates.
python3 - "$dir" tp2 pp4 tp2pp2 tp2pp2cp2 tp2pp4 tp4pp2 <<'PY' && ok "in place no weights are fetched" || bad "refits"
import json, sys
for name in sys.argv[2:]:
    rows = [x for x in map(json.loads, open(f"{sys.argv[1]}/{name}-logs/train.jsonl")) if "train/loss" in x]
    if not rows or any(x["performance/refit_bytes"] != 0 for x in rows): sys.exit(name)
PY
# A dumped step is one file a replica, of the rank that has its results, and is computed again on one rank: with the
# same bits where no tensor ranks split the sums.
replayed() { # replayed NAME RANKS MOST: the ranks of the files; how far log-probs of a whole model may be from theirs
  local name=$1 ranks=$2 most=$3 found rank out dump error
  found=$(cd "$dir/$name-logs" && ls dump_step_2_rank_*.safetensors | grep -o '[0-9]*\.' | tr -d '.\n')
  [ "$found" = "$ranks" ] || { bad "$name: ranks that dumped: $found"; return; }
  for rank in $(grep -o . <<<"$ranks"); do
    dump=$dir/$name-logs/dump_step_2_rank_$rank.safetensors
    out=$("$TRIREME" replay "$dump" 2>&1) && grep -q "difference 0$" <<<"$out" ||
      { bad "$name: replay of rank $rank without the model" "$out"; return; }
    out=$("$TRIREME" replay "$dump" --model "$dir/$name/step_1/policy/weights" 2>&1)
    error=$(grep -o "largest log-prob error [^,]*" <<<"$out" | awk '{print $4}')
    awk -v e="${error:-9}" -v most="$most" 'BEGIN { exit !(e <= most) }' ||
      { bad "$name: replay of rank $rank with the model" "$out"; return; }
    [ "$most" != 0 ] || grep -q " 0 tokens differ" <<<"$out" ||
      { bad "$name: bits that rank $rank sampled" "$out"; return; }
  done
  ok "$name: the dumps of ranks $ranks are replayed"
}
replayed pp4 3 0
replayed tp2dp2 02 1e-4
replayed tp2pp2cp2 4 1e-4
# Rows travel beside products, or are awaited. Of sequence_parallel there is one way, and no length needs a divisor.
for layout in "tp2 2 2 1" "tp2pp2 4 2 2"; do
  set -- $layout
  check "GRPO on $1, exchanges awaited" run "$1-awaited" "$2" "$3" "$4" policy.megatron_cfg.tp_comm_overlap=false \
    policy.megatron_cfg.sequence_parallel=true policy.make_sequence_length_divisible_by=3
  [ "$(weights "$1-awaited" 4)" = "$(weights "$1" 4)" ] &&
    ok "$1: overlap and sequence_parallel change no bit of weights and moments" || bad "$1: overlap, sequence_parallel"
done
# What ranks stand still for: stages for each other's rows, tensor ranks for their exchanges.
waits() { # waits NAME TEST: of each step e, seconds of exchanges, b, of the bubble (means of ranks), t, of the step
  python3 -c 'import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
print([(round(e, 4), round(b, 4)) for e, b in
       ((x["performance/exposed_exchange_s"], x["performance/pipeline_bubble_s"]) for x in rows)])
sys.exit(0 if len(rows) == 4 and all(eval(sys.argv[2], {"e": x["performance/exposed_exchange_s"],
  "b": x["performance/pipeline_bubble_s"], "t": x["timing/train/total_step_time"]}) for x in rows) else 1)' \
    "$dir/$1-logs/train.jsonl" "$2"
}
out=$(waits tp2 "0 < e < t and b == 0") && ok "tp2: exchanges are waited for: $out" || bad "what tp2 waits for: $out"
out=$(waits pp4 "0 < b < t and 0 < e < t") && ok "pp4: stages wait for each other: $out" ||
  bad "what pp4 waits for: $out"
# Stages generate in as many lanes as they are; one lane has the same bits.
check "GRPO on pp4 in one lane, six steps" run onelane 4 1 4 policy.generation.pipeline_lanes=1 grpo.max_num_steps=6
check "GRPO on pp4 goes on to six steps" run pp4 4 1 4 logger.dump_steps=[2] grpo.max_num_steps=6
[ "$(weights onelane 6)" = "$(weights pp4 6)" ] && ok "four lanes and one: weights and moments bit for bit" ||
  bad "four lanes and one"
out=$(run idle 2 1 1 policy.megatron_cfg.context_parallel_size=2 grpo.max_num_steps=1 2>&1)
[[ "$out" == *"at most 1 of the 2 context parallel ranks compute one"* ]] &&
  ok "a cp above a sequence's pieces is said" || bad "a cp above a sequence's pieces" "$out"
[ "$(ls "$dir/tp2dp2/step_4/policy/optimizer" | wc -l)" = 4 ] && ok "four ranks saved their part" ||
  bad "what four ranks saved"
echo '{"prompt": "1+2="}' | "$TRIREME" generate --model "$dir/tp2dp2/step_4/policy/weights" --temperature 0 \
  >"$dir/out" 2>"$dir/err" && ok "the saved weights are a model" || bad "the saved weights" "$(cat "$dir/err")"

# Two steps, then the rest: in the same layout bit for bit, in others at all.
check "two steps" run again 4 2 1 grpo.max_num_steps=2
cp -r "$dir/again" "$dir/alone"
check "the rest of them" run again 4 2 1
[ "$(weights again 4)" = "$(weights tp2dp2 4)" ] && ok "resumed on tp2 dp2: weights and moments bit for bit" ||
  bad "a resume on tp2 dp2"
check "the rest of them on one rank" run alone 1 1 1
cp -r "$dir/alone" "$dir/four"; rm -rf "$dir/four/step_4"
check "the last step on tp4" run four 4 4 1
sound four 1 >/dev/null; [ -d "$dir/four/step_4" ] && ok "one rank and tp4 went on with what tp2 dp2 had" ||
  bad "other layouts went on"
check "two steps on tp2 pp2" run stages 4 2 2 grpo.max_num_steps=2
cp -r "$dir/stages" "$dir/deeper"
check "the rest of them on tp2 pp2" run stages 4 2 2
[ "$(weights stages 4)" = "$(weights tp2pp2 4)" ] && ok "resumed on tp2 pp2: weights and moments bit for bit" ||
  bad "a resume on tp2 pp2"
check "the rest of them on pp4" run deeper 4 1 4
[ -d "$dir/deeper/step_4" ] && ok "pp4 went on with what tp2 pp2 had" || bad "pp4 went on"

# Fine-tuning: the losses of one rank.
sft() {
  local name=$1 ranks=$2 pp=$3; shift 3
  "$TRIREME" launch --nproc-per-node "$ranks" -- train --config configs/quickstart_sft.yaml \
    policy.model_name="$dir/model" data.train.data_path="$dir/task/warm_start.jsonl" \
    data.train.split_validation_size=10 checkpointing.enabled=false \
    logger.log_dir="$dir/$name-logs" logger.prometheus.enabled=false logger.report=false cluster.device=cpu \
    cluster.gpus_per_node="$ranks" policy.megatron_cfg.enabled=true \
    policy.megatron_cfg.pipeline_model_parallel_size="$pp" sft.max_num_steps=3 sft.val_period=3 sft.val_batches=1 \
    policy.train_global_batch_size=16 policy.train_micro_batch_size=4 "$@"
}
check "SFT on one rank" sft sft1 1 1
check "SFT on cp2" sft sft2 2 1 policy.megatron_cfg.context_parallel_size=2
check "SFT on pp4" sft sft4 4 4
check "SFT on tp2 pp2 cp2" sft sft8 8 2 policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.megatron_cfg.context_parallel_size=2
for many in sft2 sft4 sft8; do
python3 - "$dir" $many <<'PY' && ok "$many: loss, gradient norm and validation of one rank" || bad "the losses of $many"
import json, sys
def rows(name):
    return [x for x in map(json.loads, open(f"{sys.argv[1]}/{name}-logs/train.jsonl"))
            if "train/loss" in x or "validation/loss" in x]
one, four = rows("sft1"), rows(sys.argv[2])
keys = ["train/loss", "train/grad_norm", "validation/loss"]
pairs = [(a[k], b[k]) for a, b in zip(one, four) for k in keys if k in a]
sys.exit(0 if len(one) == len(four) >= 3 and len(pairs) >= 7 and
         all(abs(a - b) <= 1e-5 * abs(a) for a, b in pairs) else 1)
PY
done

# A rank that dies is named with its place.
killed() { # killed NAME RANKS TP PP RANK PLACE [overrides...]; in the phase that PLACE names a run nearly always is
  local name=$1 ranks=$2 tp=$3 pp=$4 rank=$5 place=$6 launcher victim; shift 6
  for _ in 1 2 3 4 5; do
    rm -rf "${dir:?}/$name"
    run "$name" "$ranks" "$tp" "$pp" grpo.max_num_steps=200 $far_deadline "$@" >"$dir/out" 2>&1 & launcher=$!
    await 240 test -d "$dir/$name/step_2"
    victim=$(pgrep -f "logger.log_dir=$dir/$name-logs" | while read -r pid; do
      grep -qz "^RANK=$rank\$" "/proc/$pid/environ" 2>/dev/null && echo "$pid"; done | head -1)
    kill -9 "$victim"; SECONDS=0; wait $launcher
    grep -q "$place" "$dir/out" && break
    [[ "$place" == *"in phase"* ]] || break
  done
  [ $SECONDS -le $soon ] && grep -q "$place" "$dir/out" && ok "a killed rank is named: $place" ||
    bad "a killed rank ($SECONDS s)" "$(cat "$dir/out")"
}
killed killed 4 2 1 3 "rank 3 (tp 1, dp 1)"
killed lanes 4 1 4 2 "rank 2 has died in phase generation" policy.max_total_sequence_length=256 \
  policy.generation.kv_cache_tokens=2048 policy.generation.forced_lengths=synthetic:8x4:mean=200:max=240:prompt=6
killed middle 6 2 3 3 "rank 3 (tp 1, pp 1)" policy.megatron_cfg.num_layers_in_first_pipeline_stage=2
# A middle stage that computes nonsense is seen where the loss is; one that stands still is named by its neighbours.
faulty() { # faulty FAULT CODE WORDS [overrides...]
  local fault=$1 expected=$2 words=$3 code; shift 3
  TRIREME_FAULT=$fault run "${fault%%@*}" 3 1 3 policy.megatron_cfg.num_layers_in_first_pipeline_stage=2 \
    checkpointing.enabled=false grpo.num_prompts_per_step=6 policy.train_global_batch_size=24 "$@" \
    >"$dir/out" 2>&1; code=$?
  [ $code = "$expected" ] && grep -q -- "$words" "$dir/out" && ok "$fault: code $code" ||
    bad "$fault: code $code" "$(cat "$dir/out")"
}
faulty nan@2:1 21 "rank 2 .*in phase training: the log-prob of a token of sample .* is not finite in the loss"
faulty memory@2:1 1 "rank 1 .*out of memory in phase training: 1.0 PiB were asked for .*; lower the micro-batch"
faulty hang@2:1 30 "rank 1 on .* has not come (last seen at number .*, phase training)" cluster.collective_timeout_s=30

# What cannot be, in one sentence before any weight is read.
refused() { # refused NAME WORDS COMMAND...
  local name=$1 words=$2; shift 2
  "$@" >"$dir/out" 2>&1 && { bad "$name was accepted"; return; }
  grep -q "$words" "$dir/out" && ok "$name" || bad "$name" "$(cat "$dir/out")"
}
mega=policy.megatron_cfg
refused "heads that do not divide" "$mega.tensor_model_parallel_size: .* cannot be split so: tp 3" run odd 3 3 1 \
  grpo.num_prompts_per_step=6 policy.train_global_batch_size=24
refused "layers that do not divide" \
  "$mega.pipeline_model_parallel_size: .* cannot be split so: pp 3 does not divide the 4 layers" run uneven 3 1 3 \
  grpo.num_prompts_per_step=6 policy.train_global_batch_size=24
refused "lanes without stages" "2 lanes need stages: set policy.megatron_cfg.pipeline_model_parallel_size" \
  run laneless 1 1 1 policy.generation.pipeline_lanes=2
refused "stages that do not add up" \
  "$mega.num_layers_in_first_pipeline_stage 3 and $mega.num_layers_in_last_pipeline_stage 2 do not add up" \
  run stages_off 2 1 2 policy.megatron_cfg.num_layers_in_first_pipeline_stage=3 \
  policy.megatron_cfg.num_layers_in_last_pipeline_stage=2
# Two nodes of a rank each, as they are started, whatever the configuration says of nodes.
spanning() {
  local node port=$((20000 + RANDOM % 10000)) pid pids="" codes=""
  for node in 0 1; do
    "$TRIREME" launch --nproc-per-node 1 --nnodes 2 --node-rank $node --master-addr 127.0.0.1 --master-port $port -- \
      $(run_args spanning cluster.device=cpu cluster.gpus_per_node=2 $mega.enabled=true \
        $mega.tensor_model_parallel_size=2) >"$dir/out.$node" 2>&1 & pids="$pids $!"
  done
  for pid in $pids; do wait "$pid"; codes="$codes $?"; done
  [ "$codes" = " 10 10" ] && grep -q "$mega.tensor_model_parallel_size: .*tp 2 does not divide the 1 GPUs of a node" \
    "$dir/out.0" && ok "tensor ranks on two nodes are refused" ||
    bad "tensor ranks on two nodes:$codes" "$(cat "$dir"/out.?)"
}
spanning
# Ranks that would compute something else.
unlike() { # unlike WHAT WORDS PROGRAM [overrides...]: rank 1 has these, rank 0 says WORDS, both end with code 10
  local what=$1 words=$2 other=$3 port=$((20000 + RANDOM % 10000)) rank pid pids="" codes=""; shift 3
  for rank in 0 1; do
    [ $rank = 0 ] && set -- "$TRIREME" "$@" || set -- "$other" "${@:2}"
    RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$1" \
      $(run_args unlike cluster.gpus_per_node=2 $([ $rank = 0 ] || echo "${@:2}")) >"$dir/out.$rank" 2>&1 &
    pids="$pids $!"
  done
  for pid in $pids; do wait "$pid"; codes="$codes $?"; done
  [ "$codes" = " 10 10" ] && grep -q "$words" "$dir/out.0" && ok "ranks with $what are refused" ||
    bad "ranks with $what: codes$codes" "$(cat "$dir/out.0")"
}
unlike "other settings" "rank 1 has other settings than rank 0: grpo.seed is [0-9]* there and 6 here" "$TRIREME" \
  grpo.seed=6
unlike "another layout" "rank 1 has the layout tp=2,.*, rank 0 tp=1," "$TRIREME" $mega.enabled=true \
  $mega.tensor_model_parallel_size=2
cp "$TRIREME" "$dir/trireme" && echo >>"$dir/trireme"
unlike "another program" "rank 1 runs another program than rank 0, of another version or build" "$dir/trireme"
finish
