"""One server for each ComfyUI in a test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_wan import dit_shapes, write_checkpoint

from tools.comfyui.frontends import frontend_folder, frontend_version
from tools.comfyui.server import ComfyServer

from .frontend.browser import NO_BROWSER, find_chromium
from .hunyuan import hunyuan_shapes
from .installations import REPOSITORY, Installation, comfyui_python, installations
from .placeholders import write_placeholders

SUPPORT = Path(__file__).with_name("support_nodes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.comfyui)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line, in capitals, if all frontend tests are skipped: among other skips this is easily overlooked."""
    for installation in installations():
        terminalreporter.write_line(f"{installation.name} at {installation.root}")
    browser = find_chromium()
    line = f"Frontend: tested in {browser}" if browser else f"*** FRONTEND NOT TESTED: {NO_BROWSER.upper()} ***"
    terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def base_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoints in ComfyUI's folder layout, written once for all servers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "diffusion_models" / "tiny_wan.safetensors", dit_shapes(), seed=1)
    write_checkpoint(folder / "diffusion_models" / "tiny_hunyuan.safetensors", hunyuan_shapes(), seed=2)
    return folder


@pytest.fixture(scope="session", params=installations(), ids=lambda installation: installation.name)
def installation(request: pytest.FixtureRequest) -> Installation:
    """Each ComfyUI in turn."""
    installation: Installation = request.param
    if installation.reason_missing is not None:
        pytest.skip(installation.reason_missing)
    return installation


@pytest.fixture(scope="session")
def root(installation: Installation) -> Path:
    """The folder of each ComfyUI in turn."""
    return installation.root


@pytest.fixture(scope="session")
def start(base_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ComfyServer]:
    """Makes a server: the ComfyUI at `root`, the pack at `pack` (None: no pack), support nodes and tiny checkpoints.

    Further arguments are options of ComfyUI's main.py.
    """

    def make(root: Path, pack: Path | None, *options: str) -> ComfyServer:
        base = tmp_path_factory.mktemp(root.name)
        nodes, models = base / "custom_nodes", base / "models"
        nodes.mkdir()
        models.mkdir()
        if pack is not None:
            (nodes / "comfy_sage2").symlink_to(pack, target_is_directory=True)
        (nodes / "test_support").symlink_to(SUPPORT, target_is_directory=True)
        for checkpoint in base_template.glob("*/*"):
            (models / checkpoint.parent.name).mkdir(exist_ok=True)
            (models / checkpoint.parent.name / checkpoint.name).symlink_to(checkpoint)
        write_placeholders(base)
        folder = frontend_folder(frontend_version(root))
        frontend = ("--front-end-root", str(folder)) if folder.is_dir() else ()
        return ComfyServer(comfyui_python(), root, base, ("--cpu", *frontend, *options))

    return make


@pytest.fixture(scope="session", autouse=True)
def patient_threads() -> Iterator[None]:
    """Waiting threads sleep. On a busy machine, spinning threads make tiny models many times slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="session")
def server(root: Path, start: Callable[[Path, Path], ComfyServer], patient_threads: None) -> Iterator[ComfyServer]:
    """A running ComfyUI with this pack."""
    with start(root, REPOSITORY) as server:
        yield server


@pytest.fixture(scope="session")
def newest(installation: Installation, request: pytest.FixtureRequest) -> ComfyServer:
    """The server, if it is the newest version. An older one is not started just to be skipped."""
    if not installation.is_newest:
        pytest.skip("runs only in the newest version")
    server: ComfyServer = request.getfixturevalue("server")
    return server
