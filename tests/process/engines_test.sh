#!/usr/bin/env bash
# Generation in processes of its own, of whole runs: in turn the weights are those of a run on the same devices, bit for
# bit; with exact versions a run is repeatable, killed and resumed too; in flight every token has its weights' bits.
# Engines that are killed in each of their phases, stopped, cut off, do not fit, or lack their rewards; actors that are
# killed; what is refused, in one sentence.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture
apart="policy.generation.colocated.enabled=false"

# In turn with training.
"$TRIREME" $(run_args one) >/dev/null 2>&1
"$TRIREME" launch --nproc-per-node 2 -- $(run_args two) >/dev/null 2>&1
for ranks in 1 2; do
  for engines in 1 3; do
    name=turn-$ranks-$engines
    check "$ranks ranks, $engines engines" "$TRIREME" launch --nproc-per-node $ranks --engines $engines -- \
      $(run_args $name $apart)
    check "$name: equal bits of engine and loss" sound $name 6
    [ $ranks = 1 ] && equal $name one 6 || equal $name two 6
  done
done

# Exact versions: responses end early and late, and there are more of them than places.
many="policy.generation.max_running_samples=4 policy.generation.max_new_tokens=24
  policy.generation.stop_token_ids=[$(seq -s , 200 219)]"
async="$apart $many grpo.async_grpo.enabled=true loss_fn.use_importance_sampling_correction=true"
ages() {  # NAME STEPS WHAT (python, of the rows)
  python3 - "$dir/$1-logs/train.jsonl" "$2" "$3" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
print(f"{len(rows)} steps,", [(x["train/weight_version"], x["train/max_trajectory_age"], x["train/avg_trajectory_age"],
                               x["train/spanning_samples"], x["train/mixed_context_tokens"]) for x in rows])
whole = [x["train/weight_version"] for x in rows] == list(range(len(rows)))
equal = all(x["train/logprob_mismatch_tokens"] == 0 for x in rows)
sys.exit(0 if len(rows) == int(sys.argv[2]) and whole and equal and eval("(" + sys.argv[3] + ")") else 1)
PY
}
exact='[x["train/max_trajectory_age"] for x in rows] == [0, 1, 1, 1, 1, 1] and
  [x["train/avg_trajectory_age"] for x in rows] == [0, 1, 1, 1, 1, 1] and
  all(x["train/spanning_samples"] == 0 for x in rows)'
check "exact versions" "$TRIREME" launch --engines 2 -- $(run_args exact $async checkpointing.save_period=2)
check "each step by the weights one step before" ages exact 6 "$exact"
check "again, with one engine" "$TRIREME" launch --engines 1 -- $(run_args again $async)
equal again exact 6
for attempt in $(seq 1 10); do
  "$TRIREME" launch --engines 2 -- $(run_args killed $async) >/dev/null 2>"$dir/err" & pid=$!
  if [ "$attempt" -le 4 ]; then sleep "$((1 + RANDOM % 3)).$((RANDOM % 900 + 100))"; kill -9 $pid 2>/dev/null; fi
  wait $pid 2>/dev/null && break
done
check "killed and resumed: every step once" ages killed 6 'True'
equal killed exact 6
for phase in generation training checkpoint; do
  TRIREME_FAULT="kill@3:0:$phase" "$TRIREME" launch --engines 2 -- $(run_args "in-$phase" $async) \
    >/dev/null 2>"$dir/err"
  code=$?
  [ $code = 137 ] && ok "the actor is killed in $phase" || bad "killed in $phase: code $code" "$(cat "$dir/err")"
  check "and goes on" "$TRIREME" launch --engines 2 -- $(run_args "in-$phase" $async)
  equal "in-$phase" exact 6
done
# The only engine dies while it draws what only its weights may: others come too late for that, which is said by name.
# Whether the actor has newer weights by then is chance.
lost_version() {
  local time
  for time in 16 24 32 23 31 40 15; do
    rm -rf "$dir/lost-version" "$dir/lost-version-logs"
    TRIREME_ENGINE_FAULT="kill@$time:generation" "$TRIREME" launch --engines 1 -- $(run_args lost-version $async) \
      >"$dir/err" 2>&1 || { cat "$dir/err"; return 1; }
    ages lost-version 6 'all(x["train/max_trajectory_age"] <= 1 for x in rows)' || return 1
    grep -q "groups [0-9].* get newer weights than those of version [0-9]* or older, which no engine has any more" \
      "$dir/err" && return
  done
  return 1
}
check "exact versions: weights that nobody has any more are named, and the run goes on" lost_version
check "exact versions, two ranks" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(run_args exact-two $async)
check "the same of two ranks" ages exact-two 6 "$exact"

