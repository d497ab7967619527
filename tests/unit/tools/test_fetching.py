"""What is fetched, fails or takes too long, and that nothing of it stays behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.fetching import UNTIL, Unavailable, fetch, seconds_left
from tools.progress import Activity, run_showing

# A child that holds the write end of a pipe for as long as it lives.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
CHILD = "file = open({pipe!r}, 'w'); import time; time.sleep(600)"


def test_a_failed_fetch_names_what_and_why() -> None:
    code = "import sys; print('hello'); sys.stderr.write('first\\nthe index is down\\n'); sys.exit(4)"
    with pytest.raises(Unavailable, match=r"^the wheel cannot be fetched: the index is down$"):
        fetch("the wheel", [sys.executable, "-c", code])
    with pytest.raises(Unavailable, match=r"^the wheel cannot be fetched: .*no-such-program"):
        fetch("the wheel", ["no-such-program"])
    assert fetch("the wheel", [sys.executable, "-c", "print('here')"]) == "here\n"


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTIL, raising=False)
    assert seconds_left() is None and seconds_left(5.0) == 5.0
    monkeypatch.setattr("tools.fetching.time.time", lambda: 1000.0)
    monkeypatch.setenv(UNTIL, "1007")
    assert seconds_left() == 7.0 and seconds_left(5.0) == 5.0 and seconds_left(9.0) == 7.0
    monkeypatch.setenv(UNTIL, "900")
    assert seconds_left() == 0.0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("command", ["fetch", "run_showing"])
def test_what_takes_too_long_is_ended_with_its_children(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    parent = [sys.executable, "-c", PARENT.format(child=CHILD.format(pipe=str(pipe)))]
    if command == "fetch":
        monkeypatch.setattr("tools.fetching.seconds_left", lambda: 2.0)
        with pytest.raises(Unavailable, match="it was not done in time"):
            fetch("the wheel", parent)
    else:
        with pytest.raises(TimeoutError, match="not done after 2 seconds"):
            run_showing(parent, Activity("test"), seconds=2.0)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "the end of the last writer is the end of what is read"
    os.close(reader)


def test_bytes_that_are_no_text_do_not_stop_the_reading() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'\xff one\ntwo\n')"
    assert run_showing([sys.executable, "-c", code], Activity("test")) == (0, ["\\xff one\n", "two\n"])
