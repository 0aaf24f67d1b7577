# Tangram Chat. `make` alone lists the targets.

SHELL := /bin/bash
PYTHON_IN_VENV := .venv/bin/python
TANGRAM_HOME ?= $(HOME)/.local/share/tangram-chat
# Further arguments for pytest: make test ARGS="tests/db -k path"
ARGS ?=

export TANGRAM_HOME

.DEFAULT_GOAL := help
.PHONY: help up setup model test lint format lock lock-cuda clean

help: ## list the targets
	@echo "Tangram Chat"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  MODEL=/path/or/hub-id make up   serves another model than the bundled one"

up: ## set up what is missing (CUDA build where there is a GPU), then serve the product on http://127.0.0.1:8000
	@exec scripts/up.sh

setup: ## create .venv, or bring it in line with requirements.lock
	@scripts/setup.sh

model: setup ## prepare the bundled model
	@$(PYTHON_IN_VENV) -m app.bundled_model "$$TANGRAM_HOME/models"

test: setup ## check style, types and layers, then run all tests (ARGS="..." goes to pytest)
	@scripts/test_tools.sh
	@$(MAKE) --no-print-directory lint
	@scripts/run_tests.sh $(ARGS)

lint: setup ## check style, types and layers
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m mypy
	@.venv/bin/lint-imports --no-logo

format: setup ## put imports and layout of the Python files in order
	@$(PYTHON_IN_VENV) -m ruff check --quiet --select I --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

lock: ## write requirements.lock from what is installed in .venv
	@$(PYTHON_IN_VENV) scripts/lock.py

lock-cuda: ## resolve requirements-cuda.lock for the GPU image (PYTHON= a Python 3.12)
	@$(or $(PYTHON),python3.12) scripts/lock_cuda.py

clean: ## remove .venv and everything that is made here (never your data)
	rm -rf .venv .venv-cuda build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find app admin db tangram kernels tests scripts benchmarks docs -name __pycache__ -prune -exec rm -rf {} +
