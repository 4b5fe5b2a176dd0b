# What a fresh clone needs, in one command each: `make run`, `make test`. `make` alone lists them.
SHELL := /bin/bash

PYTHON ?= python3
PROFILE ?= quick
DEVICE ?= auto
ONLY ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
UNFINISHED := $(VENV)/.unfinished

.DEFAULT_GOAL := help
.PHONY: help install run test test-all check lab site slides clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Settings: PROFILE=$(PROFILE) (smoke, quick, paper)  DEVICE=$(DEVICE) (auto, cpu, cuda, mps, xpu)"
	@echo "          ONLY=$(ONLY) (such as 04 or 03,04)  PYTHON=$(PYTHON) (3.11, 3.12 or 3.13)"

install: $(INSTALLED) ## install what the notebooks and the commands need, into .venv

run: $(INSTALLED) ## execute the notebooks and bind them into a report in build/
	$(BIN)/python -m companion --profile $(PROFILE) --device $(DEVICE) $(if $(ONLY),--only $(ONLY)) --output build

TESTS := GPULAB_PROFILE=smoke $(BIN)/python -m pytest -n auto --dist loadscope --max-worker-restart=0 -rs

test: check ## style, types, and the tests for every day: five minutes
	$(TESTS) -m "not slow"

test-all: $(DEVELOPED) ## all the other tests: all notebooks, site, slides, attack, clusters: seven minutes
	$(TESTS) -m slow

check: $(DEVELOPED) ## style, format and types, without the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: $(INSTALLED) ## open copies of the notebooks in JupyterLab, without outputs, in lab/; the executed ones are beside them
	$(BIN)/python -m companion copies lab
	PYTHONPATH=$(CURDIR)/notebooks $(BIN)/jupyter lab --LabApp.default_url=/lab/tree/lab/00_start_here.ipynb

site: $(DEVELOPED) ## build notebooks, pages and reference as a site in build/site, which opens from disk
	rm -rf build/site build/sphinx && mkdir -p build/sphinx/source
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/sphinx/doctrees build/sphinx/source build/site
	@echo "Open build/site/index.html"

slides: $(DEVELOPED) ## turn the notebooks into slides in build/slides, a file a notebook, which open from disk
	$(BIN)/python docs/slides.py build/slides

clean: ## remove .venv, build/ with the runs in it, and caches; runs/ stays
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
	find gpulab tests benchmarks notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# What pip says, without what takes no time; an awk may keep lines back.
define PROGRESS
import re, sys
for line in sys.stdin:
    if re.match(r" *(Downloading|Using cached) .* MB\)", line): print(line, end="")
    if line.startswith("Installing"): print("  Installing", line.count(",") + 1, "packages")
endef
export PROGRESS

# Installs once, and again when the dependencies change: what the notebooks need, or also what tests, types and the site
# do. What is imported is compiled then. An installation that was broken off left its mark, and the next one starts anew;
# what was downloaded is in pip's cache.
$(INSTALLED): EXTRAS := notebooks
$(DEVELOPED): EXTRAS := notebooks,dev
$(INSTALLED) $(DEVELOPED): pyproject.toml constraints.txt
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	    echo "gpulab needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not here)." >&2; \
	    echo "Name another one: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }; \
	  echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(UNFINISHED)
	@echo "Installing into $(VENV): a few minutes, and up to 3.3 GB to download the first time"
	@set -o pipefail; $(BIN)/python -m pip install --no-compile -c constraints.txt -e ".[$(EXTRAS)]" | \
	  $(BIN)/python -uc "$$PROGRESS"
	@rm $(UNFINISHED) && touch $(INSTALLED) $@
