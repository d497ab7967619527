# The commands of the project. `make` alone lists them; all they need is Python 3.10 or newer and make.

# The first suitable Python, the one that the pinned requirements were tried with most first; or: make PYTHON=… test
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.10 python3,$(shell \
	$(name) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $(name))) python3)

VENV := .venv
HOST_VENV := .venv-host
WHEEL_VENV := .venv-wheels
PLATFORMS_VENV := .venv-platforms
# Of requirements/torch-*.txt, the oldest one that is served first.
TORCH_VERSIONS ?= 2.6 2.8 newest
RUN := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format --style=file:csrc/.clang-format
NATIVE_SOURCES = $(shell git ls-files '*.cpp' '*.cu' '*.cuh' '*.h')

# What a suite of tests did is recorded under its name, for the summary at the end.
PYTEST = COMFY_SAGE2_TEST_SUITE=$(subst -tests,,$@) $(RUN) -m pytest -q

# Threads that spin while they wait make PyTorch many times slower on a CPU that has anything else to do.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help environment environments host-environment wheel-environment platform-environment hooks check test style contracts types lint format \
	new-records quick-tests faults mutations unit-tests comfyui-tests gpu-tests torch-tests demo demo-plan demo-baselines \
	doctor wheels wheels-verify windows-tests arm-tests clean

help:
	@echo "make check          before every commit, a minute: style, import contracts and the quick unit tests"
	@echo "make test           everything: lint; unit, packaging, ComfyUI and GPU tests"
	@echo "make faults         a fuzz of every input, and failures put into ComfyUI; results in docs/results/reliability.md"
	@echo "make mutations      mistakes put into the code one at a time: does a test notice? Hours; in the same page"
	@echo "make torch-tests    core, compiler and ComfyUI's calls with the oldest torch and two others, as far as pip gets them"
	@echo "make demo           sample a video in full precision, precise, 8b and 4b; results in demo-output/"
	@echo "make demo-baselines the same with the attentions that the paper compares with"
	@echo "make doctor         say which attention backends can run on this machine, and why others cannot"
	@echo "make lint           ruff, clang-format, import contracts and mypy"
	@echo "make format         let ruff and clang-format format the code"
	@echo "make hooks          let git run the checks of .pre-commit-config.yaml before each commit"
	@echo "make wheels         build the kernel wheels into wheels/"
	@echo "make wheels-verify  rebuild the kernel wheels and compare them bit for bit"
	@echo "make windows-tests  run the Windows wheels under wine against a recording driver"
	@echo "make arm-tests      run the aarch64 wheels under qemu against a recording driver"
	@echo "make clean          remove environments and build folders"

environment:
	@$(PYTHON) -m tools.environment --venv $(VENV) --requirements requirements/test.txt

check: style contracts quick-tests

# The GPU's tests come first: without a GPU all are skipped, and that should not be the last that is read. A ComfyUI is
# cloned where there is none, as for the demo; the time for that is not in .ci/run's.
test: CLONE := --clone
test: new-records lint gpu-tests unit-tests comfyui-tests
	@$(RUN) -m tools.test_summary

lint: style contracts types

style: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(NATIVE_SOURCES)

contracts: environment
	$(VENV)/bin/lint-imports --no-logo

types: environment
	$(RUN) -m mypy

format: environment
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .
	$(CLANG_FORMAT) -i $(NATIVE_SOURCES)

hooks: environment
	$(VENV)/bin/pre-commit install

new-records:
	@rm -rf build/test-suites

quick-tests: environment
	$(PYTEST) -n 2 --dist loadfile -m "not slow" tests/unit

unit-tests: environment
	$(PYTEST) -n 2 --dist loadfile tests/unit tests/packaging

