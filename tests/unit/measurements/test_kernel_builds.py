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

from comfy_sage2.backends.base import AttentionRequest
from comfy_sage2.backends.tensors import OptionalTensors
from comfy_sage2.benchmark.timing import Subject, Timed
from comfy_sage2.options import AttentionOptions
from lab.measurements import kernel_builds
from lab.measurements.kernel_builds import CUDNN, Sizes, agreement, load, row


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


@pytest.mark.parametrize("hidden", [0, 3])
def test_each_call_is_what_its_name_says(monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    called: list[tuple[str, tuple[int, ...], Any]] = []

    def launch(module: ModuleType, q: Any, k: Any, v: Any, request: AttentionRequest, optional: OptionalTensors) -> Any:
        called.append((module.__name__, tuple(k.shape), optional.attn_mask))
        return torch.full_like(q, float(module.__name__ == "b")), None

    def in_rounds(subjects: Mapping[str, Subject], *_: Any) -> dict[str, Timed]:
        return {name: Timed(0.0, [2.0, 1.0, 9.0]) for name in subjects}

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype: randn(*size, dtype=dtype))
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device, dtype: ones(*size, dtype=dtype))
    monkeypatch.setattr(kernel_builds, "launch", launch)
    monkeypatch.setattr(kernel_builds, "in_a_graph", lambda run, calls: run)
    monkeypatch.setattr(kernel_builds, "time_in_rounds", in_rounds)
    monkeypatch.setattr(kernel_builds, "_cudnn", lambda q, k, v, is_causal: q)
    builds = {"old": ModuleType("a"), "new": ModuleType("b")}
    text = kernel_builds.measure(
        builds, Sizes(2, 3, 5, 7, 8), torch.float16, AttentionOptions("8b"), hidden, random.Random(0)
    )
    assert text == "| 2 x 3 x 5 x 7 x 8 | 50.0 | 50.0 (+0.0%) | 50.0 (+0.0%) | new differs by at most 1 |"
    names, shapes, masks = zip(*called, strict=True)
    assert names == ("a", "b", "a")[: len(names)] and set(shapes) == {(2, 3, 7, 8)}
    assert len(names) == 3 if hidden else 2
    for mask in masks[:2]:
        assert (mask is not None) == bool(hidden)
        if mask is not None:
            assert mask.shape == (2, 1, 1, 7) and mask[0, 0, 0].tolist() == [True] * 4 + [False] * 3
    assert hidden == 0 or masks[2] is None


@pytest.mark.parametrize("hidden", ["-1", "7"])
def test_hidden_keys_leave_some(hidden: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernel_builds.main(["old", "--calls", "1x1x9x7x64", "--hidden", hidden])
    assert "fewer than all keys" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="builds needs a CUDA device"):
        kernel_builds.main(["old", "--calls", "1x1x9x7x64"])
