"""What did not run at all is said, and a run without tests is no success."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import suite_record
from suite_record import skipped_as_a_whole

from tools import test_summary
from tools.test_summary import summary

TESTS = Path(__file__).resolve().parents[2]


def test_the_largest_part_without_a_test_that_ran_is_named() -> None:
    ran = ["tests/unit/a/test_one.py::test_x", "tests/unit/test_two.py::test_y[1]"]
    skipped = {
        "tests/gpu/test_a.py::test_z": "no GPU",
        "tests/gpu/deep/test_b.py::test_z": "no GPU",
        "tests/unit/a/test_three.py": "no timm",
        "tests/unit/a/test_one.py::test_w": "no browser",
    }
    found = skipped_as_a_whole(ran, skipped)
    assert found == {"tests/gpu": Counter({"no GPU": 2}), "tests/unit/a/test_three.py": Counter({"no timm": 1})}


def suite(passed: int, failed: int = 0, skipped: int = 0, whole: dict[str, Any] | None = None) -> dict[str, Any]:
    counts = {"passed": passed, "failed": failed, "error": 0, "skipped": skipped}
    by_folder = {"tests/gpu": {"no GPU": skipped}} if skipped else {}
    return {"counts": counts, "skipped": by_folder, "skipped_as_a_whole": whole or {}}


def test_the_last_line_tells_that_tests_ran() -> None:
    text, good = summary({"unit": suite(12), "gpu": suite(0, skipped=3, whole={"tests/gpu": {"no GPU": 3}})})
    assert good
    assert "*** NOT TESTED: TESTS/GPU (3 TESTS): no GPU ***" in text
    assert text.splitlines()[-1] == "tests: 12 passed, 0 failed, 3 skipped"


def test_what_was_skipped_has_one_line_a_folder() -> None:
    record = suite(7)
    reasons = {"no browser": 261, "no host": 3, "an older version": 70, "no pack": 96, "no files": 2, "no node": 1}
    record["skipped"] = {"tests/comfyui": reasons, "tests/comfyui/stacks": {"no pack": 8}}
    assert [line.strip() for line in summary({"comfyui": record})[0].splitlines()[3:5]] == [
        "tests/comfyui: 433 skipped: no browser (261); no pack (96); an older version (70); no host (3); "
        "2 other reasons, above",
        "tests/comfyui/stacks: 8 skipped: no pack",
    ]


def test_failures_and_nothing_at_all_are_no_success() -> None:
    assert not summary({"unit": suite(12, failed=1)})[1]
    assert not summary({"gpu": suite(0, skipped=3)})[1]
    text, good = summary({})
    assert not good and text.splitlines()[-2:] == ["*** NO TEST RAN ***", "tests: 0 passed, 0 failed, 0 skipped"]


def test_errors_count_as_failed() -> None:
    broken = suite(3, failed=1)
    broken["counts"]["error"] = 2
    text, good = summary({"unit": broken, "windows": suite(4, skipped=1)})
    assert not good and text.splitlines()[-1] == "tests: 7 passed, 3 failed, 1 skipped"


def test_a_suite_that_could_not_be_run_is_named(records: Path) -> None:
    told = test_summary.not_tested("torch-2.6", "pip has no network")
    assert told == "*** NOT TESTED: TORCH-2.6: pip has no network ***"
    written = json.loads((records / "torch-2.6.json").read_text(encoding="utf-8"))
    text, good = summary({"unit": suite(12), "torch-2.6": written})
    assert good and told in text and text.splitlines()[-1] == "tests: 12 passed, 0 failed, 0 skipped"


def test_a_record_that_was_not_finished_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test_summary, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["test_summary"])
    (tmp_path / "unit.json").write_text(json.dumps(suite(12)))
    assert test_summary.main() == 0
    (tmp_path / "comfyui.json").write_text('{"counts": {"pas')
    assert test_summary.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "tests: 12 passed, 0 failed, 0 skipped"
    assert any("comfyui.json CANNOT BE READ" in line for line in lines)


def test_what_cannot_be_recorded_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(test_summary, "FOLDER", tmp_path / "file" / "records")
    told = test_summary.not_tested("arm", "the disk is full")
    assert told.startswith("*** NOT TESTED: ARM: the disk is full (and this cannot be recorded: ")


def test_pytest_writes_where_the_summary_reads() -> None:
    assert (suite_record.FOLDER, suite_record.SUITE) == (test_summary.FOLDER, test_summary.SUITE)


SOME_TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason="no luck")
def test_not():
    pass
"""
SKIPPED_MODULE = """
import pytest
pytest.skip("no host", allow_module_level=True)
"""
CONFTEST = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import suite_record
from suite_record import pytest_terminal_summary
suite_record.FOLDER = Path({records!r})
"""


def test_a_session_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "tests" / "some").mkdir(parents=True)
    (tmp_path / "tests" / "some" / "test_it.py").write_text(SOME_TESTS)
    (tmp_path / "tests" / "test_other.py").write_text(SKIPPED_MODULE)
    records = tmp_path / "records"
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(TESTS), records=str(records)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "tests"]
    environment = os.environ | {"COMFY_SAGE2_TEST_SUITE": "small"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "NOT TESTED: TESTS/TEST_OTHER.PY (1 TESTS): no host" in done.stdout.splitlines()[-2]
    written = json.loads((records / "small.json").read_text(encoding="utf-8"))
    assert written["counts"] == {"passed": 1, "failed": 0, "error": 0, "skipped": 2}
    assert written["skipped"] == {"tests/some": {"no luck": 1}, "tests": {"no host": 1}}
