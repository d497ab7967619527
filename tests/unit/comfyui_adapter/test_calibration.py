"""Calibration: what is measured, at what cost, and that the sampling itself is not touched."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_sage2 import attention
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.calibration import Calibration
from comfy_sage2.comfyui.session.measurement import BLOCK_ROWS, Budget, measure_variants
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.metrics import Agreement
from comfy_sage2.policy.calibrated import BOUNDS, Policy
from comfy_sage2.policy.document import LONGEST
from comfy_sage2.policy.files import load_policy, policy_path, read_policy_text, save_policy
from comfy_sage2.policy.signature import Signature
from comfy_sage2.policy.targets import VARIANTS

STEPS = 10
LAYERS = 3
SIGMAS = [1.0 - step / STEPS for step in range(STEPS + 1)]
SIGNATURE = Signature.of("WAN21", {"num_layers": LAYERS})
HEADS, HEAD_DIM = 4, 32


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())


def test_measurement_is_the_error_of_the_whole_call() -> None:
    """On two whole heads of two blocks the sample is the call, and the error can be had without sampling."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 2 * BLOCK_ROWS, 64) for _ in range(3))
    found = measure_variants(AttentionCall(q, k, v, 2, skip_reshape=True))
    truth = exact(q, k, v)
    for variant in VARIANTS:
        out = attention(q, k, v, options=replace(variant, rotate="off"), backend="reference", return_lse=False)
        error = float((out - truth).abs().sum() / truth.abs().sum())
        assert found[variant].relative_l1 == pytest.approx(error, rel=1e-3)
        assert 1 - error < found[variant].cosine < 1


def test_a_sampled_block_has_the_numbers_of_the_whole_call() -> None:
    """Smooth Q works on blocks of rows: the sampled ones must not be cut differently."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5 * BLOCK_ROWS, 64) for _ in range(3))
    q = q + 4.0 * torch.randn(1, 2, 5, 1, 64).expand(-1, -1, -1, BLOCK_ROWS, -1).flatten(2, 3)  # a mean for each block
    found = measure_variants(AttentionCall(q, k, v, 2, skip_reshape=True))
    out, truth = attention(q, k, v, mode="4b", rotate="off", backend="reference"), exact(q, k, v)
    kept = torch.cat([torch.arange(BLOCK_ROWS), torch.arange(4 * BLOCK_ROWS, 5 * BLOCK_ROWS)])
    out, truth = out[:, :, kept], truth[:, :, kept]
    error = float((out - truth).abs().sum() / truth.abs().sum())
    assert found[VARIANTS[0]].relative_l1 == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("mask_shape", [None, (1, 1, 1, 90), (2, 8, 300, 90)])
def test_masks_grouped_heads_and_both_layouts(mask_shape: tuple[int, ...] | None) -> None:
    q, k, v = torch.randn(2, 8, 300, 32), torch.randn(2, 2, 90, 32), torch.randn(2, 2, 90, 32)
    mask = None if mask_shape is None else torch.rand(mask_shape) > 0.3
    one = measure_variants(AttentionCall(q, k, v, 8, mask, skip_reshape=True, enable_gqa=True))
    q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
    other = measure_variants(AttentionCall(q, k, v, 8, mask, enable_gqa=True))
    assert all(measured.relative_l1 < 0.3 for measured in one.values())
    for variant in VARIANTS:
        assert one[variant].relative_l1 == pytest.approx(other[variant].relative_l1, rel=1e-4)


def test_the_worst_of_the_batch_counts() -> None:
    """With all keys alike and all values alike, as an empty prompt's may be, every mode is exact."""
    easy = torch.ones(1, 2, 64, 32)
    hard = torch.randn(1, 2, 64, 32)
    alone = measure_variants(AttentionCall(hard, hard, hard, 2, skip_reshape=True))
    trivial = measure_variants(AttentionCall(hard, easy, easy, 2, skip_reshape=True))
    assert all(measured.relative_l1 < 1e-3 < alone[variant].relative_l1 for variant, measured in trivial.items())
    for pair in ((easy, hard), (hard, easy)):
        both = measure_variants(
            AttentionCall(torch.cat([hard, hard]), torch.cat(pair), torch.cat(pair), 2, skip_reshape=True)
        )
        for variant in VARIANTS:
            assert both[variant].relative_l1 == pytest.approx(alone[variant].relative_l1, rel=1e-4)


def test_another_gpus_thread_may_add_layers_meanwhile() -> None:
    """Each GPU has its thread, and they share the calibration."""
    calibration = Calibration(SIGNATURE, 5.0, lambda *done: None)
    calibration.head_dims = {0: HEAD_DIM, 1: HEAD_DIM}

    class Interrupted(Counter[tuple[int, int]]):
        """Lets the other thread run whenever it is looked into."""

        def __getitem__(self, place: tuple[int, int]) -> int:
            calibration.head_dims.setdefault(len(calibration.head_dims), HEAD_DIM)
            return super().__getitem__(place)

    calibration._passes = Interrupted({(layer, 0): 1 for layer in range(100)})
    assert calibration._is_due((0, 0))


