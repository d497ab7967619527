"""The handler of the *SageAttention2 Auto Policy* node: calibrate a model once, then render by the policy."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...call_site import CallSite, Layer
from ...policy.calibrated import Policy
from ...policy.document import to_text
from ...text import one_line
from ..adapter.attention_call import AttentionCall
from .calibration import Calibration
from .dispatcher import Dispatcher
from .handler import Handler
from .record import Decision, Summary
from .subject import Identity, Subject

log = logging.getLogger("comfy_sage2")

MOST_KEPT = 64  # calibrations
MOST_NODES = 500

NodeKey = tuple[str, str]  # the workflow's id, "" where none is known, and the node's number in it
MEASURING = "auto policy: sampled in full precision and measured"
NEXT = "From the next run on this node renders by its policy"

NOTHING = "nothing was measured"
UNFINISHED = "the sampling did not come to its end"


class Calibrations:
    """What was measured in this process, by subject, for all nodes: the same model needs no second calibration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Subject, Calibration] = OrderedDict()
        self._made: Counter[NodeKey] = Counter()
        self._sampled: OrderedDict[NodeKey, Subject] = OrderedDict()

    def find(self, subject: Subject) -> Calibration | None:
        """What was measured of `subject`, or None."""
        with self._lock:
            return self._found.get(subject)

    def add(self, node: NodeKey, subject: Subject, calibration: Calibration) -> None:
        """This node has calibrated `subject`."""
        with self._lock:
            self._found[subject] = calibration
            self._found.move_to_end(subject)
            self._made[node] += 1
            while len(self._found) > MOST_KEPT:
                self._found.popitem(last=False)

    def forget(self, subject: Subject) -> None:
        """What was measured of `subject` does not fit it."""
        with self._lock:
            self._found.pop(subject, None)

    def sampled(self, node: NodeKey, subject: Subject) -> None:
        """A sampling of `subject` through this node came to its end, whether it was measured or took a policy."""
        with self._lock:
            self._sampled[node] = subject
            self._sampled.move_to_end(node)
            while len(self._sampled) > MOST_NODES:
                self._sampled.popitem(last=False)

    def last_sampled(self, node: NodeKey) -> Subject | None:
        """What was sampled last through this node."""
        with self._lock:
            return self._sampled.get(node)

    def made(self, node: str | None, workflow: str | None = None) -> int:
        """How often a node has calibrated: with it changes what the node does with the same inputs.

        node: None counts all nodes, for a host that does not say which node it asks. workflow: None counts the nodes of
        this number in all workflows, for a host that does not say which one it runs.
        """
        with self._lock:
            return sum(
                count
                for (found, number), count in self._made.items()
                if node in (None, number) and workflow in (None, found)
            )


calibrations = Calibrations()


