#!/usr/bin/env bash
# What users see when something is wrong: one sentence, the right exit code, nothing lost.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

# refuses CODE TEXT COMMAND...: ends with CODE and prints TEXT on one line, without a stack trace.
refuses() {
  local code=$1 text=$2 out got; shift 2
  out=$("$@" 2>&1); got=$?
  if [ $got = "$code" ] && grep -qF -- "$text" <<<"$out" && ! grep -q "frame #" <<<"$out"; then ok "refuses: $text"
  else bad "expected code $code (got $got) and '$text'" "$out"; fi
}

refuses 10 "train_global_batch_size" "$TRIREME" $(run_args a policy.train_globl_batch_size=3)
refuses 10 "no/such.yaml" "$TRIREME" train --config no/such.yaml
refuses 10 "no/such/model" "$TRIREME" $(run_args a policy.model_name=no/such/model)
# Below a program that ignores the end of its children, which those inherit.
refuses 10 "no/such/model" timeout 300 env --ignore-signal=CHLD "$TRIREME" launch -- \
  $(run_args a policy.model_name=no/such/model)
refuses 10 "tensor" "$TRIREME" $(run_args a policy.megatron_cfg.enabled=true \
  policy.megatron_cfg.tensor_model_parallel_size=2 cluster.gpus_per_node=2)
refuses 10 "says tp 2, but the RLJob (--layout) says 1; the RLJob decides: set spec.roles.actor.parallelism.tp" \
  "$TRIREME" $(run_args a policy.megatron_cfg.enabled=true policy.megatron_cfg.tensor_model_parallel_size=2 \
    cluster.gpus_per_node=2) --layout tp=1,dp=2
cp -r "$dir/model" "$dir/cut"; truncate -s 1000 "$dir/cut/model.safetensors"
refuses 21 "model.safetensors" "$TRIREME" $(run_args a policy.model_name="$dir/cut")
cp -r "$dir/model" "$dir/unknown"; sed -i 's/"model_type": *"qwen3"/"model_type": "nosuch"/' "$dir/unknown/config.json"
refuses 10 "nosuch" "$TRIREME" $(run_args a policy.model_name="$dir/unknown")
cp -r "$dir/model" "$dir/classifier"
sed -i 's/Qwen3ForCausalLM/Qwen3ForSequenceClassification/' "$dir/classifier/config.json"
refuses 10 "Qwen3ForSequenceClassification with 2 labels" "$TRIREME" $(run_args a policy.model_name="$dir/classifier")
sed -i '0,/{/s//{"num_labels": 1,/' "$dir/classifier/config.json"
refuses 10 "is a value or reward model (...ForSequenceClassification), which generates no text" \
  "$TRIREME" $(run_args a policy.model_name="$dir/classifier")
cp "$dir/task/train.jsonl" "$dir/bad.jsonl"; echo '{"input": "1+1=", "output"' >>"$dir/bad.jsonl"
refuses 21 "bad.jsonl line 331" "$TRIREME" $(run_args a data.train.data_path="$dir/bad.jsonl")
# Before the weights, which cannot be read here, are: a model with 1024 positions.
refuses 10 "policy.max_total_sequence_length is 2048 but the model of" \
  "$TRIREME" $(run_args a policy.model_name="$dir/cut" policy.max_total_sequence_length=2048)
refuses 10 "grpo.val_period is 3 but there is no validation data" \
  "$TRIREME" $(run_args a data.validation.data_path= data.train.split_validation_size=0)
refuses 10 "sft.val_period is 10 but there is no validation data" "$TRIREME" train \
  --config configs/quickstart_sft.yaml policy.model_name="$dir/model" \
  data.train.data_path="$dir/task/warm_start.jsonl" data.train.split_validation_size=0 \
  checkpointing.checkpoint_dir="$dir/a" logger.log_dir="$dir/a-logs"
