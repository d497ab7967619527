"""The test of a built wheel: it must import without torch and without a driver, and hold its kernels.

python check_wheel.py sm90
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(architecture: str) -> None:
    module = importlib.import_module(f"comfy_sage2_{architecture}")
    assert module.architecture == architecture, module.architecture
    assert "torch" not in sys.modules
    cubins = sorted(path.name for path in Path(str(module.__file__)).parent.glob("*.cubin.xz"))
    assert cubins, "the wheel holds no cubin"
    try:
        driver = str(module.driver_version())
    except RuntimeError as error:
        driver = str(error)
    print(f"{module.__name__} {module.version} for {module.target} by {module.toolchain}")
    print(f"Python {sys.version.split()[0]}, driver: {driver}, cubins: {', '.join(cubins)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
