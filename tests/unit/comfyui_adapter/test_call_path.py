"""A call that was planned before goes through few files: those that architecture.md names in its order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import comfy_sage2
from comfy_sage2.backends.reference import ReferenceCall
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes

from .calls import SIGMAS, ones, qkv, session_with

PACKAGE = Path(comfy_sage2.__file__).parent
PAGE = PACKAGE.parent / "docs" / "dev" / "architecture.md"
MOST_FILES = 14
PLANNED = {"call/signature.py", "dispatch/plan.py", "dispatch/registry.py"}
LENGTH = 72  # of no other test in this process: the plan is made here
# In place of the reference: the backend's part in Python, and what its module runs.
OF_A_KERNEL = {
    "backends/kernel_call.py",
    "csrc/plan_binding.cpp",
    "csrc/plan.cpp",
    "csrc/launch_list.cpp",
    "csrc/driver.cpp",
}


def entered(monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[str]:
    """The files of the package that a call of the second pass enters before its backend runs it."""
    run = ReferenceCall.run

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    def run_unseen(*given: Any) -> Any:
        sys.setprofile(None)
        return run(*given)

    monkeypatch.setattr(ReferenceCall, "run", run_unseen)
    session = session_with(**options)
    session.begin_sampling(SIGMAS, times_calls=False)
    override, arguments = make_override(session), (*qkv(LENGTH), 2)
    for sigma in SIGMAS[:2]:
        files: set[str] = set()
        with torch.no_grad(), model_passes.running(0, session.begin_pass(sigma, torch.device("cpu"), {})):
            sys.setprofile(profile)
            try:
                override(ones, *arguments, _inside_attn_wrapper=True, transformer_options={"block_index": 1})
            finally:
                sys.setprofile(None)
    assert [share.calls for share in session.record.summary().shares] == [2]
    return files


@pytest.mark.parametrize("guard", [False, True])
def test_from_comfyui_to_the_launch_a_call_enters_few_files(monkeypatch: pytest.MonkeyPatch, guard: bool) -> None:
    """The page names each."""
    files = entered(monkeypatch, guard=guard)
    assert not files & PLANNED, "a call of the same form is decided once"
    assert "comfyui/session/dispatcher.py" in files and "backends/reference.py" not in files
    assert len(files | OF_A_KERNEL) <= MOST_FILES, sorted(files)
    path = PAGE.read_text(encoding="utf-8").partition("## Call path")[2].partition("\n## ")[0]
    named = tuple(re.findall(r"`([\w/]+\.(?:py|cpp))`", path))
    assert [file for file in files | OF_A_KERNEL if not file.endswith(named)] == []
