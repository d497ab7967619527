"""torchvision's operators are declared for it only where its own cannot be loaded."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]

# A process of its own: what is declared stays, and a real torchvision may have been imported in this one.
SCRIPT = """
import sys
import torch
from tools.comfyui.launch import TorchvisionOperators
torch.version.cuda = {cuda!r}
sys.meta_path.insert(0, TorchvisionOperators())
import torchvision
print(torchvision.__file__, hasattr(torch.ops.torchvision, "nms"), hasattr(torch.ops.torchvision, "qnms"))
"""


@pytest.mark.parametrize(
    ("cuda", "extension", "declared"),
    [(None, "absent", True), (None, "broken", True), (None, "loads", False), ("12.8", "broken", False)],
)
def test_operators_are_declared_only_where_they_are_needed(
    cuda: str | None, extension: str, declared: bool, tmp_path: Path
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    library = package / f"_C{importlib.machinery.EXTENSION_SUFFIXES[-1]}"
    if extension == "broken":
        library.write_bytes(b"no library")
    elif extension == "loads":
        shutil.copyfile(torch._C.__file__, library)
    # `python -c` has the folder that it is started in on its path.
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(cuda=cuda)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    file, nms, qnms = found.stdout.split()
    assert Path(file) == package / "__init__.py"
    assert (nms, qnms) == (str(declared), str(declared))
