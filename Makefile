# Everything a developer or an operator types. `make serve` and `make test` work on a bare machine with Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
# Installs are redone when what they depend on changes, not when a file's date does.
STAMP := $(VENV)/.$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# torch alone comes first: resolved together with the rest, pip may prefer a build with gigabytes of CUDA libraries.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Two files at a time: many tests wait for processes.
SIDE_BY_SIDE := -n 2 --dist loadfile

.PHONY: serve test check fix e2e bench bench-peers format lint types unit integration clean

serve: $(STAMP)-runtime  ## serve the bundled pair on http://127.0.0.1:8000
	RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.ingress.proxy:middlewares RAY_SERVE_PROXY_USE_GRPC=1 \
	$(BIN)/python -m deployments $(ARGS)

test: unit integration  ## every test that needs no GPU

check: format lint types unit  ## what must hold before a commit

fix: $(STAMP)-dev
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

e2e: $(STAMP)-dev  ## real processes only
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "e2e and not gpu"

bench: $(STAMP)-dev  ## side by side with transformers; JSON=path writes the rows
	$(BIN)/python -m tests.bench $(if $(JSON),--json $(JSON))

bench-peers: $(STAMP)-dev $(PEERS)/.$(shell cksum < tests/bench/peers.txt | cut -d' ' -f1)  ## the same, and vLLM
	$(BIN)/python -m tests.bench --peers $(if $(JSON),--json $(JSON))

format: $(STAMP)-dev
	$(BIN)/ruff format --check .

lint: $(STAMP)-dev
	$(BIN)/ruff check .

types: $(STAMP)-dev
	$(BIN)/mypy

unit: $(STAMP)-dev
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not e2e and not slow and not gpu"

integration: $(STAMP)-dev
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "(e2e or slow) and not gpu"

clean:
	rm -rf $(VENV) $(PEERS) build *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(STAMP)-runtime:
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@rm -f $(VENV)/.*-runtime $(VENV)/.*-dev
	@touch $@

$(STAMP)-dev: $(STAMP)-runtime
	$(PIP) -e ".[dev]"
	@touch $@

# Without dependency resolution: vLLM asks for packages that text does not need, of a kind that few machines can install.
$(PEERS)/.%:
	@echo "Installing vLLM into $(PEERS) (once; a few minutes)"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep ^torch== tests/bench/peers.txt)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/bench/peers.txt
	@touch $@
