PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
PORT ?= 8000

.PHONY: serve test check bench install dev link

serve: $(BIN)/stoker  ## install, fetch a small chat model, serve it on port 8000
	$(BIN)/stoker serve $(MODEL) --port $(PORT)

test: $(VENV)/dev  ## all tests that need no GPU
	$(BIN)/pytest -q

check: $(VENV)/dev link  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev  ## the scheduler's own cost, then this machine's CPU ops
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/cpu_ops.py

install: $(BIN)/stoker
dev: $(VENV)/dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(BIN)/stoker: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(BIN)/stoker

link:  # mypy reads the checkout as the package `stoker` through this link
	@mkdir -p .cache/path && ln -sfn "$(CURDIR)" .cache/path/stoker
