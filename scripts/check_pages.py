#!/usr/bin/env python3
"""check_pages.py [FILE.md...]: lines of at most 120 columns outside tables, table cells of at most 200 characters,
links to files that exist. Pages that programs write are not looked at. Prints one line a mistake; part of lint.sh."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS, CELL = 120, 200
WRITTEN_BY_PROGRAMS = {"docs/recipes.md", "docs/configuration.md"}


def mistakes(name):
    page = ROOT / name
    for number, line in enumerate(page.read_text().splitlines(), 1):
        place = f"{name}:{number}"
        if line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if len(cell.strip()) > CELL:
                    yield f"{place}: a cell of {len(cell.strip())} characters, {CELL} are the most"
        elif len(line) > COLUMNS:
            yield f"{place}: {len(line)} columns, {COLUMNS} are the most"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                yield f"{place}: {target} is not there"


def main():
    pages = sys.argv[1:] or subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    pages = [page for page in pages if page not in WRITTEN_BY_PROGRAMS and not page.startswith("third_party/")]
    found = [mistake for page in pages for mistake in mistakes(page)]
    for mistake in found[:60]:
        print(mistake)
    print(f"{len(pages)} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
