"""Finding out the times of a GPU: remembered from an earlier process, or measured now.

Nothing else may run on the GPU meanwhile: the nodes ask before a pass of the model, never within one.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from .. import machine
from . import store
from .cache_file import user_cache_file
from .cost_model import TunedChoices
from .rounds import Clock, GpuClock, time_rounds
from .timings import ORDINARY, Candidate, Errors, ErrorsOfKinds, Rounds, Times, Work

log = logging.getLogger("comfy_sage2")

# Rises when what is timed changes: the calls, or how.
FORMAT_VERSION = 6
_OLDER_KEY = ("gpu", "capability", "driver", "torch", "module")  # what the keys of formats 1 to 5 had beside the format

# Of it all. The first calls, which load kernels and build cuDNN's plans, can take all of it and more (0.9 s on an H200,
# nearly all of it in cuDNN); the fewest rounds then end later.
_SECONDS = 0.4
_FREE_BYTES = 1 << 30  # with less the model needs it
_HEAD_DIMS = (64, 128)
# Heads, in those of `heads_for`, and tokens of q and of k: calls that a GPU's start-up dominates, short ones on a whole
# GPU and where quantization begins to pay, one of the products, one of the quantization, and one of few keys, such as
# those of a prompt. The q of the long ones, like that of a video, is larger than a GPU's cache, from which it would be
# read in no time.
_Calls = tuple[tuple[int, int, int], ...]
_CALLS: _Calls = (
    (2, 1024, 1024), (8, 1024, 1024), (2, 2048, 2048), (2, 4096, 4096), (1, 32768, 512), (2, 4096, 77),
)  # fmt: skip
# With the heads first in memory and with masks it counts more what exact attentions do before and after.
_HEADS_FIRST: _Calls = ((2, 1024, 1024), (2, 4096, 4096), (1, 32768, 512))
_MASKED: _Calls = ((2, 512, 512), (2, 1024, 1024), (2, 4096, 4096), (1, 32768, 512), (2, 4096, 256))
_KINDS: tuple[tuple[dict[str, bool], _Calls], ...] = (
    ({}, _CALLS), ({"heads_first": True}, _HEADS_FIRST), ({"hides_keys": True}, _MASKED),
)  # fmt: skip
_HIDDEN = 77  # keys at the end, where a mask hides some: a multiple of no block
_DTYPE = torch.bfloat16
_HEADS = ((96, 16), (48, 8), (0, 4))  # from so many multiprocessors on
# On an H200 flash attention took half of the other's time or less in every call that was tried; loading both costs the
# user's time.
_FLASH, _EFFICIENT = Candidate("torch-flash"), Candidate("torch-efficient")

Run = Callable[[], object]


class Candidates(Protocol):
    """The attentions that are timed; whoever knows the backends hands them in."""

    def calls(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> Mapping[Candidate, Run]:
        """Each candidate that can run attention on q, k and v, (B, H, N, D), ready to be timed.

        mask: bool (1, 1, 1, Nkv), or None.
        """

    def errors(self, device: torch.device, head_dim: int) -> Mapping[Candidate, ErrorsOfKinds]:
        """The relative L2 of each that quantizes, as `timings.Errors` has it."""

    def builds(self, capability: tuple[int, int]) -> Mapping[str, str]:
        """Names the candidates' builds for GPUs of this compute capability: another build, another name."""


_lock = threading.RLock()
_tried: set[int] = set()


