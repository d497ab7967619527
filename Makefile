# The commands of the project. `make` alone lists them; all they need is Python 3.10 or newer and make.

# The first suitable Python, the one that the pinned requirements were tried with most first; or: make PYTHON=… test
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.10 python3,$(shell \
	$(name) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $(name))) python3)

VENV := .venv
HOST_VENV := .venv-host
WHEEL_VENV := .venv-wheels
MODALITIES_VENV := .venv-modalities
RUN := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format --style=file:csrc/.clang-format
NATIVE_SOURCES = $(shell git ls-files '*.cpp' '*.cu' '*.cuh' '*.h')
PYTEST := $(RUN) -m pytest -q

# Threads that spin while they wait make PyTorch many times slower on a CPU that has anything else to do.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help environment modalities-environment wheel-environment test lint format unit-tests modalities-tests \
	host-tests demo doctor wheels wheels-verify clean

help:
	@echo "make test           set up $(VENV) and run everything: lint, types; unit, packaging, modalities and ComfyUI tests"
	@echo "make demo           sample a video in full precision, 8b, 4b and baselines; results in demo-output/"
	@echo "make doctor         say which attention backends can run on this machine, and why others cannot"
	@echo "make lint           ruff, mypy and clang-format only"
	@echo "make format         let ruff and clang-format format the code"
	@echo "make wheels         build the kernel wheels into wheels/"
	@echo "make wheels-verify  rebuild a kernel wheel of each architecture and compare it bit for bit"
	@echo "make clean          remove environments and build folders"

environment:
	@$(PYTHON) -m tools.environment --venv $(VENV) --requirements requirements/test.txt

test: lint unit-tests modalities-tests host-tests

lint: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(NATIVE_SOURCES)

format: environment
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .
	$(CLANG_FORMAT) -i $(NATIVE_SOURCES)

unit-tests: environment
	$(PYTEST) -n 2 --dist loadfile tests/unit tests/packaging

modalities-environment:
	@$(PYTHON) -m tools.environment --venv $(MODALITIES_VENV) --requirements requirements/modalities.txt

modalities-tests: modalities-environment
	$(MODALITIES_VENV)/bin/python -m pytest -q tests/modalities

# Without a ComfyUI on the machine there is nothing to start, and that has to be seen.
host-tests: environment
	@set -e; folders="$$($(PYTHON) -m tools.comfyui_folders)"; \
	if [ -z "$$folders" ]; then \
		echo "***********************************************************************"; \
		echo "*** ComfyUI TESTS NOT RUN: no ComfyUI on this machine.              ***"; \
		echo "*** Put one at ~/ComfyUI, or name its folder in COMFYUI_PATH.       ***"; \
		echo "***********************************************************************"; \
	else \
		$(PYTHON) -m tools.host_environment --venv $(HOST_VENV) --comfyui $$folders; \
		$(PYTEST) tests/comfyui; \
	fi

demo: environment
	@$(PYTHON) -m tools.run_demo --venv $(VENV) --host-venv $(HOST_VENV)

doctor: environment
	@$(RUN) -m comfy_sage2 doctor

wheel-environment:
	@$(PYTHON) -m tools.environment --venv $(WHEEL_VENV) --requirements requirements/wheels.txt

# Needs podman and the image that docs/releasing.md tells how to make.
wheels: wheel-environment
	$(WHEEL_VENV)/bin/python -m tools.wheels.build_wheels
	$(WHEEL_VENV)/bin/python -m tools.wheels.release_wheels

wheels-verify: wheel-environment
	$(WHEEL_VENV)/bin/python -m tools.wheels.verify_wheels

clean:
	rm -rf $(VENV) $(HOST_VENV) $(WHEEL_VENV) $(MODALITIES_VENV) build demo-output
