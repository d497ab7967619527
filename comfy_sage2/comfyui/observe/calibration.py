"""Measuring, during an ordinary sampling in full precision, what each mode would have done to each layer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ...attention import attention
from ...metrics import Agreement, worst
from ...policy.calibrated import BOUNDS
from ...policy.policy import part_of
from ...policy.signature import Signature
from ...policy.targets import VARIANTS, Variant
from ..call.attention_call import HostCall
from ..call.forwards import Forward
from ..report import stopwatch
from ..report.quality import Sample, evenly
from ..report.statistics import Outcome
from ..serve.selection import Selection
from ..serve.session import Override, Session, log
from ..settings import Settings

# The sample of a call: so many of the batch, so many heads, and of each so many blocks of query rows. A block is the
# group of rows that smooth Q averages over, so a sampled block has the numbers that it has in the whole call.
BATCH = 2
HEADS = 2
BLOCKS = 2
BLOCK_ROWS = 128
# A guided sampling asks the model with and without the text, in one pass or in two: each place is measured in so many.
PASSES = 2
# Seconds of the first measurement on a GPU, where kernels are loaded for it; about 0.1 to 0.2 on an H200.
LOADING = 0.25
CALIBRATING = "calibration: sampled in full precision"

Progress = Callable[[int, int], None]  # takes what is measured and how much there is to measure


class Budget:
    """Keeps the time spent on measuring below a share of the time that has passed."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.spent = 0.0
        self._latest = 0.0
        self._started = time.perf_counter()

    def allows(self, first: float = 0.0) -> bool:
        """Whether one more measurement stays within the share: as long as the latest, or `first` seconds."""
        expected = self._latest if self.spent > 0.0 else first
        return self.spent + expected <= self.share * (time.perf_counter() - self._started)

    def add(self, seconds: float) -> None:
        """A measurement took so long."""
        self.spent += seconds
        self._latest = seconds