refuses 10 "there is no value 'val_loss' in this run" "$TRIREME" $(run_args a checkpointing.metric_name=val_loss)

# Prompts of 63, 64 and 65 tokens where prompt and response have 64: the last two are left out and counted.
for n in 62 63 64; do printf '{"input": "%s=", "output": "1"}\n' "$(printf '1%.0s' $(seq 1 $n))"; done \
  >"$dir/long.jsonl"
head -5 "$dir/task/train.jsonl" >>"$dir/long.jsonl"
check "a run with prompts that leave no room for a response" \
  "$TRIREME" $(run_args long data.train.data_path="$dir/long.jsonl" grpo.max_num_steps=2 grpo.max_num_epochs=9)
grep -q '"train/skipped_long_prompts":[1-9]' "$dir/long-logs/train.jsonl" &&
  ok "prompts that fill max_total_sequence_length are counted" ||
  bad "long prompts" "$(cat "$dir/long-logs/train.jsonl")"

refuses 10 "nothing to launch" "$TRIREME" launch --nproc-per-node 2
refuses 10 "'x'" env WORLD_SIZE=x "$TRIREME" $(run_args a)
refuses 10 "spec.network.rdma.require) but this run is on the CPU" env TRIREME_REQUIRE_RDMA=1 \
  "$TRIREME" $(run_args a cluster.device=cpu)
# Ranks on two machines whose template names sockets: before rendezvous and device, with the code of a network.
sockets="requires RDMA (spec.network.rdma.require) but NCCL_NET is 'Socket', which goes over sockets"
refuses 20 "$sockets" env TRIREME_REQUIRE_RDMA=1 NCCL_NET=Socket WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_PORT=1 \
  "$TRIREME" $(run_args a cluster.device=cuda)
refuses 20 "$sockets" env TRIREME_REQUIRE_RDMA=1 NCCL_NET=Socket TRIREME_WORK_PORT=1 MASTER_PORT=1 \
  "$TRIREME" $(run_args a cluster.device=cuda policy.generation.colocated.enabled=false)
refuses 20 "$sockets" env TRIREME_REQUIRE_RDMA=1 NCCL_NET=Socket MASTER_ADDR=192.0.2.1 MASTER_PORT=1 \
  "$TRIREME" engine $(run_args a cluster.device=cuda policy.generation.colocated.enabled=false | cut -d ' ' -f 2-)

# A plan is one of the configuration's devices, wherever it is made: 8.03 G parameters, gradients as the recipe holds
# them and an eighth of them in float32.
refuses 0 "gradients                  18.7        18.7  bfloat16" "$TRIREME" plan --config configs/llama3.1_8b.yaml
refuses 0 "1 nodes of 8 (cluster.gpus_per_node)" "$TRIREME" plan --config configs/llama3.1_8b.yaml
refuses 0 "gradients                  33.7        33.7  float32" "$TRIREME" plan --config configs/llama3.1_8b.yaml \
  policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true
refuses 0 "tp=1,cp=1,ep=1,dp=2,pp=1,etp=1" "$TRIREME" plan --config configs/llama3.1_8b.yaml --gpus 2
refuses 1 "wants least" "$TRIREME" plan --config configs/llama3.1_70b.yaml --gpus 8 --gpu-memory 80
refuses 0 "is the fastest of" "$TRIREME" plan --config configs/qwen3_32b.yaml \
  policy.megatron_cfg.tensor_model_parallel_size=auto policy.megatron_cfg.pipeline_model_parallel_size=auto
refuses 10 "policy.megatron_cfg.tensor_model_parallel_size: auto is for trireme plan" "$TRIREME" train \
  --config configs/qwen3_32b.yaml policy.megatron_cfg.tensor_model_parallel_size=auto
refuses 10 "it is one of no_shard, optim, optim_grads, optim_grads_params" "$TRIREME" plan \
  --config configs/llama3.1_8b.yaml --sharding zero3
