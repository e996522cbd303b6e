PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint docs clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed  ## train a small GPT-2 in four processes, resume it, generate from it
	$(BIN)/python examples/demo.py

test: .venv/.installed  ## the test suite
	$(BIN)/python -m pytest

test-full: .venv/.installed  ## the same, with the whole oracle matrix
	$(BIN)/python -m pytest -m ""

lint: .venv/.installed  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv/.installed-docs  ## build the site into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove what was built here, .venv included
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache

# torch goes first and by its exact version, so that nothing else chooses a build of it.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -c constraints.txt -e '.[dev,plots]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	$(BIN)/pip install -c constraints.txt -e '.[docs]'
	@touch $@
