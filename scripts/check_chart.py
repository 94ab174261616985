"""check_chart.py ROOT OPERATOR RENDERED...: does what the chart renders agree with itself and with the code?

OPERATOR is the program, or "" when none is built. Prints what fails, and last "count PASSED FAILED".
"""
import json
import pathlib
import re
import subprocess
import sys

import yaml

root = pathlib.Path(sys.argv[1])
chart = root / "charts/trireme"
operator = sys.argv[2]
passed = failed = 0

CLUSTER_SCOPED = {
    "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ValidatingWebhookConfiguration",
    "MutatingWebhookConfiguration"
}


class Loader(yaml.SafeLoader):
    """Refuses a key given twice, which YAML readers otherwise take in silence."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"keys given twice: {twice}")
        return super().construct_mapping(node, deep)


def check(what, problem):
    """`problem` is falsy when all is well."""
    global passed, failed
    if problem:
        failed += 1
        print(f"FAILED: {what}: {problem}")
    else:
        passed += 1


def sources(*folders):
    return "\n".join(p.read_text() for f in folders for p in sorted((root / f).rglob("*"))
                     if p.suffix in (".cpp", ".h"))


OPERATOR = sources("operator", "api")
METRIC_SOURCE = OPERATOR + sources("trainer/telemetry")


def find(docs, kind, name=None):
    return [d for d in docs if d["kind"] == kind and (name is None or d["metadata"]["name"] == name)]


def matches(selector, labels):
    return all(labels.get(k) == v for k, v in selector.items())


# ---- one rendering ---------------------------------------------------------------------------------------------------


def check_objects(where, docs):
    for d in docs:
        name = f"{d.get('kind')} {d.get('metadata', {}).get('name')}"
        missing = [k for k in ("apiVersion", "kind", "metadata") if not d.get(k)]
        problem = missing and f"has no {missing}"
        if not problem:
            namespaced = "namespace" in d["metadata"]
            if d["kind"] in CLUSTER_SCOPED and namespaced:
                problem = "is cluster-scoped and names a namespace"
            elif d["kind"] not in CLUSTER_SCOPED and not namespaced and not name.endswith("-extra"):
                problem = "names no namespace"
            elif not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", d["metadata"]["name"]):
                problem = "has an odd name"
            elif "trireme" not in json.dumps(d["metadata"].get("labels", {})) and not name.endswith("-extra"):
                problem = "has no labels"
        check(f"{where}: {name}", problem)
    keys = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in docs]
    check(f"{where}: objects are made once", {k for k in keys if keys.count(k) > 1})


def check_deployment(where, docs):
    deployment = find(docs, "Deployment")[0]
    pod = deployment["spec"]["template"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    container = pod["containers"][0]
    if operator:
        # Exit code 2 means that it did not take its flags; with them all right it misses the kubeconfig.
        ran = subprocess.run([operator, *container["args"], "--kubeconfig=/nonexistent"], capture_output=True,
                             text=True, env={}, timeout=60)
        check(f"{where}: the operator takes its flags", (ran.returncode != 1 or "/nonexistent" not in ran.stderr)
              and ran.stderr)
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    values = dict(a.split("=", 1) for a in container["args"] if "=" in a)
    for name in ("health", "metrics", "status", "webhook"):
        told = int(values[f"--{name}-port"])
        check(f"{where}: port {name}", told != ports.get(name, -1)
              and f"the flag says {told}, the pod {ports.get(name)}")
    check(f"{where}: selector", not matches(deployment["spec"]["selector"]["matchLabels"], labels)
          and "does not match the pods")
    context = container["securityContext"]
    check(
        f"{where}: restricted",
        not (
            context["readOnlyRootFilesystem"]
            and not context["allowPrivilegeEscalation"]
            and context["capabilities"] == {"drop": ["ALL"]}
            and pod["securityContext"]["runAsNonRoot"]
        )
        and context,
    )
    mounted = {v["name"] for v in pod.get("volumes", [])}
    check(f"{where}: volumes", {m["name"] for m in container.get("volumeMounts", [])} ^ mounted)

    for service in find(docs, "Service"):
        name = service["metadata"]["name"]
        port = service["spec"]["ports"][0]
        problem = (
            not matches(service["spec"]["selector"], labels)
            and "selects no operator pod"
            or port["targetPort"] not in ports
            and f"leads to no port: {port}"
        )
        if not problem and port["name"] == "status" and port["port"] != ports["status"]:
            problem = "has another port than trainers are told"
        check(f"{where}: Service {name}", problem)
    services = {d["metadata"]["name"]: d for d in find(docs, "Service")}
    for flag in ("--status-service", "--webhook-service"):
        if flag in values:
            check(f"{where}: {flag}", values[flag] not in services and f"no Service {values[flag]}")
    for flag, kind in (
        ("--webhook-validating", "ValidatingWebhookConfiguration"),
        ("--webhook-mutating", "MutatingWebhookConfiguration"),
        ("--webhook-secret", "Secret"),
    ):
        if flag in values:
            check(f"{where}: {flag}", not find(docs, kind, values[flag]) and f"no {kind} {values[flag]}")
    for policy in find(docs, "NetworkPolicy"):
        opened = {p["port"] for rule in policy["spec"]["ingress"] for p in rule["ports"]}
        check(f"{where}: NetworkPolicy", opened ^ set(ports))
        check_policy(where, policy, values)
    for monitor in find(docs, "ServiceMonitor"):
        hit = [
            s for s in services.values() if matches(monitor["spec"]["selector"]["matchLabels"], s["metadata"]["labels"])
        ]
        port = monitor["spec"]["endpoints"][0]["port"]
        check(
            f"{where}: ServiceMonitor",
            [s["metadata"]["name"] for s in hit if port in [p["name"] for p in s["spec"]["ports"]]]
            != ["trireme-metrics"]
            and f"finds {hit}",
        )
    for monitor in find(docs, "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        check(f"{where}: PodMonitor",
              [t for pair in wanted.items() for t in pair if t != "0" and f'"{t}"' not in OPERATOR])
    return values, services


def check_policy(where, policy, values):
    """API server and kubelets have no addresses of pods; what is let in by label has to be a label that pods get."""
    rules = policy["spec"]["ingress"]
    closed = {p["port"] for rule in rules if "from" in rule for p in rule["ports"]}
    check(f"{where}: NetworkPolicy lets the API server and kubelets in", closed & {"health", "webhook"})
    check(f"{where}: NetworkPolicy has no rule that lets in everybody by an empty list",
          [r for r in rules if "from" in r and not r["from"]])
    keys = {
        e["key"]
        for rule in rules
        for peer in rule.get("from", [])
        for e in peer.get("podSelector", {}).get("matchExpressions", [])
        if "trireme" in e["key"]
    }
    check(
        f"{where}: NetworkPolicy knows pods of jobs by a label that they have",
        {k for k in keys if f'"{k}"' not in OPERATOR},
    )
    scrapers = [peer for rule in rules if {"port": "metrics"} in rule["ports"] for peer in rule["from"][1:]]
    if "--scraped-by" in values:
        check(f"{where}: the same may scrape jobs and the operator", scrapers != json.loads(values["--scraped-by"])
              and scrapers)


def check_webhooks(where, docs, services):
    for kind in ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"):
        for configuration in find(docs, kind):
            hook = configuration["webhooks"][0]
            service = hook["clientConfig"]["service"]
            problem = None
            if "caBundle" in hook["clientConfig"]:
                problem = "writes caBundle, which is the operator's"
            elif (
                service["name"] not in services
                or services[service["name"]]["spec"]["ports"][0]["port"] != service["port"]
            ):
                problem = f"no such Service and port: {service}"
            elif f'"{service["path"]}"' not in OPERATOR:
                problem = f"the operator does not serve {service['path']}"
            check(f"{where}: {kind}", problem)


def check_rights(where, docs, arguments):
    """Every kind that the code names must be in some rule, and no rule may be wider than one that was thought about."""
    roles = find(docs, "ClusterRole") + find(docs, "Role")
    own = [r for r in roles if "-rljob-" not in r["metadata"]["name"]]
    rules = [rule for role in own for rule in role["rules"]]
    wide = [r for r in rules if "*" in json.dumps(r) or "pods/exec" in r["resources"]]
    check(f"{where}: rights without wildcards", wide)
    clusterwide = [r for role in find(docs, "ClusterRole") for r in role["rules"] if "secrets" in r["resources"]]
    check(f"{where}: no Secrets of other namespaces", clusterwide)
    granted = {(g, r) for rule in rules for g in rule["apiGroups"] for r in rule["resources"]}
    off = set()
    if "--webhook-secret" not in arguments:
        off |= {"secrets"}
    if "--webhook-validating" not in arguments:
        off |= {"validatingwebhookconfigurations", "mutatingwebhookconfigurations"}
    if arguments["--status-port"] == "-1":
        off |= {"tokenreviews"}
    if "--lease-name" not in arguments:
        off |= {"leases"}
    if "--no-network-policies" in arguments:
        off |= {"networkpolicies"}
    if "--no-watch-nodes" in arguments:
        off |= {"nodes"}
    named = set(re.findall(r'inline const Resource k\w+\{"([^"]*)", "[^"]*", "([^"]*)"', OPERATOR))
    gangs = {g for g in re.findall(r'"([a-z0-9.-]+)/v[0-9a-z]+"', sources("operator/scheduling"))}
    needed = {(g, r) for g, r in named if r not in off} | {
        ("scheduling.k8s.io", "workloads"),
        ("kueue.x-k8s.io", "workloads"),
    }
    needed |= {(g, "podgroups") for g in gangs - {"kueue.x-k8s.io"}}
    check(f"{where}: rights for every kind in the code",
          len(named) < 10 and "kinds not found in the code" or needed - granted)
    check(f"{where}: no rights to what is off", {r for _, r in granted} & off)
    accounts = {d["metadata"]["name"] for d in find(docs, "ServiceAccount")}
    pod_account = find(docs, "Deployment")[0]["spec"]["template"]["spec"]["serviceAccountName"]
    bound = {s["name"] for b in find(docs, "ClusterRoleBinding") + find(docs, "RoleBinding") for s in b["subjects"]}
    check(f"{where}: service account", bound != {pod_account} or accounts and accounts != {pod_account})
    names = {(r["kind"], r["metadata"]["name"], r["metadata"].get("namespace")) for r in roles}
    dangling = [b["metadata"]["name"] for b in find(docs, "ClusterRoleBinding") + find(docs, "RoleBinding")
                if (b["roleRef"]["kind"], b["roleRef"]["name"], b["metadata"].get("namespace")) not in names]
    check(f"{where}: bindings", dangling)


def check_crd(where, docs):
    original = yaml.safe_load((root / "crds/trireme.dev_rljobs.yaml").read_text())
    for crd in find(docs, "CustomResourceDefinition"):
        crd["metadata"].pop("labels")
        crd["metadata"].pop("annotations", None)
        check(f"{where}: CRD equals crds/", crd != original and "differs")


# ---- metrics ---------------------------------------------------------------------------------------------------------

FUNCTIONS = set(
    """absent abs avg avg_over_time changes clamp_max count histogram_quantile increase label_values max max_over_time
