"""`sparse` where it cannot work or something fails: the output is dense, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.backends.constraints import DENSE
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.dispatch import registry

from .calls import raising, serve_by
from .calls import reference_attention as attention
from .sparse_samplings import TOKENS, SparseSession, by_mask, dense, focused, selected, sparse

pytestmark = pytest.mark.usefixtures("short_calls_are_sparse")


def sparse_in_all_steps(level: str = "medium", **options: Any) -> SparseSession:
    """A session whose every step is sparse."""
    return sparse(level, dense_percent=0.0, **options)


@pytest.mark.parametrize(
    ("tensors", "keywords", "reason"),
    [
        (focused(8), {"mask": torch.ones(1, 1, TOKENS, dtype=torch.bool)}, "this call has a mask"),
        (focused(8, tokens=TOKENS - 128), {}, "fewer than 8 blocks"),
        ([focused(8)[0], *focused(8, tokens=1500)[1:]], {}, None),
        # Like LTX's guides, which attend to all tokens.
        ([focused(8)[0][:, :512], *focused(8)[1:]], {}, "this is not self-attention: its queries and keys differ"),
    ],
    ids=["mask", "short", "cross", "a part of the queries"],
)
def test_unsupported_calls_are_dense(tensors: list[torch.Tensor], keywords: dict[str, Any], reason: str | None) -> None:
    session, off = sparse_in_all_steps(), sparse("off")
    for out, expected in zip(session.sampled(tensors, 2, **keywords), off.sampled(tensors, 2, **keywords), strict=True):
        assert torch.equal(out, expected)
    text = report([session])
    assert "Key blocks skipped (sparse medium): none" in text
    if reason is not None:
        assert text.count(reason) == 1 and "  2 calls computed all key blocks: [SA-318] " in text


def test_the_report_names_a_backend_without_block_lists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (DENSE,))
    session, tensors = sparse_in_all_steps(), focused(9)
    assert all(torch.equal(out, dense(tensors)) for out in session.sampled(tensors, 3))
    assert report([session]).count("  3 calls computed all key blocks: [SA-212] ") == 1


def test_exact_attention_stays_exact() -> None:
    session = sparse_in_all_steps(mode="exact")
    session.sampled(focused(10), 2)
    reason = "[SA-318] an exact attention computes such calls and skips no key blocks"
    assert f"  2 calls computed all key blocks: {reason}\n" in report([session]) and not session.figures()


@pytest.mark.parametrize("broken", ["sparsity.choices.block_scores", "comfyui.session.sparsity.listed_plan", "kernel"])
@pytest.mark.parametrize(
    "error", [RuntimeError("kernel"), torch.cuda.OutOfMemoryError("memory"), TypeError("block_mask")]
)
def test_a_failure_gives_the_dense_output(monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception) -> None:
    fails = raising(error)

    def without_lists(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = fails() if "block_mask" in kwargs else attention(*args, **kwargs)
        return out

    if broken == "kernel":
        serve_by(monkeypatch, without_lists)
    else:
        monkeypatch.setattr(f"comfy_sage2.{broken}", fails)
    session, tensors = sparse_in_all_steps(), focused(11)
    assert all(torch.equal(out, dense(tensors)) for out in session.sampled(tensors, 3))
    assert session.skips() == [False] * 3
    given_up = f"[SA-318] skipping key blocks failed and stays off for this sampling: {error}"
    assert report([session]).count(given_up) == 1
    assert all(share.decision.backend == "reference" for share in session.record.summary().shares)


def test_the_next_sampling_tries_to_skip_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, tensors = sparse_in_all_steps(), focused(11)
    with monkeypatch.context() as patched:
        patched.setattr("comfy_sage2.sparsity.choices.block_scores", None)
        session.sampled(tensors, 2)
    session.sampled(tensors, 2)
    assert session.skips() == [True, True] and "stays off" not in report([session])


@pytest.mark.parametrize("at_end", [True, False], ids=["once a pass", "at each call"])
def test_the_guard_moves_a_layer_with_a_broken_output_to_precise_with_all_blocks(
    monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    def broken_lists(*args: Any, block_mask: Any = None, nonfinite: Any = None, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attention(*args, nonfinite=nonfinite, **kwargs)
        if block_mask is not None:
            out = out / 0.0
            if nonfinite is not None:
                nonfinite.fill_(1)
        return out

    serve_by(monkeypatch, broken_lists)
    session, tensors = sparse_in_all_steps(guard=True), focused(12)
    session.begin()
    outs = [session.run(step, tensors, at_end=at_end)[0] for step in range(4)]
    session.end_sampling()
    assert all(out.isfinite().all() for out in outs)
    assert session.record.summary().cells[0, 3].label == "reference · precise"
    assert torch.equal(outs[2], dense(tensors, "precise"))


def test_the_choices_of_a_broken_pass_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, tensors = [True], focused(27)

    def first_breaks(*args: Any, nonfinite: Any = None, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attention(*args, nonfinite=nonfinite, **kwargs)
        if broken:
            broken.clear()
            out = out * torch.nan
            if nonfinite is not None:
                nonfinite.fill_(1)
        return out

    serve_by(monkeypatch, first_breaks)
    session, other = sparse_in_all_steps("light", guard=True), focused(28, beside=3)
    session.begin()
    session.run(0, other, tensors)  # the guard reruns this pass
    outs = session.run(1, other, tensors)
    session.end_sampling()
    for layer, out, call in zip(session.figures().values(), outs, (other, tensors), strict=True):
        assert (layer.choices, layer.calls) == (1, 2) and torch.equal(out, by_mask(call, selected("light", call)))
