# The two commands: `make serve` and `make test`. Both build .venv first, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER ?= cluster.yaml
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve serve-fast test check lint clean

serve: $(VENV)/.installed ## Serve cluster.yaml on 127.0.0.1:8000; Ctrl-C ends everything
	@$(BIN)/serve_app up $(CLUSTER)

serve-fast: $(VENV)/.installed ## The same with HAProxy and gRPC in front: more requests per CPU
	@$(BIN)/serve_app up --fast $(CLUSTER)

test: $(VENV)/.installed-dev ## Lint, types and the whole test suite
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

check: $(VENV)/.installed ## Validate the cluster file
	@$(BIN)/serve_app check $(CLUSTER)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean: ## Remove everything that can be made again
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
