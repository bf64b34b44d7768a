# The two commands of a new machine: `make train` and `make test`. Both make .venv and install into it first.
PYTHON ?= python3.11
# On Linux, pip's build of PyTorch is the one for CUDA unless an index of CPU builds is configured. To choose the CPU build:
# make train TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EIGHT_BIT := .eight_bit/.installed
# uv resolves and installs in seconds what takes pip minutes. pip stays for PyTorch, whose CPU build uv may not find, and as
# the fallback where uv cannot run. Bytecode is compiled once for all packages, on all cores.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
# vLLM pins the versions of almost all packages, so it has a separate environment.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
ARGS ?=
# Processes that run tests; each starts a local Ray. Idle OpenMP threads of one would take the others' cores.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

.PHONY: train train-vllm test test-vllm test-vllm-core test-vllm-long vllm test-long test-faults soak test-recipes lint types \
	unit test-layouts bench bench-gpu peers install clean help

help:
	@echo "make train [ARGS='trainer.steps=20 …']   install, then train the default task on the CPU"
	@echo "make test                                install, then lint, types and all tests"
	@echo "make train-vllm [ARGS='…']               the same with vLLM as generation engine, in .venv-vllm"
	@echo "make test-vllm                           tests of vLLM engines, and of models, rollout and packing with its versions"
	@echo "make test-vllm-core                      all tests of make test, with vLLM's versions of all packages"
	@echo "make test-vllm-long                      vLLM with every kind of model, 200,000 draws, more runs in flight"
	@echo "make vllm                                install into .venv-vllm only"
	@echo "make test-long                           10,000 random plans, 300 damaged run directories, 10,000 steps in flight, dead engines, all tests marked as long, test-vllm-core, test-vllm-long"
	@echo "make test-layouts                        every parallel layout with every model family, batching mode and role"
	@echo "make test-faults                         every role, phase and fault in real runs (ARGS='--only kill --seconds 600')"
	@echo "make soak                                1,000 steps with a fault every 20: same bits, nothing grows"
	@echo "make test-recipes                        every recipe learns the default task, about 3 minutes each"
	@echo "make bench                               measure plans, training steps and memory into benchmarks/RESULTS.md"
	@echo "make bench-gpu [ARGS='--only update']    measure on one NVIDIA GPU into benchmarks/RESULTS.md"
	@echo "make peers                               time TRL's and verl's packing against ours"
	@echo "make lint | types | unit | clean"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlpack needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt uv || true
	$(UV) --constraint constraints.txt --editable '.[dev]' || \
		$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@# Packages may hold files for other versions of Python, which don't compile.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@# The planner's inner loops are compiled here, too; otherwise the first run would compile them.
	$(BIN)/python -c 'from rlpack.packing import warm_up_jit; warm_up_jit()'
	touch $@

