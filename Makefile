# `make demo` and `make test` set up everything they need, on a machine with Python 3.11
# or newer and nothing else, in .venv.  The set-up runs again only when its inputs change.
#
#   make PYTHON=python3.12 test               another interpreter
#   make TORCH_ARGS="--index-url URL" test    another source of the torch wheel (CPU-only)

PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
PACKAGES_VENV ?= .venv-packages
TORCH_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
OLDEST_BIN := $(OLDEST_VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
OLDEST_TORCH := $(shell sed -nE 's/^ *"torch>=([0-9.]+)",$$/torch==\1/p' pyproject.toml)
THOROUGH := not slow and not gpu and not conformance
QUICK := $(THOROUGH) and not thorough
ZOO := $(shell grep -E '^(pillow|timm|torchvision)==' constraints.txt)

# Tests start Python hundreds of times: each would compile autoamp anew.
unexport PYTHONDONTWRITEBYTECODE

# Sets of strings have the same order in every run of the tests.
export PYTHONHASHSEED := 0

.DEFAULT_GOAL := help
.PHONY: help setup zoo demo test test-thorough test-all test-oldest \
  test-cuda-fake conformance packages fuzz mutants \
  lint types bench gpu docs check-wheel clean
.DELETE_ON_ERROR:

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / - /'

# Torch is installed first and by its exact version, so that no resolver chooses another.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "autoamp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_ARGS) \
	  --constraint constraints.txt '$(TORCH)'
	@touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt hatchling
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --constraint constraints.txt --editable '.[tests,lint]'
	@touch $@

# In a folder of their own (tests/zoo/site.py): what is beside torch in the environment
# would import this torchvision, whose operators need CUDA.
$(VENV)/.zoo: $(VENV)/.ready constraints.txt
	rm -rf $(VENV)/zoo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --constraint constraints.txt --target $(VENV)/zoo $(ZOO)
	@touch $@

setup: $(VENV)/.ready ## Make .venv with everything in it

zoo: $(VENV)/.zoo ## Fetch timm and torchvision, for the conformance tests alone

demo: $(VENV)/.ready ## One minute beside torch.autocast: time, memory, error, an overflow, lost sums
	$(BIN)/python examples/demo.py

test: lint types ## Lint, types and the quick tests
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)"

test-thorough: $(VENV)/.ready ## The tests that take longer than the quick, and are not slow
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "thorough and $(THOROUGH)"

test-all: lint types $(VENV)/.zoo ## The quick, the thorough and the slow tests, and the GPU tests where there is a GPU
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The oldest torch that pyproject.toml allows, beside the versions of constraints.txt less
# setuptools, which an older torch limits.  From PyPI, where it is the CUDA build (5 GB on
# the disk): that runs on CPUs too.
$(OLDEST_VENV)/.torch: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	sed -e 's/^torch==.*/$(OLDEST_TORCH)/' -e '/^setuptools==/d' constraints.txt \
	  >$(OLDEST_VENV)/constraints.txt
	$(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(OLDEST_VENV)/constraints.txt '$(OLDEST_TORCH)'
	@touch $@

$(OLDEST_VENV)/.ready: $(OLDEST_VENV)/.torch
	$(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(OLDEST_VENV)/constraints.txt hatchling
	$(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --constraint $(OLDEST_VENV)/constraints.txt --editable '.[tests]'
	@touch $@

test-oldest: $(OLDEST_VENV)/.ready ## The quick tests under the oldest torch that is allowed
	$(OLDEST_BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)"

test-cuda-fake: $(OLDEST_VENV)/.ready ## What the pass makes of every model on GPUs; no GPU is needed
	$(OLDEST_BIN)/python -m pytest $(PYTEST_ARGS) tests/whole/test_cuda_fake.py

conformance: $(VENV)/.ready $(VENV)/.zoo ## Every op, every peer's own cases, random programs, a zoo of models, faults
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/conformance \
	  --trust-table benchmarks/results/trust

# Beside the other environments: these packages import each other where they find one.
$(PACKAGES_VENV)/.ready: tests/packages/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PACKAGES_VENV)
	$(PACKAGES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(TORCH_ARGS) --constraint constraints.txt '$(TORCH)'
	$(PACKAGES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --requirement tests/packages/requirements.txt '$(TORCH)'
	$(PACKAGES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps --editable .
	@touch $@

packages: $(VENV)/.ready $(PACKAGES_VENV)/.ready ## Ten packages' own training loops, beside fp32 and torch.autocast
	PACKAGES_PYTHON=$(CURDIR)/$(PACKAGES_VENV)/bin/python \
	  $(BIN)/python -m pytest $(PYTEST_ARGS) tests/packages/loops.py

SECONDS ?= 600

fuzz: $(VENV)/.ready ## New examples for all property tests and state machines, for SECONDS=600
	$(BIN)/python -m tests.fuzz $(SECONDS)

mutants: $(VENV)/.ready ## Which faults planted in the passes and in training the tests find (hours)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --constraint constraints.txt --editable '.[mutation]'
	$(BIN)/python -m benchmarks.mutation

lint: $(VENV)/.ready ## ruff
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.ready ## mypy --strict on autoamp/
	$(BIN)/python -m mypy --strict

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## Build the documentation site; a warning or a dead link is an error
	$(BIN)/python -m website

# Into an environment of its own and outside of .venv: what autoamp requires, nothing else.
check-wheel: ## Install the wheel into an empty environment, and try it there
	rm -rf build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(TORCH_ARGS) '$(TORCH)'
	build/wheel/venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  build/wheel/*.whl
	build/wheel/venv/bin/python -P tests/repository/installed.py

bench: $(VENV)/.ready ## Time fp32, torch.autocast and autoamp side by side
	$(BIN)/python -m benchmarks.training

# With the torch that is there, since a machine with a GPU may have no network: `.venv` is
# used where it exists.  `make gpu PIECES="tests training"` runs some pieces only.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PIECES ?=
GPU_ARGS ?=

gpu: ## The tests and tables that need a GPU, in pieces of ten minutes that go on where they were
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS) $(PIECES)

clean: ## Remove .venv and every cache
	rm -rf $(VENV) $(OLDEST_VENV) $(PACKAGES_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