class AutoPolicy(Handler):
    """Measures a sampling whose subject is new, and serves by the policy where it is known.

    ComfyUI keeps the node's output as long as its inputs stay the same, so all is decided when a sampling begins.
    """

    def __init__(
        self,
        node: NodeKey,
        identity: Identity,
        quality: str,
        kept: Policy | None,
        dispatch: Callable[[Policy | None], Dispatcher],
        calibrate: Callable[[], Calibration],
        settings: tuple[object, ...],
    ) -> None:
        """
        Args:
            node: which node it is: workflows and tabs may have nodes of equal numbers.
            identity: of the model.
            quality: the name of the target.
            kept: the policy that the workflow carries, which is taken as long as it fits.
            dispatch, calibrate: make the handler for a sampling.
            settings: in what calibrations of one model may differ.
        """
        self._node, self._identity, self._quality, self._kept = node, identity, quality, kept
        self._dispatch, self._calibrate, self._settings = dispatch, calibrate, settings
        self._subject: Subject | None = None
        self._measured: Calibration | None = None  # in the sampling that runs or ran last
        self._ended = False  # that sampling, and without an error
        self._origin = ""  # of the policy
        self._said: str | None = None  # of the sampling that ran last
        self._steps = 1
        self._dropping = threading.Lock()
        first = dispatch(kept)
        self.idle_reason, self.notes = first.idle_reason, first.notes
        self.traced_as = (settings, first.traced_as)
        self._take(first)

    def before_sampling(self, model: Any, noise: torch.Tensor, sigmas: Sequence[float]) -> None:
        """See `Handler.before_sampling`: the sampling is measured, or takes the policy of an earlier one."""
        if self.idle_reason is not None:
            return
        self._subject = Subject.of(model, noise.shape, sigmas, self._settings)
        self._measured = None
        earlier, why = calibrations.last_sampled(self._node), "this model was not calibrated yet"
        if self._kept is not None:
            differences = self._kept.signature.differences(self._subject.model)
            if not differences:
                self._render(self._kept, "kept in this workflow")
                return
            why = f"the policy kept in this workflow does not fit: {'; '.join(differences)}"
        elif earlier is not None and (changes := self._subject.changes(earlier)):
            why = f"since the last sampling changed: {changes}"
        found = calibrations.find(self._subject)
        if found is None:
            self._measure(why)
        else:
            self._render(found.policy(self._quality), "measured in an earlier run")

    def begin_sampling(self, steps: int) -> None:
        """See `Handler.begin_sampling`."""
        self._steps, self._ended = steps, False
        self._now.begin_sampling(steps)

    def complete_sampling(self) -> None:
        """See `Handler.complete_sampling`: what was measured counts from now on."""
        self._ended = True
        if self._subject is not None:
            calibrations.sampled(self._node, self._subject)
        if self._measured is None or self._subject is None:
            return
        try:
            policy = self._measured.policy(self._quality)
        except ValueError as error:  # no attention call that can be measured
            log.warning("SageAttention2: auto policy: %s", error)
            self._said = f"Nothing could be measured, and the next run tries again: {error}"
            return
        calibrations.add(self._node, self._subject, self._measured)
        log.info("SageAttention2: auto policy: measured; %s: %s", NEXT, policy.shares)
        self._said = f"Measured. {NEXT}: {policy.shares}."

    def end_sampling(self) -> None:
        """See `Handler.end_sampling`."""
        self._now.end_sampling()

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        """See `Handler.choose`; a policy that does not fit is dropped, and the rest of the sampling measured."""
        now = self._now
        try:
            return now.choose(call, site)
        except ValueError as error:
            self._drop(now, error)
            return self._now.choose(call, site)

    def more_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """See `Handler.more_exact`."""
        return self._now.more_exact(call, decision)

    def next_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """See `Handler.next_exact`."""
        return self._now.next_exact(call, decision)

    def end_pass(self, calls: Sequence[Layer], first: bool) -> None:
        """See `Handler.end_pass`; a policy that does not fit is dropped, and the rest of the sampling measured."""
        now = self._now
        try:
            now.end_pass(calls, first)
        except ValueError as error:
            self._drop(now, error)

    def status(self) -> str:
        """See `Handler.status`: what the last sampling did, or what the next one will do, as far as the node knows."""
        if self._said is not None:
            return self._said
        if self._kept is not None:
            return f"Renders by the policy kept here: {self._kept.shares}."
        if not self.policy_text():
            return f"The next sampling is in full precision and measured. {NEXT}."
        return (
            "Renders by the policies that it measured. It measures again when the model, a LoRA, the size or the steps "
            "change."
        )

    def policy_text(self) -> str:
        """See `Handler.policy_text`: the policy of what this node sampled last, in its workflow; a kept one stays."""
        if self._kept is not None:
            return to_text(self._kept)
        latest = calibrations.last_sampled(self._node)
        if latest is None or latest.identity != self._identity or latest.settings != self._settings:
            return ""
        found = calibrations.find(latest)
        return "" if found is None else to_text(found.policy(self._quality))

    def reasoning(self, summary: Summary) -> Sequence[str]:
        """See `Handler.reasoning`."""
        return (f"auto policy: {self._origin}", *self._now.reasoning(summary))

    def own_headline(self, summary: Summary) -> str | None:
        """See `Handler.own_headline`."""
        return self._now.own_headline(summary)

    def own_report(self, summary: Summary) -> str | None:
        """See `Handler.own_report`."""
        own = self._now.own_report(summary)
        if own is None or self._subject is None or not summary.calls:
            return own
        lines = [own, f"{NEXT}, quality {self._quality}."]
        if calibrations.find(self._subject) is None:
            lines[1] = f"Auto Policy keeps nothing of it: {NOTHING if self._ended else UNFINISHED}."
        return "\n".join(lines)

    def _take(self, handler: Handler) -> None:
        self._now = handler
        self.title, self.guard, self.measure_quality = handler.title, handler.guard, handler.measure_quality
        self.sparsity, self.leaves_to_declared = handler.sparsity, handler.leaves_to_declared

    def _render(self, policy: Policy, origin: str) -> None:
        self._origin = f"by the policy {origin}"
        self._take(self._dispatch(policy))
        self.title = f"auto policy, {self.title}"
        self._said = f"Renders by the policy {origin}: {policy.shares}."

    def _measure(self, why: str) -> None:
        self._measured = self._calibrate()
        self._take(self._measured)
        self.title = MEASURING
        log.info("SageAttention2: auto policy: %s; this sampling is in full precision and measured", why)
        # Until it does.
        self._said = f"The node made no policy, because {UNFINISHED}. Run the workflow again to the end."

    def _drop(self, handler: Handler, error: ValueError) -> None:
        """The policy of `handler` does not fit; ValueError once more where `handler` has none."""
        with self._dropping:
            if self._now is not handler:  # the thread of another GPU was first
                return
            if self._measured is not None or self._subject is None:
                raise error
            self._kept = None
            calibrations.forget(self._subject)
            self._measure(one_line(str(error)))
            self._now.begin_sampling(self._steps)
