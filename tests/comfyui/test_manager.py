"""ComfyUI-Manager with this pack: install, update, disable, enable and remove, from the registry and by git.

A server on this machine stands in for the registry, and a copy of the Manager has its address. After each action,
ComfyUI restarts and samples, with the node if it is installed. ComfyUI's environment needs comfyui-manager, and the
path needs comfy-cli. COMFY_SAGE2_RESULTS names a folder for a page of the results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from comfy_sage2 import __version__ as OLD
from tools.comfyui.server import LAUNCHER, ComfyServer, PromptRefused

from .installations import REPOSITORY, Installation, comfyui_python
from .prompts import REPORT, sage, sampling, with_report

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]

PACK, NEW = "comfy-sage2", "99.0.0"
INSTALL: dict[str, Any] = {"id": PACK, "version": "unknown", "mode": "remote", "channel": "default"}
COLUMNS = ("from", "action", "the Manager's answer", "in `custom_nodes`", "MB", "pip", "version", "a sampling")
ROWS: list[tuple[str, ...]] = []


class Registry(ThreadingHTTPServer):
    """Answers like the registry for this pack, and serves the files of `folder`: archives, and a bare clone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Answer, directory=str(folder)))
        self.folder, self.newest = folder, OLD
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str) -> Any:
        version = {"id": "1", "version": self.newest, "downloadUrl": f"{self.address}/{self.newest}.zip"}
        node = {"id": PACK, "name": PACK, "description": "", "publisher": {"id": PACK, "name": PACK}}
        node |= {"repository": f"{self.address}/{PACK}.git", "latest_version": version}
        answers = {"/nodes": {"nodes": [node], "totalPages": 1}, f"/nodes/{PACK}/install": version}
        return answers.get(path)

    def publish(self) -> None:
        """Publish a new version: the registry names it, and the bare clone gets its commit."""
        self.newest = NEW
        run("git", "commit", "-qam", NEW, cwd=self.folder / "clone")
        run("git", "push", "-q", "bare", "HEAD", cwd=self.folder / "clone")
        run("git", "update-server-info", cwd=self.folder / f"{PACK}.git")


