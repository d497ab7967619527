"""The nodes as ComfyUI shows them. They load on every machine; what cannot run says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from comfy_sage2.comfyui.nodes.support import (
    CATEGORY,
    IMPORT_ERROR,
    PASSED_THROUGH,
    POLICY,
    ROTATIONS,
    advanced,
    backend_input,
    checked,
    library,
    measure_quality_input,
    schema,
    skip_input,
    sparse_inputs,
    status_of,
)

# As in support.py: the same on every machine.
MODES = ["8b", "4b", "precise", "auto", "exact", "off"]
TARGETS = ["self and cross", "self only"]
WHEN = ["where it is faster", "always", "whatever is fastest"]
GUARD_LEVELS = ["values", "values and fidelity"]


class SageAttention2(io.ComfyNode):
    """Gives a copy of a model quantized attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2",
            display_name="SageAttention2",
            category=CATEGORY,
            description="Speeds up a model's attention: queries and keys in 8 or 4 bits, values in 8 or 16 bits, "
            "smoothed to keep the result close to full precision.",
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            search_aliases=[
                "patch sage",
                "sage",
                "sage attention",
                "sageattn",
                "patch sage attention",
                "patch sageattention kj",
                "quantized attention",
                "int4 int8 attention",
                "faster attention",
                "speed up",
            ],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model. It stays as it is; the output is a copy with quantized attention.",
                ),
                io.Combo.Input(
                    "mode",
                    options=MODES,
                    default="8b",
                    tooltip="Bits of queries and keys. 8b: close to full precision. 4b: less exact, faster on GPUs "
                    "with INT4 tensor cores. precise: closest and slower; 8 bits, with values in 16. auto: on a GPU "
                    "with INT4 4b in the middle steps and layers, 8b elsewhere; the report gives the reasons. "
                    "exact: quantizes nothing, takes the fastest exact attention. off: leaves the model as it is.",
                ),
                io.Boolean.Input(
                    "smooth_v",
                    default=False,
                    tooltip="Subtract the mean of each value channel before quantization, and add it back to the "
                    "output. Helps models whose values lie far from zero. Costs little time.",
                ),
                io.Float.Input(
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of this sampler's steps before the node becomes active. 0.1 of 20 steps keeps the "
                    "first 2 in full precision. Where several samplers share one schedule, each counts its own steps.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of this sampler's steps after which the node is no longer active. 0.9 of 20 steps "
                    "keeps the last 2 in full precision.",
                ),
                io.Combo.Input(
                    "apply_to",
                    options=TARGETS,
                    default="self and cross",
                    tooltip="'self only' keeps cross-attention (to the text or an image) in full precision. "
                    "Joint attention over text and image counts as self-attention.",
                ),
                backend_input(),
                measure_quality_input(),
                # Inputs that came later are optional, so that workflows saved before them still load.
                advanced(
                    io.Boolean.Input(
                        "guard",
                        default=True,
                        optional=True,
                        tooltip="Detect NaN/Inf in the attention output. If one appears, the step is rerun and the "
                        "affected layers use precise or full precision until sampling ends; the report names them. "
                        "Overhead is below 1 %, higher with ControlNet or other model patches. API prompts without "
                        "it keep it off.",
                    )
                ),
                POLICY.Input(
                    "policy",
                    optional=True,
                    tooltip="A calibrated policy. It decides mode and smooth_v for each layer and step, in place of "
                    "the inputs above. A policy for another kind of model is refused.",
                ),
                # Last, so that the values of older workflow files, which are stored by position, stay where they are.
                advanced(
                    io.Combo.Input(
                        "rotate",
                        options=ROTATIONS,
                        default="auto",
                        optional=True,
                        tooltip="Rotate queries and keys after smoothing. auto: in the attention heads that get closer "
                        "to full precision by it, found while rendering. on: in all heads. off: in none, the paper's "
                        "numerics. API prompts without it keep it off.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "when",
                        options=WHEN,
                        default="where it is faster",
                        optional=True,
                        tooltip="where it is faster: calls for which exact attention was measured to be the fastest on "
                        "this GPU take it, also those in full precision; so they do comfy-kitchen's INT8 attention or "
                        "SageAttention, where installed, if it is faster than this node's mode and no less exact. The "
                        "report names both. always: quantize every call that can be, as API prompts without this input "
                        "do. whatever is fastest: as the first, and those packages serve also where they are less "
                        "exact.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "guard_level",
                        options=GUARD_LEVELS,
                        default="values",
                        optional=True,
                        tooltip="What the guard checks. values: NaN and Inf. values and fidelity: in each pass of the "
                        "model also a sample of one layer, against exact attention; a layer that is too far off in "
                        "two passes goes to the next more exact mode until sampling ends, and the report names it.",
                    )
                ),
                skip_input(),
                advanced(
                    io.Boolean.Input(
                        "respect_model_attention",
                        default=False,
                        optional=True,
                        tooltip="Some model files and LoRAs ask for an attention of their own in each layer, INT8 or "
                        "sparse. Off: this node serves those layers too, and leaves to that attention what it does not "
                        "serve. On: those layers keep it. The report names it.",
                    )
                ),
                *sparse_inputs(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model with SageAttention2's attention.")],
        )

    @classmethod
    def validate_inputs(cls, mode: Any = None, backend: Any = None, rotate: Any = None) -> bool:
        """Before the run; ComfyUI checks no value of the inputs named here, and would tell an error once for each.

        An unknown mode, backend or rotation is no reason to refuse: the node takes its default and says so. rotate was
        true or false before, which older workflows have.
        """
        return True

    @classmethod
    @checked
    def execute(
        cls,
        model: Any,
        mode: str,
        smooth_v: bool,
        start_percent: float,
        end_percent: float,
        apply_to: str,
        backend: str,
        measure_quality: bool,
        guard: bool = False,  # what an API prompt that was saved without it means, here and below
        policy: Any = None,
        rotate: str | bool = "off",
        when: str = "always",
        guard_level: str = "values",
        skip: str = "off",
        respect_model_attention: bool = False,
        sparse: str = "off",
        dense_percent: float = 0.2,
    ) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        settings = library.Settings.of_workflow(
            mode=mode,
            smooth_v=smooth_v,
            start_percent=start_percent,
            end_percent=end_percent,
            apply_to=apply_to,
            backend=backend,
            measure_quality=measure_quality,
            guard=guard,
            policy=policy,
            rotate=rotate,
            when=when,
            guard_level=guard_level,
            skip=skip,
            respect_model_attention=bool(respect_model_attention),
            sparse=sparse,
            dense_percent=dense_percent,
        )
        patched = library.patch_model(model, settings)
        return io.NodeOutput(patched, ui={"text": [status_of(patched, "SageAttention2", cls.hidden)]})