# What starts the ComfyUIs that are here, and the packs of COMFY_SAGE2_PACKS in them.
PACKS = $(if $(COMFY_SAGE2_PACKS),--packs $(COMFY_SAGE2_PACKS))
host-environment:
	@folders="$$($(PYTHON) -m tools.comfyui.folders)" && \
	if [ -n "$$folders" ]; then $(PYTHON) -m tools.comfyui.environment --venv $(HOST_VENV) --comfyui $$folders $(PACKS); fi

environments: environment host-environment

# Without a ComfyUI, or without a GPU, every test of the suite is skipped, which the summary says.
comfyui-tests: environment
	@$(PYTHON) -m tools.comfyui.suite --venv $(VENV) --host-venv $(HOST_VENV) $(PACKS) $(CLONE)

# Both suites are also in `make test`; here they write their figures down.
faults: environment host-environment
	@rm -rf build/reliability
	$(PYTEST) -n 2 --dist loadfile tests/unit/fuzz tests/unit/integrations/drop_in/test_random_calls.py \
		tests/comfyui/test_faults.py
	$(RUN) -m tools.reliability

# For a night: all tests once with their lines counted, then MOST mistakes of each part, others every day.
MOST ?= 40
mutations: environment
	OMP_NUM_THREADS=1 $(RUN) -m tools.mutation --most $(MOST)

gpu-tests: environment
	$(PYTEST) tests/gpu

# What cannot be had is told. TORCH_MINUTES is for making each environment; 0 takes only those that are there. One takes
# some 6 GB, and pip keeps what it fetches, packed, beside it until the end. The 10,000 random calls of a function of
# sageattention are made with the usual torch alone.
TORCH_MINUTES ?= 10
torch-tests:
	@$(MAKE) --no-print-directory --keep-going $(TORCH_VERSIONS:%=torch-tests-%)

torch-tests-%:
	@$(PYTHON) -m tools.suite torch-$* --venv .venv-torch-$* --requirements requirements/torch-$*.txt \
		--minutes $(TORCH_MINUTES) --gigabytes 12 -- -n 2 --dist loadfile -k "not (test_random_calls and 10000)" \
		tests/unit/core tests/unit/comfyui_adapter tests/unit/integrations

demo-plan:
	@$(PYTHON) -m tools.demo_plan --venv $(VENV) --host-venv $(HOST_VENV)

demo: demo-plan environment
	@$(PYTHON) -m tools.run_demo --venv $(VENV) --host-venv $(HOST_VENV)

demo-baselines: demo-plan environment
	@$(PYTHON) -m tools.run_demo --venv $(VENV) --host-venv $(HOST_VENV) --baselines

doctor: environment
	@$(RUN) -m comfy_sage2 doctor

wheel-environment:
	@$(PYTHON) -m tools.environment --venv $(WHEEL_VENV) --requirements requirements/wheels.txt

# Needs podman and the image that docs/dev/releasing.md tells how to make.
wheels: wheel-environment
	$(WHEEL_VENV)/bin/python -m tools.wheels.build_wheels
	$(WHEEL_VENV)/bin/python -m tools.wheels.release_wheels

wheels-verify: wheel-environment
	$(WHEEL_VENV)/bin/python -m tools.wheels.verify_wheels

# Windows CPythons under wine, and aarch64 ones under qemu: safe to call anywhere, what cannot be had is told.
# COMFY_SAGE2_WHEELHOUSE names other wheels than wheels/.
export ZIG_GLOBAL_CACHE_DIR ?= $(CURDIR)/build/zig-cache

# Before both suites at once; each makes it, too.
platform-environment:
	@$(PYTHON) -m tools.environment --venv $(PLATFORMS_VENV) --requirements requirements/platforms.txt

windows-tests:
	@$(PYTHON) -m tools.platforms.suite windows --venv $(PLATFORMS_VENV)

arm-tests:
	@$(PYTHON) -m tools.platforms.suite arm --venv $(PLATFORMS_VENV)

clean:
	rm -rf $(VENV) $(HOST_VENV) $(WHEEL_VENV) $(PLATFORMS_VENV) .venv-torch-* build demo-output
