"""Writing a module to disk in bad conditions: the result is a whole file that others cannot change, or an error."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from pathlib import Path

import pytest
from fake_pack import EXTENSION, Plugin

from comfy_sage2.kernels import place
from comfy_sage2.system import files

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files and permissions")
PROCESSES = 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kernels" / "_C.so"


def test_the_module_is_written_once(path: Path) -> None:
    place.place(path, EXTENSION)
    os.utime(path, (1, 1))
    place.place(path, EXTENSION)
    assert path.read_bytes() == EXTENSION and path.stat().st_mtime == 1
    assert [*path.parent.iterdir()] == [path]


@posix
def test_other_users_may_read_but_not_write_under_any_umask(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "_C.so"
    before = os.umask(0)
    try:
        place.place(path, EXTENSION)
    finally:
        os.umask(before)
    assert [entry.stat().st_mode & 0o777 for entry in (path, path.parent, path.parent.parent)] == [0o755] * 3


@pytest.mark.parametrize(
    "changed", [b"", EXTENSION[:-1] + b"!", EXTENSION + b"!", EXTENSION[:100]], ids=["empty", "byte", "longer", "cut"]
)
def test_a_changed_module_is_written_again(path: Path, changed: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(changed)
    place.place(path, EXTENSION)
    assert path.read_bytes() == EXTENSION and [*path.parent.iterdir()] == [path]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith(f"[SA-107] {path} was changed")


@posix
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_module_that_others_may_write_to_is_written_again(path: Path, mode: int) -> None:
    place.place(path, EXTENSION)
    path.chmod(mode)
    with path.open("rb") as opened_by_others:
        place.place(path, EXTENSION)
        assert not os.path.sameopenfile(opened_by_others.fileno(), os.open(path, os.O_RDONLY))
    assert path.stat().st_mode & 0o777 == 0o755


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_a_module_of_another_user_is_written_again_and_their_folder_is_not_used(path: Path) -> None:
    place.place(path, EXTENSION)
    os.chown(path, 1234, -1)
    place.place(path, EXTENSION)
    assert path.stat().st_uid == 0
    os.chown(path.parent, 1234, -1)
    with pytest.raises(OSError, match="other users own this folder"):
        place.place(path, EXTENSION)


@posix
@pytest.mark.parametrize(
    ("owner", "user", "may"), [(7, 7, False), (0, 7, False), (0, 0, False), (8, 7, True), (7, 0, True)]
)
def test_trusted_owners(owner: int, user: int, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted are this user and root, who may have unpacked it for all users of an installation."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    status = os.stat_result((0o100755, 1, 2, 1, owner, owner, 3, 4, 5, 6))
    assert place._others_may_change(status) == may


@posix
def test_a_folder_that_others_may_write_to_is_not_used(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(OSError, match="may write to it"):
        place.place(path, EXTENSION)
    assert not path.exists()


@posix
def test_a_link_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    (tmp_path / "other").write_bytes(EXTENSION)
    path.symlink_to(tmp_path / "other")
    place.place(path, EXTENSION)
    assert not path.is_symlink() and path.read_bytes() == EXTENSION


@posix
def test_a_pipe_in_place_of_the_module_is_replaced_and_a_folder_is_an_error(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    place.place(path, EXTENSION)
    assert path.read_bytes() == EXTENSION
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        place.place(path, EXTENSION)


def test_a_full_disk_leaves_no_partial_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        place.place(path, EXTENSION)
    assert not [*path.parent.iterdir()]


@pytest.mark.parametrize("failures", [2, 3])
def test_windows_waits_for_processes_that_write_the_same_file(
    path: Path, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [failures]

    def busy(path: Path, content: bytes, mode: int) -> None:
        if left[0]:
            left[0] -= 1
            raise PermissionError(13, "Permission denied")
        files.replace(path, content, mode)

    monkeypatch.setattr(place, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(place, "replace", busy)
    if failures == 3:
        with pytest.raises(PermissionError):
            place.place(path, EXTENSION)
    else:
        place.place(path, EXTENSION)
        assert path.read_bytes() == EXTENSION


def test_concurrent_processes_all_get_the_whole_file(plugin: Plugin) -> None:
    code = f"""
import os, time
from pathlib import Path
from comfy_sage2.kernels import place
root, content = Path({str(plugin.root)!r}), {EXTENSION!r}
(root / "gate").mkdir(exist_ok=True)
(root / "gate" / str(os.getpid())).touch()
while len(os.listdir(root / "gate")) < {PROCESSES}:
    time.sleep(0.001)
place.place(root / "kernels" / "_C.so", content)
assert (root / "kernels" / "_C.so").read_bytes() == content
"""
    processes = [plugin.start(code) for _ in range(PROCESSES)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, outputs
    assert [path.name for path in (plugin.root / "kernels").iterdir()] == ["_C.so"]


def test_files_of_a_killed_process_are_removed_an_hour_later(path: Path) -> None:
    path.parent.mkdir()
    old, young = (path.parent / f".partial-{name}" for name in ("old", "young"))
    for partial, age in ((old, 3700), (young, 3500)):
        partial.write_bytes(b"half")
        os.utime(partial, (time.time() - age,) * 2)
    place.place(path, EXTENSION)
    assert sorted(path.parent.iterdir()) == sorted([path, young])


def test_modules_of_older_wheels_are_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.place(path, EXTENSION)
    other, foreign = path.with_name("old_C.so"), path.with_name("file")
    for file in (other, foreign):
        file.touch()
    place.remove_others(path, "*_C.so")
    assert sorted(path.parent.iterdir()) == sorted([path, foreign])
    other.touch()

    def in_use(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "in use")

    monkeypatch.setattr(Path, "unlink", in_use)
    place.remove_others(path, "*_C.so")


@posix
@pytest.mark.parametrize(
    ("variable", "home", "cache"),
    [
        ("{}/cache", "{}", "{}/cache"),
        ("relative", "{}", "{}/.cache"),
        ("", "{}", "{}/.cache"),
        ("", "relative", None),
    ],
)
def test_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, home: str, cache: str | None
) -> None:
    """A relative path would make a folder wherever ComfyUI was started."""
    monkeypatch.setenv("XDG_CACHE_HOME", variable.format(tmp_path))
    monkeypatch.setenv("HOME", home.format(tmp_path))
    own, *users = place.cache_folders()
    assert own.name == "_unpacked"
    assert users == ([] if cache is None else [Path(cache.format(tmp_path)) / "comfy_sage2" / "kernels"])


def test_windows_cannot_delete_a_loaded_module_and_uses_the_packs_folder_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    user, own = place.cache_folders()
    assert own.name == "_unpacked" and user == tmp_path / "comfy_sage2" / "kernels"
