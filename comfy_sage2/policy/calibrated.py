"""The calibrated policy: which options each attention layer takes in each part of a sampling, by measurement."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..autotune.cost_model import TunedChoices
from ..call_site import CallSite, Layer, indexed_name, label, share_of_steps
from ..metrics import Agreement
from ..options import AttentionOptions
from ..text import quoted
from .selector import Choice
from .signature import Signature
from .targets import TARGETS, VARIANTS, check_target, pick

# The early and the late steps differ most from the others and among themselves.
BOUNDS = (0.0, 0.1, 0.3, 0.7, 0.9, 1.0)
COMPUTE_ALL = "off"
# The levels of `sparsity`, which is above this package: SPARSE, and SKIP of earlier versions.
SPARSE = (COMPUTE_ALL, "lossless", "light", "medium", "strong")
SKIP = (COMPUTE_ALL, "lossless", "balanced", "fast")

Measurements = Mapping[tuple[int, int], Mapping[AttentionOptions, Agreement]]  # (layer, part) -> error of each variant

IN_FULL = "[SA-304] the policy keeps this layer in full precision here"
UNKNOWN = "[SA-305] this pass makes an attention call that the first one did not, and the policy does not know it"


@dataclass(frozen=True)
class Cell:
    """One layer in one part of the steps.

    Attributes:
        options: of the quantized attention; None is full precision.
        cosine, relative_l1: the error that was measured with them. None where it was not measured: the call was left
            out or the time for measuring was used up, and the options come from the layer's other parts.
    """

    options: AttentionOptions | None
    cosine: float | None = None
    relative_l1: float | None = None


@dataclass(frozen=True)
class Policy:
    """A calibrated selector.

    Attributes:
        signature: the model it was made for.
        target: the name of the quality target it was made with.
        bounds: shares of the sampling steps, ascending from 0 to 1; part i is from bounds[i] to bounds[i + 1].
        layers: for each attention call of one pass its head_dim.
        cells: [layer][part].
        rotate: of `AttentionOptions`, with which the errors were measured. To rotate is the node's choice, not the
            policy's.
        skip: of SKIP, what a node that says nothing else leaves out. The errors were measured with all blocks.
        sparse: of SPARSE, the same for packs that have this input; goes before `skip`.
        names: of the layers, each once; () where the model names none: then they count by their order.
    """

    signature: Signature
    target: str
    bounds: tuple[float, ...]
    layers: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    rotate: str = "off"
    names: tuple[str, ...] = ()
    skip: str = COMPUTE_ALL
    sparse: str = COMPUTE_ALL

    def choose(self, site: CallSite) -> Choice:
        """See `ModeSelector.choose`; a first pass with a layer that the policy does not know raises ValueError."""
        row = self._row(site.name, site.layer)
        if row is None:
            if site.layers is None:
                raise ValueError(self._unknown(site))
            return Choice(None, reason=UNKNOWN)  # too late to refuse the model
        options = self.cells[row][part_of(site.step, site.steps, self.bounds)].options
        if options is None:
            return Choice(None, reason=IN_FULL)
        # Something closer to full precision serves where a kernel lacks the mode: 8 bits for 4, else ComfyUI.
        return Choice(options, instead=AttentionOptions(smooth_v=options.smooth_v) if options.mode == "4b" else None)

    def _row(self, name: str, number: int) -> int | None:
        """The layer of the call of this name, of which there were `number` others before; None is not known.

        A call whose name is its number goes by the order: a compiled model does not say its blocks, and its first calls
        may be called like those outside of all blocks.
        """
        if self.names and name != indexed_name(number):
            return self._rows.get(name)
        return number if number < len(self.layers) else None

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: layer for layer, name in enumerate(self.names)}

    def check_pass(self, calls: Sequence[Layer]) -> None:
        """See `ModeSelector.check_pass`. A pass may lack layers that have names."""
        unknown = [call.name for call in calls if call.name not in self._rows]
        by_order = bool(unknown) and all(call.name == indexed_name(n) for n, call in enumerate(calls))
        if unknown and self.names and not by_order:
            raise ValueError(self._other_layers(f"{quoted(unknown[0])} too, which it does not know"))
        if unknown and len(calls) != len(self.layers):
            raise ValueError(self._other_layers(str(len(calls))))
        for number, call in enumerate(calls):
            known = self.layers[number if unknown else self._rows[call.name]]
            if known != call.head_dim:
                raise ValueError(
                    f"[SA-503] the policy does not fit this model: attention layer {quoted(call.name)} has head_dim "
                    f"{quoted(known)} in the policy and {call.head_dim} in the model; calibrate this model"
                )

    def _unknown(self, site: CallSite) -> str:
        return self._other_layers(
            f"{quoted(site.name)} too, which it does not know" if self.names else f"at least {site.layer + 1}"
        )

    def _other_layers(self, found: str) -> str:
        return (
            f"[SA-503] the policy does not fit this model: it is for {len(self.layers)} attention calls in one pass, "
            f"and the model made {found}; calibrate the model with the same patches as it is sampled with"
        )

    @property
    def shares(self) -> str:
        """The shares of the modes among all layers and parts of the steps, such as "4b 43%, 8b 57%"."""
        counts = Counter(label(cell.options) for row in self.cells for cell in row)
        return ", ".join(f"{name} {count / counts.total():.0%}" for name, count in sorted(counts.items()))

    @property
    def description(self) -> str:
        """What it was made for."""
        target = TARGETS[self.target]
        return (
            f"policy: {self.target} (cosine at least {target.cosine:g}, relative L1 at most {target.relative_l1:g}), "
            f"made for {self.signature.model} with {len(self.layers)} attention layers"
            f"{'' if self.rotate == 'off' else f', measured with rotate {self.rotate}'}"
            f"{'' if self.skip == COMPUTE_ALL else f', with skip {self.skip}'}"
            f"{'' if self.sparse == COMPUTE_ALL else f', with sparse {self.sparse}'}"
        )

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """See `ModeSelector.reasoning`."""
        return (
            f"{self.description}: {self.shares} of all layers and parts of the steps (a kernel that has no 4b "
            "computes 8b in its place; if it has no precise, those calls stay in full precision)",
        )


def part_of(step: int, steps: int, bounds: tuple[float, ...]) -> int:
    """The index of the part of `bounds` in which `step` (from 0) of `steps` begins."""
    return min(max(bisect_right(bounds, share_of_steps(step, steps)) - 1, 0), len(bounds) - 2)


def make_policy(
    signature: Signature,
    target: str,
    head_dims: Mapping[int, int],
    measurements: Measurements,
    *,
    rotate: str = "off",
    choices: TunedChoices | None = None,
    names: Mapping[int, str] | None = None,
) -> Policy:
    """The policy for `target` from what was measured.

    Args:
        signature: of the calibrated model.
        target: a name of TARGETS.
        head_dims: layer -> head_dim of every attention call of one pass.
        measurements: what was measured where. A part that was not takes the most cautious options of its layer's
            measured parts; a layer without any stays in full precision.
        rotate: of `AttentionOptions`, with which it was measured.
        choices: by the times of the GPU that it is made on; None takes the shipped order of speed.
        names: of the layers; None, or names that are numbers alone, give a policy that goes by their order.

    Raises:
        ValueError: an unknown target, or nothing was measured.
    """
    check_target(target)
    if not measurements:
        raise ValueError(
            "[SA-404] nothing was measured: sample with the calibrated model first, and connect the sampler's output "
            "to 'samples', so that the policy is made afterwards"
        )
    parts = len(BOUNDS) - 1
    rows = []
    for layer in sorted(head_dims):
        measured = {
            part: _cell(measurements[layer, part], target, choices)
            for part in range(parts)
            if (layer, part) in measurements
        }
        elsewhere = _most_cautious(list(measured.values()))
        rows.append(tuple(measured.get(part, elsewhere) for part in range(parts)))
    dims = tuple(head_dims[layer] for layer in sorted(head_dims))
    given = () if names is None else tuple(names[layer] for layer in sorted(head_dims))
    if given == tuple(map(indexed_name, range(len(given)))):
        given = ()
    return Policy(signature, target, BOUNDS, dims, tuple(rows), rotate, given)


def _cell(measured: Mapping[AttentionOptions, Agreement], target: str, choices: TunedChoices | None) -> Cell:
    options = pick(measured, TARGETS[target], choices)
    if options is None:
        return Cell(None)
    return Cell(options, measured[options].cosine, measured[options].relative_l1)


def _most_cautious(cells: list[Cell]) -> Cell:
    """The most exact options among `cells`, without their error; full precision when there is none."""
    order: list[AttentionOptions | None] = [*VARIANTS, None]
    return Cell(max((cell.options for cell in cells), key=order.index, default=None))
