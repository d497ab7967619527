"""Unpacking under trouble: every case ends with a working module file or with none and a reason."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import takewhile
from pathlib import Path

import pytest
from fake_pack import EXTENSION, Plugin

from comfy_sage2.kernels import unpack
from comfy_sage2.kernels.errors import KernelUnavailable

PROCESSES = 8


def as_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "win32":
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setattr(unpack, "_open", lambda path: os.open(path, os.O_RDONLY))


def test_the_module_is_unpacked_once_into_the_preferred_folder(plugin: Plugin) -> None:
    plugin.add_wheels()
    path = Path(plugin.prepare())
    assert path.is_relative_to(plugin.preferred) and path.read_bytes() == EXTENSION
    made = path.stat().st_mtime_ns
    assert plugin.prepare() == str(path) and path.stat().st_mtime_ns == made
    assert plugin.unpacked_files() == [path]


def test_processes_that_unpack_at_once_all_get_the_whole_file(plugin: Plugin) -> None:
    plugin.add_wheels()
    # Every process announces itself and waits for the others, so that they really write at the same time.
    code = f"""
import os, time
from pathlib import Path
from kernels import unpack
gate = Path({str(plugin.root.parent / "gate")!r})
original = unpack._write
def write(path, content):
    gate.mkdir(exist_ok=True)
    (gate / str(os.getpid())).touch()
    deadline = time.monotonic() + 600
    while len(os.listdir(gate)) < {PROCESSES}:
        assert time.monotonic() < deadline, "the other processes did not come"
        time.sleep(0.01)
    original(path, content)
unpack._write = write
print(loader.prepare('sm90'))
"""
    processes = [plugin.start(code) for _ in range(PROCESSES)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, outputs
    assert len({output for output, _ in outputs}) == 1
    # `prepare` has compared the content in each process. Windows opens no file while another process replaces it, so
    # it is read once more when all have ended.
    (file,) = plugin.unpacked_files()
    assert file == Path(outputs[0][0].strip()) and file.read_bytes() == EXTENSION


def test_a_file_that_windows_does_not_open_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first folder is kept: the other processes load from there."""
    as_windows(monkeypatch)
    really_open = unpack._open
    refused: list[Path] = []

    def busy(path: Path) -> int:
        if path.exists() and len(refused) < 3:
            refused.append(path)
            raise PermissionError(13, "Permission denied")
        return really_open(path)

    def write(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        raise PermissionError(13, "Permission denied")  # another process has it open

    monkeypatch.setattr(unpack, "_open", busy)
    monkeypatch.setattr(unpack, "_write", write)
    placed = unpack.place(Path("a", "b.pyd"), EXTENSION, [tmp_path / "first", tmp_path / "second"])
    placed.close()
    assert placed.path == tmp_path / "first" / "a" / "b.pyd" and len(refused) == 3


@pytest.mark.parametrize("readable_after", [3, None], ids=["the second folder gets free", "none gets free"])
def test_windows_waits_in_every_folder_and_less_than_a_second_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable_after: int | None
) -> None:
    as_windows(monkeypatch)
    waited = [0.0]

    def sleep(seconds: float) -> None:
        waited.append(waited[-1] + max(seconds, 1 / 64))  # the least that Windows sleeps

    really_open = unpack._open
    folders = [tmp_path / "first", tmp_path / "second"]
    refused: list[Path] = []

    def busy(path: Path) -> int:
        if path.is_relative_to(folders[1]):
            if readable_after is not None and len(refused) >= readable_after:
                return really_open(path)
            refused.append(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: waited[-1])
    monkeypatch.setattr(unpack, "_open", busy)
    if readable_after is None:
        with pytest.raises(KernelUnavailable, match="cannot be unpacked"):
            unpack.place(Path("a", "b.pyd"), EXTENSION, folders)
    else:
        placed = unpack.place(Path("a", "b.pyd"), EXTENSION, folders)
        placed.close()
        assert placed.path.is_relative_to(folders[1])
    assert 0.2 < waited[-1] < 0.75, "the rest of the second is for reading the wheel"


