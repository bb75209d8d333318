# SPDX-License-Identifier: Apache-2.0
# The commands of this project. `make help` lists them.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ATP_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/atp
export ATP_CACHE

.PHONY: help setup prereqs prereqs-tests venv torch native softswitch transport simulator proto demo demo-bmv2 clean-demo test test-unit test-client test-torch test-torch-quick test-torch-versions test-cluster attack lint format \
	bench-quick fuzz images cluster-up cluster-down lock clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

prereqs: ## Say what this machine lacks, all at once, and install what Debian packages can give
	@$(PYTHON) hack/atp-cluster prereqs --install

setup: prereqs venv native ## Prepare .venv and the native builds

venv: $(VENV)/.ready

# One lock for the workspace: every shipped package is installed editable, without looking up anything again.
$(VENV)/.ready: requirements-dev.txt proto/pyproject.toml operator/pyproject.toml switch-agent/pyproject.toml \
		softswitch/pyproject.toml sidecar/pyproject.toml client/pyproject.toml
	@echo "preparing $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
	@$(PY) -m pip install -q --require-hashes -r requirements-dev.txt
	@$(PY) -m pip install -q --no-deps --no-build-isolation -e proto -e operator -e switch-agent -e softswitch -e sidecar -e client
	@touch $@

native: softswitch transport simulator

softswitch: ## Build the switch core: BPF objects, library and relay
	@$(MAKE) -s -C softswitch all

transport: venv ## Build the transport and install it in .venv
	@$(PY) hack/native_wheels.py --install atp-transport

simulator: venv ## Build the simulator and install it in .venv
	@$(PY) hack/native_wheels.py --install atp-sim

proto: venv ## Generate wire constants and gRPC stubs
	@$(PY) proto/generate.py
	@proto/generate-grpc $(PY)

demo: prereqs ## Train a real model through in-network aggregation on this machine
	@$(MAKE) -s venv softswitch transport
	@PYTHONPATH=hack $(PY) -m demo run

demo-bmv2: venv transport ## The same model with bmv2 in the middle, where bmv2 is (P4_BMV2); needs root
	@PYTHONPATH=hack $(PY) -m bmv2

clean-demo: ## Remove the demo, the local cluster and its caches
	@PYTHONPATH=hack $(PYTHON) -m demo clean

cluster-up: ## Start the local cluster only
	@$(PYTHON) hack/atp-cluster build && $(PYTHON) hack/atp-cluster up

cluster-down: ## Stop the local cluster
	@$(PYTHON) hack/atp-cluster down

prereqs-tests: ## The same, with what only the tests need
	@$(PYTHON) hack/atp-cluster prereqs --tests --install

torch: venv ## Install the torch versions that the tests use, each in an environment of its own in the cache
	@$(PY) hack/torchenv.py oldest middle newest >/dev/null

# The client's tests mostly wait, for time-outs that trainers would see: the others run beside them.
test: prereqs-tests setup torch lint ## Every check and test
	@mkdir -p build; $(MAKE) -s test-client >build/test-client.log 2>&1 & client=$$!; \
	trap 'kill $$client 2>/dev/null' INT TERM; \
	$(MAKE) -s test-unit test-torch-quick; rest=$$?; \
	wait $$client; client=$$?; cat build/test-client.log; [ $$((rest || client)) = 0 ] || exit 1; \
	$(MAKE) -s test-quiet test-cluster

test-unit: ## Unit, property, conformance and integration tests, in Rust and Python
	@cd native && cargo test --quiet --release
	@$(PY) -m pytest -q -m "not cluster and not quiet" --ignore tests/client tests

test-quiet: ## Tests that measure times: nothing else should run on the machine
	@$(PY) -m pytest -q -m quiet tests

test-client: ## The client's tests, on the oldest torch, one in the middle and the newest
	@$(PY) -m pytest -q tests/client

# PYTORCH_SOURCE names a checkout of torch's source of the same version: then its test files run too.
TORCH_TESTS = PYTHONPATH=tests:hack $(PY) -m

test-torch: venv transport ## PyTorch's own distributed tests and ours of that kind, on gloo and on atp; build/torch/result.json
	@$(TORCH_TESTS) pytorch $(TORCH_ARGUMENTS)

test-torch-quick: venv transport ## A part of them, in a few minutes
	@$(TORCH_TESTS) pytorch --quick $(TORCH_ARGUMENTS)

test-torch-versions: venv transport ## The same part with every version of torch that is supported (TORCH_VERSIONS=.., 5 GB each at a time)
	@$(TORCH_TESTS) pytorch.versions $(TORCH_VERSIONS) $(TORCH_ARGUMENTS)

test-cluster: ## The whole path on the real cluster
	@PYTHONPATH=hack $(PY) -m pytest -q -m cluster tests/e2e

attack: venv softswitch transport ## Carry out every attack that is known, in namespaces and on the cluster; build/attack/result.json; needs root
	@PYTHONPATH=tests:hack $(PY) -m attack $(ATTACK_ARGUMENTS)

fuzz: venv ## Fuzz parsers and state machines, FUZZ_SECONDS (600) for each target
	@$(MAKE) -s -C tests/fuzz long SECONDS=$(or $(FUZZ_SECONDS),600)

lint: venv ## ruff, mypy, clippy, clang-format, stale generated files
	@PY=$(PY) hack/lint.sh

format: venv ## Format everything
	@$(PY) -m ruff check -q --fix . ; $(PY) -m ruff format -q .
	@cd native && cargo fmt
	@$(MAKE) -s -C softswitch format

bench-quick: ## Figures as JSON lines, in under three minutes
	@$(PY) bench/quick.py

lock: ## Lock the Python requirements again, with hashes
	@$(PY) hack/lock.py

clean: ## Remove what was built in this checkout
	@rm -rf build native/target softswitch/build $(VENV)
