#!/usr/bin/env python3
"""check_recipes.py [--write PAGE] [NAME=]DIR...: which of NeMo-RL's recipes does this program run?

DIR is a checkout of NeMo-RL (its files below examples/configs are read), or any folder of YAML files. The program is
$TRIREME, else build/cpu/trainer/cli/trireme. A file loads, or is refused by a feature that it needs, or is an error:
then the script fails, since its keys are not known. --write puts the table into PAGE (docs/recipes.md).
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("TRIREME", str(ROOT / "build/cpu/trainer/cli/trireme"))
NOT_YET = " is not supported yet by this version"
# Rules across keys that NeMo-RL asserts as well: the file contradicts itself.
SHARED_RULES = {
    "grpo.batch_multiplier: needs grpo.use_dynamic_sampling":
        "sets grpo.batch_multiplier without grpo.use_dynamic_sampling, which NeMo-RL refuses too"
}


def name_of(argument):
    """The name of a checkout and its folder."""
    name, equals, folder = argument.rpartition("=")
    if equals:
        return name, pathlib.Path(folder)
    told = subprocess.run(["git", "-C", folder, "describe", "--tags", "--always"], capture_output=True, text=True)
    return (told.stdout.strip() if told.returncode == 0 else pathlib.Path(folder).name), pathlib.Path(folder)


def files_of(folder):
    configs = folder / "examples" / "configs"
    base = configs if configs.is_dir() else folder
    return base, sorted(base.rglob("*.yaml"))


def variables(files):
    """Something for every environment variable that a file asks for."""
    names = {name for file in files for name in re.findall(r"oc\.env:(\w+)", file.read_text())}
    return {name: f"/{name.lower()}" for name in names}


def judge(file, extra):
    """"loads", "other" (algorithm), "refused" or "error", the reasons, and how many keys have no effect."""
    ran = subprocess.run([PROGRAM, "train", "--config", str(file), "--print-config"], capture_output=True, text=True,
                         env={**os.environ, **extra}, timeout=300)
    lines = ran.stderr.splitlines()
    idle = sum(" has no effect " in line for line in lines)
    if ran.returncode == 0:
        return "loads", [], idle
    reasons = []
    for line in lines:
        if NOT_YET in line:
            reason = line.split(NOT_YET)[0].split(": ")[-1]
            if reason not in reasons:
                reasons.append(reason)
    for rule, words in SHARED_RULES.items():
        if not reasons and any(rule in line for line in lines):
            reasons.append(words)
    if "which runs grpo, ppo and sft" in ran.stderr:
        return "other", reasons, idle
    return ("refused", reasons, idle) if reasons else ("error", [lines[-1] if lines else "no message"], idle)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="PAGE")
    parser.add_argument("folders", nargs="+", metavar="[NAME=]DIR")
    arguments = parser.parse_args()
    if not pathlib.Path(PROGRAM).exists():
        sys.exit(f"error: there is no program {PROGRAM}; build it (scripts/build.sh cpu trireme) or set TRIREME")
    page = [
        "# NeMo-RL's recipes", "",
        "Made by `scripts/check_recipes.py --write docs/recipes.md NAME=CHECKOUT...`; do not edit. Each file below",
        "`examples/configs` went through `trireme train --config FILE --print-config`. *loads*: resolved, with the "
        "number of its",
        "keys that have no effect here (said once at start; why is in [configuration.md](configuration.md)). "
        "*refused*: by the",
        "features it needs, named; *other*: by its algorithm. No file fails on a key.", ""
    ]
    errors = 0
    for argument in arguments.folders:
        name, folder = name_of(argument)
        base, files = files_of(folder)
        if not files:
            sys.exit(f"error: no YAML files below {base}; name a checkout of NeMo-RL")
        extra = variables(files)
        rows, counts = [], {"loads": 0, "refused": 0, "other": 0, "error": 0}
        for file in files:
            result, reasons, idle = judge(file, extra)
            counts[result] += 1
            shown = str(file.relative_to(base))
            print(f"{result:8} {shown}: {'; '.join(reasons) or f'{idle} keys without effect'}", flush=True)
            rows.append(f"| `{shown}` | {result} | {'; '.join(reasons)} | {idle or ''} |")
        errors += counts["error"]
        summary = (
            f"Of {len(files) - counts['other']} GRPO, PPO and SFT files {counts['loads']} load, "
            f"{counts['refused']} are refused by a feature, {counts['error']} fail; {counts['other']} files are for "
            "other algorithms.")
        print(f"==> {name}: {summary}")
        page += [
            f"## {name}", "", summary, "", "| file | result | needs | keys without effect |", "|---|---|---|---|",
            *rows, ""
        ]
    if arguments.write:
        pathlib.Path(arguments.write).write_text("\n".join(page))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
