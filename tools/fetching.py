"""Getting what a suite of tests needs and this machine lacks, in the time that there is for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

UNTIL = "COMFY_SAGE2_FETCH_UNTIL"  # seconds since the epoch; .ci/run names them, so that it ends in time


class Unavailable(SystemExit):
    """Something can neither be found nor fetched here; the message says what and why. Uncaught it ends a command."""


def seconds_left(most: float | None = None) -> float | None:
    """How long something may be fetched: `most` seconds, and not beyond the time that UNTIL names. None: no limit."""
    named = os.environ.get(UNTIL)
    if not named:
        return most
    try:
        left = max(float(named) - time.time(), 0.0)
    except ValueError:
        raise SystemExit(f"{UNTIL} must be seconds since the epoch, got {named!r}") from None
    return left if most is None else min(left, most)


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process without input that speaks text. Left by an exception, the block ends it and all that it started."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, text=True, errors="backslashreplace", start_new_session=True, **options
    ) as process:
        try:
            yield process
        except BaseException:
            if os.name == "nt":
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise


def fetch(what: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command that gets `what`, and return what it prints. Unavailable when it fails or takes too long."""
    try:
        with running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate(timeout=seconds_left())
    except OSError as error:
        raise Unavailable(f"{what} cannot be fetched: {error}") from error
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what} cannot be fetched: it was not done in time") from None
    if process.returncode != 0:
        said = [line.strip() for line in (errors or output).splitlines() if line.strip()]
        raise Unavailable(f"{what} cannot be fetched: {said[-1] if said else f'exit status {process.returncode}'}")
    return output
