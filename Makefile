# make run    train the toy model: on all GPUs, or on two CPU ranks
# make test   run all tests, also those that compare with Python's torch
# Both set up what is missing first. FLAVOR=cpu or FLAVOR=cuda overrides the choice by the machine's GPU.

FLAVOR ?= auto
GO ?= go
# Test binaries at a time: each starts several processes of its own.
TEST_PROCS ?= $(shell n=$$(nproc); if [ $$n -gt 4 ]; then echo 4; else echo $$n; fi)
TEST_FLAGS ?=
BENCH_FLAGS ?=

# Before set-up there is no workspace, and after a change of the cache it may name what is gone.
goddp = GOWORK=off $(GO) run ./cmd/goddp

.DEFAULT_GOAL := help
.PHONY: help setup setup-python run test long bench gpu-bundle cuda-build docker-check build vet fmt lint clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup: ## libtorch, the compiled C++ parts, and go.work; quick when all is there
	@$(goddp) setup --quiet --flavor $(FLAVOR)

setup-python: ## a Python with torch, for the tests that compare with it
	@$(goddp) setup --quiet --python

run: setup ## train the toy model for 50 epochs
	$(GO) run ./cmd/multigpu 50 10

test: setup setup-python vet ## all tests
	$(GO) test -p $(TEST_PROCS) -timeout 20m $(TEST_FLAGS) ./...

long: setup setup-python ## what takes too long for every test: 100 restarts, 500 kills while saving, a Slurm of two nodes
	GODDP_LONG=1 $(GO) test -count=1 -timeout 30m -run TestEveryRestart ./cmd/goddp
	@command -v slurmctld >/dev/null || echo "no Slurm here: its test is left out (Debian: apt-get install slurm-wlm munge)"
	! command -v slurmctld >/dev/null || GODDP_SLURM=1 $(GO) test -count=1 -timeout 30m -run 'TestSlurm$$' ./cmd/goddp
	GODDP_KILLS=500 $(GO) test -count=1 -timeout 30m -run TestKillDuringSave ./checkpoint

bench: setup setup-python ## Go against Python, into docs/benchmarks.md; BENCH_FLAGS=-quick takes less time
	$(GO) run ./bench $(BENCH_FLAGS)

gpu-bundle: setup-python ## the CUDA tests and benchmarks, for a GPU machine without Go, into dist/
	GOWORK=off $(GO) run ./bench/gpu/bundle

cuda-build: setup-python ## compile and link the CUDA flavour, and start its programs (where there is no GPU)
	GOWORK=off $(GO) run ./bench/gpu/bundle -try

docker-check: ## the CPU image, built and tried without a Docker engine (root, buildah, debootstrap)
	docker/check.sh

build: setup ## the programs, into bin/
	$(GO) build -o bin/ ./cmd/...

vet: setup
	$(GO) vet ./...

fmt: ## format the Go code, and the C++ where there is a clang-format
	gofmt -l -w .
	! command -v clang-format >/dev/null || clang-format -i csrc/tdp/*.cpp csrc/tdp/*.h bench/internal/plain/cpp/*.cpp

lint: vet ## what vet, gofmt and staticcheck object to
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run make fmt"; exit 1; }
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

clean: ## what builds and runs left in this folder; the cache stays
	rm -rf bin dist go.work go.work.sum
