"""The kernel backends as the tests run them, each on any GPU that its module was built for, and their error bounds.

    python -m tools.build_kernels --arch sm90
    python -m tools.build_kernels --arch sm89 --target sm_90    # likewise sm120 and sm80: mma.sync kernels on Hopper
    PYTHONPATH=build/kernels pytest tests/gpu

Without a development build on the path, the bundled wheels are tested. Compute capability 9.0 emulates mma.sync's INT4
product bit by bit and keeps full FP32 accumulators in its FP8 product; accumulators of wgmma have 13 mantissa bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_oracle import oracle
from attention_oracle import relative_l1 as relative_l1
from threads import run_in_threads

from comfy_sage2.autotune.accumulators import pv_has_accumulator
from comfy_sage2.backends.base import BoundCall
from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.block_mask import BLOCK_TOKENS, BlockMask
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.kernels import loader
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP32
from comfy_sage2.quantize.groups import ADA, HOPPER_8B, GroupScheme
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions
from tools import kernel_table

_TILES = Path(__file__).resolve().parents[2] / "csrc" / "sm90" / "tiles.h"

# Relative L1 error against float64 on Gaussian inputs, from INT8 or INT4 scores and E4M3 values. "precise": from INT8
# scores at any head_dim; head_dim 128 gives 0.0103.
EXACT_BOUND = {"8b": 0.06, "4b": 0.25, "precise": 0.03}
# Against the reference with the same groups, which differs only in rounding.
REFERENCE_BOUND = 2e-3
# With few rows of output, a single P that rounds to the other E4M3 number shows.
REFERENCE_BOUND_OF_FEW_ROWS, FEW_ROWS = 8e-3, 512
# For self-attention with a padding mask on Hopper. Its kernels begin with the last visible key, not with the last key,
# so the first two of 9 steps round P by other maxima: 0.0038, measured by a reference in that order.
REFERENCE_BOUND_OF_PADDING = 8e-3
# With P and the output in bf16.
REFERENCE_BOUND_OF_BF16 = 5e-3
# Bounds for one row and one channel, whose error a sum over the whole tensor hides: a row in place of another
# differs by 1.4. The reference itself differs by up to 0.17 in a row for inputs that differ by 1e-5, because numbers
# round the other way. When V of an early key rounds to the next E4M3 number, it changes all rows of a causal call that
# see few keys: by up to 0.051 in one of 250,000 channels of 100 rows.
WORST_ROW, WORST_CHANNEL, LEAST_ROWS, LEAST_CHANNELS = 0.3, 0.1, 64, 16
# The LSE of a row with few keys moves this much when one P rounds to the next E4M3 number.
LSE_BOUND = 0.06


def backend(name: str) -> KernelBackend:
    """The backend `name`, allowed on this GPU. Skips the test, with the reason, if its module was not built for it."""
    reason = loader.reason_unavailable(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    major, minor = torch.cuda.get_device_capability()
    target = loader.load(name).target
    if target.removesuffix("a") != f"sm_{major}{minor}":
        pytest.skip(f"{name} was built for {target}, this GPU is sm_{major}{minor}")
    return KernelBackend(name, ((major, minor),))


def module_of(name: str) -> ModuleType:
    """The kernel module of `backend(name)`."""
    backend(name)
    return loader.load(name)


# What the modules are built for, as declared: collecting the tests loads no module.
DECLARED = tuple(kernel_table.read(kernels.name) for kernels in KERNELS)

# Parametrize a test by `name` and `mode`, or also by the product P V.
each_mode = pytest.mark.parametrize(
    ("name", "mode"), [(architecture.name, mode) for architecture in DECLARED for mode in architecture.modes]
)
# One module of each family, for tests of what all modules of a family share.
each_family = pytest.mark.parametrize(
    "name", [architecture.name for architecture in DECLARED if architecture.name in ("sm90", "sm80")]
)
each_product = pytest.mark.parametrize(
    ("name", "mode", "accumulator", "pv"),
    [
        (architecture.name, mode, accumulator, pv)
        for architecture in DECLARED
        for mode in architecture.modes
        for pv in (("fp16",) if mode == "precise" else architecture.pv_formats)
        for accumulator in architecture.pv_accumulators
        if pv_has_accumulator(pv, accumulator)
    ],
)
# For tests that other kernels of the same source would only repeat.
each_kernel = pytest.mark.parametrize(
    ("name", "mode"),
    [
        (architecture.name, mode)
        for architecture in DECLARED
        if architecture.name in ("sm90", "sm89")
        for mode in architecture.modes
    ],
)


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """Fill new tensors with NaN, and the workspace with bytes of 255, to show values that a kernel forgets to write."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def options_of(*, rotate: str | bool = False, **choices: Any) -> AttentionOptions:
    """Options with `rotate` off unless a test sets it: whether a head gains by it may depend on rounding."""
    if isinstance(rotate, bool):
        rotate = "on" if rotate else "off"
    return AttentionOptions(rotate=rotate, **choices)


