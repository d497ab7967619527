"""Getting what the tests of other platforms need and this machine lacks."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


class Unavailable(Exception):
    """Something that the tests need can neither be found nor fetched here; the message says what and why."""


def fetch(what: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command that downloads `what`, and return what it prints. Unavailable when it fails."""
    try:
        answer = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
        )
    except OSError as error:
        raise Unavailable(f"{what} cannot be fetched: {error}") from error
    if answer.returncode != 0:
        said = [line.strip() for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{what} cannot be fetched: {said[-1] if said else f'exit status {answer.returncode}'}")
    return answer.stdout
