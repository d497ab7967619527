"""The capture file and the bounds of what is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lab.capture.recorder import FORMAT, CaptureBounds, CaptureError, Recorder, load_samples


def call(batch: int = 2, q_heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, q_heads, 5, 8, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, 7, 8, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


def test_a_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    recorder = Recorder(CaptureBounds(heads=4))
    q, k, v = call()
    mask = torch.rand(1, 1, 5, 7) < 0.5
    assert recorder.add(q, k, v, layer=3, step=5, scale=0.25)
    assert recorder.add(q, k, v, layer=4, step=5, is_causal=True, mask=mask)
    recorder.save(tmp_path / "capture.safetensors")
    first, second = load_samples(tmp_path / "capture.safetensors")
    assert (first.layer, first.step, first.scale, first.is_causal, first.mask) == (3, 5, 0.25, False, None)
    assert (second.layer, second.scale, second.is_causal) == (4, None, True)
    assert second.mask is not None
    assert torch.equal(second.mask, mask)
    assert torch.equal(first.q, q[:1])
    for kept, given in ((first.k, k), (first.v, v)):
        assert torch.equal(kept, given[:1].repeat_interleave(2, dim=1))  # each query head's own key head


def test_heads_are_spread_over_all() -> None:
    recorder = Recorder(CaptureBounds(heads=2))
    q, k, v = call(q_heads=6, kv_heads=3)
    mask = torch.randn(1, 6, 5, 7)
    recorder.add(q, k, v, layer=0, step=0, mask=mask)
    (sample,) = recorder.samples
    assert sample.mask is not None
    for kept, given, heads in ((sample.q, q, [0, 5]), (sample.k, k, [0, 2]), (sample.mask, mask, [0, 5])):
        assert torch.equal(kept, given[:1, heads])


def test_bounds_of_layers_steps_and_bytes() -> None:
    size = sum(t[:1, :2].nbytes for t in call())
    recorder = Recorder(CaptureBounds(every_layer=2, every_step=3, heads=2, most_bytes=2 * size))
    assert [(layer, step) for layer in range(4) for step in range(4) if recorder.wants(layer, step)] == [
        (0, 0), (0, 3), (2, 0), (2, 3),
    ]  # fmt: skip
    assert [recorder.add(*call(), layer=0, step=0) for _ in range(3)] == [True, True, False]
    assert (len(recorder.samples), recorder.left_out) == (2, 1)


def test_what_does_not_fit_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*args: object) -> torch.Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr("lab.capture.recorder._first", copied)
    recorder = Recorder(CaptureBounds(most_bytes=1))
    assert not recorder.add(*call(), layer=0, step=0, mask=torch.zeros(1, 4, 5, 7))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CaptureBounds)])
def test_bounds_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be 1 or more, got 0"):
        CaptureBounds(**{field: 0})


def test_nothing_captured_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no attention call reached the capture"):
        Recorder(CaptureBounds()).save(tmp_path / "capture.safetensors")


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(CaptureError, match="format None, expected"):
        load_samples(tmp_path / "model.safetensors")
    with pytest.raises(CaptureError, match="cannot be read as safetensors"):
        load_samples(tmp_path / "text.safetensors")
    with pytest.raises(FileNotFoundError):
        load_samples(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    "dtype", ["\x1b[31m\nforged", "\u202egnp.exe", "A" * 5000], ids=["escape", "reordered", "long"]
)
def test_what_safetensors_says_of_a_file_is_one_harmless_line(tmp_path: Path, dtype: str) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}, ensure_ascii=False).encode()
    path = tmp_path / "forged\nname.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CaptureError, match=r"cannot be read as safetensors .*unknown variant") as refused:
        load_samples(path)
    assert len(str(refused.value)) < 1200 and str(refused.value).isprintable()


ENTRY = {"layer": 0, "step": 0, "scale": None, "is_causal": False}
BROKEN = {
    "missing": None,
    "no JSON": "{",
    "deep": "[" * 100_000,
    "digits": "9" * 5000,
    "no list": "{}",
    "no objects": "[3]",
    "field missing": json.dumps([{"layer": 0, "step": 0, "scale": None}]),
    "field too many": json.dumps([{**ENTRY, "extra": "\ud800"}]),
    "layer of another type": json.dumps([{**ENTRY, "layer": "x\n"}]),
    "negative step": json.dumps([{**ENTRY, "step": -1}]),
    "scale is infinite": json.dumps([{**ENTRY, "scale": float("inf")}]),
    "scale is zero": json.dumps([{**ENTRY, "scale": 0}]),
    "flag of another type": json.dumps([{**ENTRY, "is_causal": 1}]),
    "more entries than tensors": json.dumps([ENTRY, ENTRY]),
}


@pytest.mark.parametrize("samples", BROKEN.values(), ids=BROKEN.keys())
def test_broken_metadata_is_refused(tmp_path: Path, samples: str | None) -> None:
    q, k, v = (tensor[:1].contiguous() for tensor in call())
    metadata = {"format": FORMAT} if samples is None else {"format": FORMAT, "samples": samples}
    save_file({"0.q": q, "0.k": k, "0.v": v}, tmp_path / "capture.safetensors", metadata=metadata)
    with pytest.raises(CaptureError, match="is a broken capture: ") as refused:
        load_samples(tmp_path / "capture.safetensors")
    assert len(str(refused.value)) < 1000 and str(refused.value).isprintable()


@pytest.mark.parametrize(
    "part, value", [("q", torch.zeros(3)), ("k", torch.zeros(1, 2, 7, 9)), ("mask", torch.ones(3))]
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, part: str, value: torch.Tensor) -> None:
    q, k, v = (tensor[:1].contiguous() for tensor in call())
    tensors = {"0.q": q, "0.k": k, "0.v": v, f"0.{part}": value}
    metadata = {"format": FORMAT, "samples": json.dumps([ENTRY])}
    save_file(tensors, tmp_path / "capture.safetensors", metadata=metadata)
    with pytest.raises(CaptureError, match=r"is a broken capture: samples\[0\]"):
        load_samples(tmp_path / "capture.safetensors")
