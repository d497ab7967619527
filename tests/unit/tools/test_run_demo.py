"""What `make demo` does where ComfyUI cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import demo_plan, run_demo
from tools.comfyui import clone


def test_a_failed_clone_is_one_friendly_line_and_the_embedded_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_demo, "comfyui_folders", lambda: [])
    monkeypatch.setattr(clone, "SOURCE", str(tmp_path / "nowhere"))
    monkeypatch.setattr(clone, "CLONE", tmp_path / "clone")
    assert run_demo.host_options(tmp_path / "environment") == []
    shown = capfd.readouterr()
    assert shown.err == ""
    cloning, reason, instead = shown.out.splitlines()
    assert cloning.startswith("cloning ComfyUI") and cloning.endswith("failed")
    assert reason.startswith("No ComfyUI here, and it cannot be cloned (fatal: ")
    assert reason.endswith("make demo COMFYUI_PATH=/path/to/ComfyUI")
    assert instead == "The demo runs in its embedded host, diffusers, instead of ComfyUI."


def test_an_old_comfyui_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo takes a clone then."""
    old, new = tmp_path / "old", tmp_path / "clone"
    for folder, version in ((old, "0.3.64"), (new, "0.33.0")):
        folder.mkdir()
        (folder / "main.py").touch()
        (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    monkeypatch.setattr(run_demo, "comfyui_folders", lambda: [old])
    monkeypatch.setattr(clone, "CLONE", new)
    monkeypatch.setenv("COMFY_SAGE2_HOST_PYTHON", "python-of-the-host")
    assert run_demo.host_options(tmp_path / "environment") == [
        "--comfyui", str(new), "--comfyui-python", "python-of-the-host"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--baseline", "--agian"], "unrecognized arguments: --agian"),
        (["--output", __file__], "--output: expected a folder, and a file is in the way"),
        (["--comfyui", "nowhere"], "--comfyui: expected a folder that holds ComfyUI's main.py"),
    ],
)
def test_wrong_arguments_of_the_demo_are_one_line(
    more: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is installed or cloned."""
    monkeypatch.setattr(sys, "argv", ["run_demo", "--venv", sys.prefix, "--host-venv", str(tmp_path / "venv"), *more])
    monkeypatch.setattr(run_demo, "host_options", lambda environment: pytest.fail("made an environment"))
    assert run_demo.main() == 2
    shown = capfd.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("python -m lab demo: ") and words in line and shown.out == "", line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: --venv, --host-venv"),
        (["--venv", "nowhere", "--host-venv", "b"], "--venv: expected an environment, and there is no nowhere"),
        (["--venv", sys.prefix, "--host-venv", __file__], "--host-venv: expected a folder, and a file is in the way"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is installed or cloned for them."""
    monkeypatch.setattr(sys, "argv", ["run_demo", *arguments])
    monkeypatch.setattr(run_demo, "host_options", lambda environment: pytest.fail("made an environment"))
    with pytest.raises(SystemExit) as ended:
        run_demo.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("python -m tools.run_demo: ") and words in line, line


def test_the_plan_names_what_is_missing_and_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_plan, "comfyui_folders", lambda: [])
    monkeypatch.setattr(demo_plan, "CLONE", tmp_path / "clone")
    text = "\n".join(demo_plan.plan(tmp_path / ".venv", tmp_path / ".venv-host"))
    for words in (
        "PyTorch and other packages into",
        "ComfyUI v0.33.0",
        "GB on disk",
        "4 minutes",
        "MB in demo-output/",
    ):
        assert words in text, words
    monkeypatch.setattr(demo_plan, "comfyui_folders", lambda: [tmp_path])
    text = "\n".join(demo_plan.plan(Path(sys.prefix), Path(sys.prefix)))
    assert "download" not in text.replace("after the downloads", "") and "4 minutes" in text
