# The commands people type. Each does its own set-up and says what it is doing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build test test-gpu sanitize quickstart operator parity chart images images-arm64 \
  test-cluster test-scale lint site clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup:  ## install the packages, Rust and LibTorch that the build needs
	@scripts/setup.sh cpu

build: setup  ## build trireme and trireme-operator (CPU)
	@scripts/build.sh cpu

quickstart:  ## train a small model to add by GRPO, in minutes (DEVICE=cuda|cpu; default: the GPU if built for it)
	@[ "$$(scripts/quickstart.sh --device)" = cuda ] || { scripts/setup.sh cpu && scripts/build.sh cpu trireme; }
	@scripts/quickstart.sh

test: build  ## run every test that needs no cluster and no GPU
	@scripts/test.sh

test-gpu:  ## run the GPU tests (builds the preset cuda; needs an H100 or H200)
	@scripts/test_gpu.sh

sanitize:  ## run unit tests without LibTorch under ASan+UBSan and TSan, fuzz targets 15 s each (builds twice)
	@scripts/sanitize.sh

operator:  ## build only what needs no LibTorch (trireme-operator, unit tests)
	@scripts/setup.sh operator
	@scripts/build.sh operator

parity: build  ## compare models and tokenizers with Hugging Face (downloads about 5 GB of wheels once)
	@scripts/build.sh cpu model_dump tokenizer_parity
	@python3 tests/parity/model_parity.py
	@build/parity-venv/bin/python tests/parity/tokenizer_parity.py --driver build/cpu/trainer/tokenizer/tokenizer_parity

chart:  ## lint, render and test the Helm chart, its rules and boards (builds helm once)
	@scripts/check_chart.sh

images: build  ## check what goes into the images, and their SBOMs, without a registry
	@scripts/check_images.sh

images-arm64:  ## cross-build the operator for arm64, check its image's files and SBOM, run it by qemu (TESTS=api)
	@scripts/check_arm64.sh

test-cluster: build  ## test operator and trainer on a real Kubernetes on this machine (root, Go; builds it once)
	@tests/e2e/run.sh

test-scale: build  ## run many RLJobs on kwok's nodes: memory, CPU, rates (root, Go); JOBS=10000 for all of it
	@tests/e2e/scale.sh $(or $(JOBS),1000)

lint: setup  ## check with clang-format, clang-tidy; line lengths, includes, pages, kept results
	@scripts/lint.sh

site:  ## build the pages as a web site in build/site, which needs no network to read
	@scripts/site.sh

clean:  ## remove build folders (the download cache stays)
	rm -rf build
