# One command per chore; CI calls the same ones. Everything is made below this folder (.venv, .venvs, build), except some of
# Debian's packages, which tests need and scripts/setup_system.sh installs where it may.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venvs/sglang-0.5.23
SGLANG_OLD := .venvs/sglang-0.5.18
ZARR := .venvs/zarr-3.4
TRAINERS := .venvs/trainers
# Tests wait for servers and disks most of the time, so more of them than cores. A file's tests stay together: they share a server.
JOBS := 3
PAGE_TEST := tests/faults/test_reliability_page.py

.PHONY: help setup setup-sglang setup-sglang-old setup-zarr setup-trainers setup-model setup-tokenizers setup-system setup-tests demo test test-systemd test-faults check fast types lint format bench bench-storage bench-status bench-ledger bench-capture test-gpu docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.stamp: pyproject.toml constraints.txt
	@echo "setting up $(VENV): hsx with everything its tests need (about two minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.3,<26'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(VENV)/.stamp  ## the development environment, .venv

setup-sglang:  ## an environment with the real SGLang on a CPU, .venvs/sglang-0.5.23
	PYTHON=$(PYTHON) scripts/setup_sglang.sh 0.5.23 $(SGLANG)

setup-sglang-old:
	PYTHON=$(PYTHON) scripts/setup_sglang.sh 0.5.18 $(SGLANG_OLD)

setup-zarr:
	scripts/setup_zarr.sh $(ZARR)

setup-trainers: setup  ## an environment with the trainers whose code judges exports, .venvs/trainers
	scripts/setup_trainers.sh $(TRAINERS)

setup-model: setup
	$(BIN)/python scripts/prepare_demo_model.py build/smollm2

setup-tokenizers: setup
	PYTHON=$(BIN)/python scripts/setup_tokenizers.sh build/tokenizers

setup-system:
	scripts/setup_system.sh

setup-tests: setup  ## what `make test` needs besides: two SGLangs, a newer zarr, the trainers, a trained model, tokenizers, Debian's tools
	@$(MAKE) --no-print-directory -j $(JOBS) setup-sglang setup-sglang-old setup-zarr setup-trainers setup-model setup-tokenizers setup-system

demo: setup  ## the main job, end to end: real text, a trained model, the real SGLang, two roots
	$(BIN)/python scripts/demo.py

test: setup-tests  ## all tests, those on the real SGLang included; JOBS at once
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=20

test-systemd: setup setup-sglang setup-system  ## the units under a real systemd, process 1 of namespaces of its own; as root
	$(BIN)/python -m pytest tests/systemd -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-faults: setup-tests  ## the fault matrix, on both engines; writes docs/reliability.md
	rm -rf build/faults
	$(BIN)/python -m pytest tests/faults -n $(JOBS) --dist loadfile --no-loadscope-reorder --deselect $(PAGE_TEST)
	$(BIN)/python scripts/generate_reliability.py

FAST := fast  # empty where the fast tests are run anyway
check: setup lint types $(FAST)  ## lint, types, fast tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

fast:
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow and not sglang' -q

format:  ## formats the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## benchmarks, as ratios measured in one run; results in build/bench
	mkdir -p build/bench
	$(BIN)/python scripts/bench_index.py
	$(BIN)/python scripts/bench_storage.py

bench-storage: setup  ## dump to durable shard and back, against cp and other tools; build/bench/storage.json
	$(BIN)/python scripts/bench_storage.py
	$(BIN)/python scripts/bench_commit.py

bench-status: setup  ## what it costs a run to be watched by 200 polls a second; build/bench/status.json
	$(BIN)/python scripts/bench_status.py

bench-ledger: setup  ## the ledger of 10 million samples: start-up, memory, copies; build/bench/ledger.json
	$(BIN)/python scripts/bench_ledger.py

bench-capture: setup setup-sglang  ## what capture costs the real server's prefill, on a CPU; build/bench/capture.json
	$(BIN)/python scripts/bench_capture.py

test-gpu: setup  ## checks that need a GPU and SGLang for it (HSX_SGLANG_GPU_PYTHON); at most eight minutes
	$(BIN)/python scripts/test_gpu.py

docs: setup  ## regenerates the generated pages, and builds docs/ into build/site
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'mkdocs>=1.6,<2'
	$(BIN)/mkdocs build --strict --quiet

clean:  ## removes what was built, environments included
	rm -rf build .venv .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
