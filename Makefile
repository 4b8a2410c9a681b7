# make demo | test | test-unit | test-laws | test-services | test-heavy | test-horovod | test-k8s | test-k8s-installation | bench | bench-k8s | compare | compare-live | compare-search | docs | lock | clean: each does its own set-up, from Python 3.11 alone.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: setup heavy-env check test test-unit test-laws test-services test-heavy test-horovod horovod-env horovod-env-keras2 test-k8s test-k8s-installation demo bench bench-k8s compare compare-live compare-search docs lock clean

PYTHON ?= python3.11
BIN := .venv/bin
UV := $(BIN)/uv
SLOTS ?= 2
UP ?=
PYTEST ?=
COMPARE ?=
# Marks of the tests that test-services runs.
SERVICES ?= not heavy
# Empty: another run has the tests over many worlds.
LAWS ?= test-laws

# Without bytecode every process would compile every package anew: twice the start of TensorFlow.
unexport PYTHONDONTWRITEBYTECODE
unexport VIRTUAL_ENV
export UV_LINK_MODE := copy
export PIP_DISABLE_PIP_VERSION_CHECK := 1

setup: .venv/.ready .venvs/keras-jax/.ready

# What only heavy tests and measurements need besides.
heavy-env: .venvs/keras2/.ready .venvs/fab/.ready .venvs/workers/.ready

# The one tool that pip installs is uv itself, by the hash that the lock has for it.
.venv/.ready: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	awk '/^[a-z]/ {wanted = /^uv==/} wanted' requirements.lock > .venv/uv.lock
	test -x $(UV) || $(BIN)/python -m pip install --quiet --no-deps --require-hashes -r .venv/uv.lock
	$(UV) pip install --python $(BIN)/python --require-hashes --compile-bytecode -r requirements.lock
	$(UV) pip install --python $(BIN)/python --no-deps --no-build-isolation --no-index -e .
	touch $@

# Keras 2, and Keras 3 on JAX, for the tests of scripts that bring an interpreter of their own; MkDocs.
# Bytecode is left to the first import: tests import a part of these packages.
.venvs/%/.ready: requirements-%.lock .venv/.ready
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv .venvs/$*
	$(UV) pip install --python .venvs/$*/bin/python --require-hashes -r $<
	touch $@

# On top of the packages of .venv: Airflow's FAB auth manager, and its executors for workers on other
# machines, which nobody but tests needs; Optuna and Syne Tune, which nobody but a comparison needs.
.venvs/fab/.ready .venvs/workers/.ready .venvs/bench/.ready: .venvs/%/.ready: requirements-%.lock .venv/.ready
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv --without-pip .venvs/$*
	$(UV) pip install --python .venvs/$*/bin/python --require-hashes --no-deps -r $<
	$(BIN)/python -c 'import os, sysconfig; print(sysconfig.get_path("purelib"), os.getcwd(), sep="\n")' \
	  > .venvs/$*/lib/python3.11/site-packages/hermes.pth
	touch $@

# Horovod's wheel is compiled once (4 CPU minutes; g++) and kept by the version of TensorFlow: its
# name does not tell it, so pip's own cache would mix them up. HOROVOD_WHEELS may be kept elsewhere.
HOROVOD := .venvs/horovod
HOROVOD_LOCK := requirements-horovod.lock
HOROVOD_WHEELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hermes-ops/horovod
WHEELS = $(HOROVOD_WHEELS)/tensorflow-$(shell sed -n 's/^tensorflow-cpu==\([^ ]*\).*/\1/p' $(HOROVOD_LOCK))

horovod-env: $(HOROVOD)/.ready

# The same with Keras 2: TensorFlow 2.15.
horovod-env-keras2:
	$(MAKE) horovod-env HOROVOD=.venvs/horovod-keras2 HOROVOD_LOCK=requirements-horovod-keras2.lock

$(HOROVOD)/.ready: $(HOROVOD_LOCK) .venv/.ready
	test -x $(HOROVOD)/bin/python || $(PYTHON) -m venv $(HOROVOD)
	awk '/^[a-z]/ {wanted = !/^horovod==/} wanted' $< > $(HOROVOD)/packages.lock
	awk '/^[a-z]/ {wanted = /^horovod==/} wanted' $< > $(HOROVOD)/horovod.lock
	$(UV) pip install --python $(HOROVOD)/bin/python --no-deps --require-hashes \
	  -r $(HOROVOD)/packages.lock
	compgen -G "$(WHEELS)/horovod-*.whl" >/dev/null || PATH="$$PWD/$(HOROVOD)/bin:$$PATH" \
	  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
	  HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 nice $(HOROVOD)/bin/python -m pip wheel --quiet --no-deps \
	  --require-hashes --no-build-isolation --no-cache-dir --wheel-dir "$(WHEELS)" \
	  -r $(HOROVOD)/horovod.lock
	$(UV) pip install --python $(HOROVOD)/bin/python --no-deps --no-index --no-cache \
	  "$(WHEELS)"/horovod-*.whl
	touch $@

