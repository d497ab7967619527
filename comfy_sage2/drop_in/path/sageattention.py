"""Where the module `sageattention` of this library was, for a PYTHONPATH that still names this folder.

The folder that it moved to takes this one's place on Python's path, and its module the place of this one.
"""

import importlib
import sys
from pathlib import Path

_PATH = Path(__file__).resolve().parents[2] / "integrations" / "sageattention" / "path"
sys.path.append(str(_PATH))
importlib.import_module("comfy_sage2_finder").replace_former_folder()
sys.path.remove(str(_PATH))
del sys.modules[__name__]
importlib.import_module(__name__)
