#!/usr/bin/env python3
"""check_pages.py [FILE...]: lines of at most 120 columns in every tracked text of ours. In pages (*.md) tables are
exempt, but their cells have at most 200 characters, and links lead to files that exist. What is not looked at is listed
below with the reason. Prints one line a mistake; part of lint.sh."""
import fnmatch
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS, CELL = 120, 200
EXEMPT = {
    "third_party/*": "not ours",
    "docs/recipes.md": "written by a program",
    "docs/configuration.md": "written by a program",
    "*.json": "data, goldens, boards as Grafana writes them: a string of JSON cannot be broken",
    "*.jsonl": "a row is a line",
    "tests/fuzz/seeds/*": "inputs, byte for byte",
    "tests/parity/tokenizer/*.jinja": "a break in a chat template may be text of the prompt",
    "crds/trireme.dev_rljobs.yaml": "a rule, its message, a description: one line each, as the API server says them",
    "charts/trireme/files/trireme.dev_rljobs.yaml": "a copy of the above",
}


def mistakes(name):
    try:
        text = (ROOT / name).read_text()
    except UnicodeDecodeError:
        return  # no text: pictures, Parquet
    page = name.endswith(".md")
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{name}:{number}"
        if page and line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if len(cell.strip()) > CELL:
                    yield f"{place}: a cell of {len(cell.strip())} characters, {CELL} are the most"
        elif len(line) > COLUMNS:
            yield f"{place}: {len(line)} columns, {COLUMNS} are the most"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line) if page else ():
            if not re.match(r"[a-z]+:", target) and not ((ROOT / name).parent / target).exists():
                yield f"{place}: {target} is not there"


def main():
    files = sys.argv[1:] or subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    files = [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in EXEMPT)]
    found = [mistake for name in files for mistake in mistakes(name)]
    for mistake in found[:60]:
        print(mistake)
    print(f"{sum(name.endswith('.md') for name in files)} pages, {len(files)} texts, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
