"""A CPython of another platform that runs on this machine."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO


class _Reader(threading.Thread):
    """Collects what a stream brings."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        assert stream is not None
        self._descriptor = os.dup(stream.fileno())
        self._parts: list[bytes] = []
        self.start()

    def run(self) -> None:
        while part := os.read(self._descriptor, 65536):
            self._parts.append(part)

    def text(self) -> str:
        """What came until now, or a second later when the stream stays open; with the line ends of Linux."""
        self.join(1)
        return b"".join(self._parts).decode("utf-8", "backslashreplace").replace("\r\n", "\n")


@dataclass(frozen=True)
class ForeignPython:
    """An interpreter behind an emulator.

    platform: its key in packages/kernels/platforms.json. command: what starts it. environment: what it needs besides
    this process's environment. drivers: the folder in which it looks for the CUDA driver's library.
    """

    platform: str
    version: str  # such as "3.12"
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_windows(self) -> bool:
        return self.platform.startswith("win")

    def path(self, path: Path) -> str:
        """A path of this machine as the interpreter names it."""
        return "Z:" + str(path).replace("/", "\\") if self.is_windows else str(path)

    def run(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout: float = 900,
    ) -> subprocess.CompletedProcess[str]:
        """Run the interpreter and wait for it. Its output is decoded from UTF-8 and has the line ends of Linux."""
        command = [*self.command, *arguments]
        # wine wants pipes for all three streams, and the services that it starts keep them open after the interpreter
        # has ended: its end is waited for, and not the end of the streams.
        with subprocess.Popen(
            command,
            env={**os.environ, **self.environment, **(environment or {})},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            readers = [_Reader(process.stdout), _Reader(process.stderr)]
            try:
                status = process.wait(timeout)
            except BaseException:
                process.kill()
                raise
            output, errors = (reader.text() for reader in readers)
            return subprocess.CompletedProcess(command, status, output, errors)

    def describe(self) -> str:
        """Its version and processor in its own words, or what kept it from starting."""
        answer = self.run("-c", "import platform; print(platform.python_version(), platform.machine())")
        return answer.stdout.strip() or answer.stderr
