# The commands people type. Each does its own set-up and says what it is doing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build test unit parity sanitize fuzz quickstart operator cuda lint test-cluster clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup:  ## packages, Rust and LibTorch that the build needs
	@scripts/setup.sh cpu

build: setup  ## trireme and trireme-operator (CPU)
	@scripts/build.sh cpu

quickstart: setup  ## a small model learns to add by GRPO, on the screen, in minutes
	@scripts/build.sh cpu trireme
	@scripts/quickstart.sh

test: build  ## every test that needs no cluster and no GPU
	@scripts/test.sh

sanitize:  ## unit tests without LibTorch under ASan+UBSan and TSan, fuzz targets 15 s each
	@scripts/sanitize.sh

operator:  ## only what needs no LibTorch
	@scripts/setup.sh operator
	@scripts/build.sh operator

cuda:  ## the CUDA build (needs no GPU)
	@scripts/setup.sh cuda
	@scripts/build.sh cuda

lint: setup  ## clang-format and clang-tidy
	@scripts/lint.sh

clean:  ## build folders (the download cache stays)
	rm -rf build
