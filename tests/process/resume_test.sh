#!/usr/bin/env bash
# Checkpoints and resume of whole runs: kill -9 at random points, SIGTERM, another number of ranks.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

check "an uninterrupted run" "$TRIREME" $(run_args whole)
expected=$(weights whole 6)

for round in 1 2 3; do
  name=killed$round
  for attempt in $(seq 1 12); do
    "$TRIREME" $(run_args $name) >/dev/null 2>"$dir/err" & pid=$!
    # Later kills hit later phases; the last attempts run to the end.
    if [ "$attempt" -le 4 ]; then sleep "0.$((RANDOM % 900 + 100))"; kill -9 $pid 2>/dev/null; fi
    wait $pid 2>/dev/null && break
  done
  if [ "$(weights $name 6)" = "$expected" ] && [ "$(values $name)" = "$(values whole)" ]; then
    ok "killed and resumed run $round: weights, moments and log equal bit for bit"
  else
    bad "killed and resumed run $round" "$(diff <(values whole) <(values $name) | head -4; cat "$dir/err")"
  fi
done

# SIGTERM: the step is finished, saved, exit code 40; the rest later gives the same result.
"$TRIREME" $(run_args term) >"$dir/out" 2>&1 & pid=$!
await 240 test -d "$dir/term/step_1" || bad "the run that is to be stopped saves its first step" "$(cat "$dir/out")"
kill -TERM $pid; wait $pid; code=$?
if [ $code = 40 ] || [ -d "$dir/term/step_6" ]; then ok "SIGTERM saves and leaves with code $code"
else bad "SIGTERM: code $code" "$(cat "$dir/out")"; fi
check "the rest after SIGTERM" "$TRIREME" $(run_args term)
[ "$(weights term 6)" = "$expected" ] && ok "SIGTERM and resume: bit for bit" || bad "SIGTERM and resume differ"

# What is under way when a run ends is finished: nothing half-written is left, and each checkpoint says what it cost.
"$TRIREME" $(run_args said) >"$dir/out" 2>"$dir/err"
if [ 6 = \
  "$(grep -c "step_[1-6]: .* of this rank in .* s (.* GB/s) beside the run, which waited .* s for it" "$dir/err")" ]
then ok "every checkpoint says how long the run waited for it"
else bad "what checkpoints say" "$(cat "$dir/err")"; fi
if [ "$(ls "$dir/said" | tr '\n' ' ')" = "step_1 step_2 step_3 step_4 step_5 step_6 " ]
then ok "only whole checkpoints are left"; else bad "what is left: $(ls "$dir/said")"; fi
out=$("$TRIREME" export --checkpoint "$dir/said" --best --out "$dir/best" 2>&1)
if grep -q "^step [0-9]: val:accuracy [0-9.]*, the highest of 6 checkpoints" <<<"$out" &&
  [ -f "$dir/best/model.safetensors" ]
then ok "export --best"; else bad "export --best" "$out"; fi

# Two ranks continue what one began.
check "three steps on one rank" "$TRIREME" $(run_args grow grpo.max_num_steps=3)
check "three more on two ranks" "$TRIREME" launch --nproc-per-node 2 -- $(run_args grow)
[ -d "$dir/grow/step_6" ] && [ "$(ls "$dir/grow/step_6/policy/optimizer" | wc -l)" = 2 ] &&
  ok "two ranks saved their slices" || bad "two ranks saved their slices"
check "one more on one rank" "$TRIREME" $(run_args grow grpo.max_num_steps=7)

# The schedule moves once a rollout (of two optimizer steps here), and goes on where it was without optimizer state, and
# from checkpoints that have no count of optimizer steps.
schedule='policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, '
schedule+='kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 6}}]'
counts() {
  grep -o '"train/\(lr\|lr_schedule_steps\|optimizer_steps\)":[^,]*' "$dir/$1-logs/train.jsonl" | tr '\n' ' '
}
check "a warm-up over the whole run" "$TRIREME" $(run_args warm policy.optimizer.kwargs.lr=0.001) "$schedule"
want=$(for s in 0 1 2 3 4 5; do awk -v s=$s 'BEGIN{printf "%.4f:%d:%d ", 0.1 + 0.9 * s / 6, s, 2 * s + 2}'; done)
got=$(python3 -c 'import json,sys
for l in open(sys.argv[1]):
    d = json.loads(l)
    if "train/lr" not in d: continue  # the validation before the first step
    print("%.4f:%d:%d" % (1000 * d["train/lr"], d["train/lr_schedule_steps"], d["train/optimizer_steps"]), end=" ")' \
  "$dir/warm-logs/train.jsonl")
[ "$got" = "$want" ] && ok "the learning rate moves once a rollout; both counts are in the log" ||
  bad "learning rates" "$got, not $want"
check "three steps without saving optimizer state" \
  "$TRIREME" $(run_args bare policy.optimizer.kwargs.lr=0.001 checkpointing.save_optimizer=false grpo.max_num_steps=3) \
  "$schedule"
check "the rest of them" \
  "$TRIREME" $(run_args bare policy.optimizer.kwargs.lr=0.001 checkpointing.save_optimizer=false) "$schedule"
[ "$(counts bare)" = "$(counts warm)" ] && ok "save_optimizer: false and resume: the schedule goes on" ||
  bad "rates after a resume without optimizer state" "$(counts bare)"
check "three steps as of an older program" \
  "$TRIREME" $(run_args older policy.optimizer.kwargs.lr=0.001 grpo.max_num_steps=3) "$schedule"
sed -i '/"optimizer_steps":/d' "$dir/older/step_3/manifest.json"
check "the rest of an older checkpoint" "$TRIREME" $(run_args older policy.optimizer.kwargs.lr=0.001) "$schedule"
[ "$(counts older)" = "$(counts warm)" ] && ok "an older checkpoint resumes at the right place" ||
  bad "rates after an older checkpoint" "$(counts older)"

# A checkpoint has the score of its own validation only: of steps 1 to 5, validated after 3, the best and the newest
# stay.
check "five steps, validated after the third" \
  "$TRIREME" $(run_args scored grpo.max_num_steps=5 grpo.val_at_end=false checkpointing.keep_top_k=1)
[ "$(ls "$dir/scored" | grep '^step_' | tr '\n' ' ')" = "step_3 step_5 " ] &&
  ok "the validated checkpoint is kept, not one that was never validated" ||
  bad "checkpoints after five steps" "$(ls "$dir/scored")"

# The sampler's and the loss's log-probs have the same bits in every step.
if [ "$(grep -c '"train/logprob_mismatch_tokens":0.0' "$dir/whole-logs/train.jsonl")" = 6 ]
then ok "0 tokens with other bits in 6 steps"
else bad "log-prob bits" "$(grep -o '"train/logprob_mismatch_tokens":[^,]*' "$dir/whole-logs/train.jsonl")"; fi

# Replay of a dumped step, from the dump alone and with the model of before the step.
check "a run with a dump" "$TRIREME" $(run_args dump grpo.max_num_steps=2 logger.dump_steps=[2])
out=$("$TRIREME" replay "$dir/dump-logs/dump_step_2.safetensors" 2>&1) && grep -q "difference 0$" <<<"$out" &&
  ok "replay without the model" || bad "replay without the model" "$out"
out=$("$TRIREME" replay "$dir/dump-logs/dump_step_2.safetensors" --model "$dir/dump/step_1/policy/weights" 2>&1) &&
  grep -q "difference 0, largest log-prob error 0, 0 tokens differ" <<<"$out" &&
  ok "replay with the model, another process: equal bits" || bad "replay with the model" "$out"
finish
