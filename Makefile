# Everything below runs in .venv, which `make venv` makes and keeps up to date.
BIN := .venv/bin
PYTHON_SOURCES := gpupoold cli state scripts tests $(if $(wildcard tui/gpupool_tui/*.py),tui) \
	$(if $(wildcard examples/*/*.py),examples) $(if $(wildcard benchmarks/*.py),benchmarks)

# Where `make install` puts things; DESTDIR is a staging folder in front of it.
export PREFIX SYSCONFDIR DESTDIR VENV DIST

# Without compiled modules each process that a test starts compiles the project.
export PYTHONDONTWRITEBYTECODE :=

# Processes that run tests: one more than CI has cores, because each waits for daemons for a sixth of
# the time. And the part of the slow tests that `make test-slow` runs: another one with each commit.
JOBS ?= 3
SHARDS := 6
SHARD ?= $(shell echo $$(($$(git rev-list --count HEAD) % $(SHARDS) + 1)))/$(SHARDS)
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv install uninstall wheel deb demo pictures test test-slow test-all lint format types imports prose reference check bench-switch bench-overhead bench-memory bench-loads bench-pinning bench-family bench-recovery bench-groups bench-conversations bench-batch bench-fleet bench-interleave bench-sim bench-api bench-step bench-hostile models-table soak fuzz judge gpu-bundle clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv (PYTHON=..., GPUPOOL_DEVICE=cpu|cuda)
	@scripts/make_venv.sh

install: ## as a system service, from what `make venv` made (PREFIX=/usr/local, DESTDIR=)
	@scripts/install.sh install

uninstall: ## what install put there; configuration that was changed, models and history stay
	@scripts/install.sh uninstall

wheel: venv ## dist/gpupool-VERSION-py3-none-any.whl, without the engine (DIST=dist)
	@scripts/make_wheel.sh

deb: ## dist/gpupool_VERSION_ARCH.deb, from what `make venv PYTHON=/usr/bin/python3` made
	@scripts/make_deb.sh

demo: venv ## four models on one emulated GPU; then one of two dies: every answer checked
	@$(BIN)/python -m examples.demo

pictures: venv ## docs/demo.svg and docs/top.svg anew, from real runs (on an idle machine)
	@$(BIN)/python -m examples.demo --svg docs/demo.svg | cat
	@$(BIN)/python -m scripts.picture_of_top docs/top.svg

test: venv ## the test suite without its slow tables (ARGS='-k name' for some of it, JOBS=1)
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: venv ## one of six parts of the slow tests, by the commit or SHARD=2/6
	@$(PYTEST) --shard $(SHARD) $(ARGS)

test-all: venv ## the whole test suite
	@$(PYTEST) $(ARGS)

lint: venv ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: venv ## ruff: mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: venv ## mypy, strict
	@$(BIN)/mypy $(PYTHON_SOURCES)

imports: venv ## import-linter: who may import whom
	@$(BIN)/lint-imports

prose: venv ## pronouns and beginnings of docstrings, comments, messages and pages
	@$(BIN)/python scripts/prose.py --max-pronouns 4 --max-beginnings 1

reference: venv ## docs/reference anew, from the code
	@$(BIN)/python -m scripts.reference

check: lint types imports prose ## lint, types, imports and prose

bench-switch: venv ## how long a switch between models takes
	@$(BIN)/gpupool bench switch --json

bench-overhead: venv ## what the pool costs beside vLLM alone
	@$(BIN)/gpupool bench overhead --json

bench-memory: venv ## every figure of the memory work: build/bench-memory.json
	@$(BIN)/python -m benchmarks.memory

bench-loads: venv ## streams on small cards while a model is added: build/bench-loads.json
	@$(BIN)/python -m benchmarks.small_cards

bench-pinning: venv ## a stream while another worker pins: build/bench-pinning.json
	@$(BIN)/python -m benchmarks.pinning

bench-family: venv ## twenty fine-tunes on one small card: build/bench-family.json
	@$(BIN)/python -m benchmarks.fine_tunes

bench-recovery: venv ## kills, moves, role changes: build/bench-recovery.json
	@$(BIN)/python -m benchmarks.recovery

bench-groups: venv ## groups of GPUs under switches, moves and kills: build/bench-groups-2.json
	@$(BIN)/python -m benchmarks.groups $(ARGS)

bench-batch: venv ## batches beneath an interactive load, and through three kills: build/bench-batch.json
	@$(BIN)/python -m benchmarks.batch

bench-fleet: venv ## three nodes on Ray (pip install 'gpupool[fleet]'), one of which dies: build/bench-fleet.json
	@$(BIN)/python -m benchmarks.fleet $(ARGS)

bench-conversations: venv ## later turns of conversations: build/bench-conversations.json
	@$(BIN)/python -m benchmarks.conversations $(ARGS)

bench-interleave: venv ## pauses of models that share a device: build/bench-interleave.json
	@$(BIN)/python -m benchmarks.interleave

bench-sim: venv ## every figure of the scheduler: build/bench-sim.json (GPUPOOL_WORKLOADS=folder)
	@$(BIN)/python -m benchmarks.sim

bench-api: venv ## the API layer, the admin API and gpupool top: build/bench-api.json
	@$(BIN)/python -m benchmarks.api_layer

bench-step: venv ## the host's time between two tokens beside vLLM's: build/bench-step.json
	@$(BIN)/python -m benchmarks.step_time

bench-hostile: venv ## requests that used to end a process, beside 100 streams: build/bench-hostile.json
	@$(BIN)/python -m benchmarks.hostile

models-table: venv ## every family of models beside vLLM alone: docs/models.md (ARGS='--only gemma3')
	@$(BIN)/python -m benchmarks.models $(ARGS)

soak: venv ## nine minutes of mixed load, and what grows: build/soak.json (ARGS='--minutes 60')
	@$(BIN)/python -m benchmarks.soak $(ARGS)

fuzz: venv ## 10,000 mutated requests and more to two daemons: build/fuzz.json
	@$(BIN)/python -m benchmarks.fuzz_surface

judge: venv ## others' tests of the API, also against vllm serve: docs/internals/judge.md
	@$(BIN)/python -m benchmarks.judge $(ARGS)

gpu-bundle: venv ## what a GPU machine without network lacks, in parts: build/gpu-bundle
	@$(BIN)/python -m benchmarks.gpu.bundle

clean: ## remove .venv, build/ and all caches
	rm -rf .venv build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
