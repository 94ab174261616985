#!/usr/bin/env bash
# PPO with a critic on the actor's ranks: it learns, one rank and two agree, a killed run goes on bit for bit, values
# come under generation or after it; actor and critic that ranks split, each by its layout.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

actor() { sha256sum <"$dir/$1/step_$2/policy/weights/model.safetensors"; }
critic() { sha256sum <"$dir/$1/step_$2/value/weights/model.safetensors"; }

check "an uninterrupted run" "$TRIREME" $(ppo_args whole)
expected=$(both whole 6)
[ "$(actor whole 1)" = "$(actor whole 2)" ] && [ "$(critic whole 1)" != "$(critic whole 2)" ] &&
  ok "only the critic trains until policy_training_start_step" || bad "steps of the critic alone"
[ "$(actor whole 2)" != "$(actor whole 3)" ] && ok "then the actor too" || bad "the actor does not train"
grep -q '"Qwen[0-9]*ForSequenceClassification"\|"LlamaForSequenceClassification"' \
  "$dir/whole/step_6/value/weights/config.json" && ok "the critic's folder is a sequence classifier's" ||
  bad "the critic's folder" "$(cat "$dir/whole/step_6/value/weights/config.json")"

if out=$(python3 - "$dir/whole-logs/train.jsonl" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "critic/loss" in x]
names = ["loss", "grad_norm", "lr", "values_mean", "values_min", "values_max", "returns_mean", "explained_var",
         "vf_clipfrac"]
lacking = [n for n in names if any("critic/" + n not in x for x in rows)]
timings = all(x["timing/train/value_inference"] > 0 and x["timing/train/value_training"] > 0 for x in rows)
trained = [x for x in rows if "train/loss" in x]
mismatched = sum(x["train/logprob_mismatch_tokens"] for x in trained)
ticks = [x["train/lr_schedule_steps"] for x in trained]
versions = [x["train/weight_version"] for x in rows]
ages = [x["train/max_trajectory_age"] for x in rows]
print(len(rows), lacking, timings, len(trained), mismatched, ticks, versions, ages)
sys.exit(0 if len(rows) == 6 and not lacking and timings and len(trained) == 4 and mismatched == 0
         and ticks == [1, 3, 5, 7] and versions == [0, 0, 0, 1, 2, 3] and not any(ages) else 1)
PY
); then ok "critic/*, timings and versions of every step, schedules by passes"; else bad "what the log says" "$out"; fi

for attempt in $(seq 1 12); do
  "$TRIREME" $(ppo_args killed) >/dev/null 2>"$dir/err" & pid=$!
  if [ "$attempt" -le 4 ]; then sleep "0.$((RANDOM % 900 + 100))"; kill -9 $pid 2>/dev/null; fi
  wait $pid 2>/dev/null && break
done
if [ "$(both killed 6)" = "$expected" ] && [ "$(values killed)" = "$(values whole)" ]; then
  ok "killed and resumed: both models, their moments and the log equal bit for bit"
else
  bad "killed and resumed" "$(diff <(values whole) <(values killed) | head -4; cat "$dir/err")"
fi

check "one rank" "$TRIREME" $(ppo_args one $one_step)
check "two ranks" "$TRIREME" launch --nproc-per-node 2 -- $(ppo_args two $one_step)
if out=$(python3 - "$dir/one-logs/train.jsonl" "$dir/two-logs/train.jsonl" <<'PY'
import json, sys
one, two = ([x for x in map(json.loads, open(f)) if "critic/loss" in x] for f in sys.argv[1:])
worst = 0
for a, b in zip(one, two):
    for name in ("critic/loss", "critic/values_mean", "critic/returns_mean", "critic/grad_norm", "train/loss",
                 "train/grad_norm", "train/advantages/min", "train/advantages/max"):
        worst = max(worst, abs(a[name] - b[name]) / max(1.0, abs(a[name])))
print("largest difference", worst)
sys.exit(0 if len(one) == len(two) == 3 and worst < 1e-5 else 1)
PY
); then ok "1 and 2 ranks within 1e-5"; else bad "1 and 2 ranks" "$out"; fi

