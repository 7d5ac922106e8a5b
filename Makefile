# Every target works from a fresh clone; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

.PHONY: help install demo test chaos quality lint clean
.DEFAULT_GOAL := help

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Create .venv and install the project with its tests' needs; nothing to do when up to date

# torch comes first and alone: resolved together with the rest, pip would weigh builds against each other.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python must be >= 3.11, got $$($(PYTHON) --version 2>&1); say make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) (the largest download)"
	@$(BIN)/python -m pip install --quiet '$(TORCH)'
	@echo "installing the project and its other packages"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,s3]'
	@touch $@

demo: install ## Train the example run on four islands, lose one and take it back
	$(BIN)/diloco demo

# Two at a time, file by file in the order of their names: the tests of real services mostly wait.
test: install ## Run the test suite
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

chaos: install ## Run every fault of the matrix on real processes, and print its table
	$(BIN)/python -m pytest -q -m chaos tests/test_chaos.py

lint: install ## Format check and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

quality: lint ## Lint and type-check
	$(BIN)/mypy

clean: ## Remove .venv, build output and caches; runs stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
