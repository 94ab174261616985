# For tests that run the trireme program: source it. Needs TRIREME (the program) in the environment.
set -uo pipefail
: "${TRIREME:?}"
export OMP_WAIT_POLICY=passive
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
passed=0 failed=0
ok() { passed=$((passed + 1)); echo "ok    $1"; }
bad() {
  failed=$((failed + 1)); echo "FAIL  $1"
  [ $# -lt 2 ] || printf '%s\n' "$2" | tail -15 | sed 's/^/      /'
  return 1
}
# check NAME COMMAND...: passes when the command does.
check() { local name=$1 out; shift; if out=$("$@" 2>&1); then ok "$name"; else bad "$name" "$out"; fi; }
# await SECONDS COMMAND...: polls until it succeeds; fails when the time is over, which is for a run that stands still,
# not for a slow machine.
await() {
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do [ $SECONDS -lt $end ] || return 1; sleep 0.05; done
}
# For runs in which a rank dies: a deadline of collectives that is far away, and the seconds that are soon before it.
# Who leaves soon has not waited for the deadline, on however slow a machine.
far_deadline=cluster.collective_timeout_s=900 soon=300
finish() { echo "$passed passed, $failed failed"; [ "$failed" = 0 ]; }

# A tiny model and task in $dir, and the overrides of a run that takes a second.
make_fixture() {
  "$TRIREME" init-model --out "$dir/model" --hidden 32 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 \
    --intermediate 48 >/dev/null
  "$TRIREME" init-task addition --out "$dir/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null
}
# run_args NAME [overrides...]: the arguments of a run with its own folders. A random model solves nothing, so the
# format of an answer is rewarded too: without rewards that differ every gradient would be zero.
run_args() {
  local name=$1; shift
  echo train --config configs/quickstart.yaml policy.model_name="$dir/model" \
    data.train.data_path="$dir/task/train.jsonl" data.validation.data_path="$dir/task/held_out.jsonl" \
    checkpointing.checkpoint_dir="$dir/$name" logger.log_dir="$dir/$name-logs" \
    grpo.use_dynamic_sampling=false grpo.batch_multiplier=1 grpo.num_prompts_per_step=8 \
    grpo.num_generations_per_prompt=4 policy.train_global_batch_size=16 policy.train_micro_batch_size=4 \
    grpo.max_num_steps=6 grpo.val_period=3 grpo.max_val_samples=20 grpo.stop_at_validation_metric=null \
    grpo.stop_at_validation_threshold=null checkpointing.save_period=1 checkpointing.keep_top_k=0 \
    policy.generation.max_running_samples=16 policy.generation.kv_cache_tokens=4096 \
    policy.generation.max_new_tokens=12 env.format.enabled=true "env.format.pattern=(a|b|c|x|y|z|A|B|0|1|2|3)" \
    logger.prometheus.enabled=false logger.report=false cluster.collective_timeout_s=120 "$@"
}
# paid [SECONDS]: overrides of a reward by a program that takes so long for an answer. It keeps a run of a tiny model
# going for long enough to be waited for, and disturbed.
paid() {
  [ -f "$dir/reward.sh" ] || cat >"$dir/reward.sh" <<'SH'
while read -r line; do echo "{\"reward\": 1}"; [ -z "$1" ] || sleep "$1"; done
SH
  echo "env.command.enabled=true env.command.num_workers=1 env.command.command=[sh,$dir/reward.sh${1:+,'$1'}]"
}
# A model that four tensor ranks and four stages can share, and a run of four steps over them on CPU.
make_split_fixture() {
  make_fixture
  "$TRIREME" init-model --out "$dir/model" --hidden 64 --layers 4 --heads 4 --kv-heads 4 --head-dim 16 \
    --intermediate 64 >/dev/null
}
# A mixture of experts beside it, of as many layers as two stages need.
make_mixture() {
  "$TRIREME" init-model --out "$dir/mixture" --family qwen3_moe --hidden 64 --layers 2 --heads 4 --kv-heads 2 \
    --head-dim 16 --intermediate 64 --experts 8 --experts-per-token 2 --expert-width 32 >/dev/null
}
# split_args NAME RANKS [overrides...]: run_args of the test's $common over so many ranks.
split_args() {
  local name=$1 ranks=$2; shift 2
  run_args "$name" $common cluster.gpus_per_node="$ranks" "$@"
}
# run_split NAME RANKS TP PP [overrides...]
run_split() {
  local name=$1 ranks=$2 tp=$3 pp=$4; shift 4
  "$TRIREME" launch --nproc-per-node "$ranks" -- $(run_args "$name" grpo.val_period=0 grpo.val_at_start=false \
    cluster.device=cpu cluster.gpus_per_node="$ranks" policy.megatron_cfg.enabled=true \
    policy.megatron_cfg.tensor_model_parallel_size="$tp" policy.megatron_cfg.pipeline_model_parallel_size="$pp" \
    grpo.max_num_steps=4 loss_fn.reference_policy_kl_penalty=0.05 \
    policy.generation.max_running_samples=8 policy.generation.kv_cache_tokens=400 "$@")
}
# manifest NAME ALGORITHM ROLES train --config FILE [overrides...]: an RLJob whose pods run what these arguments say.
manifest() {
  local name=$1 algorithm=$2 roles=$3 file=$6; shift 6
  cat <<Y
apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: $name}
spec:
  algorithm: $algorithm
  config:
    path: $file
    overrides:
$(printf '      - "%s"\n' "$@")
  roles: {$roles}
Y
}
weights() {
  [ -f "$dir/$1/step_$2/policy/weights/model.safetensors" ] || { echo "no weights of $1 step $2 ($RANDOM)"; return; }
  sha256sum "$dir/$1/step_$2/policy/weights/model.safetensors" "$dir/$1/step_$2/policy/optimizer/"*.safetensors |
    awk '{print $1}' | sha256sum
}
equal() {  # NAME OTHER STEP
  [ "$(weights "$1" "$3")" = "$(weights "$2" "$3")" ] && ok "$1: the weights of $2" || bad "$1: the weights of $2"
}
# in_turn NAME RANKS ENGINE [overrides...]: a run of $steps steps on the same devices, and one in turn by an engine that
# the overrides ENGINE ask for: the same weights. What the latter said is in $out.
in_turn() {
  local name=$1 ranks=$2 engine=$3; shift 3
  check "$name on the same devices" "$TRIREME" launch --nproc-per-node "$ranks" -- \
    $(split_args "$name" "$ranks" "$@")
  out=$("$TRIREME" launch --nproc-per-node "$ranks" --engines 1 -- \
    $(split_args "turn-$name" "$ranks" $engine "$@") 2>&1) && ok "$name, an engine" || bad "$name, an engine" "$out"
  equal "turn-$name" "$name" "$steps"
}
# Of that engine's log-probs: they have the loss's bits, so no pass computes them again.
without_pass() {
  check "turn-$1: equal bits of engine and loss" sound "turn-$1" "$steps"
  grep -q "previous-log-prob pass" <<<"$out" && bad "$1: a pass that nobody needs" "$out" || ok "$1: no pass"
}
# near NAME STEPS: log-probs with other bits than the loss's, and near: those of other weights are not.
near() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
differing = sum(x["train/logprob_mismatch_tokens"] for x in rows)
worst = max(x["train/token_mult_prob_error"] for x in rows)
print(f"{len(rows)} steps, {differing} tokens with other bits, error {worst}")
sys.exit(0 if len(rows) == int(sys.argv[2]) and differing > 0 and worst < 1.001 else 1)
PY
}
# ages NAME: $steps steps, no token older than by one.
ages() {
  python3 - "$dir/$1-logs/train.jsonl" "$steps" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
ages = [x["train/max_trajectory_age"] for x in rows]
print(ages, [x["train/logprob_mismatch_tokens"] for x in rows])
sys.exit(0 if len(rows) == int(sys.argv[2]) and max(ages) <= 1 else 1)
PY
}
# carry_args grpo|ppo async_grpo|async_ppo: overrides of carry-over. Responses end early and late, and a step of
# run_args has more of them than there are places: some are always under way.
carry_args() {
  echo "$1.$2.enabled=true $1.$2.in_flight_weight_updates=true loss_fn.use_importance_sampling_correction=true
    policy.generation.max_running_samples=10 policy.generation.max_new_tokens=24
    policy.generation.stop_token_ids=[$(seq -s , 200 219)]"
}
# aged NAME STEPS WHAT: every step in order; tokens are of its weights or of the ones before, some are older, and what
# WHAT (python, of the rows) says holds. `equal`: no token that the step's own weights drew has other bits; by_version
# looks at the others.
aged() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" "$3" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
stale = sum(x["train/stale_tokens"] for x in rows)
print(f"{len(rows)} steps, {stale:.0f} older tokens,",
      [(x["train/max_trajectory_age"], x["train/spanning_samples"], x["train/mixed_context_tokens"],
        x["train/logprob_mismatch_tokens"]) for x in rows])