def prepare(device: torch.device, candidates: Candidates) -> None:
    """Find out the times of `candidates` on `device`, once in this process; on failure the shipped defaults stay."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _tried or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if index in _tried:
            return
        try:
            key = _key(index, candidates)
            times = _kept(key)
            if times is None:
                _name_older_times(key)
                times = _measured(index, key, candidates)
            if times is not None:
                store.keep(index, TunedChoices(times))
        finally:
            _tried.add(index)  # last: until then other threads wait, and leave the GPU alone


def remembered(index: int, candidates: Candidates) -> TunedChoices | None:
    """The choices for GPU `index` from an earlier measurement, or None."""
    times = _kept(_key(index, candidates))
    return None if times is None else TunedChoices(times)


def _kept(key: dict[str, str] | None) -> Times | None:
    kept = None if key is None else user_cache_file().get(key)
    return None if kept is None else Times.read(kept)


def _name_older_times(key: dict[str, str] | None) -> None:
    """Say in the log where an earlier version of this pack has kept times of this GPU: they are not used."""
    if key is None:
        return
    common = {name: value for name, value in key.items() if name in _OLDER_KEY}
    file = user_cache_file()
    if any(file.get({**common, "test": _test(version)}) is not None for version in range(1, FORMAT_VERSION)):
        log.info(
            "SageAttention2: the times that an earlier version kept say nothing of rotation, masks and other packages; "
            "GPU %s is measured again",
            key["gpu"],
        )


def measure_now(index: int, candidates: Candidates) -> TunedChoices:
    """Measure `candidates` on GPU `index` whatever is remembered of it.

    RuntimeError when that is not possible now, and why.
    """
    with _lock:
        _tried.add(index)
        if torch.cuda.mem_get_info(index)[0] < _FREE_BYTES:
            raise RuntimeError("[SA-114] less than 1 GiB of the GPU's memory is free: nothing was measured")
        times = _measured(index, _key(index, candidates), candidates)
        if times is None:
            raise RuntimeError("[SA-114] the times varied too much: another process may be using the GPU")
        choices = TunedChoices(times)
        store.keep(index, choices)
        return choices


def _measured(index: int, key: dict[str, str] | None, candidates: Candidates) -> Times | None:
    """The times of GPU `index`, remembered under `key`; None without the memory, or when they cannot be trusted."""
    if torch.cuda.mem_get_info(index)[0] < _FREE_BYTES:
        return None
    try:
        with torch.cuda.device(index), torch.no_grad():
            times = Times.of(rounds_on(index, GpuClock(), candidates), errors_on(index, candidates))
    except RuntimeError as error:  # out of memory is one too
        log.debug("SageAttention2: GPU %d was not measured: %s", index, error)
        return None
    if times is not None and key is not None:
        user_cache_file().put(key, times.document())
    return times


def rounds_on(index: int, clock: Clock, candidates: Candidates) -> Rounds:
    """Seconds of `candidates` on GPU `index`, which must be the current device."""
    deadline = clock.now() + _SECONDS
    heads = heads_for(torch.cuda.get_device_properties(index).multi_processor_count)
    inputs = _inputs(torch.device("cuda", index), heads)
    runs: dict[tuple[Candidate, Work], Run] = {}
    for work in works_for(heads):
        found = dict(candidates.calls(*inputs(work)))
        if work.kind != ORDINARY:  # V's means cost what they cost, and little
            found = {candidate: run for candidate, run in found.items() if not candidate.smooth_v}
        if _FLASH in found:
            found.pop(_EFFICIENT, None)
        runs |= {(candidate, work): run for candidate, run in found.items()}
    return time_rounds(runs, clock, random.Random(), deadline)


def errors_on(index: int, candidates: Candidates) -> Errors:
    """Errors of `candidates` on GPU `index`, which must be the current device."""
    device = torch.device("cuda", index)
    return {
        (candidate, head_dim): found
        for head_dim in _HEAD_DIMS
        for candidate, found in candidates.errors(device, head_dim).items()
    }


def works_for(heads: int) -> list[Work]:
    """The calls that are timed on a GPU of `heads_for`."""
    return [
        Work(share * heads, queries, keys, head_dim, **kind)
        for head_dim, (kind, calls) in itertools.product(_HEAD_DIMS, _KINDS)
        for share, queries, keys in calls
    ]


def heads_for(multiprocessors: int) -> int:
    """The fewest heads of a call, so that small GPUs are done as soon as large ones."""
    return next(heads for least, heads in _HEADS if multiprocessors >= least)


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _inputs(device: torch.device, heads: int) -> Callable[[Work], _Tensors]:
    """A function from a call to its q, k and v, (1, its heads, tokens, head_dim), and mask as in `Candidates.calls`.

    All calls read the same memory.
    """
    generator = torch.Generator(device).manual_seed(17)

    def random_values(rows: int) -> torch.Tensor:
        size = rows * heads * max(_HEAD_DIMS)
        return torch.randn(size, dtype=_DTYPE, device=device, generator=generator)

    most_queries = max(share * queries for share, queries, _ in _CALLS)
    most_keys = max(share * keys for share, _, keys in _CALLS)
    q, k, v = map(random_values, (most_queries, most_keys, most_keys))

    def of(work: Work) -> _Tensors:
        def view(values: torch.Tensor, tokens: int) -> torch.Tensor:
            if work.heads_first:
                shape = (1, work.heads, tokens, work.head_dim)
                return values[: math.prod(shape)].view(shape)
            shape = (1, tokens, work.heads, work.head_dim)
            return values[: math.prod(shape)].view(shape).transpose(1, 2)

        mask = None
        if work.hides_keys:
            mask = torch.arange(work.kv_length, device=device).view(1, 1, 1, -1) < work.kv_length - _HIDDEN
        return view(q, work.q_length), view(k, work.kv_length), view(v, work.kv_length), mask

    return of


def _test(version: int) -> str:
    return f"times, format {version}"


def _key(index: int, candidates: Candidates) -> dict[str, str] | None:
    """What times hold for; None when the driver does not tell its version: then nothing is remembered."""
    gpu = machine.gpu_key(index)
    if gpu is None:
        return None
    builds = candidates.builds(torch.cuda.get_device_capability(index))
    return {"test": _test(FORMAT_VERSION), **gpu, "torch": torch.__version__, **builds}
