#!/usr/bin/env bash
# check_quickstart.sh: runs the quickstart and checks what it promises: at most MOST (0.45) after the warm start, at
# least LEAST (0.90) after GRPO. The first is a matter of one validation loss, and so of the machine within a few
# hundredths: CI allows 0.50 (.ci/run). SHUFFLED=1 also runs the control with shuffled rewards.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
passed=0 failed=0
judge() {
  if awk "BEGIN{exit !($2)}"; then
    passed=$((passed + 1))
    echo "ok    $1"
  else
    failed=$((failed + 1))
    echo "FAIL  $1 ($2)"
  fi
}
out=$(make --no-print-directory quickstart 2>&1 | tee >(cat >&2) | grep '^quickstart: [0-9]') ||
  die "the quickstart failed"
before=$(sed 's/.*warm start \([0-9.]*\),.*/\1/' <<<"$out"); after=$(sed 's/.*after GRPO \([0-9.]*\).*/\1/' <<<"$out")
judge "held-out accuracy after the warm start is at most ${MOST:-0.45}" "$before <= ${MOST:-0.45}"
judge "held-out accuracy after GRPO is at least ${LEAST:-0.90}" "$after >= ${LEAST:-0.90}"
judge "the report page is there" "$([ -s .trireme/volumes/quickstart/logs/report.html ] && echo 1 || echo 0)"
if [ -n "${SHUFFLED:-}" ]; then
  out=$(SHUFFLE_REWARDS=1 make --no-print-directory quickstart 2>&1 | tee >(cat >&2) | grep '^quickstart: [0-9]') ||
    die "the control failed"
  after=$(sed 's/.*after GRPO \([0-9.]*\).*/\1/' <<<"$out")
  judge "with shuffled rewards it stays at most 0.55" "$after <= 0.55"
fi
echo "$passed passed, $failed failed"
[ $failed = 0 ]