class Calibration(Session):
    """One *SageAttention2 Calibrate* node at work: a session that leaves every call to the host and measures.

    Attributes:
        signature: of the model.
        head_dims: layer -> head_dim of the calls of the last sampling.
        measurements: (layer, part of the steps) -> the error of each variant.
        left_out: layer -> why it could not be measured.
        budget: the time for measuring in the last sampling.
    """

    def __init__(
        self, signature: Signature, cost_limit: float, slot: int, previous: Override | None, progress: Progress
    ) -> None:
        """cost_limit: the share of the sampling's time, 0 to 1, that measuring may take."""
        super().__init__(Settings(), Selection("calibration", None), slot, previous)
        self.signature = signature
        self.head_dims: dict[int, int] = {}
        self.measurements: dict[tuple[int, int], dict[Variant, Agreement]] = {}
        self.left_out: dict[int, str] = {}
        self._passes: Counter[tuple[int, int]] = Counter()
        self._cost_limit = cost_limit
        self._progress = progress
        self.budget = Budget(cost_limit)

    def begin_sampling(self, sigmas: Sequence[float]) -> None:
        """See `Session.begin_sampling`; what an earlier sampling measured is forgotten."""
        super().begin_sampling(sigmas)
        self.head_dims, self.measurements, self.left_out = {}, {}, {}
        self._passes.clear()
        self.budget = Budget(self._cost_limit)

    def end_forward(self, forward: Forward) -> None:
        """See `Session.end_forward`."""
        super().end_forward(forward)
        if self.layers is not None:
            self._progress(len(self.measurements), self.measurable)

    @property
    def measurable(self) -> int:
        """How many pairs of layer and part there are to measure, as far as the passes so far tell."""
        parts = {part_of(step, self.schedule.steps, BOUNDS) for step in range(self.schedule.steps)}
        return len(parts) * (len(self.head_dims) - len(self.left_out))

    def attend(self, call: HostCall, forward: Forward, fallback: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Serve `call` by the host, and measure the modes on a sample of it if its turn has come."""
        layer = forward.next_layer(call.head_dim)
        self.head_dims.setdefault(layer, call.head_dim)
        watch = stopwatch.start(call.q.device)
        out = fallback()
        watch.stop()
        self.statistics.record(layer, forward.step, Outcome(reason=CALIBRATING), watch, None)
        place = (layer, part_of(forward.step, self.schedule.steps, BOUNDS))
        if self._is_due(place) and self.budget.allows(LOADING if call.q.device.type == "cuda" else 0.0):
            self._measure(call, place)
        return out

    def _is_due(self, place: tuple[int, int]) -> bool:
        """Whether `place` is to be measured now: the first time at once, again when its part is through for all."""
        layer, part = place
        if layer in self.left_out or self._passes[place] >= PASSES:
            return False
        # A copy: the thread of another GPU may be adding layers.
        others = (other for other in tuple(self.head_dims) if other not in self.left_out)
        return self._passes[place] == 0 or all(self._passes[other, part] for other in others)

    def _measure(self, call: HostCall, place: tuple[int, int]) -> None:
        reason = _reason_against_measuring(call)
        if reason is None:
            _wait_for(call.q.device)
            started = time.perf_counter()
            try:
                found = measure_variants(call)
                earlier = self.measurements.get(place, found)
                self.measurements[place] = {variant: worst((found[variant], earlier[variant])) for variant in found}
                self._passes[place] += 1
            except (TypeError, ValueError, RuntimeError) as error:  # the sampling itself must go on, memory or not
                reason = f"measuring failed: {error}"
                if reason not in tuple(self.left_out.values()):  # one line a reason; the report counts the layers
                    log.warning("SageAttention2: calibration: layer %d is left out: %s", place[0], reason)
            self.budget.add(time.perf_counter() - started)
        if reason is not None:
            self.left_out[place[0]] = reason


def _reason_against_measuring(call: HostCall) -> str | None:
    if call.unknown:
        return f"the model passes arguments that this version does not know: {', '.join(call.unknown)}"
    if not call.low_precision:
        return "the model asks for full precision here (low_precision_attention=False)"
    if call.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "nothing can be measured while a CUDA graph is captured"
    return None


def measure_variants(call: HostCall) -> dict[Variant, Agreement]:
    """The error of each variant on a sample of `call`, by the fastest backend that can run it, else the reference.

    Of several entries of the batch the worst one counts: an empty prompt may be easy, and say nothing about the other.
    Waits for the device. Raises the attention API's errors.
    """
    q, k, v = call.tensors()
    if call.layout == "BNHD":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = call.mask_4d()
    rows = _block_rows(q.shape[2], q.device)
    entries = evenly(q.shape[0], BATCH, q.device)
    q, k, v = (tensor.index_select(0, entries) for tensor in (q, k, v))
    if mask is not None and mask.shape[0] > 1:
        mask = mask.index_select(0, entries)
    sample = Sample.of(q, k, v, mask, evenly(q.shape[1], HEADS, q.device), rows)
    exact = sample.exact(call.scale)
    found = {}
    for variant in VARIANTS:
        out = attention(
            sample.q,
            sample.k,
            sample.v,
            mode=variant.mode,
            smooth_v=variant.smooth_v,
            scale=call.scale,
            attn_mask=sample.mask,
        )
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        found[variant] = worst(Agreement.of(*pair) for pair in zip(out, exact, strict=True))
    return found


def _block_rows(count: int, device: torch.device) -> torch.Tensor:
    """The indices of evenly spread whole blocks of `count` rows, or of all rows when they make no more blocks."""
    if count <= BLOCKS * BLOCK_ROWS:
        return torch.arange(count, device=device)
    blocks = evenly(count // BLOCK_ROWS, BLOCKS, device)
    return (blocks[:, None] * BLOCK_ROWS + torch.arange(BLOCK_ROWS, device=device)).flatten()


def _wait_for(device: torch.device) -> None:
    """Finish earlier work, so that a measurement's time is its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
