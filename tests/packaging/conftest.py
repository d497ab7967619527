"""The fixtures of the packaging tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from fake_pack import ROOT, Plugin


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    root = tmp_path / "plugin"
    shutil.copytree(
        ROOT / "comfy_sage2" / "kernels",
        root / "comfy_sage2" / "kernels",
        ignore=shutil.ignore_patterns("_unpacked", "__pycache__"),
    )
    made = Plugin(root)
    made.wheels.mkdir()
    made.environment = {"XDG_CACHE_HOME": str(made.user_cache), "LOCALAPPDATA": str(made.user_cache)}
    return made


@pytest.fixture
def pack(plugin: Plugin) -> Plugin:
    """A copy of the whole library and install.py."""
    shutil.copyfile(ROOT / "install.py", plugin.root / "install.py")
    shutil.copytree(
        ROOT / "comfy_sage2",
        plugin.root / "comfy_sage2",
        ignore=shutil.ignore_patterns("_unpacked", "__pycache__"),
        dirs_exist_ok=True,
    )
    return plugin


@pytest.fixture(scope="session")
def mount_namespace() -> tuple[str, ...]:
    """A command prefix that runs a shell which may mount file systems that nobody else sees, or a skip."""
    for prefix in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return (*prefix, "sh", "-c")
    pytest.skip("mounting a file system of the test's own is not permitted here")
