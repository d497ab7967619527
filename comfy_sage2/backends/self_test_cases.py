"""Small calls whose right results are known, and how far those of a kernel module are from them.

The right results are computed on the CPU in float32: what is wrong with a GPU or its libraries cannot spoil them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from ..block_mask import BlockMask
from ..kernels import abi
from ..options import AUTO, FLOAT_PV, AttentionOptions
from ..reference.exact import exact_attention
from ..request import AttentionRequest
from ..signature import CallSignature, TensorForm
from ..tensors import OptionalTensors
from .constraints import PRECISE
from .kernel_call import Launches, broadcast_strides
from .module_plan import Strides, Views
from .self_test_margins import MARGIN_BOUND, grade_, margins_of

_UNTOUCHED = 0xFF  # in every byte: NaN in all float types
_ALIGNMENT = 256  # bytes
_SEED = 17
# Relative L1 error, sum |O - O'| / sum |O|, that the quantization of each mode may cost in these calls.
BOUNDS = {"8b": 0.05, "4b": 0.24, "precise": 0.02}
# Mean absolute error of the LSE.
LSE_BOUNDS = {"8b": 0.006, "4b": 0.07, "precise": 0.006}


@dataclass(frozen=True)
class Case:
    """One call. Its tensors have gaps behind the tokens (layout BHND) or the heads (BNHD) that hold NaN.

    Attributes:
        mask: "" for none; "queries": bool, one for each query, of which one attends to nothing; "keys": additive, the
            same for all queries, with the last keys masked.
        broken: a value of V is infinite, which must be flagged.
        lists: () for none, else of each head, or of one for all, of each block of queries: a count, then key blocks.
            Those that are not active stand behind the count.
        invalid: an entry of the lists is invalid, which must be left out and flagged.
        block_margins: the blocks are graded, and their margins are to be recorded.
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
    block_margins: bool = False


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
    Case("head_dim 64, block margins", 2, 1, 440, 440, 64, torch.float16, _UNROTATED, block_margins=True),
    # Hopper has kernels for few keys, which note no LSE, and for 192 keys a step.
    Case("head_dim 64, few keys", 2, 1, 150, 250, 64, torch.bfloat16, _UNROTATED),
    Case("head_dim 128, few keys", 2, 1, 140, 300, 128, torch.float16, replace(_UNROTATED, layout="BNHD")),
    Case("head_dim 64, key mask", 2, 1, 140, 570, 64, torch.float16, _WITH_LSE, mask="keys"),
    Case("head_dim 128, few keys, rotated by head", 2, 1, 140, 300, 128, torch.bfloat16, AttentionOptions()),
    Case(
        "head_dim 64, key mask, rotated by head", 2, 1, 140, 1090, 64, torch.float16,
        AttentionOptions(return_lse=True), mask="keys",
    ),
    Case("infinite value", 1, 1, 64, 64, 64, torch.float16, _UNROTATED, broken=True),
)  # fmt: skip


