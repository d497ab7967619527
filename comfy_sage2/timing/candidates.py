"""The attentions that are timed: the accelerated backends, ComfyUI's attention, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import isfinite, nan

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..autotune.accumulators import pv_has_accumulator
from ..autotune.timings import PEER, PLAIN, REFERENCE, ROTATIONS, Candidate, ErrorsOfKinds
from ..backends.base import Result
from ..backends.kernels import KERNELS
from ..backends.peers import PEERS
from ..call.signature import CallSignature, Routing
from ..call.tensors import NO_TENSORS, OptionalTensors
from ..dispatch import registry
from ..dispatch.plan import CallPlan, plan
from ..kernels import loader
from ..kernels.bundled import KernelUnavailable
from ..options import EXACT, GIVEN, MODES, PV_FORMATS, AttentionOptions
from ..reference.exact import exact_attention
from ..system.memory import is_out_of_memory

Run = Callable[[], object]

_LAYOUT = "BNHD"  # most models want the output in it
_OPTIONS = (
    *(
        AttentionOptions(mode, smooth_v, layout=_LAYOUT, pv_accumulator=sums, rotate="on" if rotate else "off", pv=pv)
        for mode, pv, sums, rotate, smooth_v in product(MODES, PV_FORMATS, ("fp32", "fp16"), ROTATIONS, (False, True))
        if pv_has_accumulator(pv, sums)
        and not (mode == "precise" and (smooth_v or pv != "fp16"))  # its V has 16 bits and is not smoothed
    ),
    AttentionOptions(EXACT, layout=_LAYOUT),
)
_FOR_PEERS = AttentionOptions(layout=_LAYOUT, rotate="off")  # peers serve calls in any mode
# Each mode as the reference computes it: candidate, options, name of the backend.
_REFERENCES = tuple((Candidate(REFERENCE, mode), replace(_FOR_PEERS, mode=mode), REFERENCE) for mode in MODES)
_COMFYUI_ORDER = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
_HEADS, _TOKENS = 4, 2048  # of the calls whose errors are measured


def all_candidates() -> list[Candidate]:
    """Every candidate whose times or errors this installation may measure, on any GPU."""
    return [Candidate(PLAIN), *(candidate for candidate, _, _ in (*_backends(), *_REFERENCES))]


def calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> dict[Candidate, Run]:
    """The calls to time, of each candidate that can run q, k and v, (B, H, N, D), and a bool mask (1, 1, 1, Nkv).

    Candidates that rotate are given half of the heads to rotate, if their backend takes rotated heads.
    """
    runs: dict[Candidate, Run] = {Candidate(PLAIN): partial(_plain, q, k, v, mask)}
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    optional = OptionalTensors(mask)
    rotated_heads = torch.arange(q.shape[2], device=q.device, dtype=torch.int32).remainder(2).expand(q.shape[0], -1)
    with_heads = optional._replace(rotated_heads=rotated_heads.contiguous())
    for candidate, planned in _plans(_backends(), q, k, v, optional):
        runs[candidate] = partial(planned.run, q, k, v, optional)
        if candidate.rotate and planned.backend.takes_rotated_heads:  # as in all calls of a layer but a few
            options = replace(planned.options, rotate=GIVEN)
            given = plan(CallSignature.of(q, k, v, options, with_heads, Routing(planned.backend.name)))
            if isinstance(given, CallPlan):
                runs[candidate] = partial(given.run, q, k, v, with_heads)
    return runs


def errors(device: torch.device, head_dim: int) -> dict[Candidate, ErrorsOfKinds]:
    """Relative L2 errors of the candidates that quantize, and of `_REFERENCES` if only packages quantize here.

    Candidates that raise or return NaN are left out.
    """
    errors_of: dict[Candidate, list[float | None]] = {}
    for number, make in enumerate(_INPUTS):
        q, k, v = make(torch.Generator(device).manual_seed(23), head_dim)
        exact, _ = exact_attention(q, k, v, dtype=torch.float32)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        plans = [timed for timed in _plans(_backends(), q, k, v, NO_TENSORS) if timed[0].mode != EXACT]
        if plans and all(candidate.mode == PEER for candidate, _ in plans):
            plans += _plans(_REFERENCES, q, k, v, NO_TENSORS)
        for candidate, planned in plans:
            kind_errors = errors_of.setdefault(candidate, [None] * len(_INPUTS))
            kind_errors[number] = _relative_l2(partial(planned.run, q, k, v), exact)
    return {
        candidate: tuple(kind_errors)
        for candidate, kind_errors in errors_of.items()
        if all(error is None or isfinite(error) for error in kind_errors)
    }


def builds(capability: tuple[int, int]) -> dict[str, str]:
    """Texts that identify the candidates' builds for GPUs of this compute capability; each build has its own."""
    return {
        "module": ", ".join(_build(backend.name) for backend in KERNELS if capability in backend.capabilities),
        "peers": ", ".join(f"{peer.name} {peer.version}" for peer in PEERS if peer.version is not None),
    }