def test_nothing_compared_with_nothing_is_exact() -> None:
    zero = torch.zeros(1, 2, 64, 32)
    found = measure_variants(AttentionCall(torch.randn(1, 2, 64, 32), zero, zero, 2, skip_reshape=True))
    assert all((measured.cosine, measured.relative_l1) == (1.0, 0.0) for measured in found.values())


class Clock:
    """Time that passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("comfy_sage2.comfyui.session.calibration.time.perf_counter", lambda: self.now)


def comfyui_attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(q, 7.0)


def sampled(
    calibration: Calibration, clock: Clock | None = None, call_seconds: float = 0.0, **arguments: Any
) -> list[tuple[int, int]]:
    """One sampling in which every attention call takes `call_seconds`; the progress that was told."""
    told: list[tuple[int, int]] = []
    calibration._progress = lambda done, total: told.append((done, total))
    session = Session(calibration)
    override = make_override(session)

    def func(*args: Any, **kwargs: Any) -> torch.Tensor:
        if clock is not None:
            clock.now += call_seconds
        return comfyui_attention(*args, **kwargs)

    session.begin_sampling(SIGMAS)
    for sigma in SIGMAS[:-1]:
        model_pass = session.begin_pass(sigma, torch.device("cpu"), {})
        with model_passes.running(0, model_pass):
            for _ in range(LAYERS):
                q, k, v = torch.randn(3, 1, 64, HEADS * HEAD_DIM).unbind(0)
                out = override(func, q, k, v, HEADS, **arguments)
                assert torch.equal(out, torch.full_like(q, 7.0))  # the picture is full precision's
        session.end_pass(model_pass)
    session.end_sampling()
    return told


def calibration(limit: float = 0.15) -> Calibration:
    return Calibration(SIGNATURE, limit, lambda done, total: None)


def test_two_passes_are_measured_and_the_worse_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only once the first pass has measured every layer does a second one begin, and no third."""
    errors = iter([0.1, 0.2, 0.3, 0.3, 0.1, 0.2, *[0.9] * 100])
    measured = []

    def measure(call: AttentionCall, **options: Any) -> dict[Any, Any]:
        error = next(errors)
        measured.append(error)
        return {variant: Agreement(1.0 - error, error, 0.0) for variant in VARIANTS}

    monkeypatch.setattr("comfy_sage2.comfyui.session.calibration.measure_variants", measure)
    monkeypatch.setattr("comfy_sage2.comfyui.session.calibration.BOUNDS", (0.0, 1.0))
    node = calibration(limit=1e9)
    sampled(node)
    assert measured == [0.1, 0.2, 0.3, 0.3, 0.1, 0.2]
    assert [node.measurements[layer, 0][VARIANTS[0]] for layer in range(LAYERS)] == [
        Agreement(0.7, 0.3, 0.0), Agreement(0.8, 0.2, 0.0), Agreement(0.7, 0.3, 0.0)
    ]  # fmt: skip


def test_everything_is_measured_when_there_is_time() -> None:
    node = calibration(limit=1e9)
    told = sampled(node)
    assert set(node.measurements) == {(layer, part) for layer in range(LAYERS) for part in range(len(BOUNDS) - 1)}
    assert node.head_dims == {layer: HEAD_DIM for layer in range(LAYERS)}
    assert told[0] == (3, 15) and told[-1] == (15, 15)
    text = report([Session(node)])
    assert "measured 15 of 15 pairs" in text and "quality lossless" in text and "most exact mode" not in text