@dataclass(frozen=True)
class _Slot:
    """Where a (B, H, N, D) tensor with gaps lies in a buffer of bytes."""

    offset: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    layout: str

    @property
    def _memory(self) -> tuple[int, int, int, int]:
        batch, heads, length, head_dim = self.shape
        return (batch, length, heads + 1, head_dim) if self.layout == "BNHD" else (batch, heads, length + 1, head_dim)

    @property
    def bytes(self) -> int:
        return math.prod(self._memory) * self.dtype.itemsize

    @property
    def strides(self) -> Strides:
        """Of batch, head and token, in elements."""
        _, second, third, channels = self._memory
        rows = second * third * channels, third * channels, channels
        return rows if self.layout == "BHND" else (rows[0], rows[2], rows[1])

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of `buffer`."""
        whole = buffer[self.offset : self.offset + self.bytes].view(self.dtype).view(self._memory)
        inner = whole[:, :, : self.shape[1]].transpose(1, 2) if self.layout == "BNHD" else whole[:, :, : self.shape[2]]
        return inner


@dataclass
class _Layout:
    """The slots of one buffer."""

    bytes: int = 0

    def add(self, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> _Slot:
        slot = _Slot(self.bytes, shape, dtype, layout)
        self.bytes += -(-slot.bytes // _ALIGNMENT) * _ALIGNMENT
        return slot

    def add_contiguous(self, elements: int, dtype: torch.dtype) -> _Slot:
        """A slot of one head and one channel: its gap lies behind it."""
        return self.add((1, 1, elements, 1), dtype, "BHND")


@dataclass(frozen=True)
class Input:
    """The inputs of a case on the CPU, and its right results.

    q, k, v: slots in the buffer of inputs. mask: None or 4-D. block_mask: None or its lists. out, lse: float32.
    block_margins: None or (B, Hq, Tq, Tk) float32.
    """

    case: Case
    q: _Slot
    k: _Slot
    v: _Slot
    mask: torch.Tensor | None
    block_mask: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    block_margins: torch.Tensor | None


def make_inputs() -> tuple[torch.Tensor, list[Input]]:
    """The buffer of all inputs (uint8, on the CPU) and the inputs of each case; the same each time."""
    generator = torch.Generator("cpu").manual_seed(_SEED)  # the random numbers of the process stay as they are
    layout = _Layout()
    slots = []
    for case in CASES:
        q_shape = (case.batch, case.q_heads, case.q_length, case.head_dim)
        kv_shape = (case.batch, case.kv_heads, case.kv_length, case.head_dim)
        slots.append([layout.add(shape, case.dtype, case.options.layout) for shape in (q_shape, kv_shape, kv_shape)])
    buffer = torch.full((layout.bytes,), _UNTOUCHED, dtype=torch.uint8, device="cpu")
    found = []
    for case, places in zip(CASES, slots, strict=True):
        for place in places:
            place.of(buffer).copy_(torch.randn(place.shape, generator=generator, device="cpu"))
        q, k, v = (place.of(buffer) for place in places)
        # What smoothing is for.
        q[..., :2] += 3.0
        k[..., 1:3] += 6.0
        if case.block_margins:
            grade_(q, k)
        if case.broken:
            v[0, 0, 1, 1] = math.inf
        mask = _mask(case, generator)
        lists = BlockMask(torch.tensor([case.lists], dtype=torch.int16, device="cpu")) if case.lists else None
        out, lse = exact_attention(
            q,
            k,
            v,
            scale=case.options.scale,
            is_causal=case.options.is_causal,
            attn_mask=mask,
            active_blocks=None if lists is None else lists.to_dense(),
            dtype=torch.float32,
        )
        blocks = None if lists is None else lists.lists
        margins = margins_of(q, k) if case.block_margins else None
        found.append(Input(case, places[0], places[1], places[2], mask, blocks, out, lse, margins))
    return buffer, found


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
class _Call:
    """One call of a variant, and where its results lie in the buffer of results."""

    input: Input
    variant: Variant
    request: AttentionRequest
    out: _Slot
    lse: _Slot | None
    nonfinite: _Slot
    invalid_blocks: _Slot | None
    block_margins: _Slot | None

    @property
    def flags(self) -> Iterator[tuple[_Slot, str, int]]:
        """Where each flag lies, which is 0 before the call, what it is for and what it must become."""
        yield self.nonfinite, "NaN and infinity", int(self.input.case.broken)
        if self.invalid_blocks is not None:
            yield self.invalid_blocks, "invalid blocks", int(self.input.case.invalid)

    @property
    def name(self) -> str:
        return f"{self.input.case.name} ({self.variant.text})"


@dataclass
class Result:
    """What the calls of a module gave.

    calls: how many there were. wrong: those whose results were wrong, in words.
    """

    calls: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """What was wrong in a line, or None."""
        if not self.wrong:
            return None
        others = f" ({len(self.wrong)} of {self.calls} findings)" if len(self.wrong) > 1 else ""
        return f"{self.wrong[0]}{others}"


def run(module: ModuleType, device: torch.device, variants: Sequence[Variant]) -> Result:
    """Run every case in each of `variants` on `device` and compare; waits for the device once.

    Cases with block masks are left out where the module takes none, those with block margins where it records none, and
    those rotated by head where it cannot choose heads.

    Raises what the module raises: ValueError for a call that it refuses, RuntimeError for a failure of the driver.
    """
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        buffer, found = make_inputs()
        if not abi.has_block_masks(module):
            found = [one for one in found if one.block_mask is None]
        if not abi.has_block_margins(module):
            found = [one for one in found if one.block_margins is None]
        if not abi.rotates_by_head(module):
            found = [one for one in found if one.case.options.rotate != "auto"]
        calls, size = _layout_of_results(found, variants, device)
        on_device = buffer.to(device)
        results = torch.full((size,), _UNTOUCHED, dtype=torch.uint8, device=device)
        launches = {id(call): _launches(module, call) for call in calls}
        scratch = max(found.workspace_bytes for found in launches.values())
        workspace = torch.empty(scratch, dtype=torch.uint8, device=device)
        masks = {id(one): None if one.mask is None else one.mask.to(device) for one in found}
        lists = {id(one): None if one.block_mask is None else one.block_mask.to(device) for one in found}
        for call in calls:
            given = call.input
            workspace.fill_(_UNTOUCHED)
            for flag, _, _ in call.flags:
                flag.of(results).zero_()
            margins = None if call.block_margins is None else call.block_margins.of(results).fill_(-math.inf)
            launches[id(call)].enqueue(
                [slot.of(on_device).data_ptr() for slot in (given.q, given.k, given.v)],
                OptionalTensors(
                    attn_mask=masks[id(given)],
                    block_mask=lists[id(given)],
                    nonfinite=call.nonfinite.of(results),
                    invalid_blocks=None if call.invalid_blocks is None else call.invalid_blocks.of(results),
                    block_margins=margins,
                ),
                call.out.of(results),
                None if call.lse is None else call.lse.of(results),
                workspace,
            )
        return _compare(calls, results.cpu())


def _launches(module: ModuleType, call: _Call) -> Launches:
    """The launches of a call whose output lies in the buffer of results, between other memory."""
    given = call.input
    q, k, v, out = (slot.strides for slot in (given.q, given.k, given.v, call.out))
    mask = None if given.mask is None else broadcast_strides(TensorForm.of(given.mask))
    lists = None if given.block_mask is None else broadcast_strides(TensorForm.of(given.block_mask))[:2]
    return Launches(module, call.request, Views(q, k, v, out, mask, lists))


def _signature(given: Input, options: AttentionOptions, device: torch.device) -> CallSignature:
    """Without strides, which say nothing about what a kernel can do."""

    def form(shape: Sequence[int], dtype: torch.dtype) -> TensorForm:
        return TensorForm(torch.Size(shape), (), dtype, device)

    def of_slot(slot: _Slot) -> TensorForm:
        batch, heads, length, head_dim = slot.shape
        return form((batch, length, heads, head_dim) if options.layout == "BNHD" else slot.shape, slot.dtype)

    def of_tensor(tensor: torch.Tensor | None) -> TensorForm | None:
        return None if tensor is None else form(tensor.shape, tensor.dtype)

    q, k, v = map(of_slot, (given.q, given.k, given.v))
    mask, lists, margins = map(of_tensor, (given.mask, given.block_mask, given.block_margins))
    return CallSignature(options, None, False, False, q, k, v, mask, lists, margins)


def _layout_of_results(
    found: Sequence[Input], variants: Sequence[Variant], device: torch.device
) -> tuple[list[_Call], int]:
    layout = _Layout()
    calls = []
    for given in found:
        case = given.case
        for variant in variants:
            options = replace(case.options, mode=variant.mode, pv_accumulator=variant.pv_accumulator, pv=variant.pv)
            request = AttentionRequest.of(_signature(given, options, device))
            if PRECISE.check(request) is not None:
                continue
            lse = layout.add_contiguous(given.lse.numel(), torch.float32) if options.return_lse else None
            calls.append(
                _Call(
                    given,
                    variant,
                    request,
                    layout.add(given.q.shape, case.dtype, options.layout),
                    lse,
                    layout.add_contiguous(1, torch.int32),
                    layout.add_contiguous(1, torch.int32) if case.lists else None,
                    None
                    if given.block_margins is None
                    else layout.add_contiguous(given.block_margins.numel(), torch.float32),
                )
            )
    return calls, layout.bytes


def _compare(calls: Sequence[_Call], results: torch.Tensor) -> Result:
    result = Result(len(calls))
    untouched = torch.full_like(results, _UNTOUCHED)
    for call in calls:
        wrong = next(_wrong(call, results), None)
        if wrong is not None:
            result.wrong.append(f"{call.name}: {wrong}")
        for slot in (call.out, call.lse, call.block_margins, *(flag for flag, _, _ in call.flags)):
            if slot is not None:
                slot.of(untouched).copy_(slot.of(results))
    if not torch.equal(untouched.view(torch.int64), results.view(torch.int64)):
        result.wrong.append("a call wrote outside of its output")
    return result


def _wrong(call: _Call, results: torch.Tensor) -> Iterator[str]:
    """What is wrong with a call's results, in words."""
    given = call.input
    for flag, what, expected in call.flags:
        flagged = int(flag.of(results).item())
        if flagged != expected:
            yield f"the flag for {what} is {flagged}, expected {expected}"
    if given.case.broken:
        return
    out = call.out.of(results).float()
    error = ((out - given.out).abs().sum() / given.out.abs().sum()).item()
    bound = BOUNDS[call.variant.mode]
    if not error <= bound:  # NaN too
        yield f"relative L1 {error:.3g} from exact attention, at most {bound:g} expected"
    if call.lse is not None:
        lse = call.lse.of(results).view(given.lse.shape)
        empty = given.lse == -math.inf
        error = (lse - given.lse)[~empty].abs().mean().item()
        bound = LSE_BOUNDS[call.variant.mode]
        if not error <= bound or not torch.equal(lse == -math.inf, empty):
            yield f"the LSE is {error:.3g} from exact attention's on average, at most {bound:g} expected"
    if call.block_margins is not None and given.block_margins is not None:
        margins = call.block_margins.of(results).view(given.block_margins.shape)
        error = (margins - given.block_margins).abs().max().item()
        if not error <= MARGIN_BOUND:
            yield f"a block margin is off by {error:.3g} (log2), at most {MARGIN_BOUND:g} expected"