# What finished responses are worth is computed while others are generated, or afterwards: the same bits on every rank.
# share NAME KEY: its mean over the steps.
share() {
  python3 -c 'import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "critic/loss" in x]
print(sum(x["performance/" + sys.argv[2]] for x in rows) / len(rows))' "$dir/$1-logs/train.jsonl" "$2"
}
some() {  # NAME KEY: of some samples, not of all
  local part; part=$(share "$1" "$2")
  awk "BEGIN{exit !($part > 0 && $part < 1)}" && ok "$1: $2 $part" || bad "$1: $2" "$part"
}
beside="policy.generation.background_sms=1 policy.generation.max_running_samples=4"
check "values under generation" "$TRIREME" $(ppo_args beside $beside)
some beside values_under_generation
[ "$(share whole values_under_generation)" = 0.0 ] && ok "none of them without" || bad "values without a part for them"
[ "$(both beside 6)" = "$expected" ] && [ "$(values beside)" = "$(values whole)" ] &&
  ok "the same models, moments and log" || bad "values under generation" "$(diff <(values whole) <(values beside))"
check "on two ranks, with a KL in the loss" "$TRIREME" launch --nproc-per-node 2 -- $(ppo_args two-beside $one_step \
  $beside loss_fn.reference_policy_kl_penalty=0.05)
check "the same afterwards" "$TRIREME" launch --nproc-per-node 2 -- $(ppo_args two-after $one_step \
  policy.generation.background_sms=0 loss_fn.reference_policy_kl_penalty=0.05)
some two-beside values_under_generation
some two-beside references_under_generation
[ "$(both two-beside 3)" = "$(both two-after 3)" ] && [ "$(values two-beside)" = "$(values two-after)" ] &&
  ok "the same models, moments and log on two ranks" ||
  bad "on two ranks" "$(diff <(values two-after) <(values two-beside))"

# A KL in the rewards, raw rewards without a critic, a warm start.
check "a KL in the rewards" "$TRIREME" $(ppo_args kl ppo.max_num_steps=2 ppo.policy_training_start_step=0 \
  loss_fn.use_kl_in_reward=true loss_fn.reference_policy_kl_penalty=0.1)
grep -q '"train/kl_penalty"' "$dir/kl-logs/train.jsonl" && ok "its mean is in the log" || bad "no KL in the log"
check "raw rewards" "$TRIREME" $(ppo_args raw ppo.max_num_steps=2 ppo.policy_training_start_step=0 \
  ppo.adv_estimator.name=raw_reward)
[ ! -e "$dir/raw/step_2/value" ] && ok "have no critic" || bad "a critic of raw rewards"
warm=ppo.warm_start_value_checkpoint
check "a warm start" \
  "$TRIREME" $(ppo_args warm ppo.max_num_steps=1 $warm="$dir/whole/step_6" value.optimizer.kwargs.lr=0)
[ "$(critic warm 1)" = "$(critic whole 6)" ] && ok "begins with the other run's critic" || bad "a warm start's critic"
out=$("$TRIREME" $(ppo_args cold ppo.max_num_steps=1 $warm="$dir/raw/step_2") 2>&1); code=$?
[ $code = 10 ] && grep -q "holds no critic" <<<"$out" && ok "a folder without values is refused" ||
  bad "a warm start without values: code $code" "$out"