# In flight.
flight="$async grpo.async_grpo.in_flight_weight_updates=true"
# One response at a time is under way nearly always; whether new weights come in its middle is chance, a few runs' at
# most.
alone="$flight policy.generation.max_running_samples=1"
until_seen() {  # NAME WHAT (python, of the rows) overrides...: runs, each of which must end well, until WHAT
  local name=$1 what=$2; shift 2
  for _ in 1 2 3 4 5; do
    rm -rf "$dir/$name" "$dir/$name-logs"
    "$TRIREME" launch --engines 1 -- $(run_args "$name" "$@") >/dev/null 2>"$dir/err" || { cat "$dir/err"; return 1; }
    ages "$name" 6 'all(x["train/max_trajectory_age"] <= 1 for x in rows)' || return 1
    ages "$name" 6 "$what" && return
  done
  return 1
}
check "in flight: tokens of two versions" until_seen flight \
  'sum(x["train/spanning_samples"] for x in rows) > 0 and
   all(x["train/mixed_context_tokens"] == 0 for x in rows)' $alone $dumped
check "each has the bits of a packed forward of its weights, older ones too" by_version flight equal
check "in flight, kept keys: marked and not compared" until_seen kept \
  'sum(x["train/mixed_context_tokens"] for x in rows) > 0' $alone $dumped \
  grpo.async_grpo.recompute_kv_cache_after_weight_updates=false
check "have other bits than a packed forward: it would be noticed" by_version kept differ
check "in flight, dynamic sampling" "$TRIREME" launch --engines 2 -- $(run_args dynamic $flight \
  grpo.use_dynamic_sampling=true grpo.dynamic_sampling_max_gen_batches=50)
check "replaces groups at once" ages dynamic 6 'all(x["train/num_valid_samples"] == 32 for x in rows)'

# Without a second copy of the weights: new ones come where they are read, between two steps.
direct() { TRIREME_ENGINE_SECOND_BUFFER=0 "$@"; }
direct check "one copy of the weights, in turn" "$TRIREME" launch --engines 2 -- $(run_args direct-turn $apart)
equal direct-turn one 6
direct check "one copy, exact versions" "$TRIREME" launch --engines 2 -- $(run_args direct-exact $async)
check "one copy: each step by the weights one step before" ages direct-exact 6 "$exact"
equal direct-exact exact 6
direct check "one copy, in flight: tokens of two versions" until_seen direct-flight \
  'sum(x["train/spanning_samples"] for x in rows) > 0 and
   all(x["train/mixed_context_tokens"] == 0 for x in rows)' $alone $dumped
check "one copy: each has the bits of a packed forward of its weights" by_version direct-flight equal

# Losses. In turn the weights say whether a group was lost or doubled.
slow="$apart $many $(paid 0.05)"
"$TRIREME" $(run_args plain $many $(paid)) >/dev/null 2>&1
# As pods of a manifest, the one that generates with two processes: each is an engine.
manifest pods GRPO "actor: {}, generation: {processesPerPod: 2}" $(run_args pods $slow) >"$dir/pods.yaml"
out=$("$TRIREME" run -f "$dir/pods.yaml" 2>&1); code=$?
[ $code = 0 ] && grep -q "engine pods-generation-0-a1-0 has joined" <<<"$out" &&
  grep -q "engine pods-generation-0-a1-1 has joined" <<<"$out" && ok "two engines of one pod" ||
  bad "two engines of one pod: code $code" "$out"
equal pods plain 6
children() { pgrep -P "$1" -f " $2 --config" | sort -n; }
wait_for() {  # FILE TEXT
  await 240 grep -q "$2" "$1" || bad "waiting for '$2'" "$(cat "$1")"
}
start() {  # NAME ENGINES [overrides...]: its launcher is $pid, its log $log
  local name=$1 engines=$2; shift 2
  log="$dir/$name.err"
  "$TRIREME" launch --engines "$engines" -- $(run_args "$name" "$@") >/dev/null 2>"$log" & pid=$!
}
ended() { wait $pid && ok "$1" || bad "$1" "$(cat "$log")"; }
start lost 2 $slow
wait_for "$log" "engine-1 has joined"; sleep 0.5
kill -9 $(children $pid engine | tail -1)
ended "an engine is killed: the run goes on"
equal lost plain 6
grep -q "engine-[01] ended with signal 9 (Killed); it is started again" "$log" && ok "it is started again" ||
  bad "it is started again" "$(cat "$log")"