# Ranks that train and engines that generate: of the configuration, of the command, of a job's roles, of all devices.
refuses 0 "4 ranks that train, 4 engines that generate," "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml
refuses 0 "memory of an engine, of 2, GiB" "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml --engines 2
refuses 0 "4 ranks that train, 2 engines of 2 devices that generate," "$TRIREME" plan \
  --config configs/ppo_gsm8k_1.5b.yaml policy.generation.tensor_parallel_size=2
refuses 0 " 3x2 " "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml --gpus 8 policy.generation.tensor_parallel_size=2
refuses 10 "leaves no device to train on beside 1 engine of 2 devices" "$TRIREME" plan \
  --config configs/ppo_gsm8k_1.5b.yaml --gpus 2 policy.generation.tensor_parallel_size=2
refuses 0 "8 ranks that train, 8 engines that generate," "$TRIREME" plan -f examples/dedicated-generation.rljob.yaml
# Sizes of training are the actor's, and an engine is on one node.
cat >"$dir/apart.yaml" <<'MANIFEST'
apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: apart}
spec:
  model: {source: Qwen/Qwen3-32B}
  config: {path: configs/llama3.1_8b.yaml, overrides: [policy.generation.colocated.enabled=false]}
  roles:
    actor: {replicas: 2, gpusPerPod: 8, parallelism: {tp: 4, pp: 2}}
    generation: {gpusPerPod: 8, parallelism: {tp: 4}}
MANIFEST
refuses 0 "tp=4,cp=1,ep=1,dp=2,pp=2,etp=1 (16 ranks)" "$TRIREME" plan -f "$dir/apart.yaml"
# Where the configuration says other sizes, in the trainer's words.
sed 's/llama3.1_8b/llama3.1_70b/' "$dir/apart.yaml" >"$dir/against.yaml"
refuses 10 "says pp 4, but the RLJob (--layout) says 2; the RLJob decides: set spec.roles.actor.parallelism.pp" \
  "$TRIREME" plan -f "$dir/against.yaml"
refuses 1 "its 16 devices must share a node, which has 8" "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml \
  --engines 1 policy.generation.tensor_parallel_size=16
refuses 1 "1: an engine in tp=7" "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml --gpus 8 --engines 1 \
  policy.generation.tensor_parallel_size=7
refuses 10 "gpus_per_node is 1, fewer than the 2 devices of an engine" "$TRIREME" plan \
  --config configs/ppo_gsm8k_1.5b.yaml policy.generation.colocated.resources.gpus_per_node=1 \
  cluster.gpus_per_node=5 policy.generation.tensor_parallel_size=2
refuses 10 "--engine-tp is for --engines" "$TRIREME" bench step --shape tiny --device cpu --engines 0 --engine-tp 2
refuses 0 "1 ranks on each" "$TRIREME" plan -f examples/carry-over.rljob.yaml
refuses 0 "engines   waiting" "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml --gpus 8
refuses 0 "tp=2,cp=1,ep=1,dp=2,pp=1,etp=1" "$TRIREME" plan --config configs/ppo_gsm8k_1.5b.yaml --gpus 8 --engines 4
refuses 10 "is for generation in other processes" "$TRIREME" plan --config configs/llama3.1_8b.yaml --engines 2
refuses 10 "plan is of a configuration" "$TRIREME" plan
# Every recipe whose model is published, in its own layout, runs.
recipes=0 cannot=""
for config in configs/*.yaml; do
  case $config in */quickstart*|*/measure_step.yaml) continue ;; esac
  out=$("$TRIREME" plan --config "$config" 2>&1); recipes=$((recipes + 1))
  grep -q "^ *this version  *can run it" <<<"$out" || cannot="$cannot $config"
done
[ -z "$cannot" ] && [ $recipes -ge 13 ] && ok "plan says of $recipes recipes that this version can run them" ||
  bad "recipes that cannot run:$cannot"

