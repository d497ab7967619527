"""What `doctor --share` writes, and that it tells nothing about its sender."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from comfy_sage2 import doctor, machine, shared_report
from comfy_sage2.kernels import loader


def test_a_cudnn_that_torch_refuses_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("compiled against (9, 20, 0) but found runtime version (9, 19, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert shared_report._cudnn() == "compiled against (9, 20, 0) but found runtime version (9, 19, 0)"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert shared_report._cudnn() == 91900


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/me/a b/x.so: no", "x.so: no"),
        (r"C:\Users\me\x.dll is missing", "x.dll is missing"),
        ("cannot open '/home/me/.cache/k.so'", "cannot open 'k.so'"),
        ("1,020 TFLOP/s and n/a", "1,020 TFLOP/s and n/a"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("fp16/bf16/fp32 only", "fp16/bf16/fp32 only"),
    ],
)
def test_folders_are_cut_off(text: str, kept: str) -> None:
    assert shared_report.without_folders({"a": [text]}) == {"a": [kept]}


def test_a_home_folder_with_spaces_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/Ada Lovelace")
    monkeypatch.setenv("USERPROFILE", "/home/Ada Lovelace")
    assert shared_report.without_folders("in /home/Ada Lovelace/.cache/k.so: no") == "in k.so: no"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[Errno 2] No such file: 'C:\\\\Users\\\\bob\\\\secret\\\\x.txt'", "[Errno 2] No such file: 'x.txt'"),
        (r"Could not find module 'C:\Users\bob\secret\x.dll'", "Could not find module 'x.dll'"),
        ("c:/users/BOB/models/a.whl is bad", "a.whl is bad"),
        ("D:/Ada Lovelace/cache/k.pyd: no", "k.pyd: no"),
        (r"\\server\Ada Lovelace\k.pyd: no", "k.pyd: no"),
        (r"in C:\Users\bob", "in "),
        ("3 / 4 / 5 of 1/2", "3 / 4 / 5 of 1/2"),
    ],
)
def test_windows_folders_are_cut_off(monkeypatch: pytest.MonkeyPatch, text: str, kept: str) -> None:
    monkeypatch.setattr(Path, "home", lambda: r"C:\Users\bob")
    assert shared_report.without_folders(text) == kept


def test_a_home_that_is_the_root_folder_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: "/")
    assert shared_report.without_folders("1/2 or 3 / 4") == "1/2 or 3 / 4"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two GPUs, one of which cannot be measured, and the current folder."""
    names = ["NVIDIA GeForce RTX 4090", "NVIDIA L4"]

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=names[index], major=8, minor=9, multi_processor_count=128, total_memory=24 << 30)

    def measured(index: int, candidates: object) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError(f"{Path.home()}/w/k.so: the GPU is in use")
        times = SimpleNamespace(document=lambda: {"8b": 1.5})
        return SimpleNamespace(times=times, lines=lambda: ["8b from 512 tokens"])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(shared_report, "measure_now", measured)
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: [])
    monkeypatch.setattr(loader, "reason_unavailable", lambda name: f"{Path.home()}/w/a.whl is bad")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_report_holds_what_was_measured_and_no_folder(gpus: Path) -> None:
    path = shared_report.share(0, f"self-test passed\nof {Path.home()}/w/k.so")
    assert path == gpus / "comfy-sage2-nvidia-geforce-rtx-4090.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["gpu"] == "NVIDIA GeForce RTX 4090" and document["memory_gib"] == 24.0
    assert document["measured"] == {"8b": 1.5, "table": ["8b from 512 tokens"]}
    assert document["doctor"] == ["self-test passed", "of k.so"]
    assert document["kernels"]["sm89"] == {"unavailable": "a.whl is bad"}


def test_a_gpu_that_cannot_be_measured_is_reported_with_the_reason(gpus: Path) -> None:
    path = shared_report.share(1, "")
    assert json.loads(path.read_text(encoding="utf-8"))["measured"] == {"unavailable": "k.so: the GPU is in use"}


def test_doctor_says_where_each_report_is_and_where_to_post_it(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", index) for index in range(2)])
    monkeypatch.setattr(doctor, "report", lambda found, measure: "the report\nverdict: good")
    monkeypatch.setattr(doctor, "verdicts", lambda: [])
    doctor.main(["--share"])
    *lines, last = capsys.readouterr().out.splitlines()
    names = ["comfy-sage2-nvidia-geforce-rtx-4090.json", "comfy-sage2-nvidia-l4.json"]
    assert lines[2:] == [f"wrote {gpus / name}" for name in names]
    assert "attach" in last and "issue" in last


def test_without_a_gpu_there_is_nothing_to_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu")])
    assert doctor.main(["--share"]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "There is nothing to share, because this torch can use no NVIDIA GPU."
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(document: object, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(doctor, "report", lambda found, measure: "the report")
    monkeypatch.setattr(doctor, "verdicts", lambda: [])
    monkeypatch.setattr(shared_report, "write", refuse)
    assert doctor.main(["--share"]) == 1
    assert "cannot be written: [Errno 28] No space left on device" in capsys.readouterr().out