def bound(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors = NO_TENSORS,
    **choices: Any,
) -> BoundCall:
    """Bind calls like this one to `backend(name)`, each time anew, without a plan from a cache."""
    chosen = backend(name)
    signature = CallSignature.of(q, k, v, options_of(**choices), optional)
    reason = chosen.reason_against(signature)
    assert reason is None, reason
    return chosen.bind(chosen.settled(signature))


def run(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    rotated_heads: torch.Tensor | None = None,
    **choices: Any,
) -> tuple[torch.Tensor, Any]:
    """Run one call: tensors in the layout of `choices`, a 4-D mask, lists. Returns out and lse as `BoundCall.run`."""
    backend(name)
    if choices.get("mode") == "precise" and q.dtype == torch.float32:
        pytest.skip("mode precise takes tensors of 16 bits")
    optional = OptionalTensors(attn_mask, block_mask, nonfinite, None, rotated_heads)
    call = bound(name, q, k, v, optional, **choices)
    with _poisoned_allocations():
        return call.run(q, k, v, optional)


def assert_equal_in_threads(compute: Callable[[int], torch.Tensor]) -> None:
    """Assert that `compute(0)` and `compute(1)` give the same result in ten calls each, in two threads and streams."""
    expected = [compute(index) for index in range(2)]
    torch.cuda.synchronize()
    equal = [False, False]

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [compute(index) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        equal[index] = all(torch.equal(result, expected[index]) for result in results)

    run_in_threads([partial(work, index) for index in range(2)])
    assert equal == [True, True]


def groups_of(name: str, mode: str) -> GroupScheme:
    """The tokens that share a scale in these kernels."""
    return HOPPER_8B if name == "sm90" and mode != "4b" else ADA


def reference(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    **choices: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the reference with the numerics of these kernels."""
    call = options_of(**choices)
    same_for_queries = attn_mask is None or attn_mask.shape[2] == 1
    plain = call.mode == "8b" and same_for_queries and block_mask is None and not call.is_causal
    options = numerics(name, q, call, kv_length=k.shape[2], plain=plain)
    active = None if block_mask is None else BlockMask(block_mask).to_dense()
    masks: dict[str, Any] = {"is_causal": call.is_causal, "attn_mask": attn_mask, "active_blocks": active}
    return reference_attention(q, k, v, options, scale=call.scale, **masks)


def numerics(name: str, q: torch.Tensor, call: AttentionOptions, *, kv_length: int, plain: bool) -> ReferenceOptions:
    """The numerics of these kernels: groups, steps and their order, the sum of rounded P, the accumulator.

    plain: as for `_hopper_tile`.
    """
    call = settled(name, call)
    options = ReferenceOptions.of(call, groups=groups_of(name, call.mode), dtype=q.dtype)
    if call.mode == "precise" and name != "sm90":
        options = replace(options, p_maximum=448.0)
    options = replace(options, diagonal_early=True)
    if name == "sm90":
        options = replace(options, keys_per_step=_hopper_tile(q.shape[3], kv_length, plain), last_keys_first=True)
    elif call.pv_accumulator == "fp32" and torch.cuda.get_device_capability() == (9, 0):
        options = replace(options, accumulator=ACCUMULATE_FP32)
    return options


def settled(name: str, call: AttentionOptions) -> AttentionOptions:
    """`call` with the format of P and V that these kernels use for it."""
    return backend(name).settled(CallSignature.minimal(torch.device("cuda"), call)).options


def _hopper_tile(head_dim: int, kv_length: int, plain: bool) -> int:
    """Keys of a step, as in KernelTraits of csrc/sm90/kernel_traits.h and in csrc/sm90/kernel_choice.h.

    plain: 8b without lists, without causal order, and without a mask that has a row for each query.
    """
    tile, wide_tile = _constant("kTileN"), _constant("kWideTileN")
    with_tile, with_wide_tile = (-(-kv_length // keys) * keys for keys in (tile, wide_tile))
    short = kv_length <= _constant("kMaxShortKv") and with_tile < with_wide_tile
    return wide_tile if head_dim <= 64 and plain and not short else tile


@cache
def _constant(name: str) -> int:
    match = re.search(rf"constexpr int {name} = (\d+);", _TILES.read_text())
    assert match is not None, f"{_TILES} does not say {name}"
    return int(match[1])


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`oracle`, restricted to the blocks of a block mask."""
    if block_mask is not None:
        active = BlockMask(block_mask).to_dense().repeat_interleave(BLOCK_TOKENS, 2).repeat_interleave(BLOCK_TOKENS, 3)
        hidden = ~active[:, :, : q.shape[2], : k.shape[2]]
        if attn_mask is None or attn_mask.dtype == torch.bool:
            attn_mask = ~hidden if attn_mask is None else attn_mask & ~hidden
        else:
            attn_mask = attn_mask.double().masked_fill(hidden, -math.inf)
    return oracle(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask)


def check(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mode: str,
    *,
    smooth_v: bool = False,
    rotate: str | bool = False,
    **call: Any,
) -> None:
    """Check a call (`scale`, `is_causal`, `attn_mask`, `block_mask`) and its LSE against float64 and the reference."""
    out, lse = run(name, q, k, v, mode=mode, smooth_v=smooth_v, rotate=rotate, return_lse=True, **call)
    wanted, wanted_lse = exact(q, k, v, **call)
    same_groups, same_lse = reference(name, q, k, v, mode=mode, smooth_v=smooth_v, rotate=rotate, **call)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    error, disagreement = relative_l1(out, wanted), relative_l1(out, same_groups.to(q.dtype))
    assert error <= EXACT_BOUND[mode], f"{error} from float64: {mode}, {q.shape}, {k.shape}, {q.dtype}, {call}"
    rows = int(wanted_lse.isfinite().sum())  # of all heads; block lists may leave some empty
    bound = REFERENCE_BOUND if rows >= FEW_ROWS else REFERENCE_BOUND_OF_FEW_ROWS
    if mode == "precise" and q.dtype == torch.bfloat16:
        bound = max(bound, REFERENCE_BOUND_OF_BF16)
    mask = call.get("attn_mask")
    if name == "sm90" and mask is not None and mask.shape[2] == 1 and q.shape[2] == k.shape[2]:
        bound = max(bound, REFERENCE_BOUND_OF_PADDING)
    assert disagreement <= bound, f"{disagreement} from the reference: {mode}, {q.shape}, {k.shape}, {q.dtype}, {call}"
    if q.shape[2] >= LEAST_ROWS and q.shape[3] >= LEAST_CHANNELS:
        for kind, axis, most in (("row", 3, WORST_ROW), ("channel", 2, WORST_CHANNEL)):
            worst = worst_along(out, same_groups, axis)
            assert worst <= most, f"{worst} of a {kind} from the reference: {mode}, {q.shape}, {k.shape}, {call}"
    empty = wanted_lse == -torch.inf
    assert torch.equal(empty, lse == -torch.inf)
    assert (lse - same_lse)[~empty].abs().max() < LSE_BOUND
    assert (lse - wanted_lse)[~empty].abs().mean() < 0.2
    assert not out[empty].any()


def worst_along(result: torch.Tensor, wanted: torch.Tensor, axis: int) -> float:
    """The largest relative L1 difference of a row (`axis` 3) or of a channel (`axis` 2) of (B, H, N, D).

    Relative to its L1 norm, or to the mean norm in its head if that is larger: a row or channel may be near zero.
    """
    difference = (result.double() - wanted.double()).abs().sum(axis, keepdim=True)
    size = wanted.double().abs().sum(axis, keepdim=True)
    size = torch.maximum(size, size.mean(5 - axis, keepdim=True))
    return float(torch.where(size > 0.0, difference / size, difference).max())


def random_qkv(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: torch.dtype = torch.float16, outliers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian q, k, v; with `outliers`, channel offsets in Q, K and V as in diffusion models."""
    q, k, v = (
        torch.randn(q_shape, device="cuda"),
        torch.randn(kv_shape, device="cuda"),
        torch.randn(kv_shape, device="cuda"),
    )
    if outliers:
        q[..., :6] += 10.0
        k[..., 2:8] += torch.tensor([20.0, -20.0] * 3, device="cuda")
        v += 8.5
    return q.to(dtype), k.to(dtype), v.to(dtype)


def views_with_nan_between(channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian q (2, 2, 200, channels) and k, v (2, 2, 300, channels), views of one tensor with NaN between them."""
    whole = torch.full((2, 500, 7, channels + 8), torch.nan, device="cuda", dtype=dtype)
    q, k, v = (
        whole[:, :length, first : first + heads, :channels].transpose(1, 2)
        for length, first, heads in ((200, 0, 2), (300, 2, 2), (300, 5, 2))
    )
    for tensor in (q, k, v):
        tensor.normal_()
    return q, k, v
