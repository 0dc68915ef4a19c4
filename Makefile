# Everything runs in an environment of its own, made on first use.
#   make help            this
#   make serve           serve a model:
#                        [MODEL=folder|file.gguf|hub-name] [HOST=127.0.0.1] [PORT=8000] [ARGS="--max-running 8"]
#   make test            core tests
#   make test-all        those, and the long ones
#   make check           lint, format and types
#   make setup           what tests need, without running any
#   make default-model   fetch and convert the embedded default model
#   make operators       compile the C++ operators, if there is a compiler
#   with any of them:    [PYTHON=python3] to make the environment of, [VENV=.venv] to make it in

PYTHON ?= python3
VENV   ?= .venv
# Of make's own command line only: an environment may mean something else by these names.
MODEL  =
HOST   =
PORT   =
ARGS   =

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: help setup serve test test-all check default-model operators
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

operators: $(VENV)/.runtime
	-$(BIN)/ropewalk build-operators

setup: $(VENV)/.test default-model operators

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
