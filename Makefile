# The commands of the project; `make` alone lists them. They need make, git and Python 3.10 or newer.

# The Python that creates the environments: the first suitable one; `make PYTHON=… test` names another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.10 python3,$(shell \
	$(name) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $(name))) python3)
RUN := .venv/bin/python
PYTEST := $(RUN) -m pytest -q
TWO_PROCESSES := -n 2 --dist loadfile
CLANG_FORMAT := .venv/bin/clang-format --style=file:csrc/.clang-format
NATIVE_SOURCES = $(shell git ls-files '*.cpp' '*.cu' '*.cuh' '*.h')

# The ComfyUI that `make test` and `make demo` use: the first of COMFYUI_PATH, else the newest in the home folder, else a
# clone in build/. One environment serves older ComfyUIs too, because it has the newest one's requirements.
COMFYUI_RELEASE := v0.33.0
COMFYUI_CLONE := build/ComfyUI-$(COMFYUI_RELEASE)
COMFYUI := $(firstword $(shell $(PYTHON) -m tools.comfyui.folders) $(COMFYUI_CLONE))
ifneq ($(.SHELLSTATUS),0)
$(error cannot choose a ComfyUI, see above)
endif
HOST_PYTHON = $(or $(COMFY_SAGE2_HOST_PYTHON),.venv-host/bin/python)
# COMFY_SAGE2_PACKS names the folder of the packs that tests/comfyui/stacks combine the node with.
PACKS = $(wildcard $(COMFY_SAGE2_PACKS)/*/requirements.txt)

# The oldest supported torch, and a newer one than the pinned one.
TORCH_VERSIONS ?= 2.6 newest

# Waiting threads that spin make PyTorch many times slower on a CPU that runs anything else.
export OMP_WAIT_POLICY ?= PASSIVE
# When the package index does not answer, a command fails in minutes instead of half an hour.
export PIP_DEFAULT_TIMEOUT ?= 60
export PIP_RETRIES ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help environment host-environment frontends hooks check test test-all lint style contracts types lines format \
	quick-tests frontend-tests comfyui-tests exhaustive-comfyui-tests exhaustive-tests gpu-tests torch-tests \
	platform-tests demo doctor host-times wheels wheels-verify clean
.SECONDARY:

help:
	@echo "make demo           sample a video in full precision, precise, 8b and 4b; results in demo-output/"
	@echo "make test           lint; unit and packaging tests, and the node in a ComfyUI: ten minutes"
	@echo "make check          before every commit: style, import contracts and the quick unit tests"
	@echo "make test-all       also the slow tests: every ComfyUI, its frontend, two other versions of torch, the GPU"
	@echo "make lint           ruff, clang-format, import contracts and mypy; prints the number of lines"
	@echo "make format         format the code with ruff and clang-format"
	@echo "make hooks          make git run the checks of .pre-commit-config.yaml before each commit"
	@echo "make doctor         print which attention backends can run on this machine, and why the others cannot"
	@echo "make host-times     CPU time of a call, to compare before and after a change; needs no GPU"
	@echo "make frontend-tests ComfyUI's frontend in a browser, with the pack's nodes and workflows"
	@echo "make comfyui-tests  the node in every ComfyUI on this machine, and their frontends in a browser"
	@echo "make gpu-tests      the kernels on this machine's GPU"
	@echo "make torch-tests    the tests that a torch version can break, with the oldest torch and a newer one"
	@echo "make platform-tests the kernel modules for Windows and ARM in emulators, before a release of kernels"
	@echo "make wheels         build the kernel wheels into wheels/"
	@echo "make wheels-verify  rebuild the kernel wheels and compare them bit for bit"
	@echo "make clean          remove environments and build folders"

# An environment is complete when its file `complete` is newer than the requirements.
define make-environment
	test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off $(1)
	touch $@
endef

.venv/complete: requirements/test.txt
	$(call make-environment,-r $<)

.venv-wheels/complete: requirements/wheels.txt
	$(call make-environment,-r $<)

.venv-torch-%/complete: requirements/torch-%.txt
	$(call make-environment,-r $<)

.venv-host/complete: requirements/host.txt $(COMFYUI)/requirements.txt $(PACKS)
	$(call make-environment,$(^:%=-r %))
	@# torchaudio's compiled part does not load with a CPU torch; without it, its Python part runs.
	@.venv-host/bin/python -c "import torch; exit(torch.version.cuda is not None)" && \
		rm -f .venv-host/lib/python3*/site-packages/torchaudio/lib/*.so || true
	@# Old versions of ComfyUI do not start without this folder, which newer template packages lack.
	@mkdir -p $$(echo .venv-host/lib/python3*/site-packages)/comfyui_workflow_templates/templates

# A password prompt or a stalled connection must not block the command.
$(COMFYUI_CLONE)/requirements.txt:
	rm -rf $(@D)
	GIT_TERMINAL_PROMPT=0 GIT_HTTP_LOW_SPEED_LIMIT=1000 GIT_HTTP_LOW_SPEED_TIME=30 git clone --depth 1 \
		--branch $(COMFYUI_RELEASE) https://github.com/comfyanonymous/ComfyUI.git $(@D)