# A signal before the loop begins ends a rank at once: here one that waits for a peer that never comes. Afterwards the
# step is finished and saved (resume_test.sh).
port=$((20000 + RANDOM % 10000))
"$TRIREME" launch --nproc-per-node 1 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port $port -- \
  $(run_args lonely cluster.num_nodes=2 $far_deadline) >"$dir/out" 2>&1 & pid=$!
listens() { (exec 3<>/dev/tcp/127.0.0.1/$port); }
await 240 listens || bad "a rank that waits for its peers listens" "$(cat "$dir/out")"
SECONDS=0; kill -TERM $pid; wait $pid; code=$?
if [ $code = 143 ] && [ $SECONDS -le $soon ]; then ok "SIGTERM while peers are waited for: code 143 at once"
else bad "SIGTERM in the rendezvous: code $code after $SECONDS s" "$(cat "$dir/out")"; fi

# What the operator wrote down of the layout.
sizes='"layout": {"tp": 1, "cp": 1, "ep": 1, "dp": 2, "pp": 1, "etp": 1}, "nodes": []'
echo "{\"attempt\": 1, \"worldSize\": 2, $sizes}" >"$dir/topology.json"
refuses 10 "topology.json says worldSize 2, but this rank was started with 1" \
  env TRIREME_TOPOLOGY_FILE="$dir/topology.json" "$TRIREME" $(run_args a) --layout dp=1
refuses 10 "no/topology.json" env TRIREME_TOPOLOGY_FILE=no/topology.json "$TRIREME" $(run_args a) --layout dp=1

# A checkpoint of another model.
check "a run of one step" "$TRIREME" $(run_args first grpo.max_num_steps=1)
"$TRIREME" init-model --out "$dir/wider" --hidden 48 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 \
  --intermediate 48 >/dev/null
refuses 10 "belongs to another run" "$TRIREME" $(run_args first policy.model_name="$dir/wider")

# What else has changed since a checkpoint is said, and the run goes on; without a change nothing is said.
out=$("$TRIREME" $(run_args first grpo.max_num_steps=2) 2>&1); code=$?
if [ $code = 0 ] && ! grep -q "changed since" <<<"$out"; then ok "an unchanged run goes on silently"
else bad "unchanged: code $code" "$out"; fi
out=$("$TRIREME" $(run_args first grpo.max_num_steps=3 policy.optimizer.kwargs.lr=0.25 \
  grpo.num_prompts_per_step=16) 2>&1); code=$?
if [ $code = 0 ] && grep -q "changed since the checkpoint: policy.optimizer.kwargs.lr was .*, is 0.25" <<<"$out" &&
  grep -q "changed since the checkpoint: grpo.num_prompts_per_step was 8, is 16" <<<"$out"
then ok "changed settings are named at a resume"; else bad "changed settings: code $code" "$out"; fi
refuses 10 "of other data" "$TRIREME" $(run_args first grpo.max_num_steps=4 data.seed=99)

# A port that is taken.
exec 3<>/dev/null
python=$(command -v python3) || true
if [ -n "$python" ]; then
  "$python" -c 'import socket,sys,time
s=socket.socket(); s.bind(("0.0.0.0",0)); s.listen(); print(s.getsockname()[1],flush=True); time.sleep(600)' \
    >"$dir/port" & holder=$!
  await 240 test -s "$dir/port"
  refuses 1 "$(cat "$dir/port")" "$TRIREME" $(run_args a logger.prometheus.enabled=true \
    logger.prometheus.port="$(cat "$dir/port")")
  kill $holder; wait $holder 2>/dev/null
fi

