"""Quantized attentions of other packages, where they are installed: comfy-kitchen's INT8 and SageAttention.

They quantize in their own ways, so they serve a call only where its routing allows that (`Routing.peers`). A package is
imported when the first such call is planned. A peer that raises is disabled in this process, and the log says so.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..autotune import store
from ..call.signature import CallSignature
from ..call.tensors import NO_TENSORS, OptionalTensors, mask_4d
from ..options import MODES
from ..system.memory import is_out_of_memory
from ..text import error_text
from . import constraints as rules
from .base import Attend, Backend, BoundCall, Constraint, Result, flag_nonfinite
from .exact import closed_rows

log = logging.getLogger("comfy_sage2")

_OURS = Path(__file__).resolve().parents[1]  # its own module `sageattention` is not a peer
_OUR_VERSION = "+comfy.sage2"  # the suffix of that module's version

# Takes q, k, v, the mask (4-D or None) and the call's signature. Another package's functions are not typed.
Function = Callable[[Any, Any, Any, Any, CallSignature], Any]


@dataclass(frozen=True)
class PeerFunctions:
    """A package's functions. `attend` returns the output, `prequantize`, if any, a function that returns it later.

    The tensors are in the layout of the call where that is one of `layouts`, "BHND" and "BNHD", else (B, H, N, D).
    """

    attend: Function
    layouts: tuple[str, ...]
    prequantize: Function | None = None


class UnsupportedHere(RuntimeError):
    """A package works, and says that it has no kernels for this machine."""


class Peer(Backend):
    """The attention of another package. It replaces a mode with any of the mode's options."""

    accelerated = True
    is_peer = True

    def __init__(
        self, name: str, distribution: str, load: Callable[[], PeerFunctions], *constraints: Constraint
    ) -> None:
        """load: imports the package. If it raises, that error is why the peer cannot be used."""
        self.name = name
        self.constraints = (rules.ON_GPU, *rules.dense(*MODES), rules.option_is("return_lse", False), *constraints)
        self._distribution = distribution
        self._load = load
        self._lock = threading.Lock()
        self._functions: PeerFunctions | None = None
        self._failure: str | None = None
        self.has_ended_steps = False  # whether any call in two steps has finished

    @property
    def version(self) -> str | None:
        """The version in the metadata of the installed package; None if none is installed."""
        version = _installed_version(self._distribution)
        return None if version is None or version.endswith(_OUR_VERSION) else version

    def availability(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if self.version is None:
            return f"[SA-115] {self._distribution} is not installed"
        with self._lock:
            if self._functions is None and self._failure is None:
                try:
                    self._functions = self._load()
                except UnsupportedHere as error:  # nothing is broken, so the log need not tell
                    self._failure = self._reason(f"cannot be used: {error_text(error)}")
                except Exception as error:  # whatever another package raises at import
                    self._fail(f"cannot be used: {error_text(error)}")
        return self._failure

    def failed(self, error: Exception) -> RuntimeError:
        """Disable this peer in this process, because a call raised `error`. Returns the error to raise instead."""
        with self._lock:
            if self._failure is None:  # a call that was planned before the failure may raise again
                store.changed()  # so that the calls of its plans are planned again
                self._fail(f"failed, and is not used until the restart: {type(error).__name__}: {error_text(error)}")
        return RuntimeError(self._failure)

    def _fail(self, why: str) -> None:
        self._failure = self._reason(why)
        log.warning("SageAttention2: %s", self._failure)

    def _reason(self, why: str) -> str:
        return f"[SA-115] {self._distribution} {self.version} {why}"

    def bind(self, signature: CallSignature) -> BoundCall:
        assert self._functions is not None  # by `availability`
        return PeerCall(self, self._functions, signature)


class PeerCall(BoundCall):
    def __init__(self, peer: Peer, functions: PeerFunctions, signature: CallSignature) -> None:
        self._peer = peer
        self._functions = functions
        self._signature = signature
        self._layout = signature.options.layout
        self._transposes = self._layout not in functions.layouts

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        return self._finished(self._called(self._functions.attend, q, k, v, optional), optional)

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Attend | None:
        if self._functions.prequantize is None:
            return None
        attend = self._called(self._functions.prequantize, q, k, v, optional)
        if not self._peer.has_ended_steps:
            # An error in the second step, without q, k and v, would end the sampling: the first call runs both at once.
            out = self._guarded(attend)
            self._peer.has_ended_steps = True
            return lambda: self._finished(out, optional)
        return lambda: self._finished(self._guarded(attend), optional)

    def _called(
        self, function: Function, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors
    ) -> Any:
        if self._transposes:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._guarded(function, q, k, v, mask_4d(optional.attn_mask), self._signature)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise self._peer.failed(error) from error

    def _finished(self, out: Any, optional: OptionalTensors) -> Result:
        result: Result = self._guarded(self._checked, out, optional)
        return result

    def _checked(self, out: Any, optional: OptionalTensors) -> Result:
        out = out.transpose(1, 2) if self._transposes else out
        shape, dtype = self._signature.q.shape, self._signature.dtype
        if (out.shape, out.dtype) != (shape, dtype):
            raise ValueError(
                f"its output must be {dtype} of shape {tuple(shape)}, got {out.dtype} of shape {tuple(out.shape)}"
            )
        mask = mask_4d(optional.attn_mask)
        if mask is not None:
            closed = closed_rows(mask)[..., None]
            out = out.masked_fill(closed if self._layout == "BHND" else closed.transpose(1, 2), 0.0)
        if optional.nonfinite is not None:
            flag_nonfinite(out, optional.nonfinite)
        return out.contiguous(), None


def _kitchen() -> PeerFunctions:
    import comfy_kitchen as kitchen

    if not kitchen.int8_attention_is_available():
        raise UnsupportedHere("[SA-103] comfy-kitchen has no INT8 attention on this machine")

    def attend(q: Any, k: Any, v: Any, mask: Any, call: CallSignature) -> Any:
        return kitchen.int8_attention(q, k, v, scale=call.options.scale, attn_mask=mask)

    def prequantize(q: Any, k: Any, v: Any, mask: Any, call: CallSignature) -> Any:
        quantized = kitchen.prequantize_int8_attention(q, k, v, scale=call.options.scale, attn_mask=mask)
        return partial(kitchen.int8_attention_from_prequantized, quantized)

    has_steps = hasattr(kitchen, "prequantize_int8_attention")
    return PeerFunctions(attend, ("BHND",), prequantize if has_steps else None)


def _sage_attention() -> PeerFunctions:
    import sageattention as sage

    if _OURS in Path(str(sage.__file__)).resolve().parents:
        raise RuntimeError("[SA-115] Python finds this pack's module of that name, not the package")
    writes_to_k = _sage_is_version_1()  # it subtracts the mean of k in place

    def attend(q: Any, k: Any, v: Any, mask: Any, call: CallSignature) -> Any:
        layout = "HND" if call.layout == "BHND" else "NHD"
        k = k.clone() if writes_to_k else k
        return sage.sageattn(q, k, v, tensor_layout=layout, is_causal=call.options.is_causal, sm_scale=call.scale)

    return PeerFunctions(attend, ("BHND", "BNHD"))


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except (ImportError, OSError, ValueError, KeyError):  # it is not installed, or its metadata are damaged
        return None


def _sage_is_version_1() -> bool:
    return (_installed_version("sageattention") or "").startswith("1.")


PEERS = (
    Peer(
        "comfy-kitchen",
        "comfy-kitchen",
        _kitchen,
        rules.capability_from(7, 5),
        rules.IN_16_BITS,
        rules.option_is("is_causal", False),
        rules.requires(
            lambda call: call.mask_shape is None or call.mask_shape[1:3] == (1, 1),
            "[SA-206] it was not timed with masks that differ between heads or queries",
        ),
    ),
    Peer(
        "sageattention",
        "sageattention",
        _sage_attention,
        rules.capability_from(8, 0),
        rules.IN_16_BITS,
        rules.requires(
            lambda call: call.head_dim in (64, 128),
            "[SA-206] it takes head_dim 64 or 128, got {call.head_dim}",
        ),
        rules.requires(  # version 1 counts the missing keys of the last block of 64, with a score of 0
            lambda call: call.kv_length % 64 == 0 or not _sage_is_version_1(),
            "[SA-206] its version 1 takes a multiple of 64 keys, got {call.kv_length}",
        ),
        rules.NO_MASK,
        rules.EQUAL_HEADS,
        rules.SQUARE_IF_CAUSAL,
    ),
)
