"""The file of what was found out about a GPU: whatever is in it or happens to it, nobody is troubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_sage2.autotune.cache_file import CacheFile

ROOT = Path(__file__).resolve().parents[3]
ADA = {"gpu": "NVIDIA GeForce RTX 4090", "driver": "580.65"}
HOPPER = {"gpu": "NVIDIA H200", "driver": "580.65"}


@pytest.fixture
def findings(tmp_path: Path) -> CacheFile:
    return CacheFile(tmp_path / "cache" / "findings.json")


def test_each_gpu_keeps_its_own(findings: CacheFile) -> None:
    assert findings.get(ADA) is None
    findings.put(ADA, {"passed": True})
    findings.put(HOPPER, {"passed": False})
    findings.put(HOPPER, {"passed": True, "times": [1.5]})
    assert findings.get(ADA) == {"passed": True}
    assert findings.get(HOPPER) == {"passed": True, "times": [1.5]}
    assert findings.get({**ADA, "driver": "581.0"}) is None
    assert [path.name for path in findings.path.parent.iterdir()] == ["findings.json"]  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.timeout(60)
def test_a_pipe_in_the_files_place_is_not_waited_for(findings: CacheFile) -> None:
    assert findings.path is not None
    findings.path.parent.mkdir()
    os.mkfifo(findings.path)
    assert findings.get(ADA) is None
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) == {"passed": True}


ENTRY = {"key": ADA, "value": {"passed": True}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "findings": {}}',
        b'{"format": 1, "findings": [1, null, {"key": {}}, {"key": 1, "value": {}}]}',
        json.dumps({"format": 2, "findings": [ENTRY]}).encode(),
        json.dumps({"format": True, "findings": [ENTRY]}).encode(),
        json.dumps({"format": 1, "findings": [{**ENTRY, "value": "yes"}]}).encode(),
        json.dumps({"format": 1, "findings": [{**ENTRY, "key": {**ADA, "driver": 580.65}}]}).encode(),
        json.dumps({"format": 1, "findings": [ENTRY]}).encode().replace(b"4090", b"\xe9"),
        json.dumps({"format": 1, "findings": [ENTRY]}).encode()[:-1],
        b"\xff\xfe\x00" * 9,
        b"[" * 100_000,
        b" " * (1 << 20) + json.dumps({"format": 1, "findings": [ENTRY]}).encode(),
    ],
    ids=range(16),
)
def test_a_file_that_cannot_be_used_is_ignored_and_rewritten(findings: CacheFile, content: bytes) -> None:
    assert findings.path is not None
    findings.path.parent.mkdir()
    findings.path.write_bytes(content)
    assert findings.get(ADA) is None
    findings.put(HOPPER, {"passed": True})
    assert findings.get(HOPPER) == {"passed": True}


def test_well_formed_entries_beside_damaged_ones_are_kept(findings: CacheFile) -> None:
    assert findings.path is not None
    findings.path.parent.mkdir()
    findings.path.write_text(json.dumps({"format": 1, "findings": [None, ENTRY]}))
    assert findings.get(ADA) == {"passed": True}


@pytest.mark.slow
def test_the_oldest_entries_go(findings: CacheFile) -> None:
    for number in range(205):
        findings.put({"gpu": str(number)}, {})
    assert findings.get({"gpu": "4"}) is None
    assert findings.get({"gpu": "5"}) == {}


def test_the_oldest_go_where_the_file_would_be_too_long_to_be_read(findings: CacheFile) -> None:
    for number in range(9):
        findings.put({"gpu": str(number)}, {"text": "x" * (1 << 17)})
    kept = [number for number in range(9) if findings.get({"gpu": str(number)}) is not None]
    assert 3 <= len(kept) < 9 and kept == list(range(9))[-len(kept) :]


def test_a_full_file_of_others_stays_nearly_whole(findings: CacheFile) -> None:
    """It takes no more room than it had: to leave out one entry after the other would take long."""
    assert findings.path is not None
    findings.path.parent.mkdir()
    entries = [{"key": {"gpu": str(number)}, "value": {"x": [[]] * 1600}} for number in range(200)]
    findings.path.write_text(json.dumps({"format": 1, "findings": entries}, separators=(",", ":")))
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) == {"passed": True}
    assert findings.get({"gpu": "100"}) is not None


def test_an_entry_that_is_too_deep_to_be_written_is_left_out(
    findings: CacheFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    others = [{"key": {"gpu": "deep"}, "value": {"x": deep}}, {"key": {"gpu": "plain"}, "value": {}}]
    with monkeypatch.context() as patch:
        patch.setattr(CacheFile, "_entries", lambda self: others)
        findings.put(ADA, {"passed": True})
    assert findings.get(ADA) == {"passed": True} and findings.get({"gpu": "plain"}) == {}
    while deep:  # one at a time: it is too deep to be deleted at once, too
        deep = deep.pop()  # type: ignore[assignment]


def test_without_a_folder_nothing_is_kept() -> None:
    findings = CacheFile(None)
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    findings = CacheFile(tmp_path / "file" / "findings.json")
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) is None


def test_a_folder_in_the_place_of_the_file_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "findings.json").mkdir()
    findings = CacheFile(tmp_path / "findings.json")
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) is None
    assert [path.name for path in tmp_path.iterdir()] == ["findings.json"]  # nothing is left behind


def test_a_full_disk_is_no_error(findings: CacheFile, monkeypatch: pytest.MonkeyPatch) -> None:
    findings.put(ADA, {"passed": True})

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    findings.put(HOPPER, {"passed": True})
    assert findings.get(ADA) == {"passed": True}
    assert findings.get(HOPPER) is None


RACE = """
import sys
from pathlib import Path
from types import ModuleType
# The package without its own __init__, which imports torch.
package = sys.modules["comfy_sage2"] = ModuleType("comfy_sage2")
package.__path__ = [sys.argv[1]]
from comfy_sage2.autotune.cache_file import CacheFile
findings = CacheFile(Path(sys.argv[2]))
for turn in range(50):
    findings.put({"process": sys.argv[3]}, {"turn": turn})
    kept = findings.get({"process": sys.argv[3]})
    assert kept is None or 0 <= kept["turn"] <= turn
findings.put({"process": "all"}, {"passed": True})
"""


@pytest.mark.slow
def test_eight_processes_at_once(findings: CacheFile) -> None:
    source = ROOT / "comfy_sage2"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(source), str(findings.path), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=600)
        assert (process.returncode, output, errors) == (0, "", "")
    assert findings.get({"process": "all"}) == {"passed": True}
    assert [path.name for path in findings.path.parent.iterdir()] == ["findings.json"]  # type: ignore[union-attr]
