"""The interface of the package `sageattention`, served by comfy_sage2. Imported only where none is installed, or works.

ModuleNotFoundError, as if it were not there, where comfy_sage2 has nothing that could serve a call; the log says why.
"""

from comfy_sage2_finder import refusal

_reason = refusal()
if _reason is not None:
    raise ModuleNotFoundError(_reason, name="sageattention")

from comfy_sage2.integrations.sageattention.functions import *  # noqa: E402, F403  # its __all__ is the interface
from comfy_sage2.integrations.sageattention.functions import __all__ as __all__  # noqa: E402
from comfy_sage2.integrations.sageattention.offer import VERSION as __version__  # noqa: E402, F401
