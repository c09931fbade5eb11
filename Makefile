# Everything a developer runs. `make setup test` from a fresh clone needs Python >= 3.11 and nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := PYTHONPATH=. $(BIN)/python
ORACLE_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)

MATRIX_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
MATRIX_TORCH ?= 2.11.0

.PHONY: setup demo test test-fast test-full test-matrix lint oracle-venv test-oracle gpu-kernels gpu-sanitize gpu-model gpu-bench gpu-lt gpu-all gpu-scale fit measured

setup: $(VENV)/done

$(VENV)/done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[compile,dev]'
	touch $@

# A small checkpoint, Plans for thor and hopper, actions from the CPU's emulator: out/demo.
demo: setup
	$(RUN) examples/demo.py -o out/demo

# The whole CPU tier, files of tests spread over WORKERS processes of about 1.5 GB.
WORKERS ?= 2
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not gpu and not full"

# Under a minute: no compiler runs, no foreign models.
test-fast: setup
	$(BIN)/python -m pytest tests/test_house.py tests/passes tests/runtime tests/lowering/test_text.py -m "not gpu and not full"

# The CPU tier and the full-size model: minutes to hours, 16 GB of memory.
test-full: setup
	$(BIN)/python -m pytest -m "not gpu"

# The CPU tier on another Python and torch.
test-matrix: .venv-matrix/done
	OMP_NUM_THREADS=1 .venv-matrix/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not gpu and not full"

.venv-matrix/done: pyproject.toml constraints.txt
	$(MATRIX_PYTHON) -m venv .venv-matrix
	sed 's/^torch==.*/torch==$(MATRIX_TORCH)/' constraints.txt > .venv-matrix/constraints.txt
	.venv-matrix/bin/python -m pip install -q --upgrade pip
	.venv-matrix/bin/python -m pip install -q -c .venv-matrix/constraints.txt -e '.[compile,dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# lerobot 0.6.1 as a source of truth: Python 3.12, about 5 GB.
oracle-venv: .venv-oracle/done

.venv-oracle/done: tools/oracle-requirements.txt
	$(ORACLE_PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install -q -r $<
	.venv-oracle/bin/python -m pip install -q --no-deps lerobot==0.6.1
	touch $@

test-oracle: oracle-venv
	.venv-oracle/bin/python -m pytest tests/oracle

# On a machine with a GPU and its own python3 (torch, cuda-bindings, NVRTC, ml_dtypes, jinja2, pytest); nothing is installed.
# FRTC_COMMIT names the commit in the results, which go to $$OUT or bench/results. TIER=gpu runs whole sweeps, too:
# all configs at several sites. Kernels in one process, which has others of one thread each compute references; Plans and
# sessions beside it in another, shown when both are done.
TIER ?= gpu and not full
gpu-kernels:
	@others=$$(mktemp); \
	PYTHONPATH=. $(PYTHON) -m pytest -m "$(TIER)" --durations=6 tests/runtime tests/truth tests/frtc > $$others 2>&1 & beside=$$!; \
	OMP_NUM_THREADS=1 PYTHONPATH=. $(PYTHON) -m pytest -m "$(TIER)" tests/kernels; kernels=$$?; \
	wait $$beside; plans=$$?; cat $$others; rm $$others; \
	test $$kernels -eq 0 && test $$plans -eq 0

# Every kernel of each family once under memcheck, racecheck and initcheck, a tiny FP8 Plan under memcheck.
# SANITIZER=PATH names another compute-sanitizer than CUDA's.
gpu-sanitize:
	PYTHONPATH=. $(PYTHON) -m bench.sanitize

# One policy: pi05, pi0 or smolvla; one precision: bf16, fp8 (static scales), fp8-rows, w8a16, or all but bf16. `gpu-all`:
# checks and times of the policies beside Pi0.5, in nine minutes.
POLICY ?= pi05
PRECISION ?= bf16

gpu-model:
	PYTHONPATH=. $(PYTHON) -m bench.gpu_model --policy $(POLICY) --precision $(PRECISION)

gpu-bench:
	PYTHONPATH=. $(PYTHON) -m bench.gpu_bench --policy $(POLICY)

# Products of vision and prefix beside cuBLASLt's best, plain and with a separate epilogue, in a minute and a half.
gpu-lt:
	PYTHONPATH=. $(PYTHON) -m bench.lt_times --policy $(POLICY)

gpu-all:
	PYTHONPATH=. $(PYTHON) -m bench.gpu_all

# What `frtc models` says was measured: after every bench, from bench/results.
measured: setup
	$(RUN) tools/measured.py

# How latency grows with views, chunk, budget and steps, and the cost models fitted to it: 20 configurations in 150 s.
gpu-scale:
	PYTHONPATH=. $(PYTHON) -m bench.gpu_scale

fit: setup
	$(RUN) -m bench.fit bench/results/gpu_scale.json --write
