# Echelon's commands. Every target makes .venv by itself, from the exact versions in
# requirements.lock; nothing has to be activated or installed first.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
CODE := src tests bench reliability scripts examples
# Options for single commands: make test PYTEST_ARGS="-k redis -x"
PYTEST_ARGS ?=
DEMO_ARGS ?=
# Where `make live` has its bars from: store, kafka
FEED ?= store
LIVE_ARGS ?=
STUDY_ARGS ?=
STUDY_DIR ?= runs/study
BENCH ?=
# What is fuzzed and for how long: make fuzz FUZZ_ARGS="--cases 100000 --seed 7"
FUZZ_ARGS ?= --minutes 5
KILL_ARGS ?=
CHAOS_ARGS ?=
# Benchmarks compare on one core, and say so; override to see what more of them bring.
BENCH_THREADS ?= 1
# Tests run in two processes of one thread each; TEST_WORKERS=0 runs them in one, for a debugger.
# Those with services follow one by one, in at most 15 minutes, and have a summary of their own.
TEST_WORKERS ?= 2
threads = POLARS_MAX_THREADS=$(1) OMP_NUM_THREADS=$(1) OPENBLAS_NUM_THREADS=$(1) \
	MKL_NUM_THREADS=$(1) NUMBA_NUM_THREADS=$(1)

.PHONY: help venv demo live test check bench fuzz kill chaos study docs reference vendors format lock clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

venv: ## create or update .venv (every other target does it too)
	@scripts/install.sh

demo: venv ## agents, a hierarchy, order execution: no network, no services
	@$(BIN)/python -m echelon demo --config configs/demo.yaml \
		--hierarchy configs/demo-hierarchy.yaml \
		--execution configs/demo-execution.yaml $(DEMO_ARGS)

live: venv ## live trading on paper: run, kill -9, recover, replay, report (FEED=kafka: by a broker)
	@$(BIN)/python -m scripts.live_demo --feed $(FEED) $(LIVE_ARGS)

test: venv ## all tests; as root, installs the services they need (PYTEST_ARGS=… selects)
	@scripts/packages.sh
	@$(call threads,1) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile \
		--services none $(PYTEST_ARGS) || { code=$$?; [ $$code -eq 5 ] || exit $$code; }
	@$(call threads,1) $(BIN)/python -m pytest --services only --session-timeout 2400 \
		$(PYTEST_ARGS) || { code=$$?; [ $$code -eq 5 ] || exit $$code; }

check: venv ## formatting, lint, types and layers
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/mypy --explicit-package-bases scripts
	@$(BIN)/mypy reliability
	@$(BIN)/lint-imports --no-logo

bench: venv ## print the benchmark tables (BENCH=name selects one)
	@$(call threads,$(BENCH_THREADS)) $(BIN)/python -m bench $(BENCH)

fuzz: venv ## damaged inputs by the thousand; counts, and every distinct failure, in runs/fuzz
	@$(call threads,1) $(BIN)/python -m reliability fuzz $(FUZZ_ARGS)

kill: venv ## kill every command at every moment, resume, compare bits (KILL_ARGS="--kills 300 --seed 1")
	@$(call threads,1) $(BIN)/python -m reliability kill $(KILL_ARGS)

chaos: venv ## kill live engines, cut their logs, let venues fail (CHAOS_ARGS="--only kills --seed 2")
	@$(call threads,1) $(BIN)/python -m reliability chaos $(CHAOS_ARGS)

study: venv ## what each part of the hierarchy brings, into proofs/; takes hours, goes on after Ctrl-C
	@$(call threads,1) $(BIN)/python -m echelon study --config configs/hierarchical-tuned.yaml \
		--output-dir $(STUDY_DIR) $(STUDY_ARGS)
	@cp $(STUDY_DIR)/study.json $(STUDY_DIR)/study.md proofs/

docs: venv ## build the documentation into site/, links checked
	@$(BIN)/python scripts/gen_reference.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs: site/index.html"

reference: venv ## regenerate the reference pages from the code
	@$(BIN)/python scripts/gen_reference.py

vendors: venv ## also install the data vendors: yfinance, akshare, tushare
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint requirements.lock --requirement requirements-vendors.lock

format: venv ## format the code and mend what ruff can
	@$(BIN)/ruff check --fix --quiet $(CODE) || true
	@$(BIN)/ruff format $(CODE)

lock: ## make requirements.lock anew from pyproject.toml
	@scripts/lock.sh

clean: ## remove caches and what was built; keeps .venv, data and runs
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache src/*.egg-info
	@find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	@rm -rf .venv
