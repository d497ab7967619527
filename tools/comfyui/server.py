"""A headless ComfyUI on a free port, with its own base folder, driven over HTTP."""

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
START_SECONDS = 600  # ComfyUI imports gigabytes, perhaps from a slow disk
ANSWER_SECONDS = 300  # a running compiler leaves the server little CPU time
PROMPT_SECONDS = 3600  # a whole video on a busy CPU is slow
Prompt = dict[str, dict[str, Any]]


class NotStarted(RuntimeError):
    """The server exited while starting or did not answer; the message ends with the end of its log."""


class PromptRefused(Exception):
    """The server refused a prompt; the message is its answer."""


@dataclass(frozen=True)
class Run:
    """A finished prompt: the history's outputs by node, and the nodes with a cache hit."""

    outputs: dict[str, Any]
    cached: frozenset[str]


def _reserve() -> socket.socket:
    """Bind a socket to a free port, which reserves the port until ComfyUI listens on it, minutes later.

    Otherwise another server could take the port and answer in ComfyUI's place. ComfyUI can still bind the port, because
    both sockets allow that and this one does not listen.
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
        except BaseException:  # including KeyboardInterrupt: nothing else would end the process
            self.stop()
            raise
        return self

    def start(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Start the process and wait until it answers, calling `while_waiting` meanwhile.

        NotStarted when it exits or does not answer; the caller must `stop` it then too.
        """
        # Waiting threads that spin starve each other when the machine runs anything else.
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
            except OSError:  # not listening yet, or too busy
                while_waiting()
                time.sleep(0.25)
        raise NotStarted(f"{self.root} did not answer within {START_SECONDS} s:\n{self.tail()}")

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Terminate the process, and kill it after 20 seconds. The server cannot be started again."""
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

        workflow: the id of a workflow, which the frontend sends with the prompt.

        Raises PromptRefused, or RuntimeError with the traceback of a node that failed.
        """
        return self.finished(self.queue(prompt, workflow=workflow), while_waiting)

    def queue(self, prompt: Prompt, *, workflow: str | None = None) -> str:
        """Queue `prompt` as `run` does. Returns its id, for `finished`. Raises PromptRefused."""
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
        """Wait for the prompt with this id; RuntimeError with the traceback of a node that failed."""
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
