# What a fresh clone needs, in one command each: `make run`, `make test`. `make` alone lists them.
PYTHON ?= python3
PROFILE ?= quick
DEVICE ?= auto
ONLY ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
TESTS := GPULAB_PROFILE=smoke $(BIN)/python -m pytest -n auto --dist loadscope --max-worker-restart=0 -rs

.DEFAULT_GOAL := help
.PHONY: help install run test test-all check format lab site slides clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Settings: PROFILE=$(PROFILE) (smoke, quick, paper)  DEVICE=$(DEVICE) (auto, cpu, cuda, mps, xpu)"
	@echo "          ONLY=$(ONLY) (such as 04 or 03,04)  PYTHON=$(PYTHON) (3.11, 3.12 or 3.13)"

install: $(INSTALLED) ## install what the notebooks and the commands need, into .venv

run: $(INSTALLED) ## execute the notebooks and bind them into a report in build/
	$(BIN)/python -m companion --profile $(PROFILE) --device $(DEVICE) $(if $(ONLY),--only $(ONLY)) --output build

test: check ## style, types, and the tests for every day: four to seven minutes
	$(TESTS) -m "not slow"

test-all: $(DEVELOPED) ## all the other tests: all notebooks, site, slides, pages in a browser, fault injection, clusters
	$(TESTS) -m slow

check: $(DEVELOPED) ## style, format, types, and which module imports which, without the tests
	@failed=""; \
	for tool in "ruff check ." "ruff format --check ." mypy lint-imports; do \
	  echo "$$tool"; \
	  $(BIN)/$$tool || failed="$$failed [$$tool]"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

format: $(DEVELOPED) ## repair what ruff can repair, and format the code
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

lab: $(INSTALLED) ## open copies of the notebooks in JupyterLab, without outputs, in lab/
	$(BIN)/python -m companion copies lab
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/lab/00_start_here.ipynb

site: $(DEVELOPED) ## build notebooks, pages and reference as a site in build/site, which opens from disk
	rm -rf build/site build/sphinx && mkdir -p build/sphinx/source
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/_tools -d build/sphinx/doctrees build/sphinx/source build/site

slides: $(DEVELOPED) ## turn the notebooks into slides in build/slides, which open from disk, and print the hand-outs
	$(BIN)/python docs/_tools/slides.py build/slides

clean: ## remove .venv, build/ with the runs in it, and caches; runs/ stays
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Installs once, and again when the dependencies change. pip refuses a Python that is too old or too new, and says so.
$(INSTALLED): EXTRAS := notebooks
$(DEVELOPED): EXTRAS := notebooks,dev
$(INSTALLED) $(DEVELOPED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $(INSTALLED) $@