def test_measuring_stays_within_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 1 s and measurements of 0.4 s: of 30 s, at most 15 % may be added."""
    clock = Clock(monkeypatch)

    def measure(call: AttentionCall, **options: Any) -> dict[Any, Any]:
        clock.now += 0.4
        return measure_variants(call, **options)

    monkeypatch.setattr("comfy_sage2.comfyui.session.calibration.measure_variants", measure)
    node = calibration()
    sampled(node, clock, call_seconds=1.0)
    assert clock.now == pytest.approx(STEPS * LAYERS + node.budget.spent)
    assert 0.8 * 0.15 < node.budget.spent / clock.now <= 0.15
    assert {layer for layer, _ in node.measurements} == set(range(LAYERS))
    assert "most exact mode" in report([Session(node)])


def test_budget_lets_the_first_measurement_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    budget = Budget(0.5)
    assert budget.allows()
    budget.add(1.0)
    clock.now = 3.9
    assert not budget.allows()
    clock.now = 4.0
    assert budget.allows()


def test_a_new_sampling_measures_afresh() -> None:
    node = calibration(limit=1e9)
    sampled(node)
    node.begin_sampling(STEPS)
    assert node.measurements == {} and node.head_dims == {}
    assert "nothing was sampled for the calibration yet" in report([Session(node)])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"low_precision_attention": False}, "asks for full precision"),
        ({"is_causal": True}, "does not know: is_causal"),
    ],
)
def test_what_no_mode_may_serve_is_left_out(arguments: dict[str, Any], words: str) -> None:
    node = calibration(limit=1e9)
    sampled(node, **arguments)
    assert node.measurements == {} and words in node.left_out[0] and words in report([Session(node)])


def test_a_failing_measurement_does_not_end_the_sampling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: AttentionCall, **options: Any) -> dict[Any, Any]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("comfy_sage2.comfyui.session.calibration.measure_variants", fail)
    node = calibration(limit=1e9)
    sampled(node)
    assert node.left_out == dict.fromkeys(range(LAYERS), "[SA-408] measuring failed: out of memory")
    assert len(caplog.records) == 1


def policy() -> Policy:
    node = calibration(limit=1e9)
    sampled(node)
    return node.policy("fast")


def test_policy_files(tmp_path: Path) -> None:
    made = policy()
    folder = tmp_path / "not" / "there yet"
    path = save_policy(made, folder, " wan 2.1 ")
    assert path == folder / "wan 2.1.json" and [entry.name for entry in folder.iterdir()] == ["wan 2.1.json"]
    text = path.read_text(encoding="utf-8")
    assert load_policy(folder, "", "wan 2.1.json") == load_policy(folder, text, "")
    assert [[cell.options for cell in row] for row in load_policy(folder, text, "").cells] == [
        [cell.options for cell in row] for row in made.cells
    ]
    with pytest.raises(ValueError, match=r"no policy 'flux' in .*; there are: wan 2\.1"):
        load_policy(folder, "", "flux")
    for both in (("", ""), (text, "wan")):
        with pytest.raises(ValueError, match="either as text or as the name of a file"):
            load_policy(folder, *both)


def test_the_largest_file_that_is_read(tmp_path: Path) -> None:
    """As many characters as a policy may have, of four bytes each."""
    path = policy_path(tmp_path, "large")
    path.write_text("\U0001f600" * LONGEST, encoding="utf-8")
    assert len(read_policy_text(tmp_path, "large")) == LONGEST
    with path.open("ab") as file:
        file.write(b" ")
    with pytest.raises(ValueError, match=f"has {4 * LONGEST + 1} bytes, too many for a policy"):
        read_policy_text(tmp_path, "large")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/b",
        "a\\b",
        "/etc/passwd",
        "C:x",
        "..",
        ".hidden",
        "a..b",
        "x\0",
        "x\ny",
        "",
        " ",
        "a" * 101,
        "x.",
        "ü",
    ],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file must be a plain name"):
        policy_path(tmp_path, name)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="this system has no symbolic links")
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match="is a link out of"):
        policy_path(folder, "link")


def test_a_policy_that_an_editor_saved(tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "comfyui" / "tiny_wan_policy.json"
    text = document.read_text(encoding="utf-8")
    (tmp_path / "marked.json").write_text(text, encoding="utf-8-sig")
    assert load_policy(tmp_path, "", "marked") == load_policy(tmp_path, text, "")
    (tmp_path / "wide.json").write_text(text, encoding="utf-16")
    with pytest.raises(ValueError, match=r"wide\.json is not UTF-8 text .*: save it as UTF-8"):
        load_policy(tmp_path, "", "wide")


def test_first_measurement_waits_until_its_kernels_may_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    budget = Budget(0.15)
    clock.now = 1.0
    assert budget.allows() and not budget.allows(first=0.25)
    clock.now = 2.0
    assert budget.allows(first=0.25)
    budget.add(0.2)
    assert not budget.allows(first=0.25), "the next is taken to be as long as this one"
    clock.now = 3.0
    assert budget.allows(first=0.25)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 64, 64, dtype=torch.bool)], ids=["no mask", "mask"])
def test_keys_of_another_batch_are_left_out_with_the_reason(mask: torch.Tensor | None) -> None:
    """ComfyUI's attention broadcasts them; picking entries of q's batch from them would read beyond their end."""
    node = calibration(limit=1e9)
    session = Session(node)
    override = make_override(session)
    session.begin_sampling(SIGMAS)
    q, k, v = torch.randn(2, HEADS, 64, HEAD_DIM), *torch.randn(2, 1, HEADS, 64, HEAD_DIM).unbind(0)
    with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
        out = override(comfyui_attention, q, k, v, HEADS, mask, skip_reshape=True)
    assert torch.equal(out, torch.full_like(q, 7.0))
    assert (
        node.left_out == {0: "[SA-408] measuring failed: [SA-201] k must have q's batch size 2, got 1"}
        and not node.measurements
    )


def test_passes_outside_of_a_sampling_are_not_measured() -> None:
    node = calibration(limit=1e9)
    session = Session(node)
    override = make_override(session)
    for _ in range(3):
        with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
            override(comfyui_attention, *torch.randn(3, 1, 64, HEADS * HEAD_DIM).unbind(0), HEADS)
    assert not node.measurements and not node.head_dims and session.record.summary().calls == 0
