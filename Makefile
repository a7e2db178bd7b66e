# Everything here sets up what it needs; a second call starts at once. Needs Python 3.10 or later and make.
PYTHON ?= python3
VENV := .venv
FLOOR := .venv-floor
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-floor lint bench clean

demo: $(VENV)/ready
	$(BIN)/python notebooks/demo.py

test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses 2 tests/kernels

# The oldest transformers that is supported, and what depends on its version.
test-floor: $(FLOOR)/ready
	$(FLOOR)/bin/python -m pytest --numprocesses 2 $(FLOOR_TESTS)

FLOOR_TESTS := tests/test_modeling_kda_hybrid.py tests/test_forward_contract.py tests/test_generation.py tests/test_saving.py tests/test_training.py \
	tests/test_generation_modes.py tests/test_generation_drafts.py tests/test_reported_faults.py tests/test_cache_kda_hybrid.py \
	tests/test_kimi_k3.py tests/test_kimi_k3_model.py tests/test_layers_mlp.py tests/test_conversion_layouts.py tests/test_fla_layout.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/ready
	$(BIN)/python -m tests.benchmarks.bench_ops
	$(BIN)/python -m tests.benchmarks.bench_model
	$(BIN)/python -m tests.benchmarks.bench_load
	$(BIN)/python -m tests.benchmarks.bench_context --plot tests/benchmarks/context.svg
	$(BIN)/python -m tests.benchmarks.bench_drafts

clean:
	rm -rf $(VENV) $(FLOOR)

# torch first and alone: what comes after takes the build that is there.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) torch
	$(BIN)/python $(PIP) --editable ".[test,notebooks]"
	touch $@

$(FLOOR)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python $(PIP) torch
	grep -viE '^(transformers|tokenizers|huggingface.hub|httpx|httpcore)' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(FLOOR)/constraints.txt \
		--editable ".[test]" "transformers==5.17.0"
	touch $@
