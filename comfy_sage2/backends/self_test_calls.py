"""Small calls with known results, which test a kernel module.

The CPU computes the expected results in float32, so that a fault of the GPU or its libraries cannot affect them too.
Inputs and outputs have gaps that hold NaN, so that a wrong stride shows in the result, and a wrong write in the gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from ..block_mask import BlockMask
from ..call.signature import CallSignature, TensorForm
from ..call.tensors import OptionalTensors
from ..options import AUTO, FLOAT_PV, GIVEN, AttentionOptions
from ..reference.exact import exact_attention
from .kernel_call import broadcast_strides
from .launches import Launches
from .module_plan import Strides, Views

# Relative L1 error, sum |O - O'| / sum |O|, that the quantization of each mode may cost in these calls.
BOUNDS = {"8b": 0.05, "4b": 0.24, "precise": 0.02}
# Mean absolute error of the LSE.
LSE_BOUNDS = {"8b": 0.006, "4b": 0.07, "precise": 0.006}

_SEED = 17


@dataclass(frozen=True)
class Variant:
    """A mode with an accumulator and a format of P and V that a kernel module has."""

    mode: str
    pv_accumulator: str
    pv: str = AUTO

    @property
    def text(self) -> str:
        if self.pv not in (AUTO, *FLOAT_PV):
            return f"{self.mode}, {self.pv.upper()} P·V"
        return f"{self.mode}, {self.pv_accumulator.upper()} accumulators"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        mask: "" for none; "queries": bool, a row for each query, one of which attends to nothing; "keys": additive, the
            same for all queries, with the last keys masked.
        broken: a value of V is infinite; the call must flag it.
        lists: () for none, else for each head, or once for all, and each block of queries: a count, then key blocks.
            Those beyond the count are not active.
        invalid: an entry of the lists is invalid; the call must leave it out and flag it.
    """

    name: str
    q_heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    dtype: torch.dtype
    options: AttentionOptions
    batch: int = 1
    mask: str = ""
    broken: bool = False
    lists: tuple[tuple[tuple[int, ...], ...], ...] = ()
    invalid: bool = False


_UNROTATED = AttentionOptions(rotate="off")
_WITH_LSE = replace(_UNROTATED, return_lse=True)
CASES = (
    Case("head_dim 64, ragged lengths", 4, 2, 197, 333, 64, torch.float16, _WITH_LSE, batch=2),
    Case(
        "head_dim 128, causal", 2, 2, 260, 260, 128, torch.bfloat16,
        replace(_WITH_LSE, is_causal=True, layout="BNHD"),
    ),
    Case("head_dim 128, mask for each query", 2, 1, 150, 270, 128, torch.float16, _WITH_LSE, mask="queries"),
    Case(  # more keys than Hopper prepares in one pass
        "head_dim 256, key mask, smooth V", 2, 1, 140, 1030, 256, torch.float16,
        replace(_UNROTATED, smooth_v=True, layout="BNHD"), mask="keys",
    ),
    Case(
        "head_dim 72, float32, rotated", 2, 2, 130, 190, 72, torch.float32,
        AttentionOptions(scale=0.15, rotate="on"),
    ),
    Case(
        "head_dim 64, block masks with invalid entries", 2, 1, 150, 440, 64, torch.float16, _WITH_LSE,
        lists=(((0, 3, 2, 1, 0), (2, 0, 3, 1, 2)), ((1, 2, 0, 1, 3), (4, 1, 1, 99, 3))),
        invalid=True,
    ),
    Case(
        "head_dim 128, causal block masks for all heads", 2, 2, 330, 330, 128, torch.bfloat16,
        replace(_WITH_LSE, is_causal=True, layout="BNHD"),
        lists=(((0, 0, 1, 2), (1, 0, 1, 2), (2, 2, 0, 1)),),
    ),
    # Hopper has kernels for few keys, which write no LSE, and kernels for 192 keys a step.
    Case("head_dim 64, few keys", 2, 1, 150, 250, 64, torch.bfloat16, _UNROTATED),
    Case("head_dim 128, few keys", 2, 1, 140, 300, 128, torch.float16, replace(_UNROTATED, layout="BNHD")),
    Case("head_dim 64, key mask", 2, 1, 140, 570, 64, torch.float16, _WITH_LSE, mask="keys"),
    Case(
        "head_dim 128, few keys, rotated by head", 2, 1, 140, 300, 128, torch.bfloat16,
        AttentionOptions(rotate="auto"),
    ),
    Case(
        "head_dim 64, key mask, rotated by head", 2, 1, 140, 1090, 64, torch.float16,
        AttentionOptions(return_lse=True, rotate="auto"), mask="keys",
    ),
    Case(
        "head_dim 128, few keys, half of the heads rotated", 4, 2, 140, 300, 128, torch.float16,
        AttentionOptions(rotate=GIVEN),
    ),
    Case(
        "head_dim 64, half of the heads rotated", 4, 2, 140, 1090, 64, torch.bfloat16,
        AttentionOptions(return_lse=True, rotate=GIVEN), batch=2,
    ),
    Case("infinite value", 1, 1, 64, 64, 64, torch.float16, _UNROTATED, broken=True),
)  # fmt: skip


