"""The guard's second level: in each pass of the model a sample of one layer is compared with exact attention.

What NaN and infinity do not show is a layer that the quantization gets wrong. The layers take turns, in an order that
is spread over the model however few passes there are. A layer outside of BOUNDS is looked at again in the next pass, at
the same place, and after PASSES such passes goes to the next more exact mode for the rest of the sampling.

Comparing enqueues work and waits for nothing; the figures are read once, after the pass.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...metrics import Agreement, compare
from ...policy.targets import TARGETS
from ...readback import Readback
from ...reference.exact import exact_attention

log = logging.getLogger("comfy_sage2")

# What a policy of this quality allows a whole layer, at most: the worst layer with which the paper's videos scored as
# well as those in full precision. A sample has fewer rows, hence the second look.
BOUNDS = TARGETS["fast"]
PASSES = 2
ROWS = 64
LEFT = (
    f"[SA-315] guard: samples of this layer were below cosine {BOUNDS.cosine:g} or above relative L1 "
    f"{BOUNDS.relative_l1:g} earlier in this sampling"
)
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@lru_cache
def _places(count: int) -> tuple[int, ...]:
    """Of each turn its rank among the fractions of the turns' multiples of the golden section.

    They lie evenly whenever they stop, and so do those of every second turn: passes can alternate between two prompts.
    """
    turns = sorted(range(count), key=lambda turn: turn * _GOLDEN % 1.0)
    return tuple(sorted(range(count), key=turns.__getitem__))


def spread(number: int, count: int) -> int:
    """The place in range(count) of turn `number`, from 0; each has its turn once in `count` of them."""
    return _places(count)[number % count]


def measure(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
    number: int,
) -> torch.Tensor:
    """Compare ROWS query rows of one head of `out` with exact attention in float32.

    Args:
        out, q: (B, Hq, Nq, D).
        k, v: (B, Hkv, Nkv, D).
        scale: softmax scale; None means 1/sqrt(D).
        mask: None or 4-D, broadcasting to (B, Hq, Nq, Nkv), bool (True = attend) or additive float.
        number: of the turn, which decides the entry of the batch, the head and the first row.

    Returns:
        what `compare` gives, on the device, which nobody waits for.
    """
    batch, heads, length, _ = q.shape
    entry, head = divmod(spread(number, batch * heads), heads)
    stride = max(length // ROWS, 1)
    first = number % stride
    rows = slice(first, first + ROWS * stride, stride)
    kv_head = head // (heads // k.shape[1])
    if mask is not None:
        places = (slice(entry, entry + 1), slice(head, head + 1), rows)
        mask = mask[tuple(slice(None) if size == 1 else at for size, at in zip(mask.shape[:3], places, strict=True))]
    exact, _ = exact_attention(
        q[entry, head, rows][None, None],
        k[entry, kv_head][None, None],
        v[entry, kv_head][None, None],
        scale=scale,
        attn_mask=mask,
        dtype=torch.float32,
    )
    return compare(out[entry, head, rows], exact[0, 0], torch.float32)


@dataclass(frozen=True)
class SampledCall:
    """How the sampled call was served: its mode, in words by whom, and what comes after that mode.

    name: of the call's layer. next_mode: the next more exact one that a backend has for the call; None is full
    precision. next_by: in words. skips: blocks were left out; then the next is the same mode with all of them.
    """

    name: str
    mode: str
    by: str
    next_mode: str | None
    next_by: str
    skips: bool = False


@dataclass(frozen=True)
class Finding:
    """A layer that was outside of BOUNDS in the passes of these steps, and who serves it from there on."""

    layer: int
    name: str
    steps: tuple[int, ...]
    found: Agreement
    served_by: str
    next_by: str

    @property
    def text(self) -> str:
        """In words for the user."""
        steps = " and ".join(str(step + 1) for step in self.steps)
        return (
            f"{self.name} had cosine {self.found.cosine:.5f} and relative L1 {self.found.relative_l1:.4f} to "
            f"exact attention in steps {steps} ({self.served_by}); {self.next_by} computes this layer until the "
            "sampling ends"
        )


class Probe:
    """The sample of one pass.

    It is made before the pass, outside of the model, with the memory that takes the figures.

    Attributes:
        number: of the turn.
        layer: whose turn it is; None, where no pass has shown the layers yet, is the first that a backend quantizes.
        quantized: the layers that backends have quantized in this pass so far.
        taken: the layer that was compared and how it was served, or None.
    """

    def __init__(self, owner: Fidelity, number: int, layer: int | None, device: torch.device) -> None:
        self._owner = owner
        self.number = number
        self.layer = layer
        self._figures = Readback(3, torch.float32, device)
        self.restart()

    def restart(self) -> None:
        """The pass is made again."""
        self.quantized: list[int] = []
        self.taken: tuple[int, SampledCall] | None = None

    def wants(self, layer: int) -> bool:
        """Whether a call of `layer` that a backend quantizes is the one to compare."""
        return self.taken is None and self.layer in (None, layer)

    def take(self, layer: int, served: SampledCall, figures: torch.Tensor) -> None:
        """Keep what `measure` found of `layer`."""
        self._figures.start(figures)
        self.taken = layer, served

    def finish(self, step: int) -> None:
        """The pass, in sampling step `step`, is through; waits for the sample."""
        self._owner.finish(self, step, None if self.taken is None else Agreement(*self._figures.values()))


class Fidelity:
    """What the samples of one sampling have shown; several threads may report to it.

    Attributes:
        restricted: the layers that are kept from a mode, or from all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restricted: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """A sampling starts: every layer is trusted, and the turns begin anew, so that a seed gives one result."""
        with self._lock:
            self._turns = 0
            self._quantized: tuple[int, ...] = ()
            self._again: list[tuple[int, int]] = []  # turn and layer
            self._outside: dict[tuple[int, str, bool], list[tuple[int, Agreement]]] = {}
            self._least: dict[int, str | None] = {}
            self.restricted.clear()
            self._all_blocks: set[int] = set()
            self._findings: list[Finding] = []
            self._lowest: dict[int, tuple[float, str]] = {}  # cosine and name
            self._samples = 0

    def begin(self, device: torch.device) -> Probe:
        """A pass on `device` starts."""
        with self._lock:
            if self._again:
                return Probe(self, *self._again.pop(0), device)
            number, layers = self._turns, self._quantized
            self._turns += 1
        return Probe(self, number, layers[spread(number, len(layers))] if layers else None, device)

    def finish(self, probe: Probe, step: int, found: Agreement | None) -> None:
        """The pass of `probe` is through, and `found` is how close the compared layer came, if one was compared."""
        with self._lock:
            self._quantized = tuple(probe.quantized)
            # A result that is not finite is the first level's business, or the model's own.
            if found is None or probe.taken is None or not math.isfinite(found.cosine):
                return
            layer, served = probe.taken
            self._samples += 1
            self._lowest[layer] = min((found.cosine, served.name), self._lowest.get(layer, (math.inf, "")))
            if BOUNDS.allows(found):
                return
            outside = self._outside.setdefault((layer, served.mode, served.skips), [])
            outside.append((step, found))
            if len(outside) == PASSES:
                self._downgrade(layer, served, outside)
            if not self.is_left(layer):
                self._again.append((probe.number, layer))

    def _downgrade(self, layer: int, served: SampledCall, outside: list[tuple[int, Agreement]]) -> None:
        worst = min((found for _, found in outside), key=lambda found: found.cosine)
        finding = Finding(layer, served.name, tuple(step for step, _ in outside), worst, served.by, served.next_by)
        self._findings.append(finding)
        if served.skips:
            self._all_blocks.add(layer)
        else:
            self._least[layer] = served.next_mode
            self.restricted.add(layer)
        log.warning("SageAttention2: guard: %s", finding.text)

    def mode(self, layer: int) -> str | None:
        """The least exact mode in which `layer` may be computed, or None where nothing is known against it."""
        return self._least.get(layer)

    def is_left(self, layer: int) -> bool:
        """Whether `layer` has to be left to the attention that was there before."""
        return layer in self._least and self._least[layer] is None

    def keeps_all_blocks(self, layer: int) -> bool:
        """Whether `layer` may leave no blocks out."""
        return layer in self._all_blocks or layer in self._least

    @property
    def findings(self) -> tuple[Finding, ...]:
        """In the order in which they came."""
        return tuple(self._findings)

    @property
    def summary(self) -> list[str]:
        """For the report what was compared, in a line, or in none."""
        with self._lock:
            if not self._lowest:
                return []
            cosine, name = min(self._lowest.values())
            return [
                f"Guard: {self._samples} samples of {len(self._lowest)} layers compared with exact attention, lowest "
                f"cosine {cosine:.5f} ({name})"
            ]