whole = all(x["train/weight_version"] == s and x["train/max_trajectory_age"] <= 1 for s, x in enumerate(rows))
equal = all(x["train/logprob_mismatch_tokens"] == 0 for x in rows)
sys.exit(0 if len(rows) == int(sys.argv[2]) and stale > 0 and whole and eval(sys.argv[3]) else 1)
PY
}
no_other_bits() {
  python3 -c 'import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
sys.exit(0 if rows and all(x["train/logprob_mismatch_tokens"] == 0 for x in rows) else 1)' \
    "$dir/$1-logs/train.jsonl"
}
# What the log of NAME says: STEPS steps, no token with other bits, gradients that are some.
sound() {
  python3 - "$dir/$1-logs/train.jsonl" "$2" <<'PY'
import json, sys
rows = [x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x]
compared = sum(x["train/logprob_compared_tokens"] for x in rows)
differing = sum(x["train/logprob_mismatch_tokens"] for x in rows)
print(f"{len(rows)} steps, {differing} of {compared} tokens with other bits")
sys.exit(0 if len(rows) == int(sys.argv[2]) and compared > 300 and differing == 0 and
         all(x["train/grad_norm"] > 0 for x in rows) else 1)
PY
}
# Overrides of a run whose tokens by_version compares: a dump has a step's first optimizer step, here its only one.
dumped="logger.dump_steps=[1,2,3,4,5,6] policy.train_global_batch_size=32"
# by_version NAME equal|differ [DUMPS [MODEL]]: each token of the DUMPS (6) that NAME has written against a packed
# forward on one rank of the weights that drew it, MODEL's (model) or those that its checkpoints have kept, by memcmp:
# all are equal, some of them drawn from older weights than their step's; or one differs.
by_version() {
  python3 - "$TRIREME" "$dir" "$1" "$2" "${3:-6}" "${4:-model}" <<'PY'
import glob, re, subprocess, sys
program, folder, name, wanted, written, model = sys.argv[1:]
def replay(dump, version):
    weights = f"{folder}/{name}/step_{version}/policy/weights" if version > 0 else f"{folder}/{model}"
    done = subprocess.run([program, "replay", dump, "--model", weights], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    total = int(re.search(r"^total: (\d+) tokens", done.stdout, re.M)[1])
    line = r"^weight version (\d+): (\d+) tokens, (\d+) differ"
    of = {int(v): (int(n), int(d)) for v, n, d in re.findall(line, done.stdout, re.M)}
    if total == 0 or sum(n for n, _ in of.values()) != total:
        sys.exit(f"{dump} has {total} tokens, of known versions: {of}")
    return of
dumps = glob.glob(f"{folder}/{name}-logs/dump_step_*.safetensors")
tokens = older = differing = 0
for dump in sorted(dumps):
    newest = int(re.search(r"dump_step_(\d+)", dump)[1]) - 1  # the version that the step begins with
    first = replay(dump, newest)
    for version in first:
        count, off = (first if version == newest else replay(dump, version))[version]
        tokens += count
        older += count if version < newest else 0
        differing += off
    if wanted == "differ" and differing > 0:
        break
print(f"{tokens} tokens of {len(dumps)} dumps, {older} of older weights, {differing} differ from their weights' bits")
right = differing > 0 if wanted == "differ" else older > 0 and differing == 0
sys.exit(0 if len(dumps) == int(written) and right else 1)
PY
}
# Logged values that may not depend on time.
values() { sed 's/"time":"[^"]*"//; s/"timing[^,}]*//g; s/"performance[^,}]*//g' "$dir/$1-logs/train.jsonl"; }
# ppo_args NAME [overrides...]: run_args of a PPO run: two passes over each rollout, the critic alone in the first two
# steps.
ppo_args() {
  local name=$1; shift
  run_args "$name" algorithm=ppo ppo.num_prompts_per_step=8 ppo.num_generations_per_prompt=4 ppo.max_num_steps=6 \
    ppo.ppo_epochs=2 ppo.policy_training_start_step=2 ppo.val_period=3 ppo.val_at_start=false ppo.max_val_samples=20 \
    value_loss_fn.cliprange=0.5 value.optimizer.kwargs.lr=0.001 "$@"
}
# One optimizer step a pass: what differs between the numbers of ranks is rounding only.
one_step="policy.train_global_batch_size=32 policy.optimizer.kwargs.lr=1e-6 value.optimizer.kwargs.lr=1e-5"
one_step+=" ppo.max_num_steps=3 ppo.ppo_epochs=1 ppo.policy_training_start_step=0"
# Weights and moments of both models of a step of PPO: the critic's beside the actor's, or in a folder of its own.
both() {
  local actor="$dir/$1/step_$2/policy" critic="$dir/$1/step_$2/value"
  [ -d "$critic" ] || critic="$dir/$1/value/step_$2/value"
  [ -f "$critic/weights/model.safetensors" ] || { echo "no critic of $1 step $2 ($RANDOM)"; return; }
  sha256sum "$actor/weights/model.safetensors" "$critic/weights/model.safetensors" "$actor"/optimizer/*.safetensors \
    "$critic"/optimizer/*.safetensors | awk '{print $1}' | sha256sum
}
# What the first step of a run on GPUs was, to the digits that do not depend on the order of its sums.
first() {
  python3 -c 'import json, sys
row = next(x for x in map(json.loads, open(sys.argv[1])) if "train/loss" in x)
print(*(f"{row[key]:.3g}" for key in ("train/reward", "train/mean_generation_length", "train/grad_norm")
        if key in row))' "$dir/$1-logs/train.jsonl"
}
# Processes whose parent this one is.
children_of() { pgrep -P "$1"; }
