# Everything runs in an environment of its own, made on first use.
#   make serve [MODEL=folder|file.gguf|hub-name] [PORT=8000] [ARGS="--max-running 8"]
#   make test        core tests
#   make test-all    those, and the long ones
#   make check       lint, format and types

PYTHON ?= python3
VENV   ?= .venv
# Of make's own command line only: an environment may mean something else by these names.
MODEL  =
HOST   =
PORT   =
ARGS   =

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: help setup serve test test-all check default-model
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV); the first time this takes a minute or two'
	$(INSTALL) .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(INSTALL) '.[test]'
	@touch $@

default-model: $(VENV)/.runtime
	$(BIN)/ropewalk fetch-default

setup: $(VENV)/.test default-model

serve: $(VENV)/.runtime $(if $(MODEL),,default-model)
	$(BIN)/ropewalk serve $(MODEL) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m ''

check: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