# A rank that dies, with a deadline that is far away: the others leave soon, and who died is named with phase and cause.
# of_rank RANK PID...: the one of these processes, and of their children, that is this rank.
of_rank() {
  local rank=$1 pid; shift
  for pid in "$@" $(for parent in "$@"; do pgrep -P "$parent"; done); do
    tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -q "^RANK=$rank$" && echo "$pid"
  done
}
far=(grpo.max_num_steps=100000 checkpointing.enabled=false grpo.val_period=0 $far_deadline)
fresh() { rm -f "$dir"/out.* "$dir"/err.*; : >"$dir/out.0"; seen="step 2/"; }  # before a run
said() { grep -q "$seen" "$dir"/out.* "$dir"/err.*; }
# started NAME: waits until the run has said what is to be $seen.
started() {
  await 240 said && return
  bad "$1: '$seen' was not said" "$(cat "$dir"/err.*)"
}
# kills NAME VICTIM PID...: kills this rank of these launchers or ranks and waits for all. codes: how each ended;
# seconds: after the kill.
kills() {
  local name=$1 victim=$2 pid; shift 2
  started "$name"
  kill -9 $(of_rank "$victim" "$@"); SECONDS=0; codes=""
  for pid in "$@"; do wait "$pid"; codes="$codes $?"; done
  seconds=$SECONDS
}
# judge NAME CODES TEXT FILE...: the last run ended with these codes in time, and each file says TEXT.
judge() {
  local name=$1 expected=$2 text=$3 file silent=""; shift 3
  for file in "$@"; do grep -q -- "$text" "$dir/$file" || silent="$silent $file"; done
  if [ "$codes" = " $expected" ] && [ $seconds -le $soon ] && [ -z "$silent" ]
  then ok "$name: codes$codes, $seconds s after it"
  else bad "$name: codes$codes after $seconds s, not said in:$silent" "$(cat "$dir"/err.*)"; fi
}
# Ranks of one launcher: it sees how they end.
for case in "2 1" "3 1" "3 0"; do
  read -r world victim <<<"$case"
  name="rank $victim of $world killed under launch"
  fresh
  "$TRIREME" launch --nproc-per-node "$world" -- $(run_args "killed-$world-$victim" "${far[@]}") \
    >"$dir/out.0" 2>"$dir/err.0" & pid=$!
  kills "$name" "$victim" $pid
  judge "$name" 137 "rank $victim failed first (signal 9" err.0
  for rank in $(seq 0 $((world - 1))); do
    [ "$rank" = "$victim" ] ||
      judge "$name, rank $rank says so" 137 "rank $rank .*in phase .*rank $victim has died.*: signal 9 (Killed)" err.0
  done
done
# A rank whose reward has workers of its own, which hold the rank's stderr and outlive its program: they hold up nobody.
cat >"$dir/pool.sh" <<'POOL'
setsid sleep 1000 & echo $! >>"$(dirname "$0")/workers"; sleep 1000 &
while read -r line; do echo '{"reward": 0}'; done
POOL
fresh; export TRIREME_TERMINATION_LOG="$dir/termination"
"$TRIREME" launch --nproc-per-node 2 -- $(run_args killed-pool "${far[@]}" env.command.enabled=true \
  env.command.command="[sh,$dir/pool.sh]") >"$dir/out.0" 2>"$dir/err.0" & pid=$!
kills "rank 1 killed, its reward has workers" 1 $pid; unset TRIREME_TERMINATION_LOG
judge "rank 1 killed, its reward has workers" 137 "rank 1 failed first (signal 9" err.0
check "the termination log names it" grep -q '"rank":1' "$dir/termination"
left=$(for worker in $(cat "$dir/workers"); do kill -0 "$worker" 2>/dev/null && echo "$worker"; done)
if [ -s "$dir/workers" ] && [ -z "$left" ]; then ok "the reward's workers are gone"
else bad "workers are left: $left"; fi
# Two launchers of two ranks, as on two machines: only one of them sees it.
fresh
port=$((20000 + RANDOM % 10000)) pids=""
for node in 0 1; do
  "$TRIREME" launch --nproc-per-node 2 --nnodes 2 --node-rank $node --master-addr 127.0.0.1 --master-port $port -- \
    $(run_args killed-nodes "${far[@]}") >"$dir/out.$node" 2>"$dir/err.$node" & pids="$pids $!"