cp -r "$dir/whole/step_6" "$dir/spoilt"
python3 - "$dir/spoilt/value/weights/model.safetensors" <<'PY'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
size = struct.unpack("<Q", data[:8])[0]
entry = json.loads(data[8:8 + size])["score.weight"]
begin, end = (8 + size + offset for offset in entry["data_offsets"])
nan = {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f"}[entry["dtype"]]
data[begin:end] = nan * ((end - begin) // len(nan))
open(sys.argv[1], "wb").write(data)
PY
out=$("$TRIREME" $(ppo_args of-spoilt ppo.max_num_steps=1 $warm="$dir/spoilt") 2>&1); code=$?
which="before token [0-9]* of the response of sample [0-9]* (group [0-9]*, response [0-9]*)"
[ $code = 21 ] && grep -q "the critic's value $which is not finite" <<<"$out" &&
  ok "a value that is not finite: code 21, sample and token are named" ||
  bad "a value that is not finite: code $code" "$out"
# A model of so many tokens as no padding explains, as far as anybody looks before weights load.
wide() { cp -r "$1" "$2" && sed -i 's/"vocab_size": *[0-9]*/"vocab_size": 9999/' "$2/config.json"; }
of_wide="has a vocabulary of 9999, the policy one of [0-9]* and its tokenizer [0-9]* tokens;"
wide "$dir/model" "$dir/wide" && wide "$dir/whole/step_6/value/weights" "$dir/wide-scores"
out=$("$TRIREME" $(ppo_args of-wide value.model_name="$dir/wide") 2>&1); code=$?
[ $code = 10 ] && grep -q "value.model_name: the model of .*/wide $of_wide the critic must read" <<<"$out" &&
  ok "a critic of another vocabulary is refused" || bad "a critic of another vocabulary: code $code" "$out"
scores="env.reward_model.enabled=true env.reward_model.model_name=$dir/wide-scores"
out=$("$TRIREME" $(ppo_args of-wide $scores) 2>&1); code=$?
sentence="env.reward_model.model_name: the model of .*/wide-scores $of_wide the reward model must read"
[ $code = 10 ] && grep -q "$sentence" <<<"$out" && ok "and so is a reward model" ||
  bad "a reward model of another vocabulary: code $code" "$out"
check "with generation elsewhere" "$TRIREME" launch --engines 2 -- $(ppo_args apart \
  policy.generation.colocated.enabled=false)
[ "$(both apart 6)" = "$expected" ] && ok "the same actor and critic" || bad "the same actor and critic"

# Actor and critic that ranks split, each by a layout of its own, against one process.
"$TRIREME" init-model --out "$dir/model" --hidden 64 --layers 4 --heads 4 --kv-heads 4 --head-dim 16 \
  --intermediate 64 >/dev/null
# sizes SECTION TP PP CP
sizes() {
  echo "$1.megatron_cfg.enabled=true $1.megatron_cfg.tensor_model_parallel_size=$2" \
    "$1.megatron_cfg.pipeline_model_parallel_size=$3 $1.megatron_cfg.context_parallel_size=$4"
}
# split_args NAME RANKS ACTOR CRITIC [overrides...]: sizes as "TP PP CP"
split_args() {
  local name=$1 ranks=$2 actor=$3 critic=$4; shift 4
  ppo_args "$name" $one_step cluster.device=cpu cluster.gpus_per_node="$ranks" $(sizes policy $actor) \
    $(sizes value $critic) value.megatron_cfg.optimizer.lr=1e-4 value.megatron_cfg.scheduler.lr_warmup_iters=0 "$@"
}
split() { "$TRIREME" launch --nproc-per-node "$2" -- $(split_args "$@"); }
# near NAME STEPS [other bits]: the last STEPS steps are those of one process within 1e-4, and the loss has the
# sampler's bits, or has not.
near() {
  local out
  if out=$(python3 - "$dir/plain-logs/train.jsonl" "$dir/$1-logs/train.jsonl" "$2" "${3:-}" <<'PY'
import json, sys
plain, other = ([x for x in map(json.loads, open(f)) if "critic/loss" in x] for f in sys.argv[1:3])
steps = int(sys.argv[3])
worst = 0
for a, b in zip(plain[-steps:], other[-steps:]):
    for name in [n for n in a if n.startswith("critic/")] + ["train/loss", "train/advantages/min",
                                                             "train/advantages/max", "train/reward"]:
        worst = max(worst, abs(a[name] - b[name]) / max(1.0, abs(a[name])))
    for name in ("critic/grad_norm", "train/grad_norm"):
        worst = max(worst, abs(a[name] - b[name]) / a[name] / 10)
differing = sum(x["train/logprob_mismatch_tokens"] for x in other)
print("largest difference", worst, "tokens with other bits", differing)
sys.exit(0 if len(plain) == 3 and len(other) >= steps and worst < 1e-4 and (differing > 0) == bool(sys.argv[4]) else 1)
PY
  ); then ok "$1: as one process ($out)"; else bad "$1: not as one process" "$out"; fi
}
check "PPO on one process" split plain 1 "1 1 1" "1 1 1"
for layout in "tp2 2 2-1-1 2-1-1" "pp2 2 1-2-1 1-2-1" "cp2 2 1-1-2 1-1-2" "critic-tp2 2 1-1-1 2-1-1" \
  "critic-dp2 2 2-1-1 1-1-1" "tp2pp2 4 2-2-1 2-1-2"; do
  set -- $layout
  check "actor and critic on $*" split "$1" "$2" "${3//-/ }" "${4//-/ }"
  near "$1" 3
done
check "a folded actor" split folded 2 "1 2 1" "1 2 1" policy.generation.fold_pipeline=true
[ "$(both folded 3)" = "$(both pp2 3)" ] && ok "folded: both models and their moments bit for bit" || bad "folded"
check "an actor that generates in another layout" split other 2 "2 1 1" "2 1 1" policy.generation.tensor_parallel_size=1
near other 3 "other bits"
check "an actor of tp2, a critic on a rank of its own" "$TRIREME" launch --nproc-per-node 2 --critic-ranks 1 -- \
  $(split_args own-critic 2 "2 1 1" "1 1 1")
near own-critic 3
check "a critic of tp2 on ranks of its own" "$TRIREME" launch --nproc-per-node 1 --critic-ranks 2 -- \
  $(split_args own-tp2 1 "1 1 1" "2 1 1")
near own-tp2 3

# Two steps, then the last one: in the same layouts bit for bit, in others as well as one process.
check "two steps on tp2" split again 2 "2 1 1" "2 1 1" ppo.max_num_steps=2
cp -r "$dir/again" "$dir/moved"
check "the last one" split again 2 "2 1 1" "2 1 1"
[ "$(both again 3)" = "$(both tp2 3)" ] && ok "resumed on tp2: both models and their moments bit for bit" ||
  bad "a resume on tp2"
check "the last one, the actor on pp2 and a whole critic" split moved 2 "1 2 1" "1 1 1"
near moved 1

# A reward model is whole on every rank, whatever these have of the policy.
scored="env.reward_model.enabled=true env.reward_model.model_name=$dir/plain/step_3/value/weights ppo.max_num_steps=1"
check "a reward model" split scored 1 "1 1 1" "1 1 1" $scored
check "a reward model beside a split policy" split scored-tp2 2 "2 1 1" "1 2 1" $scored
if out=$(python3 - "$dir/scored-logs/train.jsonl" "$dir/scored-tp2-logs/train.jsonl" <<'PY'
import json, sys
a, b = ([x["train/reward"] for x in map(json.loads, open(f)) if "train/reward" in x] for f in sys.argv[1:])
print(a, b)
sys.exit(0 if len(a) == len(b) == 1 and abs(a[0] - b[0]) < 1e-5 else 1)
PY
); then ok "it gives the same rewards"; else bad "other rewards beside a split policy" "$out"; fi
check "scores under generation" split scored-beside 1 "1 1 1" "1 1 1" $scored ppo.max_num_steps=3 $beside
check "scores after it" split scored-after 1 "1 1 1" "1 1 1" $scored ppo.max_num_steps=3
some scored-beside scores_under_generation
some scored-beside values_under_generation
[ "$(both scored-beside 3)" = "$(both scored-after 3)" ] && [ "$(values scored-beside)" = "$(values scored-after)" ] &&
  ok "the same models, moments and log" || bad "scores" "$(diff <(values scored-after) <(values scored-beside))"

out=$(split odd 2 "2 1 1" "4 1 1" 2>&1); code=$?
[ $code = 10 ] && grep -q "the critic's 2 ranks cannot be divided by the 4 of its tensor x pipeline x" <<<"$out" &&
  ok "a critic's layout that its ranks do not have is refused" || bad "a critic of tp4 on two ranks: code $code" "$out"
out=$(split experts 2 "2 1 1" "1 1 1" value.megatron_cfg.expert_model_parallel_size=2 2>&1); code=$?
sentence="value.megatron_cfg.expert_model_parallel_size: the model of .* cannot be split so"
[ $code = 10 ] && grep -q "$sentence" <<<"$out" &&
  ok "what its model cannot have is refused by its key" || bad "a dense critic of ep2: code $code" "$out"
finish
