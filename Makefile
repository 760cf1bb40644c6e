# Needs: Python >= 3.11 and make. Every target makes its own .venv once and installs into it.
#
#   make run        the main job: train stages 0-3 on simulated ranks, compare, draw digits
#   make lab        open the notebooks in JupyterLab
#   make test       all tests and all notebooks
#   make check      style and import contracts only (seconds)
#   make book       the course, the pages and the reference as a web site to read offline
#   make figures    write figures/
#   make notebooks  execute the notebooks and write them in normal form
#   make bench      time everything beside NumPy: a table with what has to be reached (7 minutes)
#   make bench-peers  the same beside PyTorch and JAX too, in an environment of its own; it writes
#                   the record that is kept, benchmarks/results/ and figures/bench.*
#
# Another interpreter: make PYTHON=python3.13 run

PYTHON ?= python3
VENV := .venv
# Processes that share the tests, a file each at a time: make WORKERS=1 test runs them in order.
WORKERS ?= auto
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
EXTRAS := lab,dev,book
else
BIN := $(VENV)/bin
# The tests start real processes; there is no MPICH for Windows to install.
EXTRAS := lab,dev,book,mpi
endif
PY := $(BIN)/python
PEERS := .venv-peers
PEERS_PY := $(subst $(VENV)/,$(PEERS)/,$(PY))
# Relative, so that a clone whose path has spaces works. Newer than what it was made from.
READY := $(VENV)/.ready
# What runs as plain Python too, see `test`.
KERNEL_TESTS := $(wildcard $(addprefix tests/test_,$(addsuffix .py, \
    checks flat kernels norm partition precision rank_axis update)))

.PHONY: help run lab test test-without-jit test-long test-browser book check figures notebooks clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python >= 3.11 is needed, this is ' + sys.version.split()[0] + '; try: make PYTHON=python3.12')"
	@echo "Setting up $(VENV) (about a minute, once)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	$(PY) -m compileall -q zero_nb  # pip does not, and tests start some hundred Pythons
	$(PY) -c "open('$(READY)', 'w').close()"

run: $(READY)
	$(BIN)/zero-nb run

lab: $(READY)
	$(BIN)/zero-nb lab

# The kernels once as plain Python (what a debugger and coverage see) comes first, so that pytest's
# summary of everything is what one reads last.
test-without-jit: export NUMBA_DISABLE_JIT = 1
test-without-jit: $(READY)
	$(if $(strip $(KERNEL_TESTS)),$(PY) -m pytest -q $(KERNEL_TESTS),@echo no kernel tests found)

test: test-without-jit
	$(PY) -m pytest -q -n $(WORKERS) --dist loadfile

test-long: $(READY)
	$(PY) -m pytest -q -m "not browser" --hypothesis-profile=nightly tests

# EDITIONS=learner leaves the solved edition of the notebooks out.
test-browser: $(READY)
	$(PY) -m pytest -q -m browser -n $(WORKERS) tests/browser

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(PY) tools/nbtools.py check

book: $(READY)
	$(PY) tools/booktools.py build

figures: $(READY)
	$(BIN)/zero-nb figures --out figures

notebooks: $(READY)
	$(PY) tools/nbtools.py run

bench: $(READY)
	$(PY) benchmarks/run.py --out build/bench --figures build/bench

# The package itself is in there too, so that both sides run in one process where they can.
$(PEERS)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(PEERS): PyTorch and JAX are large"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e ".[lab,mpi,dev]" torch==2.13.0 jax optax ml_dtypes
	$(PEERS_PY) -c "open('$(PEERS)/.ready', 'w').close()"

bench-peers: $(PEERS)/.ready
	$(PEERS_PY) benchmarks/run.py

clean:
	rm -rf $(VENV) $(PEERS) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
