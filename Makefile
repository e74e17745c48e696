# A fresh machine needs Python 3.11 or newer, make, and one of: `make demo`, `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help venv demo test check soak bench gpu lock clean

help:
	@echo "make demo    install, start everything, train two tenants at once on a tiny model (minutes)"
	@echo "make test    install, check and test everything that CI does"
	@echo "make check   lint, format, types, layering"
	@echo "make soak    the long fault and load tests"
	@echo "make bench   the benchmarks, in short"
	@echo "make gpu     the engine's tests and benchmarks on a GPU, in ten minutes"
	@echo "make lock    what the image installs, at which versions, with hashes"
	@echo "make venv    only the virtual environment, in $(VENV)"
	@echo "make clean   remove what was made"

# The interpreter. torch comes first and alone: a later package that merely asks for "torch" would otherwise make pip
# choose the newest build, with gigabytes of CUDA libraries.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.worker: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[export,worker]" "tinker==$(TINKER)"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/.worker

# What pyproject.toml pins for the tests is what the demo trains through.
TINKER := $(shell sed -n 's/.*"tinker==\([^"]*\)".*/\1/p' pyproject.toml)

venv: $(VENV)/.dev

demo: $(VENV)/.worker
	$(BIN)/python examples/demo.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests of a file share servers and models, so a file stays whole. In the order of their names: that of the longest
# first, and of the many short ones last, which come out even. One process more than CI has cores: a quarter of their time
# tests wait, for leases to run out and for processes to start and end.
TEST_PROCESSES ?= 3

test: check
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak --timeout=3600 -o faulthandler_timeout=7200

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/queue_overhead.py --short --output build/bench/queue_overhead.json
	$(BIN)/python benchmarks/scale.py --short --output build/bench/scale.json
	$(BIN)/python benchmarks/device_wait.py --short --output build/bench/device_wait.json
	$(BIN)/python benchmarks/saves.py --rounds 2 --output build/bench/saves.json
	$(BIN)/python benchmarks/native_client.py --short --output build/bench/native_client.json
	$(BIN)/python benchmarks/dialects.py --short --output build/bench/dialects.json
	$(BIN)/python benchmarks/attacks.py --short --output build/bench/attacks.json
	$(BIN)/python benchmarks/step_overhead.py --short --output build/bench/step_overhead.json
	$(BIN)/python benchmarks/custom_loss.py --short --output build/bench/custom_loss.json
	$(BIN)/python benchmarks/fusion.py --short --determinism --output build/bench/fusion.json
	$(BIN)/python benchmarks/adapter_switch.py --short --output build/bench/adapter_switch.json
	$(BIN)/python benchmarks/sampling.py --short --output build/bench/sampling.json
	$(BIN)/python benchmarks/pictures.py --short --output build/bench/pictures.json
	$(BIN)/python benchmarks/ranks.py --short --output build/bench/ranks.json
	$(BIN)/python benchmarks/mesh_move.py --short --output build/bench/mesh_move.json
	$(BIN)/python benchmarks/weight_sync.py --short --output build/bench/weight_sync.json
	$(BIN)/python benchmarks/ray_calls.py --short --output build/bench/ray_calls.json
	$(BIN)/python benchmarks/data.py --short --output build/bench/data.json
	$(BIN)/python benchmarks/library.py --short --output build/bench/library.json
	$(BIN)/python benchmarks/data_check.py --short --output build/bench/data_check.json
	$(BIN)/python benchmarks/sweep.py --short --output build/bench/sweep.json
	$(BIN)/python benchmarks/dry_run.py --short --output build/bench/dry_run.json
	$(BIN)/python benchmarks/tables.py --results build/bench --print

# On a machine with a GPU, by its own Python: torch 2.11 or newer, transformers, peft, pytest and psutil are all it takes.
GPU_PYTHON ?= python3

gpu:
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu.py

# With a tool of its own, which nothing else needs.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	build/lock/bin/python docker/lock.py

clean:
	rm -rf $(VENV) .demo .twinkle build dist *.egg-info .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
