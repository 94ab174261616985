#!/usr/bin/env python3
"""check_functions.py [--most LINES] [--list] [FOLDER]: functions of our C++ and CUDA sources (kernels, templates and
members too) have at most 80 lines. Prints one line a mistake, or with --list how many are longer than 80 and than 100
and how many files than 600; part of lint.sh. A body is what stands between the braces behind a parameter list, where
everything around it is a namespace or a class."""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPS = ["api", "base", "bench", "operator", "tests", "topology", "trainer"]
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
HIDDEN = re.compile(r'R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
                    r'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
TYPE = re.compile(r"\b(?:namespace|struct|class|union|enum|extern)\b")
NAME = re.compile(r"([~\w:<>,]+)\s*\(")


def functions(text):
    """(first line, lines, name) of each function."""
    text = HIDDEN.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    line, scopes, head, start = 1, [], "", 1
    for c in text:
        if c == "\n":
            line += 1
        if c == "{":
            kind = "block"
            if all(s[0] == "type" for s in scopes):
                # A parameter list means a function, unless it belongs to a type's attributes or a default value.
                called = re.sub(r"\b(?:alignas|__launch_bounds__|requires|decltype|noexcept)\s*\([^()]*\)", "", head)
                if ")" in called and not called.rstrip().endswith(("=", ",", "(")):
                    kind = "function"
                elif TYPE.search(head):
                    kind = "type"
            scopes.append((kind, start, head))
            head = ""
        elif c == "}":
            if scopes:
                kind, begin, text_before = scopes.pop()
                if kind == "function":
                    found = NAME.search(re.sub(r"__launch_bounds__\s*\([^()]*\)", "", text_before))
                    yield begin, line - begin + 1, found.group(1) if found else "?"
            head = ""
        elif c == ";":
            head = ""
        else:
            if not head.strip() and not c.isspace():
                start, head = line, ""
            head += c


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=80)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT)
    options = parser.parse_args()
    long, files, big = [], 0, 0
    for top in TOPS:
        for path in sorted((options.folder / top).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            text = path.read_text()
            files += 1
            big += text.count("\n") > 600
            for first, lines, name in functions(text):
                long.append((lines, f"{path.relative_to(options.folder)}:{first}", name))
    if not long:
        sys.exit(f"{options.folder}: no functions found")
    if options.list:
        over = {most: sum(lines > most for lines, _, _ in long) for most in (80, 100)}
        print(f"{len(long)} functions in {files} files: {over[80]} over 80 lines, {over[100]} over 100, the longest "
              f"{max(long)[0]}; {big} files over 600 lines")
        return 0
    mistakes = [(lines, place, name) for lines, place, name in sorted(long, reverse=True) if lines > options.most]
    for lines, place, name in mistakes:
        print(f"{place}: {name} has {lines} lines, {options.most} are the most")
    print(f"{len(long)} functions, {len(mistakes)} problems")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
