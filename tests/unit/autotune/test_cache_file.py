"""The cache file of findings about a GPU: no content of it, and nothing that happens to it, raises an error."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from comfy_sage2.autotune.cache_file import CacheFile

ADA = {"gpu": "NVIDIA GeForce RTX 4090", "driver": "580.65"}
HOPPER = {"gpu": "NVIDIA H200", "driver": "580.65"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "findings.json"


@pytest.fixture
def findings(path: Path) -> CacheFile:
    return CacheFile(path)


def test_each_gpu_keeps_its_own_findings(findings: CacheFile, path: Path) -> None:
    assert findings.get(ADA) is None
    findings.put(ADA, {"passed": True})
    findings.put(HOPPER, {"passed": False})
    findings.put(HOPPER, {"passed": True, "times": [1.5]})
    assert findings.get(ADA) == findings.get(dict(reversed(ADA.items()))) == {"passed": True}
    assert findings.get(HOPPER) == {"passed": True, "times": [1.5]}
    assert findings.get({**ADA, "driver": "581.0"}) is None
    assert [each.name for each in path.parent.iterdir()] == ["findings.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")
def test_other_users_cannot_write_to_it(findings: CacheFile, path: Path) -> None:
    earlier = os.umask(0)
    try:
        findings.put(ADA, {"passed": True})
    finally:
        os.umask(earlier)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_the_file_does_not_block(findings: CacheFile, path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    assert findings.get(ADA) is None
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) == {"passed": True}


FILE = json.dumps({json.dumps(ADA, sort_keys=True): {"passed": True}}).encode()


def test_the_format_of_the_file(findings: CacheFile, path: Path) -> None:
    findings.put(ADA, {"passed": True})
    assert path.read_bytes() == FILE


def test_a_file_with_the_most_large_entries_can_be_read(findings: CacheFile) -> None:
    for driver in range(52):
        findings.put({"gpu": "NVIDIA GeForce RTX 4090", "driver": str(driver)}, {"times": "1" * 28_000})
        assert findings.get({"gpu": "NVIDIA GeForce RTX 4090", "driver": str(driver)}) is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[1]",
        b"{}",
        FILE[:-1],
        FILE.replace(b'{"passed": true}', b'"yes"'),
        FILE.replace(b"4090", b"\xe9"),
        b"\xff\xfe\x00" * 9,
        b"[" * 100_000,
        b" " * (4 << 20) + FILE,
    ],
    ids=range(10),
)
def test_a_file_that_cannot_be_used_is_ignored_and_rewritten(findings: CacheFile, path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert findings.get(ADA) is None
    findings.put(HOPPER, {"passed": True})
    assert findings.get(HOPPER) == {"passed": True}


def test_the_oldest_entries_are_dropped(findings: CacheFile) -> None:
    for number in range(55):
        findings.put({"gpu": str(number)}, {})
    assert findings.get({"gpu": "4"}) is None
    assert findings.get({"gpu": "5"}) == {}


@pytest.mark.parametrize("place", [None, "file/findings.json", "folder"])
def test_an_unwritable_place_is_not_an_error(tmp_path: Path, place: str | None) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    findings = CacheFile(None if place is None else tmp_path / place)
    findings.put(ADA, {"passed": True})
    assert findings.get(ADA) is None
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}  # nothing is left behind


def test_a_full_disk_is_not_an_error(findings: CacheFile, monkeypatch: pytest.MonkeyPatch) -> None:
    findings.put(ADA, {"passed": True})

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    findings.put(HOPPER, {"passed": True})
    assert findings.get(ADA) == {"passed": True}
    assert findings.get(HOPPER) is None
