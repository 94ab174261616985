#!/usr/bin/env bash
# compare_commits.sh COMMIT: builds COMMIT in a worktree of its own and compares with it the program that is built here:
# after 6 steps of on-policy GRPO, on one rank and on two, and of SFT, weights, moments and log must be the same. Both
# take COMMIT's configurations, and the model and task that its program makes. CPU; minutes besides the build, which
# takes as long as any, so it is no part of CI.
#   TRIREME=...   the program to be compared (default: build/cpu/trainer/cli/trireme)
#   OLD=...       COMMIT's program, where it is built already
# What is in the log of one of them only is no difference; it is printed. The worktree stays for the next time.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[ $# = 1 ] || die "name one commit to compare with, e.g. scripts/compare_commits.sh HEAD~1"
commit=$(git rev-parse --verify --quiet "$1^{commit}") || die "'$1' is no commit of this repository"
new=$(realpath -m "${TRIREME:-build/cpu/trainer/cli/trireme}")
[ -x "$new" ] || die "$new is not there: make build"
dir=$ROOT/.trireme/compare-commits
source=$dir/source-${commit:0:12}
mkdir -p "$dir"
if [ ! -e "$source/.git" ]; then
  git worktree prune
  git worktree add --quiet --detach "$source" "$commit" || die "git made no worktree of $commit in $source"
fi
[ "$(git -C "$source" rev-parse HEAD)" = "$commit" ] ||
  die "$source has another commit: git worktree remove --force $source"
old=${OLD:+$(realpath -m "$OLD")}
if [ -z "$old" ]; then
  "$source/scripts/setup.sh" cpu
  "$source/scripts/build.sh" cpu trireme
  old=$source/build/cpu/trainer/cli/trireme
fi
[ -x "$old" ] || die "$old is not there, or no program"

export OMP_WAIT_POLICY=passive
runs=$dir/runs
rm -rf "$runs" && mkdir -p "$runs"
"$old" init-model --out "$runs/model" --hidden 32 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --intermediate 48 \
  >/dev/null
"$old" init-task addition --out "$runs/task" --smallest 0 --largest 19 --warm-start 50 --held-out 20 >/dev/null

# A random model solves nothing: the format of an answer is rewarded too, or every gradient would be zero.
common="policy.model_name=$runs/model logger.prometheus.enabled=false logger.report=false cluster.device=cpu
  checkpointing.save_period=6 policy.train_global_batch_size=16 policy.train_micro_batch_size=4"
grpo="--config $source/configs/quickstart.yaml $common data.train.data_path=$runs/task/train.jsonl
  data.validation.data_path=$runs/task/held_out.jsonl grpo.use_dynamic_sampling=false grpo.batch_multiplier=1
  grpo.num_prompts_per_step=8 grpo.num_generations_per_prompt=4 grpo.max_num_steps=6 grpo.val_period=3
  grpo.max_val_samples=20 grpo.stop_at_validation_metric=null grpo.stop_at_validation_threshold=null
  loss_fn.reference_policy_kl_penalty=0.05 policy.generation.max_running_samples=16
  policy.generation.kv_cache_tokens=4096 policy.generation.max_new_tokens=12 env.format.enabled=true
  env.format.pattern=(a|b|c|x|y|z|A|B|0|1|2|3) cluster.collective_timeout_s=120"
sft="--config $source/configs/quickstart_sft.yaml $common data.train.data_path=$runs/task/warm_start.jsonl
  data.train.split_validation_size=10 sft.max_num_steps=6 sft.val_period=3 sft.val_batches=1"

# run NAME PROGRAM RANKS ARGUMENTS...: in folders of its own.
run() {
  local name=$1 program=$2 ranks=$3 before=()
  shift 3
  [ "$ranks" = 1 ] || before=(launch --nproc-per-node "$ranks" --)
  "$program" "${before[@]}" train "$@" cluster.gpus_per_node="$ranks" checkpointing.checkpoint_dir="$runs/$name" \
    logger.log_dir="$runs/$name-logs" >"$runs/$name.log" 2>&1 || die "$name failed: $runs/$name.log"
}

# Of two runs: weights and moments of step 6, tensor by tensor, and what both say of each step, but for its times.
same() {
  python3 - "$1" "$2" <<'PY'
import json, pathlib, struct, sys

def tensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[8 + size:][slice(*t["data_offsets"])]) for name, t in header.items()}

def rows(run):
    lines = map(json.loads, open(run + "-logs/train.jsonl"))
    keep = lambda key: key != "time" and not key.startswith(("timing", "performance"))
    return [{key: repr(value) for key, value in row.items() if keep(key)} for row in lines]

old, new = sys.argv[1:]
wrong, compared = [], 0
for part in ("weights", "optimizer"):
    folders = [pathlib.Path(run) / "step_6/policy" / part for run in (old, new)]
    names = [sorted(f.name for f in folder.glob("*.safetensors")) for folder in folders]
    if names[0] != names[1] or not names[0]:
        wrong.append(f"{part}: files {names[0]} and {names[1]}")
        continue
    for name in names[0]:
        a, b = tensors(folders[0] / name), tensors(folders[1] / name)
        wrong += [f"{part}/{name}: {t} is of one only" for t in sorted(set(a) ^ set(b))]
        wrong += [f"{part}/{name}: {t} differs" for t in sorted(set(a) & set(b)) if a[t] != b[t]]
        compared += len(set(a) & set(b))
a, b = rows(old), rows(new)
if len(a) != len(b):
    wrong.append(f"the logs have {len(a)} and {len(b)} lines")
for i, (x, y) in enumerate(zip(a, b)):
    wrong += [f"line {i + 1} of the log: {k} is {x[k]} and {y[k]}" for k in sorted(set(x) & set(y)) if x[k] != y[k]]
steps = [float(x["train/grad_norm"]) for x in b if "train/grad_norm" in x]
if len(steps) != 6 or min(steps) <= 0:
    wrong.append(f"gradient norms {steps}: not 6 steps that train")
keys = [set().union(*of) for of in (a, b)]
for which, lacking in (("the older", keys[0] - keys[1]), ("the newer", keys[1] - keys[0])):
    if lacking:
        print(f"      in the log of {which} only: {' '.join(sorted(lacking))}")
print(f"      {compared} tensors, {len(keys[0] & keys[1])} keys of {len(a)} lines")
for line in wrong[:15]:
    print("      " + line)
sys.exit(1 if wrong else 0)
PY
}

passed=0 failed=0
compare() { # compare NAME RANKS ARGUMENTS...
  local name=$1
  shift
  say "$name"
  run "$name-old" "$old" "$@"
  run "$name-new" "$new" "$@"
  if out=$(same "$runs/$name-old" "$runs/$name-new"); then
    passed=$((passed + 1))
    printf 'ok    %s: the bits of %s\n%s\n' "$name" "${commit:0:12}" "$out"
  else
    failed=$((failed + 1))
    printf 'FAIL  %s: other bits than %s\n%s\n' "$name" "${commit:0:12}" "$out"
  fi
}
compare grpo 1 $grpo
compare grpo-2-ranks 2 $grpo
compare sft 1 $sft
echo "$passed passed, $failed failed"
[ $failed = 0 ]
