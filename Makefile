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

.PHONY: serve test check fix e2e bench bench-peers format lint types unit avx2 integration clean

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

# The kernel, compile and exactness tests as on a CPU that has AVX2 and nothing later: in torch, oneDNN, MKL and our C++.
AVX2_ONLY := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TORCHINDUCTOR_CPP_MARCH=x86-64-v3
AVX2_TESTS := tests/engine/execution/cpu/test_kernels.py tests/engine/execution/cpu/test_half_weights.py \
	tests/engine/execution/cpu/test_paged_attention.py \
	'tests/engine/execution/cpu/test_compiled.py::test_compiled_text_does_not_depend_on_the_draft[16-bit weights]' \
	tests/engine/test_exactness.py::test_coupled_text_does_not_depend_on_the_draft

avx2: $(STAMP)-dev  ## the tests that depend on vector instructions, with AVX2 only; nothing where the CPU has none
	if grep -qsw avx2 /proc/cpuinfo; then $(AVX2_ONLY) $(BIN)/pytest $(SIDE_BY_SIDE) -m "not gpu" $(AVX2_TESTS); fi

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
