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
for _ in $(seq 1 2400); do [ -d "$dir/term/step_1" ] && break; sleep 0.05; done
[ -d "$dir/term/step_1" ] || bad "the run that is to be stopped saves its first step" "$(cat "$dir/out")"
kill -TERM $pid; wait $pid; code=$?
if [ $code = 40 ] || [ -d "$dir/term/step_6" ]; then ok "SIGTERM saves and leaves with code $code"; else bad "SIGTERM: code $code" "$(cat "$dir/out")"; fi
check "the rest after SIGTERM" "$TRIREME" $(run_args term)
[ "$(weights term 6)" = "$expected" ] && ok "SIGTERM and resume: bit for bit" || bad "SIGTERM and resume differ"

# Two ranks continue what one began.
check "three steps on one rank" "$TRIREME" $(run_args grow grpo.max_num_steps=3)
check "three more on two ranks" "$TRIREME" launch --nproc-per-node 2 -- $(run_args grow)
[ -d "$dir/grow/step_6" ] && [ "$(ls "$dir/grow/step_6/policy/optimizer" | wc -l)" = 2 ] && ok "two ranks saved their slices" || bad "two ranks saved their slices"
check "one more on one rank" "$TRIREME" $(run_args grow grpo.max_num_steps=7)

# The sampler's and the loss's log-probs have the same bits in every step.
if [ "$(grep -c '"train/logprob_mismatch_tokens":0.0' "$dir/whole-logs/train.jsonl")" = 6 ]; then ok "0 tokens with other bits in 6 steps"
else bad "log-prob bits" "$(grep -o '"train/logprob_mismatch_tokens":[^,]*' "$dir/whole-logs/train.jsonl")"; fi

# Replay of a dumped step, from the dump alone and with the model of before the step.
check "a run with a dump" "$TRIREME" $(run_args dump grpo.max_num_steps=2 logger.dump_steps=[2])
out=$("$TRIREME" replay "$dir/dump-logs/dump_step_2.safetensors" 2>&1) && grep -q "difference 0$" <<<"$out" && ok "replay without the model" || bad "replay without the model" "$out"
out=$("$TRIREME" replay "$dir/dump-logs/dump_step_2.safetensors" --model "$dir/dump/step_1/policy/weights" 2>&1) && grep -q "difference 0, largest log-prob error 0, 0 tokens differ" <<<"$out" \
  && ok "replay with the model, another process: equal bits" || bad "replay with the model" "$out"
finish