done
kills "a rank of another node killed" 3 $pids
judge "a rank of another node killed" "20 137" "rank 3 has died in phase .*: signal 9 (Killed)" err.0 err.1
judge "it is the cause" "20 137" "rank 3 failed first (signal 9" err.1
# Ranks without a launcher, or with one each as in pods: the end of their connections says it.
# alone RANK WORLD NAME [overrides...]: starts one.
alone() {
  local rank=$1 world=$2 name=$3; shift 3
  RANK=$rank WORLD_SIZE=$world LOCAL_WORLD_SIZE=$world MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    "$TRIREME" $(run_args "$name" "${far[@]}" "$@") >"$dir/out.$rank" 2>"$dir/err.$rank" &
  pids="$pids $!"
}
for case in "2 0" "2 1" "3 1"; do
  read -r world victim <<<"$case"
  name="rank $victim of $world killed, each started for itself"
  fresh
  port=$((20000 + RANDOM % 10000)) pids="" expected="" files=""
  for rank in $(seq 0 $((world - 1))); do
    alone "$rank" "$world" "killed-alone-$world-$victim"
    if [ "$rank" = "$victim" ]; then expected="$expected 137"; else expected="$expected 20" files="$files err.$rank"; fi
  done
  kills "$name" "$victim" $pids 2>/dev/null  # the shell tells of it too
  judge "$name" "${expected# }" \
    "rank . .*in phase .*rank $victim has died.*: its connection was closed without a word" $files
done
# The others are busy, or wait for something that is no connection (a device, say): here for nothing, for ever.
fresh; seen="fails on purpose"
TRIREME_FAULT=hang@2:0 "$TRIREME" launch --nproc-per-node 2 -- $(run_args killed-busy "${far[@]}") \
  >"$dir/out.0" 2>"$dir/err.0" & pid=$!
kills "rank 1 killed while rank 0 is busy" 1 $pid
judge "rank 1 killed while rank 0 is busy" 137 \
  "rank 0 leaves in phase training: rank 1 has died in phase .*: signal 9 (Killed)" err.0
fresh; seen="fails on purpose"
port=$((20000 + RANDOM % 10000)) pids=""
export TRIREME_FAULT=hang@2:1; for rank in 0 1; do alone $rank 2 killed-busy-alone; done; unset TRIREME_FAULT
kills "rank 0 killed while rank 1 is busy" 0 $pids 2>/dev/null
judge "rank 0 killed while rank 1 is busy" "137 20" \
  "rank 1 leaves in phase training: rank 0 has died: its connection was closed without a word" err.1
# A mistake that only one rank has made, found before its loop.
fresh
port=$((20000 + RANDOM % 10000)) pids=""
alone 0 2 one-mistake; alone 1 2 one-mistake policy.model_name=no/such/model
codes=""
for pid in $(printf '%s\n' $pids | tac); do wait "$pid"; codes="$codes $?"; [ "$codes" = " 10" ] && SECONDS=0; done
seconds=$SECONDS
judge "a mistake of one rank" "10 20" "rank 0 .*in phase start.*rank 1 has died in phase start" err.0
# Before the ranks have met.
fresh
"$TRIREME" launch --nproc-per-node 2 -- $(run_args killed-early "${far[@]}") >"$dir/out.0" 2>"$dir/err.0" & pid=$!
there() { victim=$(of_rank 1 $pid); [ -n "$victim" ]; }
await 240 there || victim=$pid
kill -9 $victim; SECONDS=0; wait $pid; codes=" $?" seconds=$SECONDS
judge "rank 1 of 2 killed at the start" 137 "rank 0 .*rank 1 has died.*: signal 9 (Killed)" err.0
# Ends are no deaths.
out=$("$TRIREME" launch --nproc-per-node 3 -- \
  $(run_args ended grpo.max_num_steps=2 checkpointing.enabled=false) 2>&1); code=$?