# vLLM's CPU build, which needs PyTorch's: choose it by TORCH, as above. The file lists every package, so nothing is resolved.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV) || python3 -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --no-compile --no-deps $(TORCH)
	@# Read from the file, because PyTorch can't be imported yet.
	@$(VLLM_BIN)/python -c 'import runpy, sys; from importlib.util import find_spec; from pathlib import Path; \
	sys.exit(runpy.run_path(Path(find_spec("torch").origin).with_name("version.py"))["cuda"] is not None)' || \
	{ echo "$(VLLM_VENV) needs PyTorch's CPU build: rm -r $(VLLM_VENV), then make vllm TORCH=\"$(firstword $(TORCH)) \
	--index-url https://download.pytorch.org/whl/cpu\"" >&2; exit 1; }
	$(VLLM_BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt uv || true
	$(VLLM_BIN)/uv pip install --quiet --python $(VLLM_BIN)/python --no-deps -r constraints-vllm.txt || \
		$(VLLM_BIN)/python -m pip install --quiet --no-compile --no-deps -r constraints-vllm.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(VLLM_BIN)/python -m compileall -q -j 0 $(VLLM_VENV)/lib > /dev/null || true
	$(VLLM_BIN)/python -c 'from rlpack.packing import warm_up_jit; warm_up_jit()'
	touch $@

# What the tests of 8-bit moments import: transformers would import it into every process that finds it in .venv.
$(EIGHT_BIT): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .eight_bit --constraint constraints.txt torchao
	touch $@

install: $(INSTALLED)

train: $(INSTALLED)
	$(BIN)/rlpack train $(ARGS)

vllm: $(VLLM_INSTALLED)

train-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/rlpack train rollout=vllm $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(INSTALLED) $(EIGHT_BIT)
	$(PYTEST) tests/unit rlpack -n $(WORKERS) --dist loadfile

# Many tests wait for processes or use one core. The files of tests/distributed and tests/end_to_end, which take longest,
# come first.
test: $(INSTALLED) $(EIGHT_BIT)
	$(MAKE) --jobs 2 lint types
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The tests of engines, and those of the core suite that depend on the versions in which vLLM's environment differs:
# transformers, NumPy and Numba. `make test-vllm-core` runs the whole core suite with them.
VLLM_PYTEST := OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -q
VLLM_CORE := tests/golden tests/unit/batch tests/unit/models tests/unit/packing tests/unit/rollout tests/unit/startup
test-vllm: $(VLLM_INSTALLED)
	$(VLLM_PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/vllm
	$(VLLM_PYTEST) -n $(WORKERS) --dist loadfile $(VLLM_CORE)
	TRITON_INTERPRET=1 $(VLLM_PYTEST) tests/unit/models/test_logit_kernels.py  # Triton is there

test-vllm-core: $(VLLM_INSTALLED)
	$(VLLM_PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/vllm

test-vllm-long: $(VLLM_INSTALLED)
	RLPACK_ADAPTERS=all $(VLLM_PYTEST) tests/vllm/test_adapters.py -k trainers
	RLPACK_DIRECT_LOAD=all $(VLLM_PYTEST) tests/vllm/test_direct_load.py
	RLPACK_FAMILIES=all $(VLLM_PYTEST) tests/vllm/test_families.py
	RLPACK_IN_FLIGHT=all $(VLLM_PYTEST) tests/vllm/test_in_flight_training.py
	RLPACK_FAULTS_AHEAD=1 $(VLLM_PYTEST) tests/faults/test_running_ahead.py -k vllm
	RLPACK_DRAWS=200000 $(VLLM_PYTEST) tests/vllm/test_sampling.py -k distribution
	RLPACK_REWARD_MODELS=qwen2,qwen3,llama,mistral,phi3,olmo2,gemma2,gemma3_text $(VLLM_PYTEST) \
		tests/vllm/test_serve_reward_model.py -k scores_are

test-long: $(INSTALLED) $(EIGHT_BIT)
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --long -m long
	RLPACK_EXAMPLES=10000 $(PYTEST) tests/unit/packing/test_make_plan.py
	RLPACK_DAMAGES=300 $(PYTEST) tests/unit/recipes/driver/test_damage.py
	RLPACK_CANARY=all $(PYTEST) tests/unit/rollout/test_canary_sensitivity.py
	RLPACK_COMPILED=all $(PYTEST) tests/unit/models/test_compiled_layers.py
	RLPACK_FAULTS_AHEAD=1 $(PYTEST) tests/faults/test_running_ahead.py
	RLPACK_SIMULATED_STEPS=2500 $(PYTEST) tests/unit/recipes/driver/test_in_flight_run.py -k engines_die
	$(MAKE) test-vllm-core test-vllm-long

test-layouts: $(INSTALLED)
	RLPACK_LAYOUTS=all $(PYTEST) tests/distributed/layouts tests/distributed/models/test_pipeline.py \
		tests/distributed/models/test_sharded_loading.py

test-faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.matrix $(ARGS)

soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak $(ARGS)

test-recipes: $(INSTALLED)
	$(BIN)/python -m benchmarks.recipes

bench: $(INSTALLED)
	test -d .baseline || git worktree add --detach .baseline 9f880c3  # what benchmarks/generation.py compares with
	$(BIN)/python -m benchmarks.report --skip peers

bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

peers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .peers \
		trl accelerate verl tensordict orjson pyvers cloudpickle
	$(BIN)/python -m benchmarks.report --only peers

clean:
	rm -rf $(VENV) $(VLLM_VENV) .peers .eight_bit .pytest_cache .ruff_cache .hypothesis .import_linter_cache
