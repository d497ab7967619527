"""The self-test of a kernel module at its first use on a GPU: a module that computes wrong results is not used.

A module that passed is remembered for this GPU, driver and module. One that failed is tested again by the next process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .. import machine
from ..autotune.cache_file import user_cache_file
from ..kernels import loader
from ..options import AUTO, FLOAT_PV
from ..text import error_text
from . import self_test_run
from .self_test_comparison import Variant

log = logging.getLogger("comfy_sage2")

# Rises when what a module has to pass changes: the calls, their bounds, or how a module is called.
CASES_VERSION = 7

_lock = threading.RLock()
_results: dict[tuple[str, int], TestResult] = {}
# Modules that were asked for while a CUDA graph was captured, when nothing else can run, or without the memory for it.
_postponed: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class TestResult:
    """What the test of a module on a GPU gave.

    Attributes:
        reason: why the module must not be used there, or None.
        calls: that were made and compared; 0 when an earlier process did it.
        seconds: that it took.
        failed: formats of P and V that must not be used there, with the reason of each: others serve in their place.
    """

    reason: str | None
    calls: int
    seconds: float
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """In words for the user."""
        if self.reason is not None:
            return f"failed: {self.reason}"
        if not self.calls:
            return "passed earlier with this GPU, driver and module"
        others = "".join(f"; without pv {pv}: {reason}" for pv, reason in self.failed.items())
        return f"passed: {self.calls} calls within their bounds in {1000 * self.seconds:.0f} ms{others}"


def reason_against(architecture: str, index: int | None, variants: Sequence[Variant]) -> str | None:
    """Why the module of `architecture` must not be used on GPU `index` (None: the current one), or None.

    Tests it with `variants` when this GPU is new; the answer is kept for the life of the process.
    """
    place = (architecture, _device_index(index))
    with _lock:
        if place not in _results:
            result = None if torch.cuda.is_current_stream_capturing() else _result(*place, variants)
            if result is None:
                _postponed.add(place)
                return None
            _results[place] = result
        return _results[place].reason


def failed_formats(architecture: str, index: int | None) -> Mapping[str, str]:
    """The formats of P and V that failed the test on GPU `index`, with the reason of each; none before the test."""
    if not _results:
        return {}
    result = _results.get((architecture, _device_index(index)))
    return {} if result is None else result.failed


def is_postponed(architecture: str, index: int | None) -> bool:
    """Whether a test is still to be made."""
    if not _postponed:
        return False
    place = (architecture, _device_index(index))
    return place in _postponed and place not in _results


def test_now(architecture: str, index: int, variants: Sequence[Variant]) -> TestResult:
    """Test the module whatever is remembered of it. RuntimeError while the GPU has no memory for it."""
    with _lock:
        result = _tested(architecture, index, variants, _key(architecture, index, variants))
        if result is None:
            raise RuntimeError("[SA-113] the GPU has too little free memory for the self-test: free some and try again")
        _results[architecture, index] = result
        return result


def _device_index(index: int | None) -> int:
    return torch.cuda.current_device() if index is None else index


def _result(architecture: str, index: int, variants: Sequence[Variant]) -> TestResult | None:
    """The result that is remembered, or that of a test; None when the test could not be made."""
    key = _key(architecture, index, variants)
    kept = None if key is None else user_cache_file().get(key)
    if kept is not None and kept.get("passed") is True:
        return TestResult(None, 0, 0.0)
    return _tested(architecture, index, variants, key)


def _tested(
    architecture: str, index: int, variants: Sequence[Variant], key: dict[str, str] | None
) -> TestResult | None:
    """The result of a test, remembered under `key` when it was passed; None without the memory for it."""
    started = time.perf_counter()
    calls = 0
    failed: dict[str | None, str] = {}
    try:
        for pv in dict.fromkeys(_optional_format(variant) for variant in variants):
            of_format = [variant for variant in variants if _optional_format(variant) == pv]
            count, found = _run(architecture, index, of_format)
            calls += count
            if found is not None:
                failed[pv] = found
    except torch.cuda.OutOfMemoryError:  # tested when there is more
        return None
    if key is not None:
        user_cache_file().put(key, {"passed": not failed})
    reason = failed.pop(None, None)
    if reason is not None:
        reason = (
            f"[SA-113] the self-test of these kernels failed on this GPU: {reason}. The pack does not use them "
            "here. Update the driver and the pack, and report it if that does not help"
        )
        log.warning("SageAttention2: %s: %s", architecture, reason)
    formats = {
        pv: f"[SA-113] the self-test of pv {pv} failed on this GPU: {found}. The kernels use another format for "
        "the product of P and V. Update the driver and the pack, and report it if that does not help"
        for pv, found in failed.items()
        if pv is not None
    }
    for found in formats.values():
        log.warning("SageAttention2: %s: %s", architecture, found)
    return TestResult(reason, calls, time.perf_counter() - started, formats)


def _optional_format(variant: Variant) -> str | None:
    """The format of P and V in whose place another can serve, or None."""
    return None if variant.pv in (AUTO, *FLOAT_PV) else variant.pv


def _run(architecture: str, index: int, variants: Sequence[Variant]) -> tuple[int, str | None]:
    """How many calls of `variants` were compared, and what was wrong with them."""
    try:
        with torch.cuda.device(index):
            found = self_test_run.run(loader.load(architecture), torch.device("cuda", index), variants)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return 0, error_text(error)
    return found.calls, found.reason


def _key(architecture: str, index: int, variants: Sequence[Variant]) -> dict[str, str] | None:
    """What a passed test holds for; None when the driver does not tell its version: then nothing is remembered."""
    gpu = machine.gpu_key(index)
    if gpu is None:
        return None
    return {
        "test": f"kernel module, cases {CASES_VERSION}",
        **gpu,
        "architecture": architecture,
        "module": loader.fingerprint(architecture),
        "variants": "; ".join(variant.text for variant in variants),
    }
