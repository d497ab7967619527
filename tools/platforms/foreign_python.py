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
    """Collects the output of a stream."""

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
        """The whole output, or that of the next second when the stream stays open; with the line ends of Linux."""
        self.join(1)
        return b"".join(self._parts).decode("utf-8", "backslashreplace").replace("\r\n", "\n")


@dataclass(frozen=True)
class ForeignPython:
    """An interpreter in an emulator.

    platform: its key in packages/kernels/platforms.json. command: the command that starts it. environment: the
    variables that it needs besides those of this process.
    """

    platform: str
    version: str  # such as "3.12"
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_windows(self) -> bool:
        return self.platform.startswith("win")

    def path(self, path: Path) -> str:
        """The interpreter's name for a path of this machine."""
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
        # wine needs pipes for all three streams. The services that it starts keep them open after the interpreter has
        # exited, so this waits for the process and not for the end of the streams.
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
        """The version and processor that it reports, or its error output when it does not start."""
        answer = self.run("-c", "import platform; print(platform.python_version(), platform.machine())")
        return answer.stdout.strip() or answer.stderr
