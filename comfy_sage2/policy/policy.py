"""The policy: which mode each attention layer takes in each part of a sampling, and the errors that it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import FULL, Choice, Place
from .signature import Signature
from .targets import TARGETS

IN_FULL = "the policy keeps this layer in full precision here"
UNKNOWN = "this pass makes more attention calls than the first one, and the policy does not know them"


@dataclass(frozen=True)
class Cell:
    """One layer in one part of the steps.

    Attributes:
        mode: "8b", "4b" or "full".
        smooth_v: whether V is smoothed.
        cosine, relative_l1: the error that was measured in this mode; None where it was not measured, because the call
            was left out or the time for measuring was used up, and the mode was taken from the layer's other parts.
    """

    mode: str
    smooth_v: bool
    cosine: float | None = None
    relative_l1: float | None = None


@dataclass(frozen=True)
class Policy:
    """A calibrated plan.

    Attributes:
        signature: the model it was made for.
        target: the name of the quality target it was made with.
        bounds: shares of the sampling steps, ascending from 0 to 1; part i is from bounds[i] to bounds[i + 1].
        layers: for each attention call of one pass its head_dim.
        cells: [layer][part].
    """

    signature: Signature
    target: str
    bounds: tuple[float, ...]
    layers: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def part(self, step: int, steps: int) -> int:
        """The part of the sampling to which `step` (from 0) of `steps` belongs."""
        return part_of(step, steps, self.bounds)

    def choose(self, place: Place) -> Choice:
        """See `Plan.choose`; a first pass with a layer that the policy does not know raises ValueError."""
        if place.layer >= len(self.cells):
            if place.layers is None:
                raise ValueError(self._reason_other_layers(f"at least {place.layer + 1}"))
            return Choice(FULL, reason=UNKNOWN)  # too late to refuse the model
        cell = self.cells[place.layer][self.part(place.step, place.steps)]
        if cell.mode == FULL:
            return Choice(FULL, reason=IN_FULL)
        # A kernel without the policy's mode computes in 8 bits, which is closer to full precision.
        return Choice(cell.mode, cell.smooth_v, instead="8b" if cell.mode == "4b" else None)

    def check_pass(self, head_dims: Sequence[int]) -> None:
        """See `Plan.check_pass`."""
        if len(head_dims) != len(self.layers):
            raise ValueError(self._reason_other_layers(str(len(head_dims))))
        for layer, (known, found) in enumerate(zip(self.layers, head_dims, strict=True)):
            if known != found:
                raise ValueError(
                    f"the policy does not fit this model: attention layer {layer} has head_dim {known} in the policy "
                    f"and {found} in the model; calibrate this model"
                )

    def _reason_other_layers(self, found: str) -> str:
        return (
            f"the policy does not fit this model: it is for {len(self.layers)} attention calls in one pass, and the "
            f"model made {found}; calibrate the model with the same patches as it is sampled with"
        )

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """See `Plan.reasoning`."""
        cells = [cell for row in self.cells for cell in row]
        counts = Counter(cell.mode + (" · smooth V" if cell.smooth_v else "") for cell in cells)
        shares = ", ".join(f"{name} {count / len(cells):.0%}" for name, count in sorted(counts.items()))
        target = TARGETS[self.target]
        return (
            f"policy: {self.target} (cosine at least {target.cosine:g}, relative L1 at most {target.relative_l1:g}), "
            f"made for {self.signature.model} with {len(self.layers)} attention layers: {shares} of all layers and "
            "parts of the steps (8b serves 4b where the kernel has no 4b)",
        )


def part_of(step: int, steps: int, bounds: tuple[float, ...]) -> int:
    """The index of the part of `bounds` in which `step` (from 0) of `steps` begins."""
    share = (step + 1e-6) / steps
    return min(max(sum(bound <= share for bound in bounds) - 1, 0), len(bounds) - 2)
