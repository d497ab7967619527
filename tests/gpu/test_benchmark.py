"""The benchmark on a real GPU: one small shape from end to end. No figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import run

from .builds import backend

pytestmark = pytest.mark.gpu


def test_one_shape(tmp_path: Path) -> None:
    backend("sm90")
    path = tmp_path / "result.json"
    arguments = ["--shapes", "d128-n1024", "--backends", "sm90", "--peers", "torch-flash", "--seconds", "1"]
    assert run.main([*arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    speeds = {speed["candidate"]: speed for speed in document["speed"]}
    assert speeds.keys() == {
        f"sm90 {mode}{rotated}" for mode in ("8b", "4b", "precise") for rotated in ("", " rotate auto")
    } | {"torch flash"}
    assert not document["speed_failures"]
    assert document["kernel_times"] == "measured"
    assert 0 < speeds["sm90 8b"]["kernel_ms"] < speeds["sm90 8b"]["call_ms"]
    assert 0.4 < speeds["sm90 8b"]["extra_memory"] < 0.8
    assert 0 <= speeds["torch flash"]["extra_memory"] < 0.1
    assert document["accuracy"]["sm90 8b"]["gaussian"]["relative_l1"] < 0.06
    assert all(0 <= speed["call_spread"] < 10 for speed in speeds.values())
    kernels = document["machine"]["kernels"]["sm90"]
    assert kernels["target"] == "sm_90a" and ("sha256" in kernels["wheel"] or kernels["version"] == "development")
