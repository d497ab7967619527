"""The inputs and outputs of the nodes, on every supported ComfyUI.

The choices are the same on every machine. Otherwise ComfyUI would refuse a shared workflow where a kernel is missing.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..settings import CHOICES, Settings

CATEGORY = "model/patch"  # of ComfyUI's own attention nodes
OPTIONS = io.Custom("SAGE2_OPTIONS")
DEFAULTS = Settings()
_SEARCH_WORDS = [
    "patch sage", "sage", "sage attention", "sageattn", "patch sage attention", "patch sageattention kj",
    "quantized attention", "sparse attention", "flash attention", "attention backend", "int4", "int8 fp8 attention",
    "faster attention", "speed up",
]  # fmt: skip


def schema(**options: Any) -> io.Schema:
    """A schema with the options that this ComfyUI knows: older ones have no `search_aliases` and no `is_dev_only`."""
    known = io.Schema.__dataclass_fields__
    return io.Schema(**{name: value for name, value in {"category": CATEGORY, **options}.items() if name in known})


def _input(name: str, tooltip: str, display_name: str | None = None) -> io.Input:
    """The input for a field of the settings, with its default and choices. A number is a share of the steps."""
    default = getattr(DEFAULTS, name)
    shown = {"display_name": display_name, "default": default, "optional": True, "tooltip": tooltip}
    if name in CHOICES:
        return io.Combo.Input(name, options=list(CHOICES[name]), **shown)
    if isinstance(default, bool):
        return io.Boolean.Input(name, **shown)
    return io.Float.Input(name, min=0.0, max=1.0, step=0.01, **shown)


def sage_attention_2() -> io.Schema:
    return schema(
        node_id="SageAttention2",
        display_name="SageAttention2",
        description="Makes a model's attention faster: it rounds queries and keys to 8 or 4 bits and values to 8 or 16 "
        "bits. It subtracts means before it rounds, so that the result stays close to full precision.",
        hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.dynprompt],
        search_aliases=_SEARCH_WORDS,
        inputs=[
            io.Model.Input(
                "model",
                tooltip="The diffusion model. It is not changed: the output is a copy with quantized attention.",
            ),
            _input(
                "mode",
                "auto takes precise if it costs at most 15% more time than 8b, else 8b. 4b is less exact. exact "
                "rounds nothing.",
            ),
            _input(
                "smooth_v",
                "Helps models whose values lie far from zero, and hurts some others. Does nothing in precise and "
                "exact.",
                "smooth values",
            ),
            _input(
                "sparse",
                "Skips what matters least in long videos. light is the closest. strong and draft give another video.",
            ),
            OPTIONS.Input("options", optional=True, tooltip="From SageAttention2 Options, for everything else."),
        ],
        outputs=[io.Model.Output(display_name="model", tooltip="The model with SageAttention2's attention.")],
    )


def sage_attention_2_options() -> io.Schema:
    return schema(
        node_id="SageAttention2Options",
        display_name="SageAttention2 Options",
        description="Further options of SageAttention2. The node's defaults are those that SageAttention2 has without "
        "it.",
        hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        search_aliases=["sage options", "sage advanced"],
        inputs=[
            _input(
                "start_percent",
                "Steps before this share stay in full precision. 0.1 of 20 steps: the first 2.",
                "start percent",
            ),
            _input(
                "end_percent",
                "Steps from this share on stay in full precision. 0.9 of 20 steps: the last 2.",
                "end percent",
            ),
            _input(
                "apply_to",
                "self only keeps cross-attention (to the text or an image) in full precision.",
                "apply to",
            ),
            _input(
                "when",
                "where it is faster: the fastest attention, if no less exact. whatever is fastest: any. always: "
                "quantizes what it can.",
                "when to quantize",
            ),
            _input(
                "rotate",
                "Mixes channels of queries and keys before rounding. auto: in the heads that this makes more exact.",
                "rotate queries and keys",
            ),
            _input(
                "guard",
                "Looks for NaN and infinity while sampling, and computes layers that give them in a more exact mode.",
            ),
            _input(
                "dense_percent",
                "The first share of the steps, in which sparse skips nothing. These steps decide what the video shows.",
                "dense at first (share of steps)",
            ),
            _input(
                "respect_model_attention",
                "On: layers keep the attention that the model's file asks for.",
                "respect the model's own attention",
            ),
            _input(
                "backend",
                "auto: this GPU's fastest kernel. reference: the same in plain PyTorch, slow, for comparisons.",
            ),
        ],
        outputs=[OPTIONS.Output(display_name="options", tooltip="For the options input of SageAttention2.")],
    )


def sage_attention_2_report() -> io.Schema:
    return schema(
        node_id="SageAttention2Report",
        display_name="SageAttention2 Report",
        description="Shows after sampling how much faster it was and how close to full precision, which attention "
        "computed how many calls, and why some were left to ComfyUI's attention.",
        hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.dynprompt],
        search_aliases=["sage report", "attention statistics", "is sage attention on"],
        is_output_node=True,
        inputs=[
            io.Model.Input(
                "model", tooltip="The model that was sampled: SageAttention2's output, or a model made from it."
            ),
            io.Latent.Input(
                "samples",
                optional=True,
                tooltip="The sampler's output. It passes through, so that the report waits for the sampling.",
            ),
            io.Image.Input(
                "images",
                optional=True,
                tooltip="The decoded images, instead of samples. They pass through.",
            ),
            io.Boolean.Input(
                "measure_quality",
                display_name="measure quality",
                default=False,
                optional=True,
                tooltip="Compares a sample of each call with full precision. Sampling is slower while it is on.",
            ),
        ],
        outputs=[
            io.Latent.Output(display_name="samples", tooltip="The samples, unchanged."),
            io.Image.Output(display_name="images", tooltip="The images, unchanged."),
            io.String.Output(display_name="text", tooltip="The report as text."),
            io.Image.Output(display_name="chart", tooltip="The report's picture, with a map of the errors."),
        ],
    )
