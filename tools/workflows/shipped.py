"""All shipped workflows, in the order of the template browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import images, paper, showcases, videos
from .graph import Graph
from .newer_nodes import with_newer_nodes


@dataclass(frozen=True)
class Workflow:
    """A shipped workflow.

    Attributes:
        name: of its API prompt's file, without ending.
        family: the model, as people write it.
        task: what it does.
        make: adds its nodes to a graph.
        needs: the version of ComfyUI, where it is newer than the one that the files are made with.
    """

    name: str
    family: str
    task: str
    make: Callable[[Graph], None]
    needs: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The name of the template's files, without ending.

        ComfyUI's template browser shows and searches nothing else of a pack's templates. It cuts long titles off, so
        the model comes first. A title of few words ranks higher, and a digit behind a name counts as a word: so it is
        "SageAttention", and "Wan2.2", which is found as "wan 2.2" too.
        """
        return f"{self.family} {self.task} - SageAttention"

    def graph(self, object_info: dict[str, Any]) -> Graph:
        """The graph from a server's answer to GET /object_info."""
        graph = Graph(with_newer_nodes(object_info), f"{self.family} {self.task}")
        self.make(graph)
        return graph


def _workflow(
    family: str, task: str, make: Callable[[Graph], None], group: str = "sage2", needs: tuple[int, ...] = ()
) -> Workflow:
    return Workflow(f"{group}_{make.__name__}", family, task, make, needs)


_T2V, _I2V, _T2I = "text to video", "image to video", "text to image"
_PAPER = "sage2_paper"
WORKFLOWS = (
    _workflow("MiniMax H3", _T2V, videos.minimax_h3_text_to_video),
    _workflow("MiniMax H3", _I2V, videos.minimax_h3_image_to_video),
    _workflow("MiniMax H3", "references to video", videos.minimax_h3_reference_to_video),
    _workflow("FastH3", _T2V, videos.fasth3_text_to_video, needs=(0, 43)),
    _workflow("LTX-2.5", _T2V, videos.ltx25_text_to_video),
    _workflow("LTX-2.5", _I2V, videos.ltx25_image_to_video),
    _workflow("LTX-2.3", _T2V, videos.ltx23_text_to_video),
    _workflow("LTX-2.3", _I2V, videos.ltx23_image_to_video),
    _workflow("Wan2.2", _T2V, videos.wan22_text_to_video),
    _workflow("Wan2.2", _I2V, videos.wan22_image_to_video),
    _workflow("Wan Animate 2", "motion transfer", videos.wan_animate2),
    _workflow("HunyuanVideo 1.5", _T2V, videos.hunyuanvideo15_text_to_video),
    _workflow("Z-Image Turbo", _T2I, images.z_image_turbo_text_to_image),
    _workflow("Qwen-Image 2.1", _T2I, images.qwen_image21_text_to_image, needs=(0, 39)),
    _workflow("Qwen-Image 2.1", "image edit", images.qwen_image21_edit, needs=(0, 39)),
    _workflow("Qwen-Image", _T2I, images.qwen_image_text_to_image),
    _workflow("Qwen-Image-Edit", "image edit", images.qwen_image_edit),
    _workflow("Krea 2", _T2I, images.krea2_text_to_image),
    _workflow("Flux.2", _T2I, images.flux2_text_to_image),
    _workflow("Flux.2 Klein", _T2I, images.flux2_klein_text_to_image),
    _workflow("FLUX.3 Image", _T2I, images.flux3_text_to_image, needs=(0, 41)),
    _workflow("Calibrate", "Wan2.1, then sample", showcases.calibrate_then_render),
    _workflow("Compare", "Wan2.1 with full precision", showcases.compare_with_full_precision),
    _workflow("Demo model", "video without a GPU", showcases.demo_model),
    _workflow("Wan2.1", _T2V, paper.wan21_text_to_video, _PAPER),
    _workflow("LTX-Video", _T2V, paper.ltx_video_text_to_video, _PAPER),
    _workflow("Mochi", _T2V, paper.mochi_text_to_video, _PAPER),
    _workflow("CogVideoX", "object removal", paper.cogvideox_object_removal, _PAPER),
    _workflow("Flux.1", _T2I, paper.flux1_text_to_image, _PAPER),
    _workflow("Stable Diffusion 3.5", _T2I, paper.sd35_text_to_image, _PAPER),
)