class Result(NamedTuple):
    """How many calls of a module were compared, and a text about each wrong one."""

    calls: int
    wrong: list[str]

    @property
    def reason(self) -> str | None:
        if not self.wrong:
            return None
        return self.wrong[0] + f" ({len(self.wrong)} of {self.calls} calls)" * (len(self.wrong) > 1)


def run(module: ModuleType, device: torch.device, variants: Sequence[Variant]) -> Result:
    """Run every case in each of `variants`, and then compare. ValueError, RuntimeError: what the module raises."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        generator = torch.Generator("cpu").manual_seed(_SEED)  # leaves the random state of the process alone
        calls = [
            _Call(module, inputs, variant)
            for inputs in [_Inputs(case, generator, device) for case in CASES]
            for variant in variants
            if variant.mode != "precise" or inputs.case.dtype != torch.float32
        ]
        problems = ((call.name, next(call.problems(), None)) for call in calls)
        return Result(len(calls), [f"{name}: {problem}" for name, problem in problems if problem is not None])


def _room(shape: Sequence[int], dtype: torch.dtype, layout: str, device: str | torch.device = "cpu") -> torch.Tensor:
    """NaN, with room for a (B, H, N, D) tensor in `layout` and a gap after its tokens (BHND) or heads (BNHD)."""
    batch, heads, length, channels = shape
    rows = (length, heads + 1) if layout == "BNHD" else (heads, length + 1)
    return torch.full((batch, *rows, channels), math.nan, dtype=dtype, device=device)


def _bhnd(room: torch.Tensor, layout: str) -> torch.Tensor:
    filled = room[:, :, :-1]
    return filled.transpose(1, 2) if layout == "BNHD" else filled


def _strides(room: torch.Tensor, layout: str) -> Strides:
    batch, head, token, _ = _bhnd(room, layout).stride()
    return batch, head, token


class _Inputs:
    """The tensors of a case on the device, and its expected results on the CPU."""

    def __init__(self, case: Case, generator: torch.Generator, device: torch.device) -> None:
        layout = case.options.layout
        q_shape = (case.batch, case.q_heads, case.q_length, case.head_dim)
        kv_shape = (case.batch, case.kv_heads, case.kv_length, case.head_dim)
        rooms = [_room(shape, case.dtype, layout) for shape in (q_shape, kv_shape, kv_shape)]
        q, k, v = (_bhnd(room, layout) for room in rooms)
        for tensor in (q, k, v):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cpu"))
        # The outliers that smoothing removes.
        q[..., :2] += 3.0
        k[..., 1:3] += 6.0
        if case.broken:
            v[0, 0, 1, 1] = math.inf
        mask = _mask(case, generator)
        lists = BlockMask(torch.tensor([case.lists], dtype=torch.int16, device="cpu")) if case.lists else None
        self.case = case
        self.out, self.lse = exact_attention(
            q,
            k,
            v,
            scale=case.options.scale,
            is_causal=case.options.is_causal,
            attn_mask=mask,
            active_blocks=None if lists is None else lists.to_dense(),
            dtype=torch.float32,
        )
        self.rooms = [room.to(device) for room in rooms]
        self.mask = None if mask is None else mask.to(device)
        self.lists = None if lists is None else lists.lists.to(device)


def _mask(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.mask == "queries":
        mask = torch.rand(1, case.q_heads, case.q_length, case.kv_length, generator=generator, device="cpu") < 0.7
        mask[:, :, case.q_length // 2] = False
        return mask
    if case.mask == "keys":
        mask = torch.randn(case.batch, 1, 1, case.kv_length, generator=generator, device="cpu").to(case.dtype)
        mask[..., -case.kv_length // 4 :] = -math.inf
        return mask
    return None


class _Call:
    """One call of a variant, enqueued when it is made; `problems` waits for it."""

    def __init__(self, module: ModuleType, inputs: _Inputs, variant: Variant) -> None:
        case, device = inputs.case, inputs.rooms[0].device
        self._inputs, self._mode = inputs, variant.mode
        self.name = f"{case.name} ({variant.text})"
        options = replace(case.options, mode=variant.mode, pv_accumulator=variant.pv_accumulator, pv=variant.pv)
        self._nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self._invalid = torch.zeros(1, dtype=torch.int32, device=device) if case.lists else None
        rotated = None
        if options.rotate == GIVEN:
            flags = torch.arange(case.batch * case.kv_heads, dtype=torch.int32, device="cpu").remainder(2)
            rotated = flags.view(case.batch, case.kv_heads).to(device)
        optional = OptionalTensors(inputs.mask, inputs.lists, self._nonfinite, self._invalid, rotated)
        q, k, v = (room[:, :, :-1] for room in inputs.rooms)
        signature = CallSignature.of(q, k, v, options, optional)
        self._room = _room(inputs.out.shape, case.dtype, options.layout, device)
        # Like the output, it has a gap.
        self._lse = torch.full((inputs.lse.numel() + 1,), math.nan, device=device) if options.return_lse else None
        q_at, k_at, v_at, out_at = (_strides(room, options.layout) for room in (*inputs.rooms, self._room))
        mask = None if inputs.mask is None else broadcast_strides(TensorForm.of(inputs.mask))
        lists = None if inputs.lists is None else broadcast_strides(TensorForm.of(inputs.lists))[:2]
        launches = Launches(module, signature, Views(q_at, k_at, v_at, out_at, mask, lists))
        workspace = torch.full((launches.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)
        addresses = [room.data_ptr() for room in inputs.rooms]
        launches.enqueue(addresses, optional, _bhnd(self._room, options.layout), self._lse, workspace)

    def problems(self) -> Iterator[str]:
        case, right = self._inputs.case, self._inputs
        flags = [(self._nonfinite, "NaN and infinity", case.broken), (self._invalid, "invalid blocks", case.invalid)]
        for flag, what, expected in flags:
            if flag is not None and flag.item() != expected:
                yield f"the flag for {what} is {flag.item()}, expected {int(expected)}"
        room = self._room.cpu()
        out, bound = _bhnd(room, case.options.layout).float(), BOUNDS[self._mode]
        error = ((out - right.out).abs().sum() / right.out.abs().sum()).item()
        if not case.broken and not error <= bound:  # NaN too
            yield f"relative L1 {error:.3g} from exact attention, at most {bound:g} expected"
        if not room[:, :, -1].isnan().all():
            yield "it wrote outside of its output"
        if self._lse is None:
            return
        memory = self._lse.cpu()
        lse, bound = memory[:-1].view(right.lse.shape), LSE_BOUNDS[self._mode]
        empty = right.lse == -math.inf
        error = (lse - right.lse)[~empty].abs().mean().item()
        if not error <= bound or not torch.equal(lse == -math.inf, empty):
            yield f"the LSE is {error:.3g} from exact attention's on average, at most {bound:g} expected"
        if not memory[-1].isnan():
            yield "it wrote outside of its LSE"