min quantile_over_time rate round sum time topk vector by without on ignoring group_left group_right and or unless
offset bool""".split())


def metric_names(expression, more_labels=()):
    """Names of series in a PromQL expression: what is left without strings, label lists, durations and functions."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    text = re.sub(r"\{[^}]*\}", "", text)
    text = re.sub(r"\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", text)
    text = re.sub(r"\boffset\s+\w+", "", text)
    return set(re.findall(r"(?<![\w:$])[a-zA-Z_][\w:]*", text)) - FUNCTIONS - set(more_labels)


def unknown_metrics(names, records):
    out = set()
    for name in names - records - {"up"}:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if f'"{name}"' not in METRIC_SOURCE and f'"{base}"' not in METRIC_SOURCE:
            out.add(name)
    return out


def check_rules(where, docs):
    for rule in find(docs, "PrometheusRule"):
        text = yaml.safe_dump(rule)
        check(f"{where}: all thresholds are put in", set(re.findall(r"\b__(?!name__)\w+?__", text)))
        rules = [r for g in rule["spec"]["groups"] for r in g["rules"]]
        records = {r["record"] for r in rules if "record" in r}
        for r in rules:
            check(f"{where}: rule {r.get('record') or r['alert']}", unknown_metrics(metric_names(r["expr"]), records))


