# Every target does its own set-up through `setup`; nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEED ?= 0
# Tests compute on one thread each.
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint types check format clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP)  ## make .venv and install covey with everything development needs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## watch a small model learn to add, in about three minutes (SEED=3 for another seed)
	$(BIN)/covey train recipe=arithmetic seed=$(SEED)

test: $(STAMP)  ## all tests that run in minutes
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_PROCESSES) --dist loadfile

test-slow: $(STAMP)  ## the tests that take long
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

check: lint types test  ## what CI runs

format: $(STAMP)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what set-up and tools made (runs under outputs/ stay)
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
