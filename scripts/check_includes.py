#!/usr/bin/env python3
"""check_includes.py: a folder includes only from folders whose libraries its CMakeLists.txt names, and what
docs/architecture.md says of it ("What may include what") is what it does include. And device code is chosen by linking:
outside of folders cuda/ and no_cuda/ no preprocessor line asks for CUDA, and outside of cuda/ nothing includes headers
of CUDA's or of a cuda/ folder. Prints one line a mistake; part of lint.sh."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPS = ["api", "base", "operator", "topology", "trainer"]
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
GPU_PROGRAMS = ["bench/gpu", "tests/gpu"]  # which are built with CUDA only
ASKS_FOR_CUDA = re.compile(r"\s*#\s*(?:el)?if.*CUDA")
INCLUDES_CUDA = re.compile(r'\s*#\s*include (?:<(?:cuda|cublas|nccl|c10/cuda/|ATen/cuda/|.*NCCL)|"[^"]*/cuda/)')


def folder_of(path):
    """The library folder of a source: the nearest one above it that has a CMakeLists.txt with a library."""
    for parent in path.parents:
        if parent in FOLDERS:
            return parent
    return None


def name_of(folder):
    return str(folder.relative_to(ROOT))


def read_libraries():
    """CMake library -> folder, folder -> named libraries."""
    owners, named = {}, {}
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("CMakeLists.txt")):
            text = re.sub(r"#.*", "", file.read_text())
            for call in re.findall(r"\b(?:trireme_library|add_library|add_executable)\(([^)]*)\)", text):
                owners[call.split()[0]] = file.parent
            uses = re.findall(r"\b(?:trireme_library|trireme_program|target_link_libraries)\(([^)]*)\)", text)
            words = {word for call in uses for word in call.split()}
            named.setdefault(file.parent, set()).update(w for w in words if w.startswith("trireme"))
    return owners, named


def includes_of(folder):
    """Folder -> a place where `folder` includes from it."""
    found = {}
    for source in sorted(folder.rglob("*")):
        if source.suffix not in SOURCES or folder_of(source) != folder:
            continue
        for number, line in enumerate(source.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include "([^"]+)"', line)
            if not match:
                continue
            target = folder_of(ROOT / match.group(1))
            if target is not None and target != folder:
                found.setdefault(target, f"{source.relative_to(ROOT)}:{number}")
    return found


def device_lines():
    """Lines by which a source chooses device code itself, instead of the linker."""
    found = []
    for top in TOPS + ["bench", "tests"]:
        for source in sorted((ROOT / top).rglob("*")):
            if source.suffix not in SOURCES:
                continue
            path = str(source.relative_to(ROOT))
            parts = set(source.parts)
            device = "cuda" in parts or any(path.startswith(folder + "/") for folder in GPU_PROGRAMS)
            for number, line in enumerate(source.read_text().splitlines(), 1):
                if not {"cuda", "no_cuda"} & parts and ASKS_FOR_CUDA.match(line):
                    found.append(
                        f"{path}:{number}: asks for CUDA; what differs with it belongs in a function of cuda/ and "
                        "no_cuda/, of which CMake links one")
                if not device and INCLUDES_CUDA.match(line):
                    found.append(f"{path}:{number}: only cuda/ includes this; declare what is wanted of it in a header "
                                 "beside that folder")
    return found


def documented():
    """Folder -> folders that the table of docs/architecture.md lets it include; base is always allowed. And those
    folders whose row names everything but some."""
    table, wide = {}, set()
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.search(r"\| folder \| includes, besides `base` \|\n\|[-|]+\|\n((?:\|.*\n)+)", page).group(1)
    everything = [name_of(f) for f in FOLDERS]
    trainer = [n for n in everything if n.startswith("trainer/")]
    for row in rows.splitlines():
        left, right = [cell.strip() for cell in row.strip("|").split("|")]
        folders = []
        for quoted in re.findall(r"`([^`]+)`", left):
            braces = re.match(r"(.*)\{(.*)\}$", quoted)
            folders += [braces.group(1) + part.strip() for part in braces.group(2).split(",")] if braces else [quoted]
        for folder in folders:
            top = folder.split("/")[0]
            words = re.findall(r"`([^`]+)`", right)
            full = {w if w in everything else f"{top}/{w}" for w in words}
            if "everything of the trainer but" in right:
                start = right.index("everything of the trainer but")
                but = {f"trainer/{w}" for w in re.findall(r"`([^`]+)`", right[start:])}
                full = {w for w in full if w not in but} | (set(trainer) - but)
            if "everything of the operator" in right:
                full |= {n for n in everything if n.startswith("operator/")}
            table[folder] = full - {folder}
            if "everything" in right:
                wide.add(folder)
    return table, wide


OWNERS, NAMED = read_libraries()
FOLDERS = set(OWNERS.values())


def main():
    problems = []
    table, wide = documented()
    for folder in sorted(FOLDERS):
        used = includes_of(folder)
        allowed = {OWNERS[library] for library in NAMED.get(folder, ()) if library in OWNERS}
        for target, place in sorted(used.items()):
            if target not in allowed:
                problems.append(f"{place}: includes from {name_of(target)}, which {name_of(folder)}/CMakeLists.txt "
                                "does not name")
        own = name_of(folder)
        seen = {name_of(target) for target in used} - {"base"}
        if own == "base":
            continue
        if own not in table:
            problems.append(f"docs/architecture.md: no row says what {own} includes")
            continue
        for target in sorted(seen - table[own]):
            problems.append(f"docs/architecture.md: {own} includes from {target} ({used[ROOT / target]}); the table "
                            "does not say so")
        if own not in wide:
            for target in sorted(table[own] - seen):
                problems.append(f"docs/architecture.md: {own} includes nothing from {target}")
    problems += device_lines()
    print("\n".join(problems))
    print(f"{len(FOLDERS)} folders, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
