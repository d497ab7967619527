"""Copies small tensors from a device to the host and back while both keep running."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

import torch

from .stream import current_stream

_HOST = torch.device("cpu")  # always explicit, because a pack may change torch's default device


class Readback:
    """Copies a small tensor to the host. A reader waits only for the copy, not for what was enqueued after it.

    The constructor may allocate pinned memory, which takes time: make what every pass needs before the passes.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.empty(count, dtype=dtype, device=_HOST, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None

    def start(self, values: torch.Tensor) -> None:
        """Copy `values`, (count,) or a single one, as they are at this point of their device's current stream."""
        self._values.copy_(values, non_blocking=values.is_cuda)
        self._copied = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Whether `values` would return the last copy without waiting."""
        return self._copied is None or self._copied.query()

    def values(self, count: int | None = None) -> list[float]:
        """Wait for the last copy and return its first `count` values, or all of them."""
        # A capture of a CUDA graph must not wait, and need not: the device was synchronized before it began.
        if self._copied is not None and not torch.cuda.is_current_stream_capturing():
            self._copied.synchronize()
        copied: list[float] = self._values[:count].tolist()
        return copied


def copied(values: torch.Tensor) -> Readback:
    """Begin to copy values (count,) to the host."""
    copy = Readback(values.numel(), values.dtype, values.device)
    copy.start(values)
    return copy


def uploaded(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` of a tensor on the host, made without waiting for the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def constant(device: torch.device, make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor:
    """The result of `make`, a function of a module, for these arguments, on `device`; do not write to it.

    It is uploaded once for each stream. A graph that is being captured gets its own copy.
    """
    if device.type != "cuda":
        return _make_on_host(make, arguments).to(device)
    if torch.cuda.is_current_stream_capturing():
        return uploaded(_make_on_host(make, arguments), device)
    return _constant(device, current_stream(device), make, arguments)


@lru_cache(maxsize=64)
def _constant(
    device: torch.device, stream: int, make: Callable[..., torch.Tensor], arguments: tuple[Hashable, ...]
) -> torch.Tensor:
    return uploaded(_make_on_host(make, arguments), device)


def _make_on_host(make: Callable[..., torch.Tensor], arguments: tuple[Hashable, ...]) -> torch.Tensor:
    with _HOST:
        return make(*arguments)
