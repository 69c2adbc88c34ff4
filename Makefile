# Needs Python 3.11 or newer, pip and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
READY := .venv/ready
READY_FOR_TESTS := .venv/ready-for-tests

.PHONY: demo test check bench trust clean

demo: $(READY)  ## train three methods on the embedded digits, print a table, write a report
	$(BIN)/ppfl demo

test: $(READY_FOR_TESTS) check  ## all tests, docstrings included, one process per core
	$(BIN)/pytest -n auto

check: $(READY_FOR_TESTS)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY_FOR_TESTS)  ## speed against a plain PyTorch loop and the matmul limit
	$(BIN)/python bench/bench.py

trust: $(READY_FOR_TESTS)  ## attack it: kills, damaged files, full disks, hostile input; takes about half an hour
	-$(PIP) atheris==3.0.0  # a fuzzer guided by coverage; it has no package for some versions of Python
	$(BIN)/python trust/trust.py

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ppfl needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	touch $(READY)

$(READY_FOR_TESTS): $(READY) requirements-test.txt
	$(PIP) -r requirements-test.txt
	touch $(READY_FOR_TESTS)

clean:
	rm -rf .venv runs
