# Two commands do everything, each from a clean clone: `make demo` and `make test`.
# PYTHON may name any CPython from 3.11 on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types wheel check format clean

demo: $(STAMP)
	$(BIN)/outrider demo $(ARGS)

# Two processes: each begins with a half of the tests, so a module's fixtures are seldom made twice.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Builds the wheel, installs outrider[edge] from it into a fresh environment and proves that no torch is needed there.
wheel: $(STAMP)
	$(BIN)/python tests/wheel_job.py

check: lint types test wheel

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml hatch_build.py
	PYTHON="$(PYTHON)" sh tests/make_venv.sh $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