def check_boards():
    rules = (chart / "files/rules.yaml").read_text()
    records = set(re.findall(r"record: (\S+)", rules))
    uids, titles = [], []
    for path in sorted((chart / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        uids.append(board["uid"])
        variables = {v["name"] for v in board["templating"]["list"]}
        check(
            f"{path.name}: data source is a variable",
            not ({"datasource"} <= variables and board["templating"]["list"][0]["type"] == "datasource") and variables)
        panels = [p for p in board["panels"] if p["type"] != "row"]
        ids = [p["id"] for p in board["panels"]]
        check(f"{path.name}: panel ids", {i for i in ids if ids.count(i) > 1})
        cells = [(x, y) for p in board["panels"] for g in [p["gridPos"]] for x in range(g["x"], g["x"] + g["w"])
                 for y in range(g["y"], g["y"] + g["h"])]
        check(f"{path.name}: panels do not overlap", len(cells) != len(set(cells)) or any(x > 23 for x, _ in cells))
        expressions = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"] + [
            a["expr"] for a in board["annotations"]["list"]
        ]
        for panel in panels:
            own = [t["expr"] for t in panel["targets"]]
            problem = panel["type"] not in ("timeseries", "stat", "table") and f"type {panel['type']}"
            problem = problem or [
                t for t in [panel, *panel["targets"]]
                if t["datasource"] != {"type": "prometheus", "uid": "${datasource}"}
            ]
            problem = problem or {v for e in own for v in re.findall(r"\$\{?(\w+)", e)} - variables - {
                "__rate_interval"
            }
            problem = problem or unknown_metrics(set().union(*(metric_names(e) for e in own)), records)
            check(f"{path.name}: {panel['title']}", problem)
        for expression in expressions:
            labels = re.findall(r"label_values\(.*,\s*(\w+)\)", expression)
            check(f"{path.name}: {expression}", unknown_metrics(metric_names(expression, labels), records))
    check("boards: uids", len(set(uids)) != 3 and uids)


for file in sys.argv[3:]:
    where = pathlib.Path(file).stem
    try:
        docs = [d for d in yaml.load_all(pathlib.Path(file).read_text(), Loader) if d]
    except yaml.YAMLError as error:
        check(where, str(error))
        continue
    test = [d for d in docs if d["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
    check(f"{where}: helm test", len(test) != 1 and f"{len(test)} test pods")
    if not find(docs, "Deployment"):
        check(where, "has no Deployment")
        continue
    check_objects(where, docs)
    values, services = check_deployment(where, docs)
    values.update({
        a: ""
        for a in find(docs, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"] if "=" not in a
    })
    check_webhooks(where, docs, services)
    check_rights(where, docs, values)
    check_rules(where, docs)
    check_crd(where, docs)
check("files/ holds the CRD",
      (chart / "files/trireme.dev_rljobs.yaml").read_bytes() != (root / "crds/trireme.dev_rljobs.yaml").read_bytes()
      and "differs from crds/: cp crds/trireme.dev_rljobs.yaml charts/trireme/files/")
check_boards()
print(f"count {passed} {failed}")
sys.exit(1 if failed else 0)
