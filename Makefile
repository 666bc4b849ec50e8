# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= steindiff-out

.PHONY: demo test lowest newest fuzz busy lint docs clean

demo: $(VENV)/.demo
	$(BIN)/steindiff compare --out $(OUT)

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n auto --dist worksteal -q

# What depends on versions: the engine, probes, calibration, files, metrics, commands, a host.
CORE := tests/test_denoisers.py tests/test_sample.py tests/test_probes.py tests/test_calibration.py tests/test_search.py \
	tests/test_zoo.py tests/test_metrics.py tests/test_production.py tests/contracts/test_solvers.py \
	tests/cli/test_commands.py tests/integrations/test_diffusers_schedulers.py

# The lowest versions pyproject.toml allows; old packages warn about new ones, so warnings are no errors here.
lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install -q uv
	$(VENV)-lowest/bin/uv pip install -q --python $(VENV)-lowest/bin/python --resolution lowest-direct -e ".[diffusers,test]"
	$(VENV)-lowest/bin/python -m pytest -n auto -q -W ignore::DeprecationWarning $(CORE)

# The newest torch and diffusers there are; what they announce to remove is an error.
newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install -q --upgrade -e ".[diffusers,test]"
	$(VENV)-newest/bin/python -m pytest -n auto -q -W error::FutureWarning $(CORE)

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
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(OUT) build dist site src/*.egg-info
