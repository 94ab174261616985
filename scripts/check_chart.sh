#!/usr/bin/env bash
# check_chart.sh: the chart renders, and agrees with the operator, the trainer, the CRD, helm-unittest and promtool.
# The operator's flags are tried when build/{cpu,operator}/operator/cli/trireme-operator is there.
. "$(dirname "$0")/lib.sh"
# Of the same helm, so that both share what is compiled.
UNITTEST=github.com/helm-unittest/helm-unittest/cmd/helm-unittest@v1.0.0
chart=$ROOT/charts/trireme
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

go_tool helm "$HELM"
go_tool helm-unittest "$UNITTEST"
if ! command -v promtool >/dev/null; then
  # Unpacked, not installed: the package would start a server.
  command -v apt-get >/dev/null || die "promtool is missing: install Prometheus"
  say "fetching promtool"
  fetch() { (cd "$work" && apt-get download -q prometheus && dpkg -x prometheus_*.deb deb) >"$work/apt.log" 2>&1; }
  fetch || {
    as_root apt-get update -q >/dev/null 2>&1 && fetch
  } || {
    tail -5 "$work/apt.log" >&2
    die "apt-get could not download prometheus"
  }
  mkdir -p "$CACHE/bin" && mv "$work/deb/usr/bin/promtool" "$CACHE/bin/"
fi
python=python3
for candidate in python3 /usr/bin/python3; do
  "$candidate" -c 'import yaml' 2>/dev/null && python=$candidate && break
done
"$python" -c 'import yaml' 2>/dev/null || { need_packages python3-yaml; python=/usr/bin/python3; }

passed=0; failed=0
# check WHAT COMMAND...: counts; shows the output of what fails.
check() {
  local what=$1; shift
  if "$@" >"$work/log" 2>&1; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $what" >&2
    tail -25 "$work/log" | sed 's/^/    /' >&2
  fi
}
# A helm built by `go install` would take itself for one of Kubernetes 1.20.
render() { helm template trireme "$chart" --namespace trireme-system --kube-version 1.34.0 "$@"; }
render_to() { local file=$1; shift; render "$@" >"$file"; }
refused() { ! render "$@" >/dev/null; }

say "helm"
for values in "$chart"/ci/*-values.yaml "$chart"/hardened-values.yaml; do
  name=$(basename "$values" -values.yaml)
  check "lint $name" helm lint --strict "$chart" --kube-version 1.34.0 --values "$values" --namespace trireme-system
  check "template $name" render_to "$work/$name.yaml" --values "$values"
done
check "an unknown value is refused" refused --set replicas=3
check "a wrong type is refused" refused --set-string replicaCount=two
check "a peer that is none is refused" refused --set metrics.scrapedBy[0].namespace=monitoring
check "a wrong back-end is refused" refused --set config.schedulingBackend=slurm
check "two replicas without an election are refused" refused --set config.leaderElection.enabled=false
check "helm-unittest" helm-unittest --strict "$chart"

say "agreement with the code"
operator=
for binary in "$ROOT"/build/{cpu,operator}/operator/cli/trireme-operator; do
  [ ! -x "$binary" ] || operator=$binary
done
[ -n "$operator" ] || say "no trireme-operator is built: its flags are not tried"
result=0
"$python" "$ROOT/scripts/check_chart.py" "$ROOT" "$operator" "$work"/*.yaml >"$work/python" || result=$?
grep -v '^count ' "$work/python" >&2 || true
counts=$(sed -n 's/^count //p' "$work/python")
if [ "$result" -gt 1 ] || [ -z "$counts" ]; then
  failed=$((failed + 1))
  echo "FAILED: check_chart.py ended with $result" >&2
else
  passed=$((passed + ${counts% *}))
  failed=$((failed + ${counts#* }))
fi

say "rules"
mkdir "$work/rules"
cp "$chart/rules-tests.yaml" "$work/rules/"
render --set rules.enabled=true --show-only templates/prometheusrule.yaml 2>"$work/log" |
  "$python" \
    -c 'import sys, yaml; yaml.safe_dump(yaml.safe_load(sys.stdin)["spec"], sys.stdout, sort_keys=False, width=1000)' \
      >"$work/rules/rules.yaml" || true
check "promtool check rules" promtool check rules "$work/rules/rules.yaml"
check "promtool test rules" promtool test rules "$work/rules/rules-tests.yaml"
check "every alert has a test that fires" "$python" - "$work/rules" <<'P'
import sys, yaml
load = lambda name: yaml.safe_load(open(f"{sys.argv[1]}/{name}"))
alerts = {rule["alert"] for group in load("rules.yaml")["groups"] for rule in group["rules"] if "alert" in rule}
cases = [case for test in load("rules-tests.yaml")["tests"] for case in test["alert_rule_test"]]
fired = {case["alertname"] for case in cases if case["exp_alerts"]}
quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
complete = alerts and not alerts - fired and not alerts - quiet
sys.exit(0 if complete else f"no test fires {alerts - fired}, none keeps quiet {alerts - quiet}")
P

"$python" - "$chart" >"$work/rules/boards.yaml" <<'P'
import glob, json, re, sys, yaml
# Every query of the boards as a recording rule, with something for the variables: promtool then parses it.
groups = []
for path in sorted(glob.glob(sys.argv[1] + "/dashboards/*.json")):
    board = json.load(open(path))
    queries = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
    queries += [a["expr"] for a in board["annotations"]["list"]]
    known = lambda query: re.sub(r"\$\w+", "x", query.replace("$__rate_interval", "5m"))
    name = board["uid"].replace("-", "_")
    rules = [{"record": "%s:%d" % (name, n), "expr": known(q)} for n, q in enumerate(queries)]
    groups.append({"name": board["uid"], "rules": rules})
yaml.safe_dump({"groups": groups}, sys.stdout, width=10000)
P
check "queries of the boards are PromQL" promtool check rules "$work/rules/boards.yaml"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
