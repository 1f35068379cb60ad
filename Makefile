# Every target makes what it depends on: `make serve` works in a fresh clone.
#
#   PYTHON=python3.12     the interpreter of the virtual environment (3.11 or newer)
#   TORCH_INDEX=URL       where to take torch from, such as PyTorch's index of CPU builds
#   ARGS="..."            passed on to serve, bench, bench-cpu, soak, endurance, gpu-check and test

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; \
	done)
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CLIENTS := .venv-clients
SERVER := $(VENV)/.server
EVERYTHING := $(VENV)/.everything

.PHONY: help install clients serve test test-slow check format bench bench-cpu soak endurance gpu-check \
	docker clean

help: ## Tell the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(EVERYTHING) ## Make .venv with everything

# What serving needs. torch comes first and alone, so that no other requirement picks a different
# build of it.
$(SERVER): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "make: Python 3.11 or newer is needed (PYTHON=...)" >&2; exit 1; fi
	@echo "Installing into $(VENV); the first time this takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	@$(BIN)/python -m compileall -q engine kernels loadtest server tools
	@echo "Compiling the kernels for this processor, if there is a C++ compiler."
	@$(BIN)/python -m kernels.cpu.native.build || true
	@touch $@

# What the tests and checks need besides.
$(EVERYTHING): $(SERVER)
	@echo "Installing what the tests and checks need."
	$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

# They disagree with each other and with us about versions: an environment of their own.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/js/package-lock.json
	@echo "Installing the client libraries into $(CLIENTS)."
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install \
		-r tests/clients/requirements.txt
	@if command -v npm >/dev/null; then npm ci --loglevel error --prefix tests/clients/js \
		|| echo "npm failed: the JavaScript client is not tested."; \
		else echo "npm is missing: the JavaScript client is not tested."; fi
	@touch $@

clients: $(CLIENTS)/.installed ## Install the client libraries that tests/clients drives

serve: $(SERVER) ## Serve the model that ships with Quire (ARGS="MODEL --port 9000 ...")
	@exec $(BIN)/quire serve $(ARGS)

# Test files are distributed over worker processes, one more than there are cores, since many tests
# wait for servers. Each has one thread for tensors: teams of threads that spin while they wait for
# each other cost far more than they gain.
test: WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')
test: install ## Run the tests (ARGS="tests/engine -k name"; "-n 0" keeps to one process)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install ## Run the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

check: install ## Lint, formatting, types, and the rule that imports run one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: install ## Format the code and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(SERVER) ## Measure a running server (ARGS="--concurrency 1,4,16 --html report.html")
	@$(BIN)/quire bench $(ARGS)

bench-cpu: $(SERVER) ## Measure the server and its peers on this CPU (ARGS="--quick", "--only PART")
	@$(BIN)/python -m loadtest.cpu $(ARGS)

soak: $(SERVER) ## Try that no flags change an answer (ARGS="--requests 500 -- FLAGS OF SERVE")
	@$(BIN)/python -m loadtest.soak $(ARGS)

endurance: $(SERVER) ## Thousands of requests; nothing lost, nothing grows (ARGS="--minutes 60")
	@$(BIN)/python -m loadtest.endurance $(ARGS)

gpu-check: install ## Check a GPU: tests, kernels, steps, end to end (ARGS="--only steps")
	@$(BIN)/python -m tools.bench $(ARGS)

docker: ## Build the GPU image (ARGS="--build-arg TORCH_INDEX=URL" for the CPU one)
	docker build -t quire $(ARGS) .

clean: ## Remove the virtual environment and all caches
	rm -rf $(VENV) $(CLIENTS) tests/clients/js/node_modules build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
