# Everything a person or CI runs. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
N ?= 300
# tests do not see each other and wait for much, so one more runs at a time than there are processors
WORKERS := $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
APART := -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test e2e bench bundle unit netns equivalence fuzz fmt lint types layers check lock ci clean

help: ## list the targets
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## /  make \1\t/' | expand -t 20

# -- for users -----------------------------------------------------------------

setup: $(VENV)/.setup ## make .venv with the programs; system packages too where apt is present

demo: setup ## capture a pod through a real CNI chain and prove it with connections (root)
	@$(BIN)/python -m examples.demo

test: $(VENV)/.setup-dev ## unit tests, and with root the tests in network namespaces
	@$(BIN)/pytest $(APART)

bundle: dist/.made ## freeze the programs into dist/, as nodes and images get them

dist/.made: $(VENV)/.setup-dev $(wildcard packaging/*.py packaging/*.spec launcher/*) \
            $(shell find src -name '*.py')
	@$(BIN)/python packaging/bundle.py
	@touch $@

e2e: bundle ## the stories on a real node: kubelet, containerd, API server, Envoy (root, Go)
	@packaging/setup --node
	@$(BIN)/pytest tests/e2e

bench: bundle ## what a call of the plugin costs, in units of a program that does nothing
	@PYTHONPATH=tests $(BIN)/python -m bench

# -- for developers ------------------------------------------------------------

unit: $(VENV)/.setup-dev ## tests that need no root
	@$(BIN)/pytest $(APART) tests/unit

netns: $(VENV)/.setup-dev ## tests in network namespaces (root)
	@$(BIN)/pytest $(APART) tests/netns

equivalence: $(VENV)/.setup-dev ## both back ends against N configurations' connections (root)
	@EQUIVALENCE_CONFIGURATIONS=$(N) $(BIN)/pytest tests/netns/test_equivalence.py

fuzz: $(VENV)/.setup-dev ## N hostile inputs to the launcher, under sanitizers
	@$(BIN)/python packaging/launcher.py --fuzz $(N)

fmt: $(VENV)/.setup-dev ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: $(VENV)/.setup-dev ## check style
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/.setup-dev ## check types
	@$(BIN)/mypy

layers: $(VENV)/.setup-dev ## check who may import whom
	@$(BIN)/lint-imports --no-logo

check: lint types layers unit ## all that needs no root

ci: lint types layers bundle test demo e2e ## what CI runs, in its order

lock: ## pin the dependencies anew (needs uv)
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --extra build pyproject.toml -o requirements.lock
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --extra build --extra dev pyproject.toml -o requirements-dev.lock

clean: ## remove what was made here
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.setup: requirements.lock pyproject.toml packaging/setup
	@PYTHON=$(PYTHON) packaging/setup $(VENV) requirements.lock
	@touch $@

$(VENV)/.setup-dev: requirements-dev.lock pyproject.toml packaging/setup
	@PYTHON=$(PYTHON) packaging/setup $(VENV) requirements-dev.lock
	@touch $@ $(VENV)/.setup
