# make run         set up, then see the shipped models write, fill gaps and draw (a minute)
# make train-demo  set up, then train a small PGM and an MDLM on a toy language and compare them (about three minutes)
# make test        set up, then lint, type-check and test (about five minutes)
# make docs        set up, then build the documentation as a site in build/site
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

run: .venv/ready
	$(BIN)/maskless demo

train-demo: .venv/ready
	$(BIN)/maskless train-demo

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html; with the search: $(PYTHON) -m http.server -d build/site"

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "maskless needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	@echo "installing: torch is large, so the first time takes a minute or more"
	$(INSTALL) torch
	$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/ready
	$(INSTALL) -e '.[data,dev]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

.PHONY: run train-demo test format docs clean
