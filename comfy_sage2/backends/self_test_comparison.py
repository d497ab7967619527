"""How far the results of a kernel module are from the right ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..options import AUTO, FLOAT_PV
from ..request import AttentionRequest
from .self_test_cases import Input
from .self_test_memory import UNTOUCHED, Slot

# Relative L1 error, sum |O - O'| / sum |O|, that the quantization of each mode may cost in these calls.
BOUNDS = {"8b": 0.05, "4b": 0.24, "precise": 0.02}
# Mean absolute error of the LSE.
LSE_BOUNDS = {"8b": 0.006, "4b": 0.07, "precise": 0.006}


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
class Call:
    """One call of a variant, and where its results lie in the buffer of results."""

    input: Input
    variant: Variant
    request: AttentionRequest
    out: Slot
    lse: Slot | None
    nonfinite: Slot
    invalid_blocks: Slot | None

    @property
    def flags(self) -> Iterator[tuple[Slot, str, int]]:
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


def compare(calls: Sequence[Call], results: torch.Tensor) -> Result:
    result = Result(len(calls))
    untouched = torch.full_like(results, UNTOUCHED)
    for call in calls:
        wrong = next(_wrong(call, results), None)
        if wrong is not None:
            result.wrong.append(f"{call.name}: {wrong}")
        for slot in (call.out, call.lse, *(flag for flag, _, _ in call.flags)):
            if slot is not None:
                slot.of(untouched).copy_(slot.of(results))
    if not torch.equal(untouched.view(torch.int64), results.view(torch.int64)):
        result.wrong.append("a call wrote outside of its output")
    return result


def _wrong(call: Call, results: torch.Tensor) -> Iterator[str]:
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