def test_a_killed_unpack_leaves_no_module_and_the_next_one_works(plugin: Plugin) -> None:
    plugin.add_wheels()
    code = f"""
import os
os.replace = lambda *paths: os.kill(os.getpid(), {int(signal.SIGTERM)})
loader.prepare('sm90')
"""
    for _ in range(2):
        killed = plugin.start(code)
        killed.communicate(timeout=600)
        assert killed.returncode != 0
        (left_behind,) = plugin.unpacked_files()
        assert left_behind.name.startswith(".partial-")
        # As if an hour had passed: only then is it surely nobody's.
        os.utime(left_behind, (time.time() - 3700,) * 2)
    path = Path(plugin.prepare())
    assert path.read_bytes() == EXTENSION
    assert plugin.unpacked_files() == [path]


def test_a_partial_file_that_may_still_be_written_is_left_alone(plugin: Plugin) -> None:
    plugin.add_wheels()
    path = Path(plugin.prepare())
    path.unlink()
    other = path.parent / ".partial-other"
    other.write_bytes(b"half")
    os.utime(other, (time.time() - 3500,) * 2)
    assert plugin.prepare() == str(path)
    assert other.read_bytes() == b"half"


@pytest.mark.parametrize(
    "changed", [b"", EXTENSION[:-1] + b"!", EXTENSION + b"!", EXTENSION[:100]], ids=["empty", "byte", "longer", "cut"]
)
def test_a_changed_module_is_put_aside_and_unpacked_anew(plugin: Plugin, changed: bytes) -> None:
    plugin.add_wheels()
    path = Path(plugin.prepare())
    path.write_bytes(changed)
    process = plugin.start("print(loader.prepare('sm90'))")
    output, log = process.communicate(timeout=600)
    assert output.strip() == str(path) and path.read_bytes() == EXTENSION
    aside = path.with_name(f".changed-{path.name}")
    assert aside.read_bytes() == changed and sorted(path.parent.iterdir()) == sorted([path, aside])
    assert log.startswith(f"[SA-107] {path} was not the file that the bundled wheel holds") and aside.name in log
    assert plugin.prepare() == str(path) and path.read_bytes() == EXTENSION


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_changed_module_leaves_no_file_open(plugin: Plugin) -> None:
    plugin.add_wheels()
    path = plugin.prepare()
    code = f"""
import os
for _ in range(5):
    with open({path!r}, "wb") as file:
        file.write(b"changed")
    loader.prepare("sm90")
    print(len(os.listdir("/proc/self/fd")))
"""
    assert len(set(plugin.run(code).splitlines())) == 1


def test_a_changed_module_that_cannot_be_put_aside_is_passed_over(
    plugin: Plugin, mount_namespace: tuple[str, ...]
) -> None:
    plugin.add_wheels()
    path = Path(plugin.prepare())
    path.write_bytes(b"changed")
    script = f'mount --bind {plugin.root} {plugin.root} && mount -o remount,ro,bind {plugin.root} && exec "$@"'
    found = Path(plugin.prepare((*mount_namespace, script, "sh")))
    assert found.is_relative_to(plugin.user_cache) and found.read_bytes() == EXTENSION


def test_a_new_release_does_not_meet_the_old_module(plugin: Plugin) -> None:
    plugin.add_wheels()
    old = plugin.prepare()
    (plugin.wheels / "SHA256SUMS").unlink()
    plugin.add_wheels(extension=EXTENSION * 2)
    new = plugin.prepare()
    assert new != old and Path(new).read_bytes() == EXTENSION * 2


def test_a_read_only_pack_uses_the_users_cache(plugin: Plugin, mount_namespace: tuple[str, ...]) -> None:
    plugin.add_wheels()
    script = f'mount --bind {plugin.root} {plugin.root} && mount -o remount,ro,bind {plugin.root} && exec "$@"'
    path = Path(plugin.prepare((*mount_namespace, script, "sh")))
    assert path.is_relative_to(plugin.user_cache) and path.read_bytes() == EXTENSION
    assert plugin.unpacked_files() == [path]


def test_a_read_only_pack_that_was_unpacked_before_is_used(plugin: Plugin, mount_namespace: tuple[str, ...]) -> None:
    plugin.add_wheels()
    before = plugin.prepare()
    script = f'mount --bind {plugin.root} {plugin.root} && mount -o remount,ro,bind {plugin.root} && exec "$@"'
    assert plugin.prepare((*mount_namespace, script, "sh")) == before


