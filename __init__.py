"""Entry of the ComfyUI node pack."""

from comfy_api.latest import ComfyExtension, io

from .capture_nodes import SageAttention2Capture, SageAttention2SaveCapture
from .demo_node import SageAttention2DemoBaseline, SageAttention2DemoCaption
from .nodes import SageAttention2, SageAttention2Report
from .policy_nodes import SageAttention2Calibrate, SageAttention2LoadPolicy, SageAttention2MakePolicy

WEB_DIRECTORY = "./web"


class SageAttention2Extension(ComfyExtension):
    """Lists the nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            SageAttention2,
            SageAttention2Report,
            SageAttention2Calibrate,
            SageAttention2MakePolicy,
            SageAttention2LoadPolicy,
            SageAttention2Capture,
            SageAttention2SaveCapture,
            SageAttention2DemoCaption,
            SageAttention2DemoBaseline,
        ]


async def comfy_entrypoint() -> SageAttention2Extension:
    """Called by ComfyUI once it has imported the pack."""
    return SageAttention2Extension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