if [ $code = 0 ] && ! grep -q "has died" <<<"$out"; then ok "a run of three ranks ends without a word of deaths"
else bad "the end of three ranks: code $code" "$out"; fi

# A rank that hangs: the others name it when the collective's deadline has passed, and the launcher ends it. With rank 0
# the store hangs, which the others would ask.
for rank in 1 0; do
  : >"$dir/out"  # what the run before has said is not waited for
  "$TRIREME" launch --nproc-per-node 2 -- $(run_args "hung-$rank" grpo.max_num_steps=100000 \
    checkpointing.enabled=false cluster.collective_timeout_s=30) >"$dir/out" 2>"$dir/err" & pid=$!
  await 240 grep -q "step 2/" "$dir/out"
  victim=$(of_rank $rank $pid)
  [ -n "$victim" ] || kill -TERM $pid  # the run has not come so far, and does not end by itself
  kill -STOP $victim; SECONDS=0
  wait $pid; code=$?
  text="rank 1 on .* has not come (last seen at number"
  [ $rank = 1 ] || text="rank 1 .*rank 0.*, which keeps the store, stands still or cannot be reached"
  if [ $code = 20 ] && grep -q "$text" "$dir/err" && grep -q "rank $rank still runs" "$dir/err" &&
    ! grep -q "has died" "$dir/err" && [ $SECONDS -le $soon ]
  then ok "hanging rank $rank is named and ended, and not taken for dead"
  else bad "hanging rank $rank: code $code after $SECONDS s" "$(cat "$dir/err")"; fi
done

# Failures of one rank of two, caused on purpose: the rank, its phase and what happened are named, the other says whose
# failure it was, both leave.
# fails FAULT CODE FIRST OTHER [overrides...]: the run ends with CODE; FIRST is said of rank 1, OTHER by rank 0.
fails() {
  local fault=$1 expected=$2 first=$3 other=$4; shift 4
  SECONDS=0
  TRIREME_FAULT=$fault timeout 600 "$TRIREME" launch --nproc-per-node 2 -- \
    $(run_args "fault-${fault%%@*}" grpo.max_num_steps=100000 checkpointing.enabled=false \
      $far_deadline "$@") >"$dir/out" 2>"$dir/err"; code=$?
  if [ $code = "$expected" ] && grep -q "rank 1 failed first" "$dir/err" && grep -q -- "$first" "$dir/err" &&
    grep -q -- "$other" "$dir/err" && [ $SECONDS -le $soon ]
  then ok "$fault: code $code after $SECONDS s"; else bad "$fault: code $code after $SECONDS s" "$(cat "$dir/err")"; fi
}
fails nan@2:1 21 "rank 1 on .* in phase training: the log-prob of a token of sample .* is not finite in the loss" \
  "failed: .*rank 1 on .* is not finite in the loss"
fails memory@2:1 1 "rank 1 on .* out of memory in phase training: 1.0 PiB were asked for .*; lower the micro-batch" \
  "failed: .*rank 1 on .* out of memory in phase training"
fails stay@2:1 21 "error: rank 1 on .* in phase training: an error on purpose, behind which a destructor waits" \
  "failed: .*rank 1 on .* an error on purpose"
fails hang@2:1 30 "rank 1 is stuck: the others have given up waiting" \
  "rank 1 on .* has not come (last seen at number .*, phase training)" cluster.collective_timeout_s=20
refuses 10 "KIND@STEP:RANK" env TRIREME_FAULT=flood@1:0 "$TRIREME" $(run_args a)

