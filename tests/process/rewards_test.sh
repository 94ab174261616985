#!/usr/bin/env bash
# Rewards that fail, that sit behind a token, and texts with and without a begin token.
cd "$(dirname "$0")/../.." && . tests/process/lib.sh
make_fixture

# ends CODE TEXT COMMAND...: ends with CODE and prints TEXT on one line. What it said is in $dir/said.
ends() {
  local code=$1 text=$2 got; shift 2
  "$@" >"$dir/said" 2>&1; got=$?
  if [ $got = "$code" ] && grep -q -- "$text" "$dir/said" && ! grep -q "frame #" "$dir/said"
  then ok "ends with $code: $text"
  else bad "expected code $code (got $got) and '$text'" "$(cat "$dir/said")"; fi
}
# weak.sh RANK FOLDER hang|fail [PAUSE]: a reward that answers one response (the probe) and on this rank hangs or fails
# from then on; on others it answers, the first response behind the probe after a pause.
cat >"$dir/weak.sh" <<'WEAK'
answer() { while read -r line; do echo '{"reward": 1}'; [ $# = 0 ] || return 0; done; }
[ "${RANK:-0}" = "$1" ] || { [ -z "$4" ] || { answer once; read -r line && sleep "$4" && echo '{"reward": 1}'; }
  answer; exit; }
mkdir "$2" 2>/dev/null || { [ "$3" = hang ] && exec sleep 1000; exit 1; }
read -r line; echo '{"reward": 1}'
WEAK
command=(env.command.enabled=true grpo.val_at_start=false grpo.val_period=0 grpo.val_at_end=false)
weak() { rm -rf "$dir/probed"; echo "env.command.command=[sh,$dir/weak.sh,$1,$dir/probed,$2${3:+,'$3'}]"; }
two() {
  "$TRIREME" launch --nproc-per-node 2 -- \
    $(run_args two "${command[@]}" checkpointing.enabled=false grpo.max_num_steps=100000 "$@")
}

# What cannot work is said before the first step, by its name.
ends 10 "reward 'command' does not work: pyhton3: cannot run 'pyhton3'" \
  "$TRIREME" $(run_args a "${command[@]}" "env.command.command=[pyhton3,grade.py]")
ends 10 "reward 'command' does not work: sh: ended with exit code 127" \
  "$TRIREME" $(run_args a "${command[@]}" "env.command.command=[sh,-c,no-such-grader]")
[ ! -e "$dir/a-logs/train.jsonl" ] && ok "and no step was made" || bad "a step was made"
ends 10 "TRIREME_REWARD_URL" "$TRIREME" $(run_args a env.http.enabled=true)
ends 1 "http://127.0.0.1:1/score" env TRIREME_REWARD_URL=http://127.0.0.1:1/score \
  "$TRIREME" $(run_args a env.http.enabled=true env.startup_timeout_s=1)
grep -q "has not answered a probe within 1 s" "$dir/said" &&
  ok "a service that does not come is waited for, and then said" || bad "no word of the probe" "$(cat "$dir/said")"

# What works at first and then not: the step is not trained on.
ends 1 "reward 'command' failed for 32 of 32 responses, more than env.max_failed_share 0.5; the last error: sh: .*\
ended with exit code 1" "$TRIREME" $(run_args b "${command[@]}" "$(weak 0 fail)")
[ ! -s "$dir/b-logs/train.jsonl" ] && ok "and no step was made" ||
  bad "a step was made" "$(cat "$dir/b-logs/train.jsonl")"
ends 0 "step 6/6" "$TRIREME" $(run_args c "${command[@]}" "$(weak 0 fail)" env.max_failed_share=1)
ends 0 "step 2/2" "$TRIREME" $(run_args d "${command[@]}" "$(weak 5 fail)" grpo.max_num_steps=2)
# On one rank of two: both leave, with the share of both and whose error it was.
ends 1 \
  "rank 1 .*reward 'command' failed for .* of 32 responses, .*; the last error: rank 1: sh: .*ended with exit code 1" \
  two "$(weak 1 fail)" env.max_failed_share=0
grep -q "rank 0 .*reward 'command' failed for .* of 32 responses, .*; the last error: rank 1: sh" "$dir/said" &&
  ok "the other rank counts them too" || bad "rank 0 does not say it" "$(cat "$dir/said")"

# The policy "error", on one rank: it is the cause, not the echo of a peer's end.
ends 1 "rank 1 failed first (exit code 1)" two "$(weak 1 fail)" env.command.failure_policy=error
grep -q "rank 0 .*failed: .*rank 1 on .*reward 'command' failed for group .*: sh: ended with exit code 1" "$dir/said" &&
  ok "the other rank says whose failure it was" || bad "rank 0 does not say it" "$(cat "$dir/said")"
ends 1 "groups have no reward yet after cluster.collective_timeout_s" \
  "$TRIREME" $(run_args e "${command[@]}" env.command.timeout_s=600 cluster.collective_timeout_s=3 "$(weak 0 hang)" \
    "env.command.num_workers=1")
# On one rank of two likewise. The other one's rewards take 15 s, however many it has, so that it is not the first to
# have waited for 30.
ends 1 "rank 1 failed first (exit code 1)" two "$(weak 1 hang 15)" env.command.timeout_s=600 \
  cluster.collective_timeout_s=30 env.command.num_workers=1
grep -q "rank 0 .*failed: .*rank 1.*: [0-9]* groups have no reward yet after cluster.coll" "$dir/said" &&
  ok "the other rank says who waited for rewards" || bad "rank 0 does not say it" "$(cat "$dir/said")"

# A service behind a token: it is sent, and is in nothing that the run leaves behind or says.
python=$(command -v python3) || true
if [ -n "$python" ]; then
  cat >"$dir/service.py" <<'SERVICE'
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        right = self.headers.get("Authorization") == "Bearer sesame-4711"
        answer = "who is " + str(self.headers.get("Authorization"))
        if right: answer = json.dumps({"rewards": [len(r["response"]) % 2 for r in body["requests"]]})
        self.send_response(200); self.send_header("Content-Length", str(len(answer))); self.end_headers()
        self.wfile.write(answer.encode())
    def log_message(self, *arguments): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
SERVICE
  "$python" "$dir/service.py" >"$dir/port" & service=$!
  await 240 test -s "$dir/port"
  export TRIREME_REWARD_URL=http://127.0.0.1:$(cat "$dir/port")/score
  printf 'Bearer sesame-4711\n' >"$dir/token"
  ends 0 "step 2/2" "$TRIREME" $(run_args f env.http.enabled=true \
    "env.http.headers=[\"Authorization:{file:$dir/token}\"]" grpo.max_num_steps=2 logger.report=true)
  grep -q '"train/reward_failures/http":0[.0]*[,}]' "$dir/f-logs/train.jsonl" && ok "every answer was graded" ||
    bad "failures" "$(cat "$dir/f-logs/train.jsonl")"
  left=$(grep -rlF "sesame" "$dir/f" "$dir/f-logs" "$dir/said")
  [ -z "$left" ] && [ -s "$dir/f-logs/report.html" ] && ok "no secret in checkpoints, logs and report" ||
    bad "a secret is left in: $left"
  ends 10 "reward 'http' does not work: .*answered 'who is \*\*\*'" env REWARD_TOKEN=wrong-sesame \
    "$TRIREME" $(run_args a env.http.enabled=true 'env.http.headers=["Authorization:{env:REWARD_TOKEN}"]')
  ends 10 "REWARD_TOKEN is not set" "$TRIREME" $(run_args a env.http.enabled=true \
    'env.http.headers=["Authorization:{env:REWARD_TOKEN}"]')
  unset TRIREME_REWARD_URL
  kill $service; wait $service 2>/dev/null
fi

# A tokenizer that puts a begin token before a text.
cp -r "$dir/model" "$dir/begin"
begin='{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|im_start|>","type_id":0}},'
begin+='{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},'
begin+='{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<|im_start|>":{"id":"<|im_start|>","ids":[257],'
begin+='"tokens":["<|im_start|>"]}}}'
sed -i 's/"post_processor": *null/"post_processor":'"$begin/" "$dir/begin/tokenizer.json"
scored() { echo "$2" | "$TRIREME" score --model "$dir/begin" $1 | sed 's/.*"ids":\(\[[^]]*\]\).*/\1/'; }
is() {
  local name=$1 expected=$2; shift 2; local got; got=$("$@" 2>&1)
  [ "$got" = "$expected" ] && ok "$name" || bad "$name: $got instead of $expected"
}
is "score follows the tokenizer" "[257,104,105]" scored "" '{"text": "hi"}'
is "score --no-special-tokens" "[104,105]" scored --no-special-tokens '{"text": "hi"}'
is "a line's add_special wins" "[104,105]" scored "" '{"text": "hi", "add_special": false}'
is "ids are taken as they are" "[104]" scored "" '{"ids": [104]}'
answer() { echo "$2" | "$TRIREME" generate --model "$dir/begin" --max-new-tokens 8 $1 | sed 's/.*"tokens"://'; }
is "generate follows the tokenizer" "$(answer "" '{"ids": [257, 104, 105]}')" answer "" '{"prompt": "hi"}'
is "generate --no-special-tokens" "$(answer "" '{"ids": [104, 105]}')" answer --no-special-tokens '{"prompt": "hi"}'
finish
