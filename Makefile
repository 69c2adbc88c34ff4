# Needs Python 3.11 or newer, pip and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check bench clean

demo: $(READY)  ## train three methods on the embedded digits, print a table, write a report
	$(BIN)/ppfl demo

test: $(READY) check  ## all tests, docstrings included
	$(BIN)/pytest -n auto  # one process per core

check: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## speed against a plain PyTorch loop and the matmul limit
	$(BIN)/python bench/bench.py

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ppfl needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

clean:
	rm -rf .venv runs