# Two attempts of one job, as when the cluster has given up a machine whose processes still run: the older one leaves at
# its next checkpoint, and one that comes late is refused.
attempt() {
  exec env TRIREME_JOB_UID=uid TRIREME_ATTEMPT=$1 "$TRIREME" \
    $(run_args fenced grpo.max_num_steps=100000 checkpointing.keep_top_k=2 logger.log_dir="$dir/fenced-$1")
}
attempt 1 >"$dir/out" 2>"$dir/err" & old=$!
some_step() { ls -d "$dir"/fenced/step_*; }
await 240 some_step
attempt 2 >"$dir/out.2" 2>"$dir/err.2" & new=$!
wait $old; code=$?
if [ $code = 20 ] &&
  grep -q "belongs to attempt 2 of this job, on .*; this process is of attempt 1 and writes nothing there any more" \
    "$dir/err"
then ok "an older attempt leaves the folder to the newer"
else bad "older attempt: code $code" "$(cat "$dir/err")"; fi
(attempt 1) >"$dir/out" 2>"$dir/err"; code=$?
if [ $code = 20 ] && grep -q "belongs to attempt 2 of this job" "$dir/err"
then ok "an older attempt that comes late is refused"
else bad "late attempt: code $code" "$(cat "$dir/err")"; fi
await 240 grep -q "step [0-9]*/" "$dir/out.2"
kill -TERM $new; wait $new; code=$?
if [ $code = 40 ] && ! ls -d "$dir"/fenced/tmp_step_* >/dev/null 2>&1; then ok "the newer attempt is not disturbed"
else bad "newer attempt: code $code" "$(cat "$dir/err.2")"; fi

# A full disk at the checkpoint (a small tmpfs, when this may be mounted).
size_of_one=$(du -sb "$dir/first/step_1" | cut -f1)
mkdir -p "$dir/small"
if mount -t tmpfs -o size=200k tmpfs "$dir/small" 2>/dev/null; then
  out=$("$TRIREME" $(run_args a checkpointing.checkpoint_dir="$dir/small/ck") 2>&1); code=$?
  if [ $code = 1 ] && grep -q "No space left" <<<"$out" && [ -z "$(ls "$dir/small/ck" 2>/dev/null)" ]
  then ok "a full disk is named and leaves nothing half-written"
  else bad "full disk: code $code" "$out"; fi
  umount "$dir/small"
fi
# The same when it is full at the second checkpoint, with one rank and with two: the run learns of it a step later, the
# first checkpoint stays.
for ranks in 1 2; do
  if mount -t tmpfs -o size=$((size_of_one * 3 / 2)) tmpfs "$dir/small" 2>/dev/null; then
    out=$("$TRIREME" launch --nproc-per-node $ranks -- \
      $(run_args full checkpointing.checkpoint_dir="$dir/small/ck" grpo.max_num_steps=100000) 2>&1); code=$?
    if [ $code = 1 ] && grep -q "step_2 failed.*No space left" <<<"$out" && [ "$(ls "$dir/small/ck")" = step_1 ]
    then ok "a disk that is full at the second checkpoint, $ranks ranks: the first stays"
    else bad "full at the second checkpoint, $ranks ranks: code $code, left $(ls "$dir/small/ck")" "$out"; fi
    umount "$dir/small"
  fi
done
# A model that cannot fit is refused before its weights are drawn, or looked for, with what would want least.
cp -r "$dir/model" "$dir/huge"
python3 - "$dir/huge/config.json" <<'PY'
import json, sys
config = json.load(open(sys.argv[1]))
config.update(hidden_size=16384, num_hidden_layers=400, intermediate_size=65536)
json.dump(config, open(sys.argv[1], "w"))
PY
out=$(timeout 600 "$TRIREME" $(run_args huge policy.model_name="$dir/huge" policy.random_weights=true) 2>&1); code=$?
[ $code = 10 ] && [[ "$out" == *"of the host for a rank at the least"*"wants least"* ]] &&
  ok "a model that cannot fit is refused" || bad "a model that cannot fit: code $code" "$out"
finish
