"""The self-test of a kernel module at its first use on a GPU: a module that computes wrong results is not used.

The test makes small calls with known results (`self_test_calls`), once a process, in some 0.2 s. During the capture of
a CUDA graph, or without memory, it is postponed to the first call that allows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..autotune import store
from ..kernels import loader
from ..options import AUTO, FLOAT_PV
from ..system.memory import is_out_of_memory
from ..text import error_text
from . import self_test_calls
from .self_test_calls import Variant

log = logging.getLogger("comfy_sage2")

_lock = threading.RLock()
_results: dict[tuple[str, int], TestResult] = {}
# Modules that were requested during the capture of a CUDA graph, when nothing else can run, or without enough memory.
_postponed: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class TestResult:
    """Why a module must not be used on a GPU, or None. failed: formats of P and V not to use -> the reason."""

    reason: str | None
    calls: int
    seconds: float
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        if self.reason is not None:
            return f"failed: {self.reason}"
        failures = "".join(f"; without pv {pv}: {reason}" for pv, reason in self.failed.items())
        return f"passed: {self.calls} calls within their bounds in {1000 * self.seconds:.0f} ms{failures}"


def reason_against(architecture: str, index: int | None, variants: Sequence[Variant]) -> str | None:
    """Why a module must not be used on GPU `index` (None: the current one), or None; tests it once a process."""
    place = (architecture, _device_index(index))
    with _lock:
        if place not in _results:
            is_capturing = torch.cuda.is_current_stream_capturing()
            result = None if is_capturing else _tested(*place, variants)
            if result is None:
                _postponed.add(place)
                return None
            _results[place] = result
            if place in _postponed:
                store.changed()  # a plan that was made before may use what has failed
        return _results[place].reason


def failed_formats(architecture: str, index: int | None) -> Mapping[str, str]:
    """The formats of P and V that failed the test on GPU `index`, each with its reason; none before the test."""
    if not _results:
        return {}
    result = _results.get((architecture, _device_index(index)))
    return {} if result is None else result.failed


def is_postponed(architecture: str, index: int | None) -> bool:
    if not _postponed:
        return False
    place = (architecture, _device_index(index))
    return place in _postponed and place not in _results


def test_now(architecture: str, index: int, variants: Sequence[Variant]) -> TestResult:
    """Test the module again. RuntimeError while the GPU has no memory for it."""
    with _lock:
        result = _tested(architecture, index, variants)
        if result is None:
            raise RuntimeError("[SA-113] the GPU has too little free memory for the self-test: free some and try again")
        _results[architecture, index] = result
        return result


def _device_index(index: int | None) -> int:
    return torch.cuda.current_device() if index is None else index


def _tested(architecture: str, index: int, variants: Sequence[Variant]) -> TestResult | None:
    """Run the test; None if there is too little memory for it."""
    started = time.perf_counter()
    # Format of P and V -> its variants; None stands for the formats that no other can replace.
    by_format: dict[str | None, list[Variant]] = {}
    for variant in variants:
        by_format.setdefault(None if variant.pv in (AUTO, *FLOAT_PV) else variant.pv, []).append(variant)
    calls = 0
    failed: dict[str | None, str] = {}
    for pv, format_variants in by_format.items():
        try:
            with torch.cuda.device(index):
                result = self_test_calls.run(loader.load(architecture), torch.device("cuda", index), format_variants)
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):  # the test runs later
                return None
            failed[pv] = error_text(error)
            continue
        calls += result.calls
        if result.reason is not None:
            failed[pv] = result.reason
    reasons = {}
    for pv, problem in failed.items():
        tested, consequence = "these kernels", "The pack does not use them here"
        if pv is not None:
            tested, consequence = f"pv {pv}", "The kernels use another format for the product of P and V"
        text = reasons[pv] = (
            f"[SA-113] the self-test of {tested} failed on this GPU: {problem}. {consequence}. Update the driver and "
            "the pack, and report it if that does not help"
        )
        log.warning("SageAttention2: %s: %s", architecture, text)
    reason = reasons.pop(None, None)
    formats = {pv: text for pv, text in reasons.items() if pv is not None}
    return TestResult(reason, calls, time.perf_counter() - started, formats)