class _Answer(SimpleHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        answer = self.server.answer(urlparse(self.path).path)
        if answer is None:
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


def run(*command: str | Path, cwd: Path) -> str:
    author = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@a",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@a",
    }
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **author}, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def wait_for(condition: Callable[[], Any]) -> Any:
    """What `condition` returns, once it is true."""
    deadline = time.monotonic() + 120
    while not (answer := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return answer


@pytest.fixture(scope="module", autouse=True)
def page(installation: Installation) -> Iterator[None]:
    """Write the page of results at the end, if COMFY_SAGE2_RESULTS is set."""
    yield
    folder = os.environ.get("COMFY_SAGE2_RESULTS")
    if folder is None or not ROWS:
        return
    find = (
        "import importlib.metadata, platform; print(importlib.metadata.version('comfyui-manager'), platform.system())"
    )
    manager, system = run(comfyui_python(), "-c", find, cwd=REPOSITORY).split()
    cli = json.loads(run("comfy", "--version", cwd=REPOSITORY))["data"]["version"]
    lines = [
        "# ComfyUI-Manager with this pack",
        "",
        f"- Machine: no GPU; {system}, {installation.name}, ComfyUI-Manager {manager}, comfy-cli {cli}.",
        "- Settings: the Manager's defaults. A server on the same machine stands in for the registry.",
        "- Command: `COMFY_SAGE2_RESULTS=docs/results pytest tests/comfyui/test_manager.py`, which wrote this page.",
        f"- Date: {date.today().isoformat()}.",
        "",
        "Each row is one action of the Manager. Then ComfyUI starts anew and samples with a tiny model on the CPU. "
        "*MB* is the size of the pack's folder, with the history of a clone. *pip* is whether the Manager ran pip for "
        "the pack, and *version* is what the pack says when it starts.",
        "",
        *(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *ROWS)),
    ]
    (Path(folder) / "manager.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry with two versions of the pack's last commit."""
    comfy = shutil.which("comfy")
    if comfy is None:
        pytest.skip("no `comfy` on the path (pip install comfy-cli)")
    folder = tmp_path / "registry"
    clone = folder / "clone"
    folder.mkdir()
    run("git", "clone", "-q", REPOSITORY, clone, cwd=folder)
    run("git", "clone", "-q", "--bare", "--single-branch", "--no-local", clone, folder / f"{PACK}.git", cwd=folder)
    run("git", "update-server-info", cwd=folder / f"{PACK}.git")
    run("git", "remote", "add", "bare", f"../{PACK}.git", cwd=clone)
    for version in (OLD, NEW):
        for name in ("pyproject.toml", "comfy_sage2/__init__.py"):
            text = (clone / name).read_text(encoding="utf-8")
            (clone / name).write_text(text.replace(f'"{OLD}"', f'"{version}"', 1), encoding="utf-8")
        run(comfy, "--skip-prompt", "--no-enable-telemetry", "node", "pack", cwd=clone)
        (clone / "node.zip").rename(folder / f"{version}.zip")
    with Registry(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def host(
    installation: Installation,
    registry: Registry,
    start: Callable[..., ComfyServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> ComfyServer:
    """A ComfyUI without the pack, whose Manager uses `registry`."""
    if not installation.is_newest:
        pytest.skip("runs only in the newest version")
    find = "import importlib.util as u; s = u.find_spec('comfyui_manager'); print(s.origin if s else '')"
    origin = run(comfyui_python(), "-c", find, cwd=tmp_path).strip()
    if not origin:
        pytest.skip("ComfyUI's environment has no comfyui-manager")
    manager = shutil.copytree(Path(origin).parent, tmp_path / "manager" / "comfyui_manager")
    client = manager / "common" / "cnr_utils.py"
    client.write_text(
        client.read_text(encoding="utf-8").replace("https://api.comfy.org", registry.address), encoding="utf-8"
    )
    # After an update the Manager starts ComfyUI's main.py itself, without the launcher that a CPU torch needs.
    (manager.parent / "sitecustomize.py").write_text(
        f"import runpy, sys\nlauncher = {str(LAUNCHER)!r}\n"
        "if launcher not in sys.orig_argv:\n"
        "    sys.meta_path.insert(0, runpy.run_path(launcher)['TorchvisionOperators']())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(manager.parent))
    return start(installation.root, None)


class ManagedComfyUI:
    """A ComfyUI that runs within the context. Each action of its Manager adds a row to ROWS."""

    def __init__(self, host: ComfyServer, source: str) -> None:
        self.host, self.source = host, source
        self.nodes = host.base / "custom_nodes"

    def __enter__(self) -> ManagedComfyUI:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    def start(self) -> None:
        """Start ComfyUI, and wait until its Manager has read the registry."""
        options = ("--cpu", "--enable-manager")
        self.server = ComfyServer(comfyui_python(), self.host.root, self.host.base, options)
        try:
            self.server.start()
            wait_for(lambda: "All startup tasks have been completed" in self.log())
        except BaseException:
            self.server.stop()
            raise

    def log(self) -> str:
        return self.server.log.read_text(errors="replace")

    def act(self, action: str, kind: str, **params: Any) -> dict[str, str]:
        """Let the Manager act, restart ComfyUI and sample; return the new row by column names."""
        answer = self.run_task(kind, params)
        pip = "yes" if "Install: pip packages" in self.log() else "no"
        self.server.stop()
        self.start()
        sampled = self.sample()
        packs = [
            path.parent for pattern in ("*", ".disabled/*") for path in self.nodes.glob(f"{pattern}/pyproject.toml")
        ]
        place = ", ".join(str(path.relative_to(self.nodes)) for path in packs) or "nothing"
        size = sum(file.stat().st_size for path in packs for file in path.rglob("*") if file.is_file())
        version = re.search(r"SageAttention2: version ([\d.]+):", self.log())
        row = (self.source, action, answer, place, f"{size / 1e6:.0f}", pip, version[1] if version else "", sampled)
        ROWS.append(row)
        return dict(zip(COLUMNS, row, strict=True))

    def run_task(self, kind: str, params: dict[str, Any]) -> str:
        task = {"kind": kind, "params": params, "ui_id": kind, "client_id": "test"}
        for path, body in (("queue/task", task), ("queue/start", {})):
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            address = f"http://127.0.0.1:{self.server.port}/v2/manager/{path}"
            urllib.request.urlopen(urllib.request.Request(address, data, headers)).close()
        history = "/v2/manager/queue/history?client_id=test"
        result: str = wait_for(lambda: self.server.get(history)["history"].get(kind))["result"]
        return result

    def sample(self) -> str:
        try:
            prompt = with_report(sampling("wan", sage("loader", when="always")))
            text = self.server.run(prompt).outputs[REPORT]["text"][0]
        except PromptRefused:
            self.server.run(sampling("wan"))
            return "without the node"
        counts = re.search(r"(\d+) attention calls: (\d+) in ", text)
        assert counts is not None and counts[1] == counts[2], text
        return f"by the node: {counts[1]} of {counts[1]} calls"


@pytest.mark.parametrize("source", ["the registry", "git"])
def test_the_manager_installs_updates_disables_enables_and_removes_the_pack(
    host: ComfyServer, registry: Registry, source: str
) -> None:
    git = source == "git"
    disabled = f".disabled/{PACK}@{'nightly' if git else NEW.replace('.', '_')}"
    with ManagedComfyUI(host, source) as comfyui:
        row = comfyui.act("install", "install", **INSTALL, selected_version="nightly" if git else OLD)
        served = row["a sampling"]
        assert row["the Manager's answer"] == "success" and row["version"] == OLD and row["pip"] == "no"
        assert row["in `custom_nodes`"] == PACK and served.startswith("by the node")
        registry.publish()
        row = comfyui.act("update", "update", node_name=PACK, node_ver="nightly" if git else OLD)
        assert row["version"] == NEW and row["pip"] == "no" and row["a sampling"] == served
        row = comfyui.act("disable", "disable", node_name=PACK)
        assert row["in `custom_nodes`"] == disabled and row["a sampling"] == "without the node"
        row = comfyui.act("enable", "enable", cnr_id=PACK)
        assert row["in `custom_nodes`"] == PACK and row["version"] == NEW and row["a sampling"] == served
        row = comfyui.act("remove", "uninstall", node_name=PACK)
        assert row["in `custom_nodes`"] == "nothing" and row["a sampling"] == "without the node"
