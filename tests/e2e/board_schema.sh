#!/usr/bin/env bash
# board_schema.sh: the boards against Grafana's own published types (npm package @grafana/schema), by the TypeScript
# compiler: unknown keys, wrong values, missing parts; panels' options and field settings against those of their panel
# type.
. "$(dirname "$0")/lib.sh"
SCHEMA=11.6.0
TYPESCRIPT=5.6.3
command -v npm >/dev/null || die "npm is missing: install Node.js"
folder=$COMPONENTS/grafana-schema-$SCHEMA-$TYPESCRIPT
if [ ! -e "$folder/complete" ]; then
  rm -rf "$folder"; mkdir -p "$folder"
  (cd "$folder" && echo '{"private": true}' >package.json &&
    npm install --no-audit --no-fund "@grafana/schema@$SCHEMA" "typescript@$TYPESCRIPT") >"$folder/npm.log" 2>&1 ||
    { tail -5 "$folder/npm.log" >&2; die "npm could not fetch @grafana/schema@$SCHEMA and typescript@$TYPESCRIPT"; }
  touch "$folder/complete"
fi
work=$(mktemp -d "$folder/check.XXXXXX"); trap 'rm -rf "$work"' EXIT
python3 - "$ROOT" "$work/boards.ts" <<'P'
import glob, json, sys
raw = "../node_modules/@grafana/schema/dist/esm/raw"
out = [f'import type {{ Dashboard, Panel, RowPanel }} from "{raw}/dashboard/x/dashboard_types.gen";']
parts = {"timeseries": "TimeSeries", "stat": "Stat", "table": "Table", "bargauge": "BarGauge", "gauge": "Gauge",
         "piechart": "PieChart", "barchart": "BarChart"}
for kind, name in parts.items():
    out.append(f'import type * as {kind} from "{raw}/composable/{kind}/panelcfg/x/{name}PanelCfg_types.gen";')
# Enumerations as the strings that JSON has.
out.append("""type Plain<T> = T extends string ? `${T}` : T extends (infer U)[] ? Plain<U>[] :
  T extends object ? {[K in keyof T]: Plain<T[K]>} : T;
type Some<T> = T extends string ? `${T}` : T extends (infer U)[] ? Some<U>[] :
  T extends object ? {[K in keyof T]?: Some<T[K]>} : T;""")
for path in sorted(glob.glob(sys.argv[1] + "/charts/trireme/dashboards/*.json")):
    board = json.load(open(path))
    name = board["uid"].replace("-", "_")
    panels = board.pop("panels")
    for annotation in board["annotations"]["list"]:
        for key in ("target", "expr", "step", "titleFormat", "textFormat", "tagKeys", "useValueForTime"):
            annotation.pop(key, None)  # Prometheus' own; the published type knows only those of Grafana's own source
    out.append(f"export const {name}: Plain<Dashboard> = {json.dumps(board)};")
    for number, panel in enumerate(panels):
        kind = "RowPanel" if panel["type"] == "row" else "Panel"
        out.append(f"export const {name}_{number}: Plain<{kind}> = {json.dumps(panel)};")
        if kind == "Panel":
            assert panel["type"] in parts, f"{path}: no types are known for panel type {panel['type']}"
            what, options = f"export const {name}_{number}", json.dumps(panel.get("options", {}))
            out.append(f"{what}_options: Some<{panel['type']}.Options> = {options};")
            if panel["type"] in ("timeseries", "table", "barchart"):
                custom = json.dumps(panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {}))
                out.append(f"{what}_custom: Some<{panel['type']}.FieldConfig> = {custom};")
open(sys.argv[2], "w").write("\n".join(out) + "\n")
P
(cd "$work" && ../node_modules/.bin/tsc --noEmit --strict --skipLibCheck --target es2022 --module esnext \
  --moduleResolution bundler boards.ts) >"$work/log" ||
  { cat "$work/log" | head -40 >&2; die "the boards do not fit Grafana's schema $SCHEMA"; }
echo "the boards fit Grafana's schema $SCHEMA: $(grep -c '^export' "$work/boards.ts") parts"