start lost-two 3 $slow
wait_for "$log" "engine-2 has joined"; sleep 0.3
kill -9 $(children $pid engine | tail -2)
ended "two of three are killed"
equal lost-two plain 6
start stopped 2 $slow grpo.async_grpo.lease_timeout_s=3
wait_for "$log" "engine-1 has joined"; sleep 0.3
stopped=$(children $pid engine | tail -1)
kill -STOP "$stopped"
wait_for "$log" "is gone: nothing was heard of it for 3 s"
kill -CONT "$stopped"
ended "an engine is stopped: others generate what it had"
equal stopped plain 6
start orphaned 2 $slow grpo.max_num_steps=1000 checkpointing.enabled=false
wait_for "$log" ": 2 are there"; sleep 0.5
kill -9 "$(children $pid train | head -1)"
wait $pid; code=$?
[ $code = 137 ] && ok "actor 0 is killed: its code" || bad "actor 0 is killed: code $code" "$(cat "$log")"
[ "$(grep -c 'engine-[01] ended with exit code 20' "$log")" = 2 ] && ! grep -q "engine-[01] still runs" "$log" &&
  ok "engines leave by themselves" || bad "engines leave by themselves" "$(cat "$log")"

# Deaths and broken transfers in each phase, in turn with training. The only engine fails, so that the run needs what it
# had, and the one that is started again: the weights say whether a group was lost or doubled.
short="$apart grpo.max_num_steps=3"
faulty() {  # NAME FAULT SENTENCES...: the first engine's; the run ends well, and $out, what was logged, has each
  local name=$1 fault=$2 said; shift 2
  out=$(TRIREME_ENGINE_FAULT=$fault "$TRIREME" launch --engines 1 -- $(run_args "$name" $short) 2>&1) ||
    { bad "$name: the run goes on" "$out"; return; }
  for said in "$@"; do grep -q "$said" <<<"$out" || { bad "$name: nobody said '$said'" "$out"; return; }; done
  equal "$name" one 3
}
for fault in 1:joining 2:fetching 2:transfer 2:applying 3:generation 3:rewards 3:brought; do
  phase=${fault#*:}
  faulty "dies-in-$phase" "kill@$fault" "is killed on purpose in phase $phase" \
    "engine-0 ended with signal 9 (Killed); it is started again"
done
faulty cut cut@2 "transfer 2 is cut on purpose; asking again"
[ "$(grep -c "engine engine-0 has joined" <<<"$out")" = 1 ] && ok "a transfer that was cut is asked for again" ||
  bad "a transfer that was cut is asked for again" "$out"
faulty cut-thrice cut@2:3 "transfer 3 is cut on purpose; asking again" \
  "engine engine-0 is gone: it has left: .*transfer 4 is cut on purpose" \
  "engine-0 ended with exit code 20; it is started again"
direct faulty direct-cut cut@2 "transfer 2 is cut on purpose; asking again"
direct faulty direct-cut-thrice cut@2:3 "transfer 3 is cut on purpose; asking again" \
  "transfer 4 is cut on purpose; its weights are in part the ones before, so this engine generates nothing any more" \
  "engine-0 ended with exit code 20; it is started again"
for phase in "rollout exchange" logprobs; do
  name="two-in-${phase// /-}"
  TRIREME_FAULT="kill@2:0:$phase" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- \
    $(run_args "$name" $short $far_deadline) >/dev/null 2>"$dir/err"
  code=$?
  [ $code = 137 ] && grep -q "rank 0 failed first (signal 9" "$dir/err" && ok "actor 0 of two is killed in $phase" ||
    bad "actor 0 of two is killed in $phase: code $code" "$(cat "$dir/err")"
  check "and goes on" "$TRIREME" launch --nproc-per-node 2 --engines 1 -- $(run_args "$name" $short)
  equal "$name" two 3
done

# Who does not fit.
port=$((20000 + RANDOM % 10000))
"$TRIREME" launch --master-port "$port" --engines 1 -- $(run_args fits $slow grpo.max_num_steps=1000 \
  checkpointing.enabled=false) >/dev/null 2>"$dir/fits.err" & pid=$!
wait_for "$dir/fits.err" "engine-0 has joined"
out=$(MASTER_PORT=$port TRIREME_ENGINE_NAME=odd "$TRIREME" engine \
  $(run_args fits $slow grpo.max_num_steps=1000 checkpointing.enabled=false | cut -d ' ' -f 2-) grpo.seed=7 2>&1)
code=$?
[ $code = 10 ] && grep -q "engine odd has other settings than the actor: grpo.seed is [0-9]* there and 7" <<<"$out" &&
  ok "an engine with other settings is refused" || bad "an engine with other settings: code $code" "$out"
kill -9 $pid; wait $pid 2>/dev/null

# Nothing comes: the code of a deadline, which groups are missing, and who has them.
waits() {  # NAME SENTENCE COMMAND...
  local name=$1 sentence=$2 out code; shift 2
  out=$("$@" 2>&1); code=$?
  [ $code = 20 ] && grep -q "$sentence" <<<"$out" && ok "$name" || bad "$name: code $code" "$out"
}
port=$((20000 + RANDOM % 10000))
still="$apart grpo.val_period=0 grpo.val_at_start=false checkpointing.enabled=false"
missing="after cluster.collective_timeout_s step 1 waits for groups 0, 1, 2, 3, 4 and 3 more"
waits "no engine comes: code 20" "$missing (nobody has 32); no engine is there: start trireme engine" \
  "$TRIREME" launch --master-port "$port" -- $(run_args none $still cluster.collective_timeout_s=5)
# Its rewards come later than that; it goes on looking for them, and is not lost.
waits "an engine brings nothing: code 20, and it is named" "$missing (engine-0 has [0-9]* of their samples" \
  "$TRIREME" launch --engines 1 -- $(run_args late $still cluster.collective_timeout_s=20 \
  $(paid 55))

# Rewards run beside engines, where they may lack what the actor's have: each probes its own before it joins.
# where.sh engine|actor: a reward that works only there.
cat >"$dir/where.sh" <<'SH'
[ "$1" = "${TRIREME_ENGINE_NAME:+engine}" ] || [ "$1${TRIREME_ENGINE_NAME:-}" = actor ] || exit 7
while read -r line; do echo '{"reward": 1}'; done
SH
only() { echo "env.command.enabled=true env.command.num_workers=1 env.command.command=[sh,$dir/where.sh,$1]"; }
idle="$still grpo.val_at_end=false grpo.max_num_steps=2"
out=$("$TRIREME" launch --engines 1 -- $(run_args not-there $idle $(only actor)) 2>&1); code=$?
[ $code = 10 ] && grep -q "reward 'command' does not work: sh: ended with exit code 7" <<<"$out" &&
  grep -q "engine-0 ended with exit code 10" <<<"$out" && ! grep -q "has joined" <<<"$out" &&
  ok "a reward that is missing where an engine runs: code 10, and none has joined" ||
  bad "a reward that is missing where an engine runs: code $code" "$out"
check "a reward that is missing where nothing is scored" \
  "$TRIREME" launch --engines 1 -- $(run_args only-there $idle $(only engine))
out=$("$TRIREME" launch --engines 1 -- $(run_args validated $idle $(only engine) grpo.val_at_end=true) 2>&1); code=$?
[ $code = 10 ] && grep -q "reward 'command' does not work: sh: ended with exit code 7" <<<"$out" &&
  ok "the same where validation needs it: code 10" || bad "the same where validation needs it: code $code" "$out"

refused() {  # NAME SENTENCE COMMAND...
  local name=$1 sentence=$2 out; shift 2
  out=$("$@" 2>&1) && { bad "$name" "was accepted"; return; }
  grep -qF "$sentence" <<<"$out" && ok "$name" || bad "$name" "$out"
}
refused "engines with generation on the same devices" "or leave --engines out" \
  "$TRIREME" launch --engines 1 -- $(run_args refused)
refused "no way to reach the run" "start it with trireme launch --engines" "$TRIREME" $(run_args refused $apart)
refused "a port that no engine can know" "start it with trireme launch --engines" \
  "$TRIREME" launch -- $(run_args refused $apart)
refused "the same, two ranks" "start it with trireme launch --engines" \
  "$TRIREME" launch --nproc-per-node 2 -- $(run_args refused $apart)
refused "early gradients" "beside generation on the same device" "$TRIREME" $(run_args refused $apart) \
  grpo.early_gradients=true
refused "a width of experts that ranks share" "from a policy of expert tensor parallel size 2" "$TRIREME" \
  $(run_args refused $apart) policy.megatron_cfg.enabled=true policy.megatron_cfg.expert_tensor_parallel_size=2 \
  cluster.gpus_per_node=2
refused "dynamic sampling with exact versions" "which step a group is of is not known" "$TRIREME" \
  $(run_args refused $async) grpo.use_dynamic_sampling=true
finish
