# `make serve` and `make test` are all the set-up there is.
PYTHON ?= python3
NATIVE  = CMakeLists.txt $(wildcard kvern/kernels/cpu/*.cpp kvern/kernels/cpu/*.h)
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL  ?= smollm2-135m-instruct

.PHONY: serve chat test test-fast lint format bench clean

serve: $(VENV)/.installed  ## set up, fetch the small default model, serve it
	$(BIN)/kvern serve $(MODEL) $(ARGS)

chat: $(VENV)/.installed  ## talk to the model in the terminal
	$(BIN)/kvern chat $(MODEL) $(ARGS)

test: $(VENV)/.developer  ## every test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-fast: $(VENV)/.developer  ## what takes about a minute and a half
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.developer
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed  ## time the scheduler alone
	$(BIN)/kvern bench scheduler $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(PIP) -e .
	@touch $@

$(VENV)/.developer: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed
