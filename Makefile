# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone with Python, pip and make.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)

.PHONY: setup demo test test-all lint format bench evidence docs wheel clean

setup: .venv/installed

# BackPACK goes in without its dependencies: one of them does not load beside a CPU-only torch, and breaks Lightning.
.venv/examples: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable ".[examples]" einops unfoldNd
	$(PIP) --no-deps backpack-for-pytorch
	$(BIN)/python -c "import backpack, lightning_taskinfo, pytorch_lightning, torchmetrics, wandb"
	touch $@

.venv/installed: .venv/examples
	$(PIP) --editable ".[dev]"
	touch $@

demo: .venv/examples
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m "slow or not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv-bench/installed
	.venv-bench/bin/python benchmarks/fisher.py --memory-growth

# Compares docs/evidence.md with the stored results, and runs the short version of every experiment.
evidence: setup
	$(BIN)/python benchmarks/evidence/page.py --short

# The peers go in without their dependencies, one of which breaks Lightning here too; what they import is named instead.
BENCH_PIP := .venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.venv-bench/installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	$(BENCH_PIP) torch
	$(BENCH_PIP) --editable . einops unfoldNd einconv linear_operator numpy opt-einsum peft scipy tqdm transformers
	$(BENCH_PIP) --no-deps --requirement benchmarks/requirements.txt
	touch $@

docs: setup
	$(PIP) --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# Builds wheel and sdist, installs the wheel into an empty environment, and runs the first screen's example from it.
wheel:
	rm -rf dist
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) build
	.venv-wheel/bin/python -m build --outdir dist .
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) torch dist/*.whl
	cd .venv-wheel && bin/python ../tests/first_screen.py

clean:
	rm -rf .venv .venv-bench .venv-wheel build dist site runs
