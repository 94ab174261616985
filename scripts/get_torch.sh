#!/usr/bin/env bash
# get_torch.sh cpu|cuda: the LibTorch of the PyPI wheel under build/deps/FLAVOUR (a link into the cache); for cuda also
# the headers of FlashInfer's attention kernels under build/deps/flashinfer.
# The cp312 wheel is taken whatever Python this machine has: nothing in it is run by Python here.
. "$(dirname "$0")/lib.sh"
flavour=${1:-cpu}
wheels=$ROOT/scripts/wheels
[ "$(uname -m)" = x86_64 ] ||
  die "the wheels of scripts/wheels are for x86_64, not $(uname -m): only the operator can be built (make operator)"
[ -f "$wheels/$flavour.txt" ] || die "get_torch.sh: unknown flavour '$flavour' (cpu or cuda)"
# pins FILE: "NAME==VERSION ..." of a list of wheels.
pins() { sed -n 's/^\([^# ]*==[^ ]*\) .*/\1/p' "$1" | tr '\n' ' '; }
key=$(pins "$wheels/$flavour.txt" | sha256sum | cut -c1-12)
dest=$CACHE/torch-$flavour-$key
if [ ! -e "$dest/.complete" ]; then
  say "fetching $(pins "$wheels/$flavour.txt" | cut -d" " -f1) and CUDA companions (0.6 GB for cpu, 1.5 GB for cuda)"
  rm -rf "$dest.tmp"; mkdir -p "$dest.tmp/wheels"
  platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
  for minor in $(seq 17 28); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
    --abi abi3 --abi none \
    "${platforms[@]}" -d "$dest.tmp/wheels" --require-hashes -r "$wheels/$flavour.txt" \
    || die "pip could not download the wheels of scripts/wheels/$flavour.txt, or one has another hash: no network?"
  for wheel in "$dest.tmp"/wheels/*.whl; do unzip -q -o "$wheel" -d "$dest.tmp"; done
  rm -rf "$dest.tmp/wheels"
  if [ "$flavour" = cuda ]; then
    # Wheels ship libX.so.N only and no lib64: make the folder look like a toolkit to CMake and nvcc.
    cu=$dest.tmp/nvidia/cu13
    [ -e "$cu/lib64" ] || ln -s lib "$cu/lib64"
    for folder in "$cu/lib" "$dest.tmp/nvidia/nccl/lib"; do
      for file in "$folder"/lib*.so.*; do
        [ -e "$file" ] || continue
        name=$(basename "$file"); link=$folder/${name%%.so.*}.so
        [ -e "$link" ] || ln -s "$name" "$link"
      done
    done
    chmod a+x "$cu"/bin/* "$cu"/nvvm/bin/*
  fi
  touch "$dest.tmp/.complete"
  rm -rf "$dest"; mv "$dest.tmp" "$dest"
fi
mkdir -p "$ROOT/build/deps"
ln -sfn "$dest" "$ROOT/build/deps/$flavour"

if [ "$flavour" = cuda ]; then
  FLASHINFER=$(pins "$wheels/flashinfer.txt" | sed "s/ $//")
  files=('flashinfer/data/include/flashinfer/*' 'flashinfer/data/cccl/libcudacxx/include/*' '*.dist-info/METADATA' \
    '*.dist-info/licenses/*')
  dest=$CACHE/flashinfer-$(echo "$FLASHINFER ${files[*]}" | sha256sum | cut -c1-12)
  if [ ! -e "$dest/.complete" ]; then
    say "fetching headers of $FLASHINFER (62 MB, of which 19 MB stay)"
    rm -rf "$dest.tmp"; mkdir -p "$dest.tmp/wheels"
    python3 -m pip download -q --no-deps --only-binary=:all: -d "$dest.tmp/wheels" --require-hashes \
      -r "$wheels/flashinfer.txt" \
      || die "pip could not download $FLASHINFER, or it has another hash; check the network and try again"
    # libcudacxx: the headers use cuda::fast_mod_div, which is newer than the CUDA toolkit's own copy.
    unzip -q -o "$dest.tmp"/wheels/*.whl "${files[@]}" -d "$dest.tmp"
    mv "$dest.tmp/flashinfer/data/include" "$dest.tmp/flashinfer/data/cccl/libcudacxx" "$dest.tmp"
    rm -rf "$dest.tmp/wheels" "$dest.tmp/flashinfer"
    touch "$dest.tmp/.complete"
    rm -rf "$dest"; mv "$dest.tmp" "$dest"
  fi
  ln -sfn "$dest" "$ROOT/build/deps/flashinfer"
fi