check: .venv/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two parts run side by side: unit tests compute with what services leave of the processors (nice),
# for which the others wait. A part of the tests alone (PYTEST) has no floor for what it covers of
# hermes_ops (pyproject.toml).
test: setup check
ifeq ($(strip $(PYTEST)),)
	$(MAKE) --jobs 2 test-unit test-services $(LAWS)
else
	$(BIN)/pytest -m "not heavy and not k8s and not horovod" $(PYTEST)
endif

# Lines are counted for all tests but those over many worlds, which would take more than twice as
# long.
test-unit: setup
	{ nice $(BIN)/coverage run $(BIN)/pytest --timeout 900 tests/unit \
	    -m "not hypothesis and not law and not heavy and not k8s" && \
	  $(BIN)/coverage report --format=total; } 2>&1 | sed -u 's/^/unit      /'

test-laws: setup
	nice $(BIN)/pytest --timeout 900 tests/unit \
	  -m "(hypothesis or law) and not heavy and not k8s" 2>&1 | sed -u 's/^/laws      /'

test-services: setup
	$(BIN)/pytest -m "$(SERVICES) and not k8s and not horovod" --ignore tests/unit --durations=10 2>&1 | \
	  sed -u 's/^/services  /'

test-heavy: setup heavy-env
	$(BIN)/pytest -m heavy --timeout 1800 $(PYTEST)

# Trials with one process per GPU, by Horovod on CPUs.
test-horovod: .venv/.ready horovod-env
	HERMES_TEST_HOROVOD=required $(BIN)/pytest -m horovod --timeout 900 $(PYTEST)

# KUBECONFIG names a cluster; without it the command in HERMES_TEST_CLUSTER starts one.
test-k8s: setup
	$(BIN)/pytest -m "k8s and not installation" --timeout 1800 $(PYTEST)

# Builds the images of the servers too, and waits for nodes that stay away: half an hour.
test-k8s-installation: setup
	$(BIN)/pytest -m installation --timeout 3600 $(PYTEST)

demo: .venv/.ready
	SLOTS=$(SLOTS) UP="$(UP)" examples/demo.sh

bench: setup heavy-env horovod-env
	$(BIN)/python -m bench

# As for test-k8s: the cluster of KUBECONFIG, or one that HERMES_TEST_CLUSTER starts.
bench-k8s: setup heavy-env
	$(BIN)/python -m bench pod_switch pod_driver

# Every policy on public traces and learning curves: writes docs/comparison.md; an hour on four cores.
compare: .venv/.ready
	$(BIN)/python -m bench.comparison $(COMPARE)

# Real sweeps under five policies beside their replays, then jobs that change their size beside
# their simulation; at most 60 minutes.
compare-live: setup heavy-env
	$(BIN)/python -m bench compare_live compare_live_elastic

# Optuna's and Syne Tune's searches against ours, on recorded curves and one virtual clock.
compare-search: .venvs/bench/.ready
	.venvs/bench/bin/python -m bench.comparison search

# The documentation as a site: site/VERSION/index.html. A warning is an error.
docs: .venvs/docs/.ready
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --quiet --strict \
	  --site-dir site/$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# Every version and hash, no index address: whoever installs chooses where from.
lock: .venv/.ready
	$(UV) pip compile pyproject.toml --extra dev --generate-hashes --no-emit-index-url --no-header \
	  --no-annotate --python-version 3.11 --upgrade --quiet --output-file requirements.lock
	$(UV) pip compile --group docs --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  --python-version 3.11 --upgrade --quiet --output-file requirements-docs.lock
	$(UV) pip compile --group horovod --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  --no-emit-package tensorflow --python-version 3.11 --upgrade --quiet \
	  --output-file requirements-horovod.lock
	$(UV) pip compile --group horovod-keras2 --generate-hashes --no-emit-index-url --no-header \
	  --no-annotate --python-version 3.11 --upgrade --quiet \
	  --output-file requirements-horovod-keras2.lock

clean:
	if [ -x $(BIN)/hermes ]; then $(BIN)/hermes down --home .hermes; fi
	rm -rf .venv .venvs .hermes .coverage dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
