#!/usr/bin/env python3
"""What the kept results of benchmarks hold is what the text about them says.

Usage: scripts/check_bench_results.py [FILE.md ...]   (default: docs/performance.md bench/README.md)

Of every file under bench/results: as many measured runs as `repeats` says, and as many as its command line asked for.
Of every command in the text that writes such a file (`--json bench/results/...`): the file's `repeats` is that of the
command (3 where it says nothing), and so are `lengths`, where they are a file or synthetic.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_REPEATS = 3


def option(command, name):
    found = re.search(rf"--{name}[ =](\S+)", command)
    return found.group(1) if found else None


def repeats_of(command):
    return int(option(command, "repeats") or DEFAULT_REPEATS)


def commands_of(text):
    """Commands of the text, continued lines joined."""
    return [c for c in re.findall(r"trireme [^`\n]*", text.replace("\\\n", " ")) if " bench " in c]


def problems_of_file(name, result):
    measured = result.get("seconds_of_repeats")
    if measured is not None and len(measured) != result["repeats"]:
        yield f"{name}: repeats is {result['repeats']}, but it holds {len(measured)} runs"
    if result.get("command") and repeats_of(result["command"]) != result["repeats"]:
        yield f"{name}: repeats is {result['repeats']}, its command asked for {repeats_of(result['command'])}"


def problems_of_command(source, command, results):
    path = option(command, "json")
    if path not in results:
        return
    result = results[path]
    if repeats_of(command) != result["repeats"]:
        yield f"{source}: the command for {path} means {repeats_of(command)} repeats, the file has {result['repeats']}"
    lengths = option(command, "lengths")
    if lengths and result.get("lengths") and result["lengths"] != lengths:
        yield f"{source}: the command for {path} has lengths {lengths}, the file {result['lengths']}"


def main():
    sources = sys.argv[1:] or ["docs/performance.md", "bench/README.md"]
    results = {str(p.relative_to(ROOT)): json.loads(p.read_text())
               for p in sorted((ROOT / "bench" / "results").rglob("*.json"))}
    problems = []
    for name, result in results.items():
        problems += problems_of_file(name, result)
    for source in sources:
        for command in commands_of((ROOT / source).read_text()):
            problems += problems_of_command(source, command, results)
    for problem in problems:
        print(problem)
    print(f"{len(results)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
