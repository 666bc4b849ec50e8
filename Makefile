# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= steindiff-out

.PHONY: demo test fuzz lint docs clean

demo: $(VENV)/.demo
	$(BIN)/steindiff compare --out $(OUT)

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n auto -q

# Every reader of files on damaged ones, 2,000 cases a test; a failure prints how to repeat it.
fuzz: $(VENV)/.dev
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n auto -q tests/fuzz

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
