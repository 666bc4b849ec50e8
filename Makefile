# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= steindiff-out

.PHONY: demo test fuzz busy lint docs clean

demo: $(VENV)/.demo
	$(BIN)/steindiff compare --out $(OUT)

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n auto -q

# Every reader on damaged files and inputs, 2,000 cases a test; a failure prints how to repeat it.
fuzz: $(VENV)/.dev
	$(BIN)/python benchmarks/fuzz.py

# The suite three times beside eight processes that never rest.
busy: $(VENV)/.dev
	$(BIN)/python benchmarks/busy.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) $(OUT) build dist site src/*.egg-info
