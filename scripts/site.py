#!/usr/bin/env python3
"""site.py SOURCE CONFIG: the pages of the tree as MkDocs wants them. site.py --check SITE: nothing there is fetched.

Every tracked page goes to SOURCE under its own path. A file of code that a page links to becomes a page of its own, a
folder without a README a list of its files, so that every link stays inside the site. CONFIG is docs/site/mkdocs.yml
with the contracts (the folders' READMEs), the laboratory and the days added to its navigation. Lists are indented by
four and begin after an empty line, which Python's Markdown wants and GitHub's does not.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".cu": "cpp", ".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json"}


def tracked():
    return subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")[:-1]


def relative(target, page):
    return os.path.relpath(target, os.path.dirname(page) or ".")


class Site:
    def __init__(self, source):
        self.source = source
        self.files = set(tracked())
        self.made = set()
        self.missing = []

    def write(self, name, text):
        (self.source / name).parent.mkdir(parents=True, exist_ok=True)
        (self.source / name).write_text(text)

    def page_of(self, target):
        """The page that shows a path of the tree; None: there is no such path."""
        if target.endswith(".md") and target in self.files:
            return target
        if target in self.files:
            return self.code(target)
        if target == ".":
            return "README.md"
        if target + "/README.md" in self.files:
            return target + "/README.md"
        inside = sorted(name for name in self.files if name.startswith(target + "/"))
        return self.folder(target, inside) if inside else None

    def code(self, name):
        page = name.lstrip(".") + ".md"
        if name not in self.made:
            self.made.add(name)
            if name.endswith((".png", ".svg")):
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.source / name)
            else:
                language = LANGUAGES.get(pathlib.Path(name).suffix, "text")
                text = (ROOT / name).read_text()
                self.write(page, f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n`````{language}\n{text}\n`````\n")
        return name if name.endswith((".png", ".svg")) else page

    def folder(self, name, inside):
        page = name + "/files.md"
        if page not in self.made:
            self.made.add(page)
            links = "\n".join(f"- [{f}]({relative(self.page_of(f), page)})" for f in inside[:200])
            self.write(page, f"# {name}\n\n{links}\n")
        return page

    def link(self, page, target):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return target
        path, _, anchor = target.partition("#")
        shown = self.page_of(os.path.normpath(os.path.join(os.path.dirname(page), path)))
        if shown is None:
            self.missing.append(f"{page}: {target} is not in the tree")
            return target
        return relative(shown, page) + ("#" + anchor if anchor else "")

    def page(self, name):
        result, fence, width, before = [], False, 0, ""
        for line in (ROOT / name).read_text().splitlines():
            if line.startswith("```"):
                fence = not fence
            elif not fence:
                indent = len(line) - len(line.lstrip())
                marker = re.match(r"\s*([-*]|\d+\.) ", line)
                if marker and indent == 0:
                    if before.strip() and not width:
                        result.append("")
                    width = marker.end() - indent
                elif line.strip() and indent == 0:
                    width = 0
                elif width and line.strip():
                    line = " " * (4 - width) + line
                line = LINK.sub(lambda m: m.group(1) + self.link(name, m.group(2)) + m.group(3), line)
            result.append(line)
            before = line
        self.write(name, "\n".join(result) + "\n")


def navigation(pages):
    def section(title, names):
        return "".join([f"  - {title}:\n"] + [f"      - {name}\n" for name in names])

    lab = [p for p in pages if p.startswith("docs/lab/")]
    days = [p for p in pages if p.startswith("bench/results/") and not p.endswith("README.md")]
    told = {"README.md", "bench/README.md", "bench/results/README.md", "docs/lab/README.md"}
    contracts = "".join(f"      - {p[:-len('/README.md')]}: {p}\n" for p in pages
                        if p.endswith("/README.md") and p not in told)
    return "".join(f"      - {day}\n" for day in days) + section("Laboratory", lab) + "  - Contracts:\n" + contracts


def prepare(source, config):
    shutil.rmtree(source, ignore_errors=True)
    site = Site(source)
    pages = sorted(name for name in site.files if name.endswith(".md") and not name.startswith("."))
    for name in pages:
        site.page(name)
    for name in ("docs/site/iframe-worker.js", "docs/site/wide.css"):
        site.write(name, (ROOT / name).read_text())
    text = (ROOT / "docs/site/mkdocs.yml").read_text().replace("../../build/", "")
    config.write_text(text + navigation(pages))
    print("\n".join(site.missing) or f"{len(pages)} pages, {len(site.made)} files of code")
    return 1 if site.missing else 0


def check(folder):
    """Problems are what a browser would fetch from elsewhere when it shows a page."""
    fetched = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(https?:)?//|"""
                         r"""<link[^>]*rel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*href=["']?(https?:)?//|"""
                         r"""@import\s+url\(["']?(https?:)?//""")
    pages = [path for kind in ("*.html", "*.css") for path in folder.rglob(kind)]
    problems = [path for path in pages if fetched.search(path.read_text())]
    for path in problems:
        print(f"{path}: fetches something from the network")
    print(f"{len(pages)} files, {len(problems)} problems")
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        sys.exit(check(pathlib.Path(sys.argv[2])))
    sys.exit(prepare(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
