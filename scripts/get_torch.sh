#!/usr/bin/env bash
# get_torch.sh cpu|cuda: the LibTorch of the PyPI wheel under build/deps/FLAVOUR (a link into the cache); for cuda also
# the headers of FlashInfer's attention kernels under build/deps/flashinfer.
# The cp312 wheel is taken whatever Python this machine has: nothing in it is run by Python here.
. "$(dirname "$0")/lib.sh"
flavour=${1:-cpu}
TORCH=torch==2.11.0
case $flavour in
  cpu) others="nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85" ;;
  cuda) others="nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85 nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
    nvidia-cuda-cccl==13.0.85 nvidia-nccl-cu13==2.28.9 nvidia-cublas==13.1.0.3 nvidia-cusparse==12.6.3.3 nvidia-cusolver==12.0.4.66" ;;
  *) die "get_torch.sh: unknown flavour '$flavour' (cpu or cuda)" ;;
esac
key=$(echo "$TORCH $others" | tr -s ' \n' ' ' | sha256sum | cut -c1-12)
dest=$CACHE/torch-$flavour-$key
if [ ! -e "$dest/.complete" ]; then
  say "fetching $TORCH and CUDA companions (about 0.6 GB for cpu, 1.5 GB for cuda)"
  rm -rf "$dest.tmp"; mkdir -p "$dest.tmp/wheels"
  platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
  for minor in $(seq 17 28); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    "${platforms[@]}" -d "$dest.tmp/wheels" $TORCH $others \
    || die "pip could not download the torch wheels; check the network and try again"
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
  FLASHINFER=flashinfer-python==0.7.2.post1
  dest=$CACHE/flashinfer-$(echo "$FLASHINFER" | sha256sum | cut -c1-12)
  if [ ! -e "$dest/.complete" ]; then
    say "fetching headers of $FLASHINFER (62 MB, of which 19 MB stay)"
    rm -rf "$dest.tmp"; mkdir -p "$dest.tmp/wheels"
    python3 -m pip download -q --no-deps --only-binary=:all: -d "$dest.tmp/wheels" "$FLASHINFER" \
      || die "pip could not download $FLASHINFER; check the network and try again"
    # libcudacxx: the headers use cuda::fast_mod_div, which is newer than the CUDA toolkit's own copy.
    unzip -q -o "$dest.tmp"/wheels/*.whl 'flashinfer/data/include/flashinfer/*' 'flashinfer/data/cccl/libcudacxx/include/*' \
      '*.dist-info/licenses/*' -d "$dest.tmp"
    mv "$dest.tmp/flashinfer/data/include" "$dest.tmp/flashinfer/data/cccl/libcudacxx" "$dest.tmp"
    rm -rf "$dest.tmp/wheels" "$dest.tmp/flashinfer"
    touch "$dest.tmp/.complete"
    rm -rf "$dest"; mv "$dest.tmp" "$dest"
  fi
  ln -sfn "$dest" "$ROOT/build/deps/flashinfer"
fi
