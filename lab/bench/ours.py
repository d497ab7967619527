"""The kernels of this pack as candidates: those that are installed, and builds that a command names."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from comfy_sage2 import __version__
from comfy_sage2.attention import attention
from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.dispatch import registry
from comfy_sage2.options import FLOAT_PV, AttentionOptions

from .candidates import BenchmarkCandidate, Call, Candidates, Inputs

EMULATED = "FP8 mma.sync is emulated on Hopper"
# The variants in which builds are compared: mode, accumulator of P V, and formats of P and V, of which a build has one.
_BUILD_VARIANTS = (
    ("8b", "fp32", FLOAT_PV),
    ("8b", "fp16", FLOAT_PV),
    ("8b", "fp32", ("int8",)),
    ("precise", "fp32", ("fp16",)),
    ("precise", "fp16", ("fp16",)),
)


def find(modes: Iterable[str]) -> Candidates:
    """The installed kernels that run on the current device, in each mode as in a new node and as in the paper.

    Only the accuracy of smoothing V is measured.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    candidates = Candidates()
    for backend in registry.kernels():
        for mode in modes:
            name = f"{backend.name} {mode}"
            options = AttentionOptions(mode, pv_accumulator="auto")
            reason = backend.reason_against(CallSignature.minimal(device, options))
            if reason is not None:
                candidates.missing[name] = reason
                continue
            candidates.able += [
                candidate(name, backend.name, options),
                candidate(f"{name}, rotate off", backend.name, replace(options, rotate="off")),
                replace(candidate(f"{name}, smooth V", backend.name, replace(options, smooth_v=True)), is_timed=False),
            ]
    return candidates


def candidate(name: str, backend: str, options: AttentionOptions) -> BenchmarkCandidate:
    """A named candidate: a backend with `options`, on causal and other inputs."""

    def prepare(inputs: Inputs) -> Call:
        chosen = replace(options, is_causal=inputs.is_causal)
        q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.attn_mask
        return Call(lambda: attention(q, k, v, attn_mask=mask, backend=backend, options=chosen, return_lse=False))

    note = "Hopper has no INT4 tensor cores" if (backend, options.mode) == ("sm90", "4b") else ""
    kernels = attention_kernels(backend, options.mode)
    return BenchmarkCandidate(name, __version__, prepare, kernel_name=kernels, note=note)


def attention_kernels(architecture: str, mode: str) -> str:
    """The prefix of the attention kernels' names, which kernels of the passes before them do not have."""
    return "precise_" if (architecture, mode) == ("sm90", "precise") else "attention_"


@dataclass(frozen=True)
class Build:
    """A folder with a kernel package, such as build/kernels/comfy_sage2_sm80, and what the tables call it.

    Nothing is verified before it is loaded: name only builds that you made or trust.
    """

    name: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Build:
        """Parse a text such as "after=build/after/comfy_sage2_sm80"; a type of argument."""
        name, separator, folder = text.partition("=")
        if not (name and separator and folder):
            raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text[:60]!r}")
        return cls(name, Path(folder))

    def load(self) -> ModuleType:
        """The kernel package, under its own name. SystemExit if there is none that can be imported."""
        source = self.folder / "__init__.py"
        if not source.is_file():
            raise SystemExit(f"{self.folder} is no kernel package: it has no __init__.py")
        name = f"comfy_sage2_build_{'_'.join(self.name.split())}"
        spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(self.folder)])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # for what it imports from itself
        try:
            spec.loader.exec_module(module)
        except (ImportError, OSError, ValueError) as error:
            raise SystemExit(f"{self.folder} cannot be imported: {error}") from error
        return module


def of_build(name: str, module: ModuleType, rotate: str = "off") -> list[BenchmarkCandidate]:
    """The kernels of one build, in the variants that it has. rotate: the option of this name."""

    def prepare(options: AttentionOptions, inputs: Inputs) -> Call:
        inputs.without_mask()
        signature = CallSignature.of(inputs.q, inputs.k, inputs.v, replace(options, is_causal=inputs.is_causal))
        call = KernelCall(module, signature)
        return Call(lambda: call.run(inputs.q, inputs.k, inputs.v)[0])

    candidates = []
    for mode, accumulator, formats in _BUILD_VARIANTS:
        pv = next((pv for pv in formats if mode == "precise" or pv in module.pv_formats), None)
        if pv is None or accumulator not in module.pv_accumulators:
            continue
        candidates.append(
            BenchmarkCandidate(
                f"{name}: {mode} {'int8' if pv == 'int8' else accumulator}",
                f"{module.architecture} {module.version} for {module.target}",
                partial(prepare, AttentionOptions(mode, pv_accumulator=accumulator, pv=pv, rotate=rotate)),
                kernel_name=attention_kernels(module.architecture, mode),
                note=EMULATED if pv == "fp8" and module.architecture != "sm90" else "",
            )
        )
    return candidates