def _backends() -> Iterator[tuple[Candidate, AttentionOptions, str]]:
    """Each candidate except ComfyUI's attention, with its options and the name of its backend."""
    for options in _OPTIONS:
        for backend in registry.backends(options.mode):
            if backend.accelerated:
                yield Candidate.of(backend.name, options), options, backend.name
    for peer in PEERS:
        yield Candidate(peer.name, PEER), _FOR_PEERS, peer.name


def _plans(
    candidates: Iterable[tuple[Candidate, AttentionOptions, str]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
) -> Iterator[tuple[Candidate, CallPlan]]:
    """Those of the candidates that can run the call, with their plans for q, k and v, (B, N, H, D)."""
    for candidate, options, name in candidates:
        planned = plan(CallSignature.of(q, k, v, options, optional, Routing(name)))
        if isinstance(planned, CallPlan):
            yield candidate, planned


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Call torch's attention as ComfyUI does, with its order of preference."""
    with sdpa_kernel(_COMFYUI_ORDER, set_priority=True):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def _build(architecture: str) -> str:
    try:
        return loader.fingerprint(architecture)
    except KernelUnavailable:
        return "none"


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _gaussian(generator: torch.Generator, head_dim: int, keys: int | None = None) -> _Tensors:
    """q, k and v (1, H, N, D) for `errors`; there are as many keys as queries unless `keys` is given."""
    sizes = [(1, _HEADS, tokens, head_dim) for tokens in (_TOKENS, keys or _TOKENS, keys or _TOKENS)]
    q, k, v = (torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16) for size in sizes)
    return q, k, v


def _loud_channels(generator: torch.Generator, head_dim: int) -> _Tensors:
    """A few channels of Q and K and all channels of V lie far from zero, as in the paper's models (section 3.1)."""
    q, k, v = _gaussian(generator, head_dim)
    q[..., :6] += 10
    k[..., 2:8:2] += 20
    k[..., 3:8:2] -= 20
    return q, k, v + 8.5


def _loud_tokens(generator: torch.Generator, head_dim: int) -> _Tensors:
    """A few tokens of K and V are large, as attention sinks are."""
    q, k, v = _gaussian(generator, head_dim)
    k[:, :, ::512] *= 4
    v[:, :, ::512] *= 20
    return q, k, v


_INPUTS: tuple[Callable[[torch.Generator, int], _Tensors], ...] = (
    _gaussian,
    _loud_channels,
    _loud_tokens,
    # One key more than whole blocks hold: SageAttention 1 counts the missing keys of the last block, with a score of 0.
    partial(_gaussian, keys=129),
)


def _relative_l2(run: Callable[[], Result], exact: torch.Tensor) -> float:
    """NaN for a call that raises."""
    try:
        out, _ = run()
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return nan
    return float((out.transpose(1, 2).to(exact.dtype) - exact).norm() / exact.norm())
