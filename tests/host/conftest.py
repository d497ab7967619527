"""One server for each ComfyUI and test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.demo.tiny_wan import dit_shapes, write_checkpoint
from tools.comfyui.server import ComfyServer
from tools.workflows.chromium import find_chromium

from .hosts import REPOSITORY, candidates, host_python, reason_missing
from .hunyuan import hunyuan_shapes
from .placeholders import write_placeholders

NO_BROWSER = "NOT TESTED, no Chromium here: install one, or name it in CHROMIUM_PATH"
SUPPORT = Path(__file__).with_name("support_nodes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.host)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A missing host or browser is easily overlooked among skips: it gets a line of its own."""
    for name, root in candidates().items():
        reason = reason_missing(root)
        terminalreporter.write_line(
            f"ComfyUI host {name}: " + (f"NOT TESTED, {reason}" if reason else f"tested at {root}")
        )
    browser = find_chromium()
    terminalreporter.write_line(f"Frontend: tested in {browser}" if browser else f"*** Frontend: {NO_BROWSER} ***")


@pytest.fixture(scope="session")
def base_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoints, made once for all hosts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "tiny_wan.safetensors", dit_shapes(), seed=1)
    write_checkpoint(folder / "tiny_hunyuan.safetensors", hunyuan_shapes(), seed=2)
    return folder


@pytest.fixture(scope="session", params=list(candidates().items()), ids=lambda item: item[0])
def root(request: pytest.FixtureRequest) -> Path:
    """The folder of each ComfyUI in turn."""
    _, folder = request.param
    reason = reason_missing(folder)
    if reason is not None:
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def start(base_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ComfyServer]:
    """Makes a server of the ComfyUI at `root` with the pack at `pack`, the support nodes and the tiny checkpoints.

    Further arguments are options of ComfyUI's main.py.
    """

    def make(root: Path, pack: Path, *options: str) -> ComfyServer:
        base = tmp_path_factory.mktemp(root.name)
        nodes, models = base / "custom_nodes", base / "models"
        nodes.mkdir()
        models.mkdir()
        (nodes / "comfy_sage2").symlink_to(pack, target_is_directory=True)
        (nodes / "test_support").symlink_to(SUPPORT, target_is_directory=True)
        (models / "diffusion_models").mkdir()
        for checkpoint in base_template.iterdir():
            (models / "diffusion_models" / checkpoint.name).symlink_to(checkpoint)
        write_placeholders(base)
        return ComfyServer(host_python(), root, base, ("--cpu", *options))

    return make


@pytest.fixture(scope="session", autouse=True)
def patient_threads() -> Iterator[None]:
    """Threads that spin while they wait slow tiny models down many times over on a machine with other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="session")
def host(root: Path, start: Callable[[Path, Path], ComfyServer], patient_threads: None) -> Iterator[ComfyServer]:
    """A running ComfyUI with this pack."""
    with start(root, REPOSITORY) as server:
        yield server
