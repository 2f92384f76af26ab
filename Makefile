# Every job, from a bare checkout with Python, pip and make. `make` lists them.

PYTHON ?= python3
VENV ?= .venv
RANKS ?= 4
ARGS ?=
# Which GPU packages to install; asked of the driver only by jobs that need it, once.
EXTRAS ?= $(eval EXTRAS := $$(shell $$(PYTHON) tools/choose_extra.py))$(EXTRAS)

INSTALL = $(PYTHON) tools/install.py
ifdef NO_VENV
PY = $(PYTHON)
BIN = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
INSTALL += --no-venv
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
BIN = $(abspath $(VENV))/bin
PY = $(BIN)/python
INSTALL += --venv $(VENV)
ifneq ($(filter-out default file undefined,$(origin PYTHON)),)
INSTALL += --same-python
endif
endif
# With what is there already: containers, machines without a network.
ifdef NO_INSTALL
INSTALL = : not installing,
endif

# A test run beside cuda12 must not bring the compiler and headers of CUDA 13.
CUDA12 = $(findstring cuda12,$(EXTRAS))
TEST_EXTRAS = $(EXTRAS),mpi,$(if $(CUDA12),test-cuda12,test)
JIT_EXTRAS = $(if $(CUDA12),cuda12,jit)
# pyproject.toml leaves the GPU's tests out.
TEST_MARKS = $(if $(findstring cuda,$(EXTRAS)),-m "gpu or not gpu")
# Not for all recipes: the interpreter that makes the environment is found on the caller's PATH.
TOOLS = export PATH="$(BIN):$$PATH"
MPI_ENV = $(TOOLS) RANKS=$(RANKS) && . tools/mpi_env.sh
NO_MPIRUN = { echo 'make: no mpirun on PATH; the extra mpi brings one' >&2; exit 2; }
KERNELS = $(wildcard cuda_src/*.cu cuda_src/*.cuh)

.PHONY: help bench test check check-ruff check-format check-types check-kernels compile-all
.PHONY: doctor format clean dev-tools

help: ## list the jobs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' Makefile
	@echo 'Variables: PYTHON=python3.12  EXTRAS=cuda13|cuda12|mpi  VENV=.venv  RANKS=4  ARGS="..."'
	@echo '  NO_VENV=1: use the current interpreter; NO_INSTALL=1: use what is installed'

bench: ## install, then run the benchmark on RANKS ranks (ARGS="--quick", ...)
	@$(INSTALL) --extras $(EXTRAS),mpi
	@$(MPI_ENV) && { command -v mpirun >/dev/null || $(NO_MPIRUN); } && \
		mpirun -n $(RANKS) $(PY) -m tileflow.bench $(ARGS)

test: ## install, then run every test that this machine can run (ARGS="-k plan", ...)
	@$(INSTALL) --extras $(TEST_EXTRAS)
	@$(TOOLS) && . tools/mpi_env.sh && $(PY) -m pytest $(TEST_MARKS) $(ARGS)

doctor: ## say what this machine can run, and why not more
	@$(INSTALL) --extras $(EXTRAS),mpi
	@$(PY) -m tileflow.doctor

check: check-ruff check-format check-types check-kernels ## lint, format and type checks

check-ruff: dev-tools ## lint
	$(PY) -m ruff check .

check-format: dev-tools ## Python's format
	$(PY) -m ruff format --check .

check-types: dev-tools ## types of tileflow/
	$(PY) -m mypy tileflow

check-kernels: dev-tools ## the kernels' format
	@echo "clang-format --dry-run -Werror cuda_src"
	@$(TOOLS) && clang-format --dry-run -Werror $(KERNELS)

format: dev-tools ## rewrite Python and kernels in the format that `check` wants
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix-only .
	@$(TOOLS) && clang-format -i $(KERNELS)

compile-all: ## compile all kernel variants, no GPU needed (ARGS="--named --jobs 2", ...)
	@$(INSTALL) --extras $(JIT_EXTRAS)
	@$(PY) -m tools.compile_all $(ARGS)

clean: ## remove what builds and tools left behind (not the environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

dev-tools:
	@$(INSTALL) --extras dev
