# A thin index: each target is one command, most of them a script of scripts/ or a tool configured in pyproject.toml.

PYTHON ?= python3
ARGS ?=
SECONDS ?= 120
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install native demo test test-oldest native-fuzz native-stress native-sanitize test-slow bench bench-peers bench-shaped bench-growth bench-against soak search fuzz lint hooks format types audit sbom protos protos-check dist dist-check check up down clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## create .venv with gradwire (editable) and the development tools

$(INSTALLED): pyproject.toml constraints.txt scripts/install
	@PYTHON="$(PYTHON)" scripts/install .venv
	@touch $@

native: $(INSTALLED) ## compile the native module in place again, if native/ has changed
	@scripts/native

demo: native ## train a model split over two workers on this machine, and compare with one process
	@$(BIN)/python examples/demo.py $(ARGS)

# All of them in several processes, since most of the time is waiting; some of them in one, which starts sooner.
# A process that crashes is not replaced: pytest-xdist would wait for ever for the tests that it had been given.
test: native ## run the tests; ARGS="-k send -x" is passed on to pytest
	@$(BIN)/python -m pytest $(or $(ARGS),--numprocesses 4 --dist loadscope --max-worker-restart 0 --maxfail 20)

test-oldest: ## run the tests on the oldest torch that pyproject.toml claims, in an environment of its own
	@PYTHON="$(PYTHON)" scripts/test-oldest $(ARGS)

native-fuzz: $(INSTALLED) ## sessions of native/ under random input and sanitizers, for SECONDS=120; ARGS="--libfuzzer"
	@scripts/native-check fuzz --seconds $(SECONDS) $(ARGS)

native-stress: ## links of native/ that many threads use and cut, with each sanitizer for SECONDS=120; ARGS="--seed 7"
	@scripts/native-check stress --seconds $(SECONDS) $(ARGS)

native-sanitize: $(INSTALLED) ## run the tests of native/ with sanitizers; ARGS="-k cancel" is passed on to pytest
	@scripts/native-check sanitize $(ARGS)

test-slow: native ## run the tests that take minutes: thousands of steps, many kills
	@$(BIN)/python -m pytest -m slow $(ARGS)

soak: native ## everything at once with faults at random, for SECONDS=120; ARGS="--seed 7", ARGS="--carrier tcp"
	@$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)

search: native ## random programs beside plain PyTorch, for SECONDS=120; ARGS="--seed 7", ARGS="--only 17"
	@$(BIN)/python -m tests.search --seconds $(SECONDS) $(ARGS)

fuzz: native ## inputs that were changed at random for all that reads bytes, for SECONDS=120; ARGS="--seed 7"
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

bench: native ## measure gradwire beside TensorPipe on this machine; ARGS="--quick", ARGS="--rows 1,6,7"
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: native ## measure gradwire beside Ray, Monarch, hivemind and Dask, installed by it; ARGS="--peers ray"
	@$(BIN)/python -m benchmarks.peers $(ARGS)

bench-shaped: native ## measure steps over a line of 100 Mbit/s with each codec; as root, with real shaping
	@$(BIN)/python -m benchmarks.shaped $(ARGS)

bench-growth: native ## measure how the time of a step grows with what is in it; ARGS="--quick"
	@$(BIN)/python -m benchmarks.growth $(ARGS)

bench-against: native ## measure this version beside another one: REF=HEAD~1; ARGS="--network"
	@$(BIN)/python -m benchmarks.against $(or $(REF),HEAD~1) $(ARGS)

lint: $(INSTALLED) ## ruff, formatting, the compiler's warnings, import contracts, the configuration of hooks
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@CXXFLAGS=-Werror scripts/native --check
	@$(BIN)/lint-imports
	@$(BIN)/pre-commit validate-config

hooks: $(INSTALLED) ## have git run the linters before each commit, and check the message of it
	@$(BIN)/pre-commit install

format: $(INSTALLED) ## format the code and apply ruff's safe fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(INSTALLED) ## mypy --strict over both packages and the benchmarks
	@$(BIN)/mypy

audit: ## look up the versions of constraints.txt in a database of vulnerabilities; 3 if that cannot be done
	@PYTHON="$(PYTHON)" scripts/audit $(ARGS)

sbom: $(INSTALLED) ## write dist/sbom.json, a CycloneDX list of what gradwire needs to run
	@PYTHON="$(PYTHON)" scripts/sbom

protos: ## generate client/gradwire/proto from protos/
	@PYTHON="$(PYTHON)" scripts/protos

protos-check: ## fail if the committed generated code is not what protos/ generates
	@PYTHON="$(PYTHON)" scripts/protos --check

dist: ## build the sdist, and a wheel for any Linux, into dist/
	@PYTHON="$(PYTHON)" scripts/dist

dist-check: ## install both in fresh environments, of each Python that is there: PYTHONS="python3.11 python3.13"
	@scripts/dist-check

check: lint types protos-check test soak ## everything that CI runs

up: ## build the image, run two workers and the demo client in containers
	$(COMPOSE) up --build --abort-on-container-exit --exit-code-from client

down: ## stop and remove those containers
	$(COMPOSE) down --remove-orphans

clean: ## remove the environments, caches and build results
	rm -rf .venv .venv-* dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f client/gradwire/transport/native.abi3.so
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
