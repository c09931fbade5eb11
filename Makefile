# Everything a developer runs. `make setup test` from a fresh clone needs Python >= 3.11 and nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := PYTHONPATH=. $(BIN)/python
ORACLE_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)

.PHONY: setup test test-fast lint oracle-venv test-oracle

setup: $(VENV)/done

$(VENV)/done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[compile,dev]'
	touch $@

# The whole CPU tier.
test: setup
	$(BIN)/python -m pytest -m "not gpu and not full"

# Under a minute: no compiler runs, no foreign models.
test-fast: setup
	$(BIN)/python -m pytest tests/test_house.py tests/passes tests/runtime tests/lowering/test_text.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# lerobot 0.6.1 as a source of truth: Python 3.12, about 5 GB.
oracle-venv: .venv-oracle/done

.venv-oracle/done: tools/oracle-requirements.txt
	$(ORACLE_PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install -q -r $<
	.venv-oracle/bin/python -m pip install -q --no-deps lerobot==0.6.1
	touch $@

test-oracle: oracle-venv
	.venv-oracle/bin/python -m pytest tests/oracle
