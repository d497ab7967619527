"""Builds of the kernels beside each other: what is loaded, called and said, with stand-ins for the GPU."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from comfy_sage2.backends.base import BoundCall
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature
from comfy_sage2.tensors import NO_TENSORS, OptionalTensors
from lab.bench.candidates import PreparedCandidate
from lab.bench.timing import Timed
from lab.measurements import kernel_builds
from lab.measurements.kernel_builds import CUDNN, Kind, Sizes, agreement, load, row


def package(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "__init__.py").write_text(f"from ._part import value\nname = {text!r}\n", encoding="utf-8")
    (folder / "_part.py").write_text(f"value = {text!r}\n", encoding="utf-8")
    return folder


def test_two_packages_of_one_name_are_loaded_beside_each_other(tmp_path: Path) -> None:
    modules = [load(package(tmp_path / text, text), number) for number, text in enumerate(("old", "new"))]
    assert [module.value for module in modules] == [module.name for module in modules] == ["old", "new"]


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is no kernel package: it has no __init__\.py"):
        load(tmp_path / "missing", 0)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "__init__.py").write_text("from ._C import attention\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"cannot be imported: .*_C"):
        load(broken, 1)


def test_sizes() -> None:
    sizes = Sizes.parse("1x40x75600x512x128")
    assert sizes == Sizes(1, 40, 75600, 512, 128) and str(sizes) == "1 x 40 x 75,600 x 512 x 128"
    assert sizes.operations == 4 * 40 * 75600 * 512 * 128
    for text in ("", "1x2x3x4", "1x2x3x4x5x6", "0x1x1x1x1", "1x1x1x1x-1", "1x1x1x1x1000000000", "ax1x1x1x1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected BATCHxHEADS"):
            Sizes.parse(text)


def test_a_row_says_how_much_longer_the_others_take() -> None:
    times = {"old": 100.0, "new": 90.0, CUDNN: 100.0 + 20.0}
    assert row(Sizes(1, 2, 3000, 4, 5), times, "same bits") == (
        "| 1 x 2 x 3,000 x 4 x 5 | 100.0 | 90.0 (-10.0%) | 120.0 (+20.0%) | same bits |"
    )


def test_outputs_are_compared_with_the_first_build() -> None:
    first = torch.randn(2, 3)
    outputs = {"old": first, "same": first.clone(), "new": first + 0.5, CUDNN: first + 9.0}
    assert agreement(outputs, ["old", "same"]) == "same bits"
    assert agreement(outputs, ["old", "same", "new"]) == "new differs by at most 0.5"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], OptionalTensors]]:
    """Build, shape of k and other tensors of each call, all on the CPU; "b" gives other outputs than "a"."""
    calls: list[tuple[str, tuple[int, ...], OptionalTensors]] = []

    class Call(BoundCall):
        def __init__(self, module: ModuleType, signature: CallSignature, request: AttentionRequest) -> None:
            self.module, self.request = module, request

        def run(self, q: Any, k: Any, v: Any, optional: OptionalTensors = NO_TENSORS) -> Any:
            assert (self.request.has_block_mask, self.request.has_block_margins) == (
                optional.block_mask is not None,
                optional.block_margins is not None,
            )
            calls.append((self.module.__name__, tuple(k.shape), optional))
            return torch.full_like(q, float(self.module.__name__ == "b")), None

    def in_rounds(subjects: Mapping[str, PreparedCandidate], *_: Any) -> dict[str, Timed]:
        return {name: Timed(0.0, [2.0, 1.0, 9.0]) for name in subjects}

    for name in ("randn", "rand", "ones", "empty"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, made=made, device, **more: made(*size, **more))
    monkeypatch.setattr(kernel_builds, "KernelCall", Call)
    monkeypatch.setattr(kernel_builds, "in_a_graph", lambda run, calls: run)
    monkeypatch.setattr(kernel_builds, "time_in_rounds", in_rounds)
    monkeypatch.setattr(kernel_builds, "_cudnn", lambda q, k, v, is_causal: q)
    return calls


def measured(sizes: Sizes, kind: Kind) -> str:
    builds = {"old": ModuleType("a"), "new": ModuleType("b")}
    return kernel_builds.measure(builds, sizes, torch.float16, AttentionOptions("8b"), kind, random.Random(0))


def test_dense_builds_are_timed_beside_cudnn(called: list[tuple[str, tuple[int, ...], OptionalTensors]]) -> None:
    text = measured(Sizes(2, 3, 5, 7, 8), Kind())
    assert text == "| 2 x 3 x 5 x 7 x 8 | 50.0 | 50.0 (+0.0%) | 50.0 (+0.0%) | new differs by at most 1 |"
    assert called == [(name, (2, 3, 7, 8), NO_TENSORS) for name in "ab"] and Kind().beside == CUDNN


@pytest.mark.parametrize(
    "kind", [Kind(hidden=3), Kind(skipped=0.4), Kind(block_margins=True)], ids=lambda kind: kind.beside
)
def test_other_calls_are_timed_beside_the_first_builds_dense_one(
    called: list[tuple[str, tuple[int, ...], OptionalTensors]], kind: Kind
) -> None:
    measured(Sizes(2, 3, 200, 900, 8), kind)
    assert [name for name, _, _ in called] == ["a", "b", "a"] and called[2][2] == NO_TENSORS
    (_, _, first), (_, _, second), _ = called
    assert first is second
    mask, lists, margins = first.attn_mask, first.block_mask, first.block_margins
    assert (mask is None, lists is None, margins is None) == (
        not kind.hidden,
        kind.skipped is None,
        not kind.block_margins,
    )
    if mask is not None:
        assert mask.shape == (2, 1, 1, 900) and torch.equal(mask[0, 0, 0], torch.arange(900) < 897)
    if lists is not None:
        active = BlockMask(lists).to_dense()
        assert active.shape == (2, 3, 2, 8) and 0.3 < active.float().mean() < 0.9
    if margins is not None:
        assert margins.shape == (2, 3, 2, 8) and margins.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--skipped", "1"], "below 1"),
        (["--skipped", "nan"], "below 1"),
        (["--skipped", "-0.5"], "expected"),
        (["--margins", "--causal"], "causal calls record no block margins"),
        (["--margins", "--skipped", "0.5"], "not allowed with"),
        (["--hidden", "3", "--margins"], "not allowed with"),
    ],
)
def test_what_no_call_can_have_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernel_builds.main(["old", "--calls", "1x1x9x7x64", *arguments])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("hidden", ["-1", "7"])
def test_hidden_keys_leave_some(hidden: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernel_builds.main(["old", "--calls", "1x1x9x7x64", "--hidden", hidden])
    assert "fewer than all keys" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="builds needs a CUDA device"):
        kernel_builds.main(["old", "--calls", "1x1x9x7x64"])
