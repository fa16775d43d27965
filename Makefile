# make site    the pages, built from verified code and served on this machine
# make test    the tests, in minutes; make test-all runs all of them
# make help    the other targets and the variables
#
# Every target makes .venv on its first run. Nothing outside this folder is changed.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help env dev site build serve test test-all test-rest test-slow browser measure-site verify verify-gpu record mutants check lint format types wheel clean

# The interpreter that makes .venv: PYTHON=..., else the first that is new enough.
TRY_PYTHONS = python3 python3.13 python3.12 python3.11 python3.14 python
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
ifeq ($(PYTHON),)
  KEEP = --keep-python
  FOUND := $(firstword $(foreach p,$(TRY_PYTHONS),$(shell \
             $(p) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $(p))))
endif
RUN_PYTHON = $(or $(PYTHON),$(FOUND))

VENV = .venv
PY = $(VENV)/bin/python
SETUP = $(RUN_PYTHON) setup_env.py --venv $(VENV) $(KEEP) \
          $(if $(TORCH),--torch $(TORCH)) \
          $(if $(TORCH_ARGS),--torch-args="$(TORCH_ARGS)")

# Test processes: half the cores, because a test may start 8 ranks itself, and two more,
# because ranks also wait; 8 at most.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS = $(shell n=$$(( $(CORES) / 2 + 2 )); [ $$n -gt 8 ] && n=8; echo $$n)
PYTEST = $(PY) -m pytest
PORT = 8000

help:
	@echo 'make site      build the pages from verified code and serve them here'
	@echo 'make test      every symbol on real ranks, and what is cheap (ARGS="..." goes to pytest)'
	@echo
	@echo 'make build     build the pages into build/site, do not serve'
	@echo 'make serve     serve what is built'
	@echo 'make browser   open the built pages in headless Chromium and check them'
	@echo 'make measure-site  lengths of pages, the search, texts that overlap, Lighthouse'
	@echo 'make verify    run the tests that feed the verification record, if stale'
	@echo 'make test-all  all sizes, layouts and dtypes: what pages count'
	@echo 'make test-rest what make test left out: the two together are test-all'
	@echo 'make test-slow the tests in their long forms, with newly drawn inputs'
	@echo 'make verify-gpu  run all lectures under NCCL on the GPUs here, record it'
	@echo 'make record    keep what tests and build gave, to be committed with the code'
	@echo 'make mutants   break FILES in small places: does a test notice?'
	@echo 'make check     what CI checks: lint, types, tests, pages'
	@echo 'make lint types format    ruff and mypy'
	@echo 'make dev       also install linters, type checker and git hooks'
	@echo 'make wheel     build the packages into dist/'
	@echo 'make clean     remove what was built (make clean VENV_TOO=1: .venv also)'
	@echo
	@echo 'PYTHON=python3.12       the Python that makes .venv (3.11 or newer)'
	@echo 'TORCH=2.12.1            another torch than the pinned one; it stays'
	@echo 'TORCH_ARGS="..."        more arguments for pip install torch'
	@echo 'ARGS="-k ring -x"       more arguments for pytest'
	@echo 'FILES="src/xtrain/plan/*.py"  what make mutants breaks'
	@echo 'WORKERS=$(WORKERS)               test processes side by side'
	@echo 'PORT=$(PORT)               where make site serves'

env: python-is-there
	@$(SETUP)

dev: python-is-there
	@$(SETUP) --dev
	@if [ -d .git ] && [ -z "$$CI" ] && [ ! -e .git/hooks/pre-commit ]; then \
	  $(PY) -m pre_commit install || \
	  echo 'No git hooks, then; make lint types checks the same.'; \
	fi

.PHONY: python-is-there
python-is-there:
	@if [ -z "$(RUN_PYTHON)" ]; then \
	  echo 'xtrain needs Python 3.11 or newer, and found none as:'; \
	  echo '  $(TRY_PYTHONS)'; \
	  echo 'Install one, or name it: make test PYTHON=/path/to/python3.12'; \
	  exit 1; \
	elif ! command -v $(RUN_PYTHON) >/dev/null 2>&1; then \
	  echo 'xtrain: PYTHON=$(RUN_PYTHON) is not a command on this machine'; \
	  exit 1; \
	fi

site: port build
	@$(PY) -m xtrain_docs.serve --port $(PORT)

# Asked first: the build takes minutes, and would be for nothing.
.PHONY: port
port: env
	@$(PY) -m xtrain_docs.serve --port $(PORT) --check

# Nothing is verified or built when nothing has changed since the last build.
build: env
	@$(PY) -m xtrain_docs.inputs || { { $(VERIFY); } && $(PY) -m xtrain_docs.build; }

serve: env
	@$(PY) -m xtrain_docs.serve --port $(PORT)

# tests/site looks at the built pages, so it has a target of its own.
TESTS = $(PYTEST) -n $(WORKERS) $(if $(findstring tests/site,$(ARGS)),,--ignore=tests/site)

# tests/tiers.py chooses; tests that ARGS names run whole.
test: env
	$(TESTS) -p tests.tiers $(ARGS)

test-all: env
	$(TESTS) $(ARGS)

# What `make test` leaves to `make test-all`.
test-rest: env
	$(TESTS) -p tests.tiers --rest $(ARGS)

# What takes long, too, and inputs that no other run has drawn: the scheduled workflow.
test-slow: env
	$(TESTS) -m "slow or not slow" --hypothesis-profile=explore $(ARGS)

browser: build
	$(PYTEST) -n 2 tests/site $(ARGS)

# Screens, words, answers of the search, texts that overlap; Lighthouse, if npx has it.
measure-site: build
	$(PY) -m tests.site.measure $(ARGS)

# The pages show what the tests have proved. Are all of them proved as they stand?
# If not, run the tests of what is not that carry @pytest.mark.verifies.
VERIFY = $(PY) -m xtrain_docs.stale || \
	  $(PYTEST) -n $(WORKERS) -m verifies $$($(PY) -m xtrain_docs.stale --files)

verify: env
	@$(VERIFY)

# Everything that can run under NCCL here, and a record of it to send.
verify-gpu: env
	@$(PY) -m xtrain.testing.verify_gpu $(ARGS)

# What tests and build gave here, to be committed with the code it is of.
record: env
	@files=$$($(PY) -m xtrain_docs.stale --all); \
	  [ -z "$$files" ] || $(PYTEST) -n $(WORKERS) -m verifies $$files
	@$(PY) -m xtrain_docs.build
	@$(PY) -m xtrain_docs.record

# One change at a time, in a copy of this folder; a survivor is for a person to judge.
FILES = src/xtrain/plan/*.py
mutants: env
	$(PY) -m tests.mutate --files $(FILES) $(ARGS)

check: dev lint types test-all
	@$(PY) -m xtrain_docs.build

lint: dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check

format: dev
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

types: dev
	$(PY) -m mypy

wheel: dev
	$(PY) -m build --no-isolation

clean:
	rm -rf build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@if [ -n "$(VENV_TOO)" ]; then rm -rf $(VENV); echo 'removed $(VENV)'; fi