def test_a_full_disk_uses_the_users_cache_and_leaves_nothing_half(
    plugin: Plugin, mount_namespace: tuple[str, ...]
) -> None:
    plugin.add_wheels()
    plugin.unpacked.mkdir()
    script = f'mount -t tmpfs -o size=16k tmpfs {plugin.unpacked} && "$@" && find {plugin.unpacked} -type f'
    lines = plugin.prepare((*mount_namespace, script, "sh")).splitlines()
    assert len(lines) == 1, "files were left on the full disk"
    path = Path(lines[0])
    assert path.is_relative_to(plugin.user_cache) and path.read_bytes() == EXTENSION


def test_no_space_anywhere_is_a_reason_that_names_each_folder(plugin: Plugin) -> None:
    plugin.add_wheels()
    code = """
import errno, os
def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.fsync = full
print(loader.reason_unavailable('sm90'))
"""
    reason = plugin.run(code)
    assert "cannot be unpacked" in reason and reason.count("No space left on device") == 2
    assert str(plugin.unpacked) in reason and str(plugin.user_cache) in reason
    assert plugin.unpacked_files() == []


def test_no_writable_folder_is_a_reason_that_names_each_folder(plugin: Plugin) -> None:
    plugin.add_wheels()
    plugin.unpacked.write_text("a file where the folder should be")
    plugin.user_cache.write_text("a file where the folder should be")
    reason = plugin.prepare()
    assert reason.startswith("unavailable:")
    assert str(plugin.unpacked) in reason and str(plugin.user_cache) in reason


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_another_user_may_read_the_module(plugin: Plugin) -> None:
    plugin.add_wheels()
    assert Path(plugin.prepare()).stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX user data base")
def test_a_user_without_a_home_still_has_the_packs_own_folder(plugin: Plugin) -> None:
    plugin.add_wheels()
    code = """
import os, pwd
os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None)
def getpwuid(user):
    raise KeyError(user)
pwd.getpwuid = getpwuid
print(loader.prepare('sm90'))
"""
    assert Path(plugin.run(code)).is_relative_to(plugin.unpacked)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_folders_are_writable_by_the_user_alone_whatever_the_umask_is(plugin: Plugin) -> None:
    plugin.add_wheels()
    path = Path(plugin.run("import os; os.umask(0); print(loader.prepare('sm90'))"))
    made = [folder for folder in path.parents if folder.is_relative_to(plugin.unpacked)]
    assert made and all(folder.stat().st_mode & 0o777 == 0o755 for folder in made)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
@pytest.mark.parametrize("make", ["mkfifo", "mkdir"])
def test_what_is_no_file_in_the_modules_place_is_passed_over(plugin: Plugin, make: str) -> None:
    plugin.add_wheels()
    path = Path(plugin.prepare())
    path.unlink()
    getattr(os, make)(path)
    assert Path(plugin.prepare()).is_relative_to(plugin.user_cache)


@pytest.mark.skipif(sys.platform != "linux", reason="loads by the descriptor on Linux")
def test_the_checked_file_is_loaded_though_another_gets_its_name(plugin: Plugin) -> None:
    plugin.add_wheels()
    code = """
import os
from kernels import unpack
from pathlib import Path
wheel = loader.manifest.find_all('host')[0]
module = loader.contents.read_host(wheel.read(), wheel.path.name)
placed = unpack.place(Path('folder') / module.name, module.content, unpack.cache_folders())
placed.path.with_name('other').write_bytes(b'of somebody else')
os.replace(placed.path.with_name('other'), placed.path)
print(Path(placed.loadable).read_bytes() == module.content, placed.path.read_bytes())
"""
    assert plugin.run(code) == "True b'of somebody else'"


def test_a_noexec_disk_is_passed_over(plugin: Plugin, mount_namespace: tuple[str, ...]) -> None:
    plugin.add_wheels()
    plugin.unpacked.mkdir()
    script = f'mount -t tmpfs -o noexec tmpfs {plugin.unpacked} && "$@"'
    path = Path(plugin.prepare((*mount_namespace, script, "sh")))
    assert path.is_relative_to(plugin.user_cache) and path.read_bytes() == EXTENSION


