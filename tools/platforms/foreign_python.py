"""A CPython of another platform that runs on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run the interpreter and wait for it. Its output is decoded from UTF-8 and has the line ends of Linux."""
        completed = subprocess.run(
            [*self.command, *arguments],
            env={**os.environ, **self.environment, **(environment or {})},
            cwd=folder,
            # wine needs a standard input that it can wait for.
            input="",
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=timeout,
        )
        completed.stdout = completed.stdout.replace("\r\n", "\n")
        completed.stderr = completed.stderr.replace("\r\n", "\n")
        return completed
