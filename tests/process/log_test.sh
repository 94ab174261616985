#!/usr/bin/env bash
# What the step log says of rewards and samples, under dynamic sampling too; the log of rollouts.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

# says NAME CODE: Python over the lines of a run's log (d: a step's values).
says() { python3 -c 'import json,sys
for line in open(sys.argv[1]):
    d = json.loads(line)
    if "train/reward" in d:
        assert eval(sys.argv[2]), (sys.argv[2], d)' "$dir/$1-logs/train.jsonl" "$2"; }

check "a run with dynamic sampling" "$TRIREME" $(run_args dapo grpo.use_dynamic_sampling=true grpo.batch_multiplier=2 \
  grpo.dynamic_sampling_max_gen_batches=20 grpo.max_num_epochs=99)
check "rewards of all answers and of the kept ones" says dapo \
  'd["train/filtered_reward"] > 0 and d["train/num_generated_samples"] >= 64'
check "groups without a difference are counted among all" says dapo '0 <= d["train/zero_std_groups"] < 1 and \
  round(d["train/zero_std_groups"] * d["train/num_generated_samples"]) % 4 == 0'
check "tokens/s count what was generated" says dapo \
  'd["performance/tokens_per_sec"] * d["timing/train/total_step_time"] > 1.5 * d["train/total_num_tokens"]'

check "a run with two rewards" "$TRIREME" $(run_args plain env.format.weight=0.5)
check "the mean of each reward by its name" says plain \
  'abs(d["train/reward"] - d["train/rewards/math"] - 0.5 * d["train/rewards/format"]) < 1e-9 and \
  d["train/rewards/format"] > 0'
check "without dynamic sampling nothing is filtered" says plain \
  '"train/filtered_reward" not in d and d["train/num_generated_samples"] == 32'
check "the importance ratio is always measured" says plain 'abs(d["train/sampling_importance_ratio"] - 1) < 1e-6'

# The log of rollouts: whole groups, the newest files; a resumed run goes on with it.
check "three steps with a log of rollouts" \
  "$TRIREME" $(run_args texts grpo.max_num_steps=3 logger.rollouts.keep_steps=2 logger.rollouts.max_samples=10 \
    env.format.weight=0.5)
there() { ls "$dir/texts-logs" | grep train_data | tr '\n' ' '; }
[ "$(there)" = "train_data_step_2.jsonl train_data_step_3.jsonl " ] && ok "the newest files are kept" ||
  bad "files kept" "$(there)"
check "prompt, response, rewards by name and advantage in every line" python3 -c 'import json,sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert [(l["group"], l["index"]) for l in lines] == [(g, i) for g in range(2) for i in range(4)], lines
for l in lines:
    assert l["step"] == 3 and l["prompt"].endswith("=") and isinstance(l["response"], str), l
    assert abs(l["raw_reward"] - l["rewards"]["math"] - 0.5 * l["rewards"]["format"]) < 1e-9, l
    assert l["prompt_tokens"] > 0 and 1 <= l["response_tokens"] <= 12, l
for g in range(2):
    of = [l["reward"] for l in lines if l["group"] == g]
    if len(set(of)) > 1: assert any(l["advantage"] != 0 for l in lines if l["group"] == g), lines' \
  "$dir/texts-logs/train_data_step_3.jsonl"
check "two more steps" "$TRIREME" $(run_args texts grpo.max_num_steps=5 logger.rollouts.keep_steps=2 \
  logger.rollouts.max_samples=10 env.format.weight=0.5)
[ "$(there)" = "train_data_step_4.jsonl train_data_step_5.jsonl " ] && ok "a resumed run goes on with them" ||
  bad "files after a resume" "$(there)"
out=$(OMP_NUM_THREADS=1 "$TRIREME" $(run_args threads grpo.max_num_steps=1) 2>&1) &&
  grep -q ", 1 threads a rank" <<<"$out" && ok "OMP_NUM_THREADS is heeded" || bad "OMP_NUM_THREADS is heeded" "$out"
finish
