#!/usr/bin/env bash
# PPO with a critic on ranks of its own: what it gives on the actor's, its checkpoints, who is named when one dies.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

# own NAME ACTORS CRITICS [overrides...]
own() {
  local name=$1 actors=$2 critics=$3; shift 3
  "$TRIREME" launch --nproc-per-node "$actors" --critic-ranks "$critics" -- $(ppo_args "$name" "$@")
}
steps() { (cd "$1" && ls -d step_* | sort) 2>/dev/null; }

# On the actor's ranks, and on others of several numbers.
check "a critic on the actor's rank" "$TRIREME" $(ppo_args local $one_step)
for ranks in "1 1" "1 2" "2 1"; do
  name="own-${ranks/ /-}"
  check "actor and critic ranks: $ranks" own "$name" $ranks $one_step
  if out=$(python3 - "$dir/local" "$dir/$name" <<'PY'
import array, json, struct, sys
def rows(name):
    return [x for x in map(json.loads, open(name + "-logs/train.jsonl")) if "critic/loss" in x]
def floats(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    values = array.array("f")
    values.frombytes(data[8 + size:])
    return values
def mean_difference(a, b):
    assert len(a) == len(b) > 0
    return sum(abs(x - y) for x, y in zip(a, b)) / len(a)
local, own = sys.argv[1:]
a_rows, b_rows = rows(local), rows(own)
worst = 0
for a, b in zip(a_rows, b_rows):
    names = [n for n in a if n.startswith("critic/")] + ["train/loss", "train/grad_norm", "train/advantages/min"]
    for name in names:
        worst = max(worst, abs(a[name] - b[name]) / max(1.0, abs(a[name])))
    assert b["timing/train/value_inference"] > 0 and b["timing/train/value_training"] > 0
critic = "/{}step_{}/value/weights/model.safetensors"
of_critic = mean_difference(floats(local + critic.format("", 3)), floats(own + critic.format("value/", 3)))
moved = mean_difference(floats(own + critic.format("value/", 1)), floats(own + critic.format("value/", 3)))
actor = "/step_3/policy/weights/model.safetensors"
of_actor = mean_difference(floats(local + actor), floats(own + actor))
print("largest difference", worst, "weights in the mean", of_critic, of_actor, "moved", moved)
sys.exit(0 if len(a_rows) == len(b_rows) == 3 and worst < 1e-5 and of_critic < moved / 10 and of_critic < 1e-5
         and of_actor < 1e-7 else 1)
PY
  ); then ok "as on the actor's rank within 1e-5 ($out)"; else bad "not as on the actor's rank" "$out"; fi
done

# The same ranks as pods of a manifest: each pod of the critic has a launcher of its own.
manifest pods PPO "actor: {}, critic: {replicas: 2}" $(ppo_args pods $one_step) >"$dir/pods.yaml"
check "an actor's pod and two of the critic" "$TRIREME" run -f "$dir/pods.yaml"
if out=$(python3 - "$dir/own-1-2-logs/train.jsonl" "$dir/pods-logs/train.jsonl" <<'PY'
import json, sys
a, b = ([x for x in map(json.loads, open(name)) if "critic/loss" in x] for name in sys.argv[1:])
names = [n for n in a[0] if n.startswith("critic/")]
worst = max(abs(x[n] - y[n]) / max(1.0, abs(x[n])) for x, y in zip(a, b) for n in names)
print("largest difference", worst)
sys.exit(0 if len(a) == len(b) == 3 and worst < 1e-5 else 1)
PY
); then ok "as by one launcher ($out)"; else bad "pods give something else than one launcher" "$out"; fi
[ -e "$dir/pods/value/step_3/value/weights" ] && ok "with the critic's checkpoints" ||
  bad "no checkpoint of the critic" "$(find "$dir/pods" -maxdepth 3)"
out=$(TRIREME_ROLE=critic NODE_RANK=0 "$TRIREME" once "$dir/never/.done" --timeout 0.3 -- \
  init-task addition --out "$dir/never" 2>&1); code=$?
[ $code != 0 ] && grep -q "waiting for node 0" <<<"$out" && [ ! -e "$dir/never" ] &&
  ok "the critic's first pod waits for what the actor's prepares" || bad "once in a critic's pod: code $code" "$out"

check "an uninterrupted run" own whole 1 1
expected=$(both whole 6)
[ "$(steps "$dir/whole")" = "$(steps "$dir/whole/value")" ] && [ ! -e "$dir/whole/step_6/value" ] &&
  ok "the critic has the actor's steps, in a folder of its own" ||
  bad "folders of checkpoints" "$(ls "$dir/whole" "$dir/whole/value")"
check "keeping the best one" own few 1 1 checkpointing.keep_top_k=1
[ "$(steps "$dir/few")" = "$(steps "$dir/few/value")" ] && ok "keeps the same steps of both" ||
  bad "other steps are kept" "$(ls "$dir/few" "$dir/few/value")"

# kills JOB_RANK NAME STEP PHASE: who died is named, the others leave, and the run goes on to the same bits.
kills() {
  local rank=$1 who=$2 step=$3 phase=$4 name="killed-$1-${4// /-}" code
  SECONDS=0
  TRIREME_FAULT="kill@$step:$rank:$phase" own "$name" 1 1 $far_deadline >"$dir/out" 2>&1; code=$?
  if [ $code = 137 ] && [ $SECONDS -le $soon ] && grep -q "[^c] $who failed first (signal 9" "$dir/out" &&
    grep -q "[^c] $who has died.*signal 9 (Killed)" "$dir/out"
  then ok "$who killed in phase $phase: named, $SECONDS s"
  else bad "$who killed in phase $phase: code $code, $SECONDS s" "$(cat "$dir/out")"; fi
  check "it goes on" own "$name" 1 1
  [ "$(both "$name" 6)" = "$expected" ] && [ "$(values "$name")" = "$(values whole)" ] &&
    ok "both models, their moments and the log equal bit for bit" ||
    bad "another run than the undisturbed one" "$(diff <(values whole) <(values "$name") | head -4)"
}
kills 1 "critic rank 0" 3 waiting
kills 1 "critic rank 0" 2 values
kills 1 "critic rank 0" 4 "value training"
kills 1 "critic rank 0" 3 checkpoint
kills 0 "rank 0" 3 generation
kills 0 "rank 0" 2 values
kills 0 "rank 0" 4 "value training"
kills 0 "rank 0" 4 training
kills 0 "rank 0" 3 checkpoint

# Weights of the critic's that are no numbers, behind the values of a step and before its training.
TRIREME_FAULT=nan@3:1 own spoilt 1 1 >"$dir/out" 2>&1; code=$?
which="the critic's value before token [0-9]* of the response of sample [0-9]*"
[ $code = 21 ] && grep -q "critic rank 0 on .* in phase value training: $which.* is not finite" "$dir/out" &&
  ok "a value that is not finite: code 21, rank, sample and token are named" ||
  bad "a value that is not finite: code $code" "$(cat "$dir/out")"

# SIGTERM: both save and stop.
"$TRIREME" launch --critic-ranks 1 -- $(ppo_args stopped) >"$dir/out" 2>&1 & pid=$!
await 240 test -e "$dir/stopped/step_1" || bad "the run that is to be stopped saves its first step" "$(cat "$dir/out")"
kill -TERM $pid; wait $pid; code=$?
if [ $code = 40 ] || { [ $code = 0 ] && [ -e "$dir/stopped/step_6" ]; }; then ok "stopped with code $code"; else
  bad "stopped with code $code" "$(cat "$dir/out")"; fi
check "it goes on" own stopped 1 1
[ "$(both stopped 6)" = "$expected" ] && ok "to the same bits" || bad "another run after a stop"

# From the one place to the other and back.
check "two steps on its own rank" own moved 1 1 ppo.max_num_steps=2
check "goes on on the actor's" "$TRIREME" $(ppo_args moved ppo.max_num_steps=4)
check "and on its own again" own moved 1 1
[ -e "$dir/moved/step_4/value/weights" ] && [ -e "$dir/moved/value/step_6/value/weights" ] &&
  ok "with the checkpoints of either place" ||
  bad "checkpoints of a critic that moved" "$(find "$dir/moved" -maxdepth 3)"

refuses() { # refuses SENTENCE COMMAND...
  local sentence=$1 out code; shift
  out=$("$@" 2>&1); code=$?
  [ $code = 10 ] && grep -q "$sentence" <<<"$out" && ok "refused: $sentence" || bad "code $code: $sentence" "$out"
}
# Its batch is shared by its own ranks, three, and not by the actor's two.
odd="cluster.gpus_per_node=2 ppo.num_prompts_per_step=6 policy.train_global_batch_size=24 ppo.max_num_steps=1
  value.train_global_batch_size=3 value.train_micro_batch_size=1 ppo.policy_training_start_step=0"
check "a batch that only the critic's ranks can share" own odd 2 3 $odd
plan() { "$TRIREME" plan $(ppo_args plan "$@" | cut -d ' ' -f 2-) --critic-ranks 3; }
out=$(plan $odd) && grep -q "critic on ranks of its own  *tp=1,cp=1,ep=1,dp=3,pp=1" <<<"$out" &&
  ! grep -q "critic's training\|weights, gradients, optimizer" <<<"$out" && ok "is planned on its own" ||
  bad "a plan of a critic on its own ranks" "$out"
uneven="value.train_global_batch_size: 16 cannot be divided by the 3 data parallel ranks of the critic"
refuses "$uneven" own uneven 1 3
refuses "$uneven" plan
refuses "critic-ranks is for a critic" "$TRIREME" plan $(run_args plan | cut -d ' ' -f 2-) --critic-ranks 2
# A model of so many tokens as no padding explains, as far as anybody looks before weights load.
wide() { cp -r "$1" "$2" && sed -i 's/"vocab_size": *[0-9]*/"vocab_size": 9999/' "$2/config.json"; }
of_wide="has a vocabulary of 9999, the policy one of [0-9]* and its tokenizer [0-9]* tokens;"
wide "$dir/model" "$dir/wide"
refuses "value.model_name: the model of .*/wide $of_wide the critic must read the policy's tokens" \
  own of-wide 1 1 value.model_name="$dir/wide"
rm -r "$dir/whole/value"
refuses "step_6 has no value" own whole 1 1
refuses "algorithm is grpo, which has no critic: 1 critic ranks" \
  "$TRIREME" launch --critic-ranks 1 -- $(run_args none)
refuses "ppo with raw rewards, which has no critic" own raw 1 1 ppo.adv_estimator.name=raw_reward \
  ppo.policy_training_start_step=0
refuses "TRIREME_ACTOR_RANKS, how many ranks the actor has, is not set" \
  env TRIREME_ROLE=critic MASTER_PORT=1 "$TRIREME" $(ppo_args none)
finish
