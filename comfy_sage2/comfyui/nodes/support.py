"""What the node modules share: inputs and schemas that every served ComfyUI version takes, and the import's failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

log = logging.getLogger("comfy_sage2")

CATEGORY = "model_patches/attention"
POLICY = io.Custom("SAGEATTENTION2_POLICY")

# Choices are written out: they have to be the same on every machine, or a shared workflow would be refused, and they
# have to be there when the library cannot be imported.
BACKENDS = ["auto", "reference", "auto or reference"]
QUALITIES = ["lossless", "balanced", "fast"]


def advanced(node_input: io.Input) -> io.Input:
    """Mark an input as advanced, also on versions whose constructor has no argument for it."""
    node_input.extra_dict = {**node_input.extra_dict, "advanced": True}
    return node_input


def schema(**options: Any) -> io.Schema:
    """A schema of those options that this ComfyUI knows: older ones have no `search_aliases` and no `is_dev_only`."""
    known = io.Schema.__dataclass_fields__
    return io.Schema(**{name: value for name, value in options.items() if name in known})


def shown_progress(node: str | None) -> Callable[[int, int], None]:
    """Shows on the node of this id how much of how much is done."""
    from comfy.utils import ProgressBar

    bar = ProgressBar(1, node_id=node)

    def progress(done: int, total: int) -> None:
        bar.update_absolute(done, max(total, 1))

    return progress


library: Any
try:
    from .. import api
except Exception as error:  # whatever an unusual torch or a broken copy raises must not take the nodes away
    log.exception("SageAttention2: the library could not be imported; models pass through unchanged")
    IMPORT_ERROR: str | None = f"[SA-111] comfy_sage2 could not be imported ({type(error).__name__}: {error})."
    library = None
else:
    library = api
    IMPORT_ERROR = None
PASSED_THROUGH = f"The model passed through unchanged: {IMPORT_ERROR}"