class SageAttention2Report(io.ComfyNode):
    """Reports what the last sampling with a model did."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2Report",
            display_name="SageAttention2 Report",
            category=CATEGORY,
            description="After sampling: which attention ran, how often and how long, which calls were left to "
            "ComfyUI's attention and why, and how close the result was to full precision.",
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            search_aliases=["sage report", "attention statistics", "is sage attention on"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model that was sampled: SageAttention2's output, or a model made from it."
                ),
                io.Latent.Input(
                    "samples",
                    optional=True,
                    tooltip="The sampler's output, passed through. Connect it so that the report runs after sampling.",
                ),
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="The decoded images, passed through. They may be connected in place of samples.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="samples", tooltip="The samples, unchanged."),
                io.Image.Output(display_name="images", tooltip="The images, unchanged."),
                io.String.Output(display_name="text", tooltip="The report as text."),
                io.Image.Output(display_name="chart", tooltip="The whole report as an image."),
            ],
        )

    @classmethod
    @checked
    def execute(cls, model: Any, samples: Any = None, images: Any = None) -> io.NodeOutput:
        passed = [value if value is not None else ExecutionBlocker(None) for value in (samples, images)]
        if IMPORT_ERROR is not None:
            return io.NodeOutput(*passed, PASSED_THROUGH, ExecutionBlocker(None), ui={"text": [PASSED_THROUGH]})
        sessions = library.sessions_of(model)
        text = library.report(sessions, library.running_prompt())
        library.node_status.publisher("SageAttention2Report", cls.hidden.unique_id, cls.hidden.extra_pnginfo)(text, "")
        card, chart = (as_image(draw(sessions)) for draw in (library.draw_card, library.draw_chart))
        shown = ui.PreviewImage(card, cls=cls).as_dict()
        whole = ui.PreviewImage(chart, cls=cls).as_dict()["images"]  # for the button that opens it
        return io.NodeOutput(*passed, text, chart, ui={**shown, "chart": whole, "text": [text]})


def as_image(picture: Image.Image) -> torch.Tensor:
    """A picture as ComfyUI has them: (1, height, width, 3), float32 from 0 to 1."""
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]
