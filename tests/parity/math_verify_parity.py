#!/usr/bin/env python3
"""How often the math reward agrees with Math-Verify's own tests.

    math_verify_parity.py DIR [--grade "PROGRAM"] [--whole-response]
    math_verify_parity.py --labels

DIR is a checkout of Math-Verify with its tests/; the Python that runs this has the package of the same version and
pytest. Of each parametrised test with a gold answer, a prediction and an expected verdict, those count where the
package itself, called plainly (no extraction options), agrees with the expectation. They are put to PROGRAM (default:
"build/cpu/trainer/cli/trireme grade --pairs"), which gets the name of a file of pairs; its disagreements are printed,
and the share of agreement. Exit status 1 below 97 %.

--labels: a pair of tests/data/math_pairs.jsonl says `why` where, and only where, the package says otherwise: of the
first 1,068 pairs with both sides in a box, of those after them (whole sentences) with both as they are. Needs no DIR.
"""
import argparse
import importlib
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

FLOOR = 0.97
PAIRS = pathlib.Path(__file__).resolve().parent.parent / "data" / "math_pairs.jsonl"
IN_BOXES = 1068  # pairs, the first ones


def cases(folder):
    """(gold, prediction, expected) of every parametrised test in DIR/tests."""
    sys.path.insert(0, str(folder))
    sys.path.insert(0, str(folder / "tests"))
    for path in sorted((folder / "tests").glob("test_*.py")):
        try:
            module = importlib.import_module("tests." + path.stem)
        except Exception as error:  # a test of something that is not installed
            print(f"{path.name} left out: {error}", file=sys.stderr)
            continue
        for name, function in vars(module).items():
            if not name.startswith("test") or not callable(function):
                continue
            for mark in getattr(function, "pytestmark", []):
                if mark.name == "parametrize":
                    yield from rows_of(mark)


def rows_of(mark):
    names = mark.args[0]
    names = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    column = {}
    for index, name in enumerate(names):
        for key in ("gold", "pred", "expected"):
            if name == key or (key != "expected" and name.startswith(key)):
                column.setdefault(key, index)
    if len(column) < 3:
        return
    for row in mark.args[1]:
        values = getattr(row, "values", row) if not isinstance(row, (list, tuple)) else row
        gold, answer, expected = (values[column[key]] for key in ("gold", "pred", "expected"))
        if isinstance(gold, str) and isinstance(answer, str):
            yield gold, answer, bool(int(expected))


def plain_verdict(gold, answer):
    from math_verify import parse, verify

    try:
        return bool(verify(parse(gold), parse(answer)))
    except Exception:
        return None


def check_labels():
    apart = wrong = 0
    for number, line in enumerate(PAIRS.read_text(encoding="utf-8").splitlines(), 1):
        pair = json.loads(line)
        sides = [pair["gold"], pair["answer"]]
        if number <= IN_BOXES:
            sides = ["\\boxed{" + side + "}" for side in sides]
        differs = bool(plain_verdict(*sides)) != pair["label"]
        apart += differs
        if differs != ("why" in pair):
            wrong += 1
            print(f"line {number}: {'no why' if differs else 'a why, but no difference'}: {line}")
    print(f"the package says otherwise for {apart} labels; {wrong} without their reason, or with one too many")
    return 1 if wrong else 0


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=pathlib.Path, metavar="DIR", nargs="?")
    options.add_argument("--labels", action="store_true", help="check the reasons of our own pairs instead")
    options.add_argument("--grade", default="build/cpu/trainer/cli/trireme grade --pairs", metavar="PROGRAM")
    options.add_argument("--whole-response", action="store_true", help="look for the answer as in a response of a run")
    chosen = options.parse_args()
    if chosen.labels:
        sys.exit(check_labels())
    if not chosen.folder:
        options.error("DIR is missing, a checkout of Math-Verify")
    key = "response" if chosen.whole_response else "answer"
    kept = total = 0
    with tempfile.TemporaryDirectory() as scratch:
        pairs = pathlib.Path(scratch) / "pairs.jsonl"
        with pairs.open("w", encoding="utf-8") as out:
            for gold, answer, expected in cases(chosen.folder.resolve()):
                total += 1
                if plain_verdict(gold, answer) == expected:
                    kept += 1
                    out.write(json.dumps({"gold": gold, key: answer, "label": expected}) + "\n")
        if kept == 0:
            sys.exit(f"{chosen.folder}/tests has no test with a gold answer, a prediction and a verdict")
        graded = subprocess.run(shlex.split(chosen.grade) + [str(pairs)], stdout=subprocess.PIPE, text=True,
                                check=False)
    verdicts = [json.loads(line) for line in graded.stdout.splitlines() if line.startswith("{")]
    verdicts = [verdict for verdict in verdicts if "agrees" in verdict]
    if len(verdicts) != kept:
        sys.exit(f"{chosen.grade} graded {len(verdicts)} of {kept} pairs (exit status {graded.returncode})")
    apart = [verdict for verdict in verdicts if not verdict["agrees"]]
    for verdict in apart:
        side = "refused here" if verdict["label"] else "accepted here"
        print(f"{side}: gold {verdict['gold'][-120:]!r}, answer {verdict[key][-120:]!r}")
    share = 1 - len(apart) / kept
    wrong = sum(1 for verdict in apart if not verdict["label"])
    print(f"{total} tests, {kept} where the package called plainly agrees with them; of these {len(apart)} apart "
          f"({wrong} accepted here), {100 * share:.1f} % agreement")
    sys.exit(0 if share >= FLOOR else 1)


if __name__ == "__main__":
    main()
