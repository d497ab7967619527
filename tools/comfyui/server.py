"""A headless ComfyUI on a free port, in a base folder of its own, driven over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

LAUNCHER = Path(__file__).with_name("launch.py")
START_SECONDS = 600  # ComfyUI imports gigabytes, on a slow disk too
ANSWER_SECONDS = 300  # while a compiler is at work the server hardly gets a turn
PROMPT_SECONDS = 3600  # a whole video on a busy CPU takes its time
Prompt = dict[str, dict[str, Any]]


class NotStarted(RuntimeError):
    """A server that ended while starting or did not answer; the message ends with the end of its log."""


class PromptRefused(Exception):
    """The server does not accept a prompt; the message is its answer."""


@dataclass(frozen=True)
class Run:
    """A finished prompt: the history's outputs by node, and the nodes that came from the cache."""

    outputs: dict[str, Any]
    cached: frozenset[str]


def _reserve() -> socket.socket:
    """A socket on a free port, which nobody else is given while it is open: ComfyUI takes minutes to come to its own.

    Until then another server could get the port, and answer in its place. ComfyUI gets it beside this one, because
    neither socket forbids that and this one does not listen.
    """
    reserved = socket.socket()
    if os.name != "nt":
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class ComfyServer:
    """Context manager around one server process.

    python: the interpreter that has ComfyUI's requirements. root: ComfyUI's folder. base: the folder of its models,
    custom nodes and outputs. options: further arguments of ComfyUI's main.py.
    """

    def __init__(self, python: Path, root: Path, base: Path, options: tuple[str, ...] = ("--cpu",)) -> None:
        self.root = root
        self.base = base
        self.log = base / "server.log"
        self._reserved = _reserve()
        self.port = self._reserved.getsockname()[1]
        places = ["--base-directory", str(base), "--database-url", f"sqlite:///{base / 'comfyui.db'}"]
        port = ["--port", str(self.port), "--disable-api-nodes"]
        self._command = [str(python), str(LAUNCHER), str(root), *options, *places, *port]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ComfyServer:
        try:
            self.start()
        except BaseException:  # Ctrl-C, too: nobody else would end the process
            self.stop()
            raise
        return self

    def start(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Start the process and wait until it answers, calling `while_waiting` meanwhile.

        NotStarted when it ends or does not answer; the caller has to `stop` it then, too.
        """
        # Threads that spin while they wait starve each other wherever something else runs on the machine.
        threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
        environment = {**os.environ, **threads, "PYTHONDONTWRITEBYTECODE": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise NotStarted(f"{self.root} ended while starting:\n{self.tail()}")
            try:
                self.get("/system_stats")
                return
            except OSError:  # not there yet, or too busy
                while_waiting()
                time.sleep(0.25)
        raise NotStarted(f"{self.root} did not answer within {START_SECONDS} s:\n{self.tail()}")

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; it gets 20 seconds to do so itself. It cannot be started again."""
        self._reserved.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tail(self, characters: int = 4000) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-characters:]

    def get(self, path: str) -> Any:
        """The JSON answer to a GET request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)

    def get_bytes(self, path: str) -> bytes:
        """The raw answer to a GET request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_SECONDS) as answer:
            result: bytes = answer.read()
            return result

    def run(
        self, prompt: Prompt, while_waiting: Callable[[], None] = lambda: None, *, workflow: str | None = None
    ) -> Run:
        """Queue `prompt` and wait for it, calling `while_waiting` about twenty times a second.

        workflow: the id of a workflow, as a page sends it with the prompt.

        Raises PromptRefused, or RuntimeError with the traceback of a node that failed.
        """
        return self.finished(self.queue(prompt, workflow=workflow), while_waiting)

    def queue(self, prompt: Prompt, *, workflow: str | None = None) -> str:
        """Queue `prompt` as `run` does: its number, for `finished`. Raises PromptRefused."""
        extra = {} if workflow is None else {"extra_data": {"extra_pnginfo": {"workflow": {"id": workflow}}}}
        body = json.dumps({"prompt": prompt, **extra}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/prompt", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                number: str = json.load(answer)["prompt_id"]
                return number
        except urllib.error.HTTPError as error:
            raise PromptRefused(error.read().decode()) from error

    def finished(self, number: str, while_waiting: Callable[[], None] = lambda: None) -> Run:
        """Wait for the prompt of this number; RuntimeError with the traceback of a node that failed."""
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            history = self.get(f"/history/{number}")
            if number in history:
                return self._run_of(history[number])
            while_waiting()
            time.sleep(0.05)
        raise RuntimeError(f"the prompt did not finish within {PROMPT_SECONDS} s:\n{self.tail()}")

    def latent(self, run: Run, node: str) -> Tensor:
        """The tensor that a SaveLatent node wrote."""
        saved = run.outputs[node]["latents"][0]
        return load_file(self.base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"].double()

    def _run_of(self, entry: dict[str, Any]) -> Run:
        messages = dict(entry["status"]["messages"])
        if "execution_error" in messages:
            error = messages["execution_error"]
            raise RuntimeError(f"{error['node_type']}: {error['exception_message']}\n{''.join(error['traceback'])}")
        return Run(entry["outputs"], frozenset(messages.get("execution_cached", {}).get("nodes", ())))