@pytest.mark.skipif(sys.platform == "win32", reason="the variable of POSIX systems")
def test_a_relative_cache_folder_is_ignored(plugin: Plugin) -> None:
    plugin.add_wheels()
    plugin.environment["XDG_CACHE_HOME"] = "relative"
    plugin.environment["HOME"] = str(plugin.user_cache)
    folders = plugin.run("from kernels import unpack; print(*unpack.cache_folders(), sep='\\n')").splitlines()
    assert folders == [str(plugin.unpacked), str(plugin.user_cache / ".cache" / "comfy_sage2" / "kernels")]
    plugin.environment["HOME"] = "relative"
    assert plugin.run("from kernels import unpack; print(*unpack.cache_folders())") == str(plugin.unpacked)


@pytest.mark.skipif(sys.platform == "win32", reason="paths are shorter there")
def test_a_cache_folder_that_lies_deep_is_made(plugin: Plugin) -> None:
    plugin.add_wheels()
    plugin.unpacked.write_bytes(b"in the way")
    plugin.environment["XDG_CACHE_HOME"] = str(plugin.user_cache) + "/a" * 1500
    path = Path(plugin.prepare())
    assert path.is_relative_to(plugin.environment["XDG_CACHE_HOME"])
    path.unlink()
    for folder in takewhile(lambda folder: folder != plugin.user_cache, path.parents):
        folder.rmdir()  # which takes pytest too many calls


@pytest.mark.skipif(sys.platform == "win32", reason="the variable of POSIX systems")
def test_a_relative_home_is_ignored(plugin: Plugin) -> None:
    """It would make a folder wherever ComfyUI was started."""
    plugin.add_wheels()
    plugin.environment["XDG_CACHE_HOME"] = ""
    plugin.environment["HOME"] = "relative"
    folders = plugin.run("from kernels import unpack; print(*unpack.cache_folders(), sep='\\n')").splitlines()
    assert folders == [str(plugin.unpacked)]


def test_an_update_removes_the_modules_of_older_wheels(plugin: Plugin) -> None:
    plugin.add_wheels()
    old = Path(plugin.prepare())
    foreign = plugin.preferred / "comfy_sage2_sm90-of-the-user" / "file"
    foreign.parent.mkdir()
    foreign.touch()
    (plugin.wheels / "SHA256SUMS").unlink()
    plugin.add_wheels(extension=EXTENSION * 2)
    new = Path(plugin.prepare())
    assert not old.parent.exists() and new.exists() and foreign.exists()


def test_an_update_removes_what_was_put_aside(plugin: Plugin) -> None:
    plugin.add_wheels()
    old = Path(plugin.prepare())
    old.write_bytes(b"changed")
    plugin.prepare()
    (plugin.wheels / "SHA256SUMS").unlink()
    plugin.add_wheels(extension=EXTENSION * 2)
    plugin.prepare()
    assert not old.parent.exists()


def test_an_update_removes_the_modules_that_an_architecture_had_of_its_own(plugin: Plugin) -> None:
    """Releases before 5.0.0 unpacked them."""
    old = plugin.preferred / f"comfy_sage2_sm90-{'0' * 16}" / "_C.abi3.so"
    old.parent.mkdir(parents=True)
    old.touch()
    plugin.add_wheels()
    new = Path(plugin.prepare())
    assert not old.parent.exists() and plugin.unpacked_files() == [new] and new.read_bytes() == EXTENSION


def test_a_module_that_cannot_be_deleted_does_not_stop_an_update(plugin: Plugin) -> None:
    """As on Windows, where a module that another process has loaded stays."""
    plugin.add_wheels()
    old = Path(plugin.prepare())
    (plugin.wheels / "SHA256SUMS").unlink()
    plugin.add_wheels(extension=EXTENSION * 2)
    code = """
from pathlib import Path
def unlink(self, missing_ok=False):
    raise PermissionError(13, "in use")
Path.unlink = unlink
print(loader.prepare('sm90'))
"""
    assert Path(plugin.run(code)).exists() and old.exists()
