# Everything runs from .venv, which is made when first needed. PYTHON chooses the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM brings some gigabytes and pins of its own, so it has an environment for itself, and its small model a folder.
ENGINE_VENV := .venv-engine
ENGINE_BIN := $(ENGINE_VENV)/bin
ENGINE_STAMP := $(ENGINE_VENV)/.installed
MODEL := .cache/smollm2

.DEFAULT_GOAL := test
.PHONY: test test-engine test-identity demo engine bench lint format bfcl clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

$(ENGINE_STAMP): pyproject.toml examples/engine/install.py
	$(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_BIN)/python -m pip install --quiet --upgrade pip
	$(ENGINE_BIN)/python -m examples.engine.install
	$(ENGINE_BIN)/python -m pip install --quiet --editable '.[engine-dev]'
	touch $(ENGINE_STAMP)

$(MODEL)/spectool-complete: $(ENGINE_STAMP) examples/engine/smollm2.py
	$(ENGINE_BIN)/python -m examples.engine.smollm2 $(MODEL)
	touch $@

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# An agent of LangGraph or LlamaIndex, stock and speculative, on real tools over real HTTP; ARGS are passed on.
demo: $(STAMP)
	$(BIN)/python -m examples.demo $(ARGS)

PYTEST_ENGINE := SPECTOOL_MODEL_FOLDER=$(MODEL) VLLM_LOGGING_LEVEL=ERROR $(ENGINE_BIN)/python -m pytest
IDENTITY := tests/engine/test_identity.py

# Engine mode on vLLM itself: its scheduler without a model, and a small real model over HTTP, on a CPU. Needs 5 GB of
# disk and about 10 minutes, three of them for installation.
test-engine: $(MODEL)/spectool-complete
	$(PYTEST_ENGINE) tests/engine --ignore $(IDENTITY) $(ARGS)

# Engine mode writes the client path's very tokens: the whole matrix, in process; 2 to 5 minutes.
test-identity: $(MODEL)/spectool-complete
	$(PYTEST_ENGINE) $(IDENTITY) $(ARGS)

# The same agents against a server of that model: stock, client mode, engine mode.
engine: $(MODEL)/spectool-complete
	$(ENGINE_BIN)/python -m examples.engine $(MODEL) $(ARGS)

# Prints the figures of docs/evaluation.md; asserts nothing about time.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# Runs the simulators of bfcl-eval under speculation and fails if a stale result is served. Installed without the
# dependencies of bfcl-eval, of which these simulators need mpmath alone.
bfcl: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps bfcl-eval mpmath
	$(BIN)/python -m benchmarks.bfcl

clean:
	rm -rf $(VENV) $(ENGINE_VENV) .cache build dist *.egg-info