environment: .venv/complete

host-environment: $(if $(COMFY_SAGE2_HOST_PYTHON),,.venv-host/complete)

# The frontend versions that the ComfyUIs' requirements pin.
frontends: environment
	@$(RUN) -m tools.comfyui.frontends

check: style contracts quick-tests

lint: style contracts types lines

style: environment
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(NATIVE_SOURCES)

contracts: environment
	.venv/bin/lint-imports --no-logo

types: environment
	$(RUN) -m mypy

lines:
	@lines() { echo "$$1: $$(git ls-files -z "$$2" | xargs -0 cat | wc -l) lines"; }; \
	lines library 'comfy_sage2/*.py'; lines csrc csrc; lines lab 'lab/*.py'; lines tools tools; lines tests tests; \
	echo "Markdown: $$(git ls-files -z '*.md' | xargs -0 cat | wc -w) words"

format: environment
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .
	$(CLANG_FORMAT) -i $(NATIVE_SOURCES)

hooks: environment
	.venv/bin/pre-commit install

# All tests in tests/unit/fuzz are slow, and importing them would take each process a second.
quick-tests: environment
	$(PYTEST) $(TWO_PROCESSES) -m "not slow and not exhaustive" tests/unit --ignore tests/unit/fuzz

test: lint
	@if $(MAKE) host-environment; then folders="tests/comfyui --ignore tests/comfyui/frontend --ignore tests/comfyui/stacks"; \
	else echo "*** No ComfyUI is available here, so the node is not tested in one ***"; fi; \
	COMFYUI_PATH=$(COMFYUI) $(PYTEST) $(TWO_PROCESSES) -m "not exhaustive" tests/unit tests/packaging $$folders

test-all: test
	@$(MAKE) --keep-going gpu-tests torch-tests comfyui-tests exhaustive-tests

frontend-tests: export COMFYUI_PATH = $(COMFYUI)
frontend-tests: environment host-environment frontends
	$(PYTEST) -rs -m "not exhaustive" tests/comfyui/frontend

comfyui-tests: environment host-environment frontends
	$(PYTEST) $(TWO_PROCESSES) tests/comfyui
	$(MAKE) frontend-tests COMFY_SAGE2_FRONTEND=newest

exhaustive-comfyui-tests: export COMFYUI_PATH = $(COMFYUI)
exhaustive-comfyui-tests: environment host-environment
	$(PYTEST) $(TWO_PROCESSES) -m exhaustive tests/comfyui --ignore tests/comfyui/frontend --ignore tests/comfyui/stacks

exhaustive-tests: environment
	$(PYTEST) $(TWO_PROCESSES) -m exhaustive tests/unit tests/packaging

gpu-tests: environment
	@if $(RUN) -c "import torch; exit(not torch.cuda.is_available())"; then $(PYTEST) tests/gpu; \
	else echo "*** No CUDA device here, so the kernels are not tested on one ***"; fi

# Each environment takes about 6 GB.
torch-tests: $(TORCH_VERSIONS:%=torch-tests-%)

torch-tests-%: .venv-torch-%/complete
	.venv-torch-$*/bin/python -m pytest -q $(TWO_PROCESSES) -m torch_api \
		tests/unit/core tests/unit/comfyui_adapter tests/unit/integrations

demo:
	@echo "One short video with a small model in full precision, precise, 8b and 4b, in a ComfyUI."
	@echo "It first installs PyTorch and other packages (1.6 GB without CUDA) into .venv, and 2.4 GB into .venv-host,"
	@echo "and clones a ComfyUI if there is none (have one? make demo COMFYUI_PATH=/path/to/ComfyUI). Then it takes about"
	@echo "3 minutes on two free CPU cores, less on a GPU. Results: 1 MB in demo-output/."
	@$(MAKE) environment
	@if $(MAKE) host-environment; \
	then $(RUN) -m lab demo --comfyui $(COMFYUI) --comfyui-python $(HOST_PYTHON); \
	else echo "No ComfyUI is available: the demo runs in diffusers instead."; $(RUN) -m lab demo; fi

# Run this before a release of kernels: it tests the kernel modules for Windows and ARM under wine and qemu
# (apt-get install wine64 wine qemu-user). COMFY_SAGE2_WHEELHOUSE names a folder of wheels in place of wheels/.
platform-tests: environment
	$(RUN) -m pip install --quiet ziglang==0.15.2
	ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/build/zig-cache $(PYTEST) --timeout 3600 tests/platforms

doctor: environment
	@$(RUN) -m comfy_sage2 doctor || true # its exit status says whether a kernel runs, which is no error of make

host-times: environment
	@OMP_NUM_THREADS=1 $(RUN) -m lab.measurements.host_times

# Needs podman and an image; docs/dev/releasing.md says how to make it.
wheels: .venv-wheels/complete
	.venv-wheels/bin/python -m tools.wheels.build_wheels
	.venv-wheels/bin/python -m tools.wheels.release_wheels

wheels-verify: .venv-wheels/complete
	.venv-wheels/bin/python -m tools.wheels.verify_wheels

clean:
	rm -rf .venv .venv-host .venv-wheels .venv-torch-* build demo-output
