#!/usr/bin/env bash
# site.sh: the pages of the tree as a web site in build/site, which needs no server and no network to be looked at.
# A broken link or anchor, and anything that a page would fetch, is an error.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
need_packages python3 python3-venv
mkdir -p build
key=$(sha256sum docs/site/requirements.txt | cut -c1-12)
venv=$CACHE/site-$key
if [ ! -e "$venv/.complete" ]; then
  say "fetching MkDocs (about 20 MB)"
  rm -rf "$venv"; mkdir -p "$CACHE"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q --only-binary=:all: --require-hashes -r docs/site/requirements.txt \
    || die "pip could not install docs/site/requirements.txt, or a wheel has another hash; is there a network?"
  touch "$venv/.complete"
fi
scripts/site.py build/site-src build/site.yml || die "a page links to what is not in the tree (above)"
log=$(mktemp)
# Not --quiet, under which --strict counts no warnings.
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --clean -f build/site.yml >"$log" 2>&1 \
  || { grep -v '^INFO' "$log" >&2; die "mkdocs found mistakes in the pages (above)"; }
rm -f "$log"
scripts/site.py --check build/site || die "a page would fetch something when it is looked at (above)"
say "file://$ROOT/build/site/index.html"
