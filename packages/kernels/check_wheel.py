"""The test of built wheels: they must import without torch and without a driver, and hold their kernels.

python check_wheel.py [ARCHITECTURE ...]

By default those of every architecture that is installed.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

PREFIX = "comfy_sage2_"


def main(architectures: list[str]) -> None:
    installed = sorted(module.name for module in pkgutil.iter_modules() if module.name.startswith(f"{PREFIX}sm"))
    names = architectures or [name.removeprefix(PREFIX) for name in installed]
    assert names, "no kernels are installed"
    for architecture in names:
        module = importlib.import_module(f"{PREFIX}{architecture}")
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
    main(sys.argv[1:])
