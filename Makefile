# Needs Python 3.11 or newer, pip and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
READY := .venv/ready
READY_FOR_TESTS := .venv/ready-for-tests
QUICK := $(addprefix tests/, core algorithms/test_twins.py algorithms/test_limits.py algorithms/test_ppfl.py \
  server/test_contract.py io/test_codec.py sites/test_client_states.py data/test_federation.py \
  glm/test_likelihoods.py glm/test_search.py runs/test_resume.py runs/test_experiment_files.py \
  cli/test_commands.py door/test_architecture.py door/test_fit.py)

.PHONY: demo quick test nightly check guard-before guard pages bench trust clean

demo: $(READY)  ## train three methods on the embedded digits, print a table, write a report
	$(BIN)/ppfl demo

quick: check  ## style, types and the laws that fail first; no test here starts a process
	PPFL_TEST_PROFILE=quick $(BIN)/pytest -n auto -x -m "not slow and not processes" $(QUICK)

test: check  ## all tests but the slow ones, docstrings included, one process per core
	$(BIN)/pytest -n auto --dist loadfile

nightly: test  ## slow tests with ten times the drawn examples, then a fifth of the attacks; set PPFL_DATA to real data
	PPFL_TEST_PROFILE=nightly $(BIN)/pytest -m slow -rs
	PPFL_TEST_PROFILE=nightly $(BIN)/pytest -n auto -rs $(QUICK)
	-$(PIP) atheris==3.0.0  # a fuzzer guided by coverage; it has no package for some versions of Python
	$(BIN)/python trust/trust.py --share 0.2

check: $(READY_FOR_TESTS)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

guard-before: $(READY_FOR_TESTS)  ## numbers that users see, of the last commit or of REF
	PYTHONPATH=tests $(BIN)/python tests/guard.py before --ref $(or $(REF),HEAD)

guard: $(READY_FOR_TESTS)  ## the same numbers of the code as it is: same bits, rounding, or what differs
	PYTHONPATH=tests $(BIN)/python tests/guard.py after

pages: $(READY)  ## write the tables and numbers of README, docs and results from what is stored in results/figures
	$(BIN)/python tools/pages.py

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
