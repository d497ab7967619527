"""The automatic policy without ComfyUI: what it does when a sampling begins."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from comfy_sage2.call_site import CallSite
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import auto_policy, model_passes, subject
from comfy_sage2.comfyui.session.auto_policy import AutoPolicy, Calibrations
from comfy_sage2.comfyui.session.calibration import Calibration
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.measurement import Budget
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import Policy
from comfy_sage2.policy.document import from_text
from comfy_sage2.policy.selector import Choice, FixedSelector, ModeSelector
from comfy_sage2.policy.signature import Signature

from .calls import REFERENCE, ones, qkv
from .lora_models import SETTINGS, SHAPE, SIGMAS, patcher, subject_of

SIGNATURE = Signature.of("SimpleNamespace", {"num_layers": 2})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Calibrations:
    """The calibrations of a process that just started."""
    fresh = Calibrations()
    monkeypatch.setattr(auto_policy, "calibrations", fresh)
    return fresh


class Node:
    """A node with its session, and what it told."""

    def __init__(
        self,
        name: str | tuple[str, str] = "7",
        quality: str = "fast",
        kept: Policy | None = None,
        cost: float = 5.0,
        model: Any = None,
        selector: Callable[[Policy], ModeSelector] = lambda policy: policy,
        settings: tuple[object, ...] = SETTINGS,
    ) -> None:
        served = Settings(backend="reference")

        def serve(policy: Policy | None) -> Dispatcher:
            return Dispatcher(replace(served, policy=policy), REFERENCE, None if policy is None else selector(policy))

        def calibrate() -> Calibration:
            return Calibration(SIGNATURE, cost, lambda done, total: None)

        self.handler = AutoPolicy(
            ("", name) if isinstance(name, str) else name,
            subject.identity_of(model or patcher()),
            quality,
            kept,
            serve,
            calibrate,
            settings,
        )
        self.session = Session(self.handler)

    def sample(self, model: Any, calls: int = 2, *, completes: bool = True, shape: tuple[int, ...] = SHAPE) -> str:
        """One sampling, as `sampling_wrapper` runs it; the report on it."""
        override = make_override(self.session)
        self.handler.before_sampling(model, torch.empty(shape), SIGMAS)
        self.session.begin_sampling(SIGMAS)
        for sigma in SIGMAS[:-1]:
            model_pass = self.session.begin_pass(sigma, torch.device("cpu"), {})
            with model_passes.running(0, model_pass):
                for _ in range(calls):
                    override(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
            self.session.end_pass(model_pass)
        if completes:
            self.handler.complete_sampling()
        self.session.end_sampling()
        return report([self.session])


MEASURED, RENDERED = "calibration measured", "auto policy: by the policy"


def test_the_second_sampling_renders(known: Calibrations) -> None:
    node = Node()
    assert "next sampling is in full precision" in node.handler.status() and known.made("7") == 0
    assert MEASURED in node.sample(patcher()) and node.session.record.summary().shares[0].decision.backend is None
    assert known.made("7") == known.made(None) == 1
    text = node.sample(patcher())
    assert RENDERED in text and "policy: fast" in text and MEASURED not in text
    assert node.session.record.summary().shares[0].decision.backend == "reference"
    assert "Renders by the policy measured in an earlier run" in node.handler.status() and known.made("7") == 1
    assert from_text(node.handler.policy_text()).target == "fast"
    # A node made anew, as after a change of its inputs, knows what was measured.
    assert "Renders by the policies" in Node().handler.status()
    assert RENDERED in Node(quality="lossless").sample(patcher())


@pytest.mark.parametrize(
    "other, words", [(patcher(scale=0.1), "its LoRAs"), (patcher(seed=9), "the model's weights")], ids=["LoRA", "model"]
)
def test_another_model_is_measured_anew_and_the_log_says_why(
    known: Calibrations, caplog: pytest.LogCaptureFixture, other: Any, words: str
) -> None:
    node = Node()
    node.sample(patcher())
    with caplog.at_level(logging.INFO, "comfy_sage2"):
        assert MEASURED in node.sample(other)
    assert f"since the last sampling changed: {words}" in caplog.text
    assert RENDERED in node.sample(other) and RENDERED in node.sample(patcher())  # both are known now


def test_a_sampling_that_was_stopped_counts_for_nothing(known: Calibrations) -> None:
    node = Node()
    assert "did not come to its end" in node.sample(patcher(), completes=False)
    assert known.made("7") == 0 and "did not come to its end" in node.handler.status()
    assert MEASURED in node.sample(patcher()) and "From the next run on" in node.handler.status()
    assert RENDERED in node.sample(patcher())


def test_without_attention_calls_the_next_sampling_tries_again(
    known: Calibrations, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    node.sample(patcher(), calls=0)
    assert known.made("7") == 0 and "SA-404" in caplog.text and "SA-404" in node.handler.status()


def test_a_policy_that_does_not_fit_is_replaced_in_the_same_sampling(
    known: Calibrations, caplog: pytest.LogCaptureFixture
) -> None:
    """A ControlNet or an adapter adds attention calls: the rest of the sampling is measured, and nothing fails."""
    node = Node()
    node.sample(patcher(), calls=2)
    with caplog.at_level(logging.INFO, "comfy_sage2"):
        assert MEASURED in node.sample(patcher(), calls=3)
    assert "SA-503" in caplog.text
    assert RENDERED in node.sample(patcher(), calls=3)
    kept = from_text(node.handler.policy_text())
    assert MEASURED in Node("8", kept=kept).sample(patcher(seed=3), calls=5)


@pytest.mark.parametrize("carried", [True, False], ids=["kept in the workflow", "measured earlier"])
def test_a_policy_that_did_not_fit_is_not_taken_again(known: Calibrations, carried: bool) -> None:
    """Nor where the sampling that found it out was stopped, and so measured nothing in its place."""
    first = Node()
    first.sample(patcher(), calls=2)
    node = Node("8", kept=from_text(first.handler.policy_text())) if carried else first
    if carried:
        known.forget(subject_of(patcher()))
    assert "did not come to its end" in node.sample(patcher(), calls=3, completes=False)
    node.handler.before_sampling(patcher(), torch.empty(SHAPE), SIGMAS)
    assert node.handler.title == auto_policy.MEASURING


def test_a_node_of_other_settings_offers_no_policy(known: Calibrations) -> None:
    """It would measure anew: the policy of its number was made with or without rotation."""
    Node().sample(patcher())
    assert Node().handler.policy_text() != "" and Node(settings=(False, 0.3)).handler.policy_text() == ""


def test_a_kept_policy_is_taken_while_the_kind_of_model_fits(
    known: Calibrations, caplog: pytest.LogCaptureFixture
) -> None:
    first = Node()
    first.sample(patcher())
    kept = from_text(first.handler.policy_text())
    node = Node("8", quality="lossless", kept=kept)
    assert "kept in this workflow" in node.sample(patcher(seed=5), shape=(1, 4, 8, 8))
    with caplog.at_level(logging.INFO, "comfy_sage2"):
        assert MEASURED in node.sample(patcher(layers=3))
    assert "num_layers is 2 in the policy and 3 in the model" in caplog.text
    assert first.handler.policy_text() != "" and from_text(node.handler.policy_text()) == kept


def test_a_node_offers_no_policy_of_another_model(known: Calibrations) -> None:
    Node().sample(patcher())
    assert Node().handler.policy_text() != ""
    for other in (patcher(layers=3), patcher(seed=1), patcher(scale=0.5), patcher(scale=0.5, way="beside")):
        node = Node(model=other)
        assert node.handler.policy_text() == "" and "next sampling is in full precision" in node.handler.status()


def test_two_gpus_find_at_once_that_a_policy_does_not_fit(known: Calibrations) -> None:
    """The second thread goes on with what the first one began, and its sampling does not fail."""
    first = Node()
    first.sample(patcher())
    both = threading.Barrier(2)

    class Unfit(FixedSelector):
        def choose(self, site: CallSite) -> Choice:
            both.wait(timeout=600)
            raise ValueError("[SA-503] it does not fit")

    node = Node("8", kept=from_text(first.handler.policy_text()), selector=lambda policy: Unfit(AttentionOptions()))
    node.handler.before_sampling(patcher(), torch.empty(SHAPE), SIGMAS)
    node.session.begin_sampling(SIGMAS)
    override = make_override(node.session)

    def one_pass(_: int) -> torch.Tensor:
        model_pass = node.session.begin_pass(SIGMAS[0], torch.device("cpu"), {})
        with model_passes.running(0, model_pass):
            return override(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})

    with ThreadPoolExecutor(2) as threads:
        assert all(bool((out == 1.0).all()) for out in threads.map(one_pass, range(2)))
    assert isinstance(node.handler._now, Calibration)


def test_only_so_many_calibrations_are_kept() -> None:
    known = Calibrations()
    subjects = [subject_of(patcher(), (1, 4, 8, number)) for number in range(auto_policy.MOST_KEPT + 1)]
    for found in subjects:
        known.add(("", "1"), found, Calibration(SIGNATURE, 1.0, lambda done, total: None))
    assert known.find(subjects[0]) is None and all(known.find(found) is not None for found in subjects[1:])


def test_a_short_sampling_may_measure_for_some_seconds() -> None:
    """A share of a moment would be less than the first measurement takes, and nothing would ever be measured."""
    assert not Budget(0.3).allows(0.25) and Budget(0.3, least=2.0).allows(0.25)
    budget = Budget(0.3, least=2.0)
    budget.add(1.5)
    assert not budget.allows()


class TestWorkflows:
    """Tabs and copied workflows have nodes of equal numbers as a rule."""

    SMALL, LARGE = (1, 16, 1, 8, 8), (1, 16, 5, 16, 16)

    def test_each_tab_keeps_the_policy_of_its_own_sampling(self, known: Calibrations) -> None:
        first, second = Node(("tab A", "12")), Node(("tab B", "12"))
        first.sample(patcher(), shape=self.SMALL)
        own = first.handler.policy_text()
        assert own and second.handler.policy_text() == ""
        second.sample(patcher(), calls=3, shape=self.LARGE)
        assert first.handler.policy_text() == own != second.handler.policy_text() != ""
        # What a node does with the same inputs changes with its own calibrations alone.
        assert known.made("12", "tab A") == known.made("12", "tab B") == 1 and known.made("12") == 2
        assert known.made("12", "tab C") == known.made("13") == 0

    def test_a_size_that_goes_back_gives_its_own_policy(self, known: Calibrations) -> None:
        node = Node()
        node.sample(patcher(), shape=self.SMALL)
        small = node.handler.policy_text()
        node.sample(patcher(), calls=3, shape=self.LARGE)
        assert node.handler.policy_text() != small
        assert RENDERED in node.sample(patcher(), shape=self.SMALL)
        assert node.handler.policy_text() == small

    def test_a_tab_whose_model_is_known_renders_at_once_and_offers_its_policy(self, known: Calibrations) -> None:
        first, second = Node(("tab A", "12")), Node(("tab B", "12"))
        first.sample(patcher())
        assert RENDERED in second.sample(patcher())
        assert second.handler.policy_text() == first.handler.policy_text() != ""

    def test_a_sampling_that_was_stopped_leaves_the_policy_before(self, known: Calibrations) -> None:
        node = Node()
        node.sample(patcher(), shape=self.SMALL)
        small = node.handler.policy_text()
        node.sample(patcher(), shape=self.LARGE, completes=False)
        assert node.handler.policy_text() == small

    def test_the_oldest_nodes_are_forgotten(self, known: Calibrations) -> None:
        for number in range(auto_policy.MOST_NODES + 1):
            known.sampled(("", str(number)), subject_of(patcher()))
        assert known.last_sampled(("", "0")) is None and known.last_sampled(("", "1")) is not None
        known.sampled(("", "1"), subject_of(patcher()))
        known.sampled(("", "new"), subject_of(patcher()))
        assert known.last_sampled(("", "1")) is not None and known.last_sampled(("", "2")) is None
