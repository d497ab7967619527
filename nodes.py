"""The nodes as ComfyUI shows them. They load on every machine; what cannot run says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from comfy_sage2.comfyui.nodes.support import (
    IMPORT_ERROR,
    PASSED_THROUGH,
    POLICY,
    advanced,
    backend_input,
    checked,
    dense_percent_input,
    hidden_widget,
    library,
    measure_quality_input,
    rotate_input,
    schema,
    share_input,
    skip_input,
    sparse_input,
    status_of,
)

# As in support.py: the same on every machine.
MODES = ["8b", "4b", "precise", "auto", "exact", "off"]
TARGETS = ["self and cross", "self only"]
WHEN = ["where it is faster", "always", "whatever is fastest"]
GUARDS = ["off", "values", "values and fidelity"]


class SageAttention2(io.ComfyNode):
    """Gives a copy of a model quantized attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2",
            display_name="SageAttention2",
            description="Makes a model's attention faster: it rounds queries and keys to 8 or 4 bits and values to 8 "
            "or 16 bits. It subtracts means before it rounds, so that the result stays close to full precision.",
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
            # Files store widget values by position: earlier_inputs.js knows the order that earlier versions had. All
            # but model and mode are optional, so that prompts of earlier versions, which lack some, still run.
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model. It is not changed. The output is a copy with quantized attention.",
                ),
                io.Combo.Input(
                    "mode",
                    options=MODES,
                    default="8b",
                    tooltip="Bits of queries and keys.\n"
                    "8b: close to full precision, the usual choice.\n"
                    "4b: less exact. It can save time only on RTX 40 cards.\n"
                    "precise: 8 bits with values in 16 bits, closer to full precision than 8b and a little slower.\n"
                    "auto: where 4b is faster than 8b it takes 4b in the middle steps and layers, and 8b elsewhere.\n"
                    "exact: quantizes nothing and takes the fastest exact attention.\n"
                    "off: leaves the model as it is.",
                ),
                sparse_input(),
                POLICY.Input(
                    "policy",
                    optional=True,
                    tooltip="A calibrated policy. It decides mode and smooth values for each layer and step, in place "
                    "of those inputs. A policy for another kind of model is refused.",
                ),
                io.Combo.Input(
                    "guard",
                    options=GUARDS,
                    default="values",
                    optional=True,
                    tooltip="Checks the attention's output while sampling.\n"
                    "values: looks for NaN and infinity. If it finds them, the node runs the step again, and the "
                    "layers that gave them use precise or full precision until sampling ends.\n"
                    "values and fidelity: also compares a sample of one layer with exact attention in each pass. A "
                    "layer that is too far off in two passes takes a more exact mode.\n"
                    "off: checks nothing.\n"
                    "API prompts without this input mean off.",
                ),
                advanced(
                    io.Combo.Input(
                        "when",
                        display_name="when to quantize",
                        options=WHEN,
                        default="where it is faster",
                        optional=True,
                        tooltip="where it is faster: quantizes only where that is faster on this GPU. Other calls "
                        "take the fastest exact attention. Where comfy-kitchen or SageAttention is installed, it "
                        "computes the calls in which it is faster than the mode and no less exact.\n"
                        "always: quantizes every call that can be, as API prompts without this input do.\n"
                        "whatever is fastest: those packages also compute calls in which they are less exact.",
                    )
                ),
                rotate_input(
                    "Mixes the channels of queries and keys before quantization.\n"
                    "auto: in the attention heads that get closer to full precision by it. The kernel looks at a "
                    "sample of each head in each call, so on an H100 a call takes 10 to 60 microseconds longer than "
                    "with off.\n"
                    "on: in all heads.\n"
                    "off: in none, as in the paper.\n"
                    "API prompts without this input keep it off.",
                ),
                advanced(
                    io.Boolean.Input(
                        "smooth_v",
                        display_name="smooth values",
                        default=False,
                        optional=True,
                        tooltip="Subtracts the mean of each value channel before quantization and adds it to the "
                        "output. It helps models whose values lie far from zero, and takes little time.",
                    )
                ),
                share_input(
                    "start_percent",
                    "active from",
                    0.0,
                    "Share of this sampler's steps before the node becomes active. 0.1 of 20 steps keeps the first 2 "
                    "in full precision. Where several samplers share one schedule, each counts its own steps.",
                ),
                share_input(
                    "end_percent",
                    "active until",
                    1.0,
                    "Share of this sampler's steps after which the node is no longer active. 0.9 of 20 steps keeps the "
                    "last 2 in full precision.",
                ),
                advanced(
                    io.Combo.Input(
                        "apply_to",
                        display_name="apply to",
                        options=TARGETS,
                        default="self and cross",
                        optional=True,
                        tooltip="self and cross: quantizes every kind of attention.\n"
                        "self only: keeps cross-attention (to the text or an image) in full precision.\n"
                        "Joint attention over text and image counts as self-attention.",
                    )
                ),
                dense_percent_input(),
                advanced(
                    io.Boolean.Input(
                        "respect_model_attention",
                        display_name="respect the model's own attention",
                        default=False,
                        optional=True,
                        tooltip="Some model files and LoRAs ask for an attention of their own in some layers, INT8 or "
                        "sparse. Off: this node computes those layers too, as far as it can. On: those layers keep "
                        "their own attention. The report names it.",
                    )
                ),
                measure_quality_input(optional=True),
                backend_input(optional=True),
                skip_input(),
                # What earlier versions had beside a guard that was on or off. Prompts of theirs still mean it.
                hidden_widget(
                    io.Combo.Input(
                        "guard_level",
                        options=GUARDS[1:],
                        default="values",
                        optional=True,
                        tooltip="What the guard checks where guard is true, as in API prompts of earlier versions.",
                    )
                ),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model with SageAttention2's attention.")],
        )

    @classmethod
    def validate_inputs(cls, mode: Any = None, backend: Any = None, guard: Any = None, rotate: Any = None) -> bool:
        """Before the run; ComfyUI checks no value of the inputs named here, and would tell an error once for each.

        An unknown mode, backend or rotation is no reason to refuse: the node takes its default and says so. In prompts
        of earlier versions guard and rotate are true or false.
        """
        return True

    @classmethod
    @checked
    def execute(cls, model: Any, mode: str, **options: Any) -> io.NodeOutput:
        """options: of `Settings`, whose defaults are what an API prompt means that was saved without them."""
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        patched = library.patch_model(model, library.Settings.of_workflow(mode=mode, **options))
        return io.NodeOutput(patched, ui={"text": [status_of(patched, "SageAttention2", cls.hidden)]})


class SageAttention2Report(io.ComfyNode):
    """Reports what the last sampling with a model did."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2Report",
            display_name="SageAttention2 Report",
            description="Shows after sampling how much faster it was and how close to full precision, which attention "
            "computed how many calls, and why some were left to ComfyUI's attention.",
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
                    tooltip="The sampler's output. It passes through. Connect it so that the report runs after "
                    "sampling.",
                ),
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="The decoded images. They pass through. They may be connected in place of samples.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="samples", tooltip="The samples, unchanged."),
                io.Image.Output(display_name="images", tooltip="The images, unchanged."),
                io.String.Output(display_name="text", tooltip="The report as text."),
                io.Image.Output(display_name="chart", tooltip="The report's picture."),
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
        chart = as_image(library.draw(sessions))
        return io.NodeOutput(*passed, text, chart, ui={**ui.PreviewImage(chart, cls=cls).as_dict(), "text": [text]})


def as_image(picture: Image.Image) -> torch.Tensor:
    """A picture as ComfyUI has them: (1, height, width, 3), float32 from 0 to 1."""
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]
