"""The times of a GPU: remembered from an earlier process, or measured now.

A measurement takes about half a second. Each candidate (`candidates`) attends to random q, k and v in some thirty calls
of two head_dims, in rounds (`rounds`), and its errors against exact attention are measured. `autotune.cache_file` keeps
the result for this GPU, driver, torch, builds of the kernels and versions of other packages.

Nothing else may run on the GPU meanwhile: the nodes measure before a pass of the model, never within one.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from statistics import median

import torch

from ..autotune import store
from ..autotune.cache_file import user_cache_file
from ..autotune.cost_model import TunedChoices
from ..autotune.timings import ORDINARY, Candidate, Errors, Rounds, Times, Work
from ..system import machine
from . import candidates
from .candidates import Run
from .rounds import GpuClock, Progress, time_rounds, unseen

log = logging.getLogger("comfy_sage2")

FORMAT_VERSION = 2  # raise it when the timed calls or the way of timing them change

# Time budget for the rounds. The first calls, which load kernels and build cuDNN's plans, may exceed it (0.9 s on an
# H200, nearly all of it in cuDNN); the minimum number of rounds then ends later.
_SECONDS = 0.4
_FREE_BYTES = 1 << 30  # if less is free, the model needs it
_HEAD_DIMS = (64, 128)
# Heads, in multiples of `_heads_of`, and tokens of q and of k: a call whose time is mostly the launch, short ones that
# fill the GPU and at which quantization begins to pay, one of mostly the products, one of mostly the quantization, and
# one with few keys, such as those of a prompt. As in a video, the q of the long ones is larger than a GPU's cache, from
# which it would be read in no time.
_Calls = tuple[tuple[int, int, int], ...]
_CALLS: _Calls = (
    (2, 1024, 1024), (8, 1024, 1024), (2, 2048, 2048), (2, 4096, 4096), (1, 32768, 512), (2, 4096, 77),
)  # fmt: skip
# With heads first in memory, and with masks, what exact attentions do before and after takes a larger part of the time.
_HEADS_FIRST: _Calls = ((2, 1024, 1024), (2, 4096, 4096), (1, 32768, 512))
_MASKED: _Calls = ((2, 512, 512), (2, 1024, 1024), (2, 4096, 4096), (1, 32768, 512), (2, 4096, 256))
_KINDS: tuple[tuple[dict[str, bool], _Calls], ...] = (
    ({}, _CALLS), ({"heads_first": True}, _HEADS_FIRST), ({"hides_keys": True}, _MASKED),
)  # fmt: skip
_HIDDEN = 77  # keys that a mask hides, at the end: not a multiple of any block
# (least multiprocessors, heads): small GPUs have fewer heads, and finish as soon as large ones.
_HEADS = ((96, 16), (48, 8), (0, 4))
# Where flash attention is timed, efficient attention is not: loading it costs the user time, and on an H200 it took at
# least twice as long in every call that was tried.
_FLASH, _EFFICIENT = Candidate("torch-flash"), Candidate("torch-efficient")

_lock = threading.RLock()
_tried: set[int] = set()


def ensure_timed(device: torch.device, progress: Progress = unseen) -> None:
    """Load or measure the times of `device`, once in this process; on failure the shipped defaults stay."""
    if device.type != "cuda":  # AMD's GPUs are "cuda" too
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _tried or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if index in _tried:
            return
        try:
            store.keep(index, remembered(index) or _measured(index, progress))
        except RuntimeError as error:
            log.debug("SageAttention2: GPU %d was not measured: %s", index, error)
        finally:
            _tried.add(index)  # last: until then other threads wait, and leave the GPU alone


def remembered(index: int) -> TunedChoices | None:
    document = user_cache_file().get(_key(index))
    if document is None:
        return None
    times = Times.read(document, candidates.all_candidates(), works_for(_heads_of(index)))
    return None if times is None else TunedChoices(times)


def measure_now(index: int) -> TunedChoices:
    """Measure GPU `index` even if its times are remembered; RuntimeError says why that is impossible now."""
    with _lock:
        _tried.add(index)
        choices = _measured(index)
        store.keep(index, choices)
        return choices


def _measured(index: int, progress: Progress = unseen) -> TunedChoices:
    """Measure and remember. RuntimeError if memory is short or the times cannot be trusted."""
    if torch.cuda.mem_get_info(index)[0] < _FREE_BYTES:
        raise RuntimeError("[SA-114] less than 1 GiB of the GPU's memory is free: nothing was measured")
    with torch.cuda.device(index), torch.no_grad():
        rounds, host = rounds_on(index, GpuClock(progress))
        times = Times.of(rounds, errors_on(index), host, _multiprocessors(index))
    if times is None:
        raise RuntimeError("[SA-114] the times varied too much: another process may be using the GPU")
    user_cache_file().put(_key(index), times.document())
    return TunedChoices(times)


def rounds_on(index: int, clock: GpuClock) -> tuple[Rounds, dict[Candidate, float]]:
    deadline = clock.now() + _SECONDS
    heads = _heads_of(index)
    inputs = Inputs(torch.device("cuda", index), heads)
    runs: dict[tuple[Candidate, Work], Run] = {}
    for work in works_for(heads):
        calls = candidates.calls(*inputs.of(work))
        if work.kind != ORDINARY:  # smoothing V costs little, and the same in every kind
            calls = {candidate: run for candidate, run in calls.items() if not candidate.smooth_v}
        if _FLASH in calls:
            calls.pop(_EFFICIENT, None)
        runs |= {(candidate, work): run for candidate, run in calls.items()}
    rounds = time_rounds(runs, clock, random.Random(), deadline)
    host: dict[Candidate, list[float]] = {}
    for candidate, work in rounds:
        host.setdefault(candidate, []).append(min(clock.host[runs[candidate, work]], default=0.0))
    return rounds, {candidate: median(seconds) for candidate, seconds in host.items() if min(seconds) > 0.0}


def errors_on(index: int) -> Errors:
    """Errors of the candidates that quantize, on GPU `index`, which must be the current device."""
    device = torch.device("cuda", index)
    return {
        (candidate, head_dim): errors
        for head_dim in _HEAD_DIMS
        for candidate, errors in candidates.errors(device, head_dim).items()
    }


def works_for(heads: int) -> list[Work]:
    """The calls that are timed on a GPU; `heads` is the number of heads of the smallest ones."""
    return [
        Work(share * heads, queries, keys, head_dim, **kind)
        for head_dim, (kind, calls) in itertools.product(_HEAD_DIMS, _KINDS)
        for share, queries, keys in calls
    ]


def _heads_of(index: int) -> int:
    return next(heads for least, heads in _HEADS if _multiprocessors(index) >= least)


def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class Inputs:
    """Random q, k and v, and masks, for the calls of `works_for`. All calls read the same memory."""

    def __init__(self, device: torch.device, heads: int) -> None:
        generator = torch.Generator(device).manual_seed(17)

        def random_values(rows: int) -> torch.Tensor:
            size = rows * heads * max(_HEAD_DIMS)
            return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)

        queries = max(share * queries for share, queries, _ in _CALLS)
        keys = max(share * keys for share, _, keys in _CALLS)
        self._q, self._k, self._v = map(random_values, (queries, keys, keys))

    def of(self, work: Work) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The q, k and v (1, heads, tokens, head_dim) of a call, in its memory order, and its mask."""

        def view(values: torch.Tensor, tokens: int) -> torch.Tensor:
            shape = (work.heads, tokens) if work.heads_first else (tokens, work.heads)
            part = values[: math.prod(shape) * work.head_dim].view(1, *shape, work.head_dim)
            return part if work.heads_first else part.transpose(1, 2)

        mask = None
        if work.hides_keys:
            mask = torch.arange(work.kv_length, device=self._q.device).view(1, 1, 1, -1) < work.kv_length - _HIDDEN
        return view(self._q, work.q_length), view(self._k, work.kv_length), view(self._v, work.kv_length), mask


def _key(index: int) -> dict[str, str] | None:
    """What the times depend on; None if the driver does not tell its version: then nothing is remembered."""
    driver, gpu = machine.loaded_driver(), torch.cuda.get_device_properties(index)
    if driver is None:
        return None
    gpu_facts = {"gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "driver": driver}
    gpu_facts["multiprocessors"] = str(gpu.multi_processor_count)  # cards of one name differ, such as the RTX 3080
    builds = candidates.builds(torch.cuda.get_device_capability(index))
    return {"test": f"times, format {FORMAT_VERSION}", **gpu_facts, "torch": torch.__version__, **builds}
