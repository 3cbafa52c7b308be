# A newcomer needs two commands: `make demo` and `make test`. Each makes what it
# needs: the environment in .venv and a small model in models/.
#
#   make PYTHON=python3.12 ...        another interpreter (3.11 or newer)
#   make EXTRAS=cuda13,test ...       another MLX backend than the platform's usual
#   make test ARGS='-k radix'         arguments for pytest, the demo or the benchmark

PYTHON ?= python3
MODEL = models/smollm2-fp32
EXTRAS = $(if $(filter Darwin,$(shell uname -s)),test,cpu$(comma)test)
ARGS =

comma := ,
BIN := .venv/bin
STAMP := .venv/.installed
CODE := $(wildcard promptstore migrations tests tools)

# MLX's CPU wheel for Linux bundles the reference BLAS. OpenBLAS, where installed,
# makes float32 prefill about 20 times faster; without it all works, slower.
BLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))
RUN := env PROMPTSTORE_TEST_MODEL=$(abspath $(MODEL))
ifneq ($(BLAS),)
RUN += LD_PRELOAD=$(BLAS)$${LD_PRELOAD:+:$$LD_PRELOAD}
endif

.PHONY: help venv model demo test lint fmt wheel-test bench crash stress mutate soak clean

help:
	@echo "make demo        the main job on a real model (about three minutes)"
	@echo "make test        the tests"
	@echo "make lint        ruff and mypy"
	@echo "make fmt         format the code"
	@echo "make wheel-test  the tests against the built wheel"
	@echo "make bench       the benchmarks"
	@echo "make crash       1,000 kills at random moments (about eight minutes)"
	@echo "make mutate      10,000 damaged stores (about fifteen minutes)"
	@echo "make soak        10,000 requests to a server (about ten minutes)"
	@echo "make stress      eight processes on one root for a minute"
	@echo "make clean       remove all that was made, but for the model"

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "installing into .venv (a minute or two)"
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

model: venv
	@$(BIN)/python tools/make_smollm2.py $(MODEL)

demo: model
ifeq ($(BLAS)$(filter Darwin,$(shell uname -s)),)
	@echo "OpenBLAS was not found; faster with: apt-get install libopenblas0-pthread"
endif
	@$(RUN) $(BIN)/python tools/demo.py --model $(MODEL) $(ARGS)

test: model
	$(RUN) $(BIN)/pytest -n auto $(ARGS)

lint: venv
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fmt: venv
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Proves that nothing lives only in the checkout: sdist, wheel from the sdist, fresh
# environment, and the tests in a folder without the package's sources.
wheel-test: model
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install -qq --disable-pip-version-check \
	  "$$(echo dist/*.whl)[$(EXTRAS)]"
	dir=$$(mktemp -d) && trap "rm -rf '$$dir'" EXIT && \
	  cp -R tests tools pyproject.toml "$$dir" && cd "$$dir" && unset PYTHONPATH && \
	  $(RUN) $(CURDIR)/.venv-wheel/bin/pytest -n auto $(ARGS)

# ARGS='--seed 7' gives the choices of an earlier run again.
crash: venv
	$(RUN) $(BIN)/python tools/crash_loop.py $(ARGS)

mutate: venv
	$(RUN) $(BIN)/python tools/mutate.py $(ARGS)

stress: venv
	$(RUN) $(BIN)/python tools/stress.py $(ARGS)

soak: venv
	$(RUN) $(BIN)/python tools/soak.py $(ARGS)

bench: model
	$(RUN) $(BIN)/python tools/bench_store.py $(ARGS)

clean:
	rm -rf .venv .venv-wheel build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
