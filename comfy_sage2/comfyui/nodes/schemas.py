"""The inputs and outputs of the nodes, on every ComfyUI that is served.

The choices are the same on every machine: else a shared workflow would be refused where a kernel is missing.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..settings import CHOICES, Settings

CATEGORY = "model_patches/attention"
OPTIONS = io.Custom("SAGE2_OPTIONS")
DEFAULTS = Settings()


def schema(**options: Any) -> io.Schema:
    """A schema of those options that this ComfyUI knows: older ones have no `search_aliases` and no `is_dev_only`."""
    known = io.Schema.__dataclass_fields__
    return io.Schema(**{name: value for name, value in {"category": CATEGORY, **options}.items() if name in known})


def _input(name: str, tooltip: str, display_name: str | None = None) -> io.Input:
    """The input of a field of the settings, which has its default and its choices; a number is a share of the steps."""
    default = getattr(DEFAULTS, name)
    shown = {"display_name": display_name, "default": default, "optional": True, "tooltip": tooltip}
    if name in CHOICES:
        return io.Combo.Input(name, options=list(CHOICES[name]), **shown)
    if isinstance(default, bool):
        return io.Boolean.Input(name, **shown)
    return io.Float.Input(name, min=0.0, max=1.0, step=0.01, **shown)


def sage_attention_2() -> io.Schema:
    """*SageAttention2*."""
    return schema(
        node_id="SageAttention2",
        display_name="SageAttention2",
        description="Makes a model's attention faster: it rounds queries and keys to 8 or 4 bits and values to 8 or 16 "
        "bits. It subtracts means before it rounds, so that the result stays close to full precision.",
        hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.dynprompt],
        search_aliases=[
            "patch sage",
            "sage",
            "sage attention",
            "sageattn",
            "patch sage attention",
            "patch sageattention kj",
            "quantized attention",
            "sparse attention",
            "flash attention",
            "attention backend",
            "int4 int8 fp8 attention",
            "faster attention",
            "speed up",
        ],
        inputs=[
            io.Model.Input(
                "model",
                tooltip="The diffusion model. It is not changed. The output is a copy with quantized attention.",
            ),
            _input(
                "mode",
                "auto: precise where it takes at most 15 % longer than 8b on this GPU, else 8b.\n"
                "8b: queries and keys in 8 bits.\n"
                "4b: less exact. It can save time only on RTX 40 cards.\n"
                "precise: as 8b with values in 16 bits, more exact.\n"
                "exact: quantizes nothing and takes the fastest exact attention.\n"
                "off: leaves the model as it is.",
            ),
            _input(
                "smooth_v",
                "Subtracts the mean of each value channel before it rounds the values. Helps models whose values lie "
                "far from zero. Changes nothing in precise and exact, which do not round values.",
                "smooth values",
            ),
            _input(
                "sparse",
                "Skips the key blocks that matter least in long videos. light is the closest to the full result, "
                "strong gives another video of the same prompt. Skips nothing in exact.",
            ),
            OPTIONS.Input("options", optional=True, tooltip="From SageAttention2 Options, for everything else."),
        ],
        outputs=[io.Model.Output(display_name="model", tooltip="The model with SageAttention2's attention.")],
    )


def sage_attention_2_options() -> io.Schema:
    """*SageAttention2 Options*."""
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
                "Share of this sampler's steps before SageAttention2 becomes active. 0.1 of 20 steps keeps the first 2 "
                "in full precision.",
                "start percent",
            ),
            _input(
                "end_percent",
                "Share of this sampler's steps after which it is no longer active. 0.9 of 20 steps keeps the last 2 in "
                "full precision.",
                "end percent",
            ),
            _input(
                "apply_to",
                "self only: keeps cross-attention (to the text or an image) in full precision. Joint attention over "
                "text and image counts as self-attention.",
                "apply to",
            ),
            _input(
                "when",
                "where it is faster: calls for which another exact attention is faster on this GPU take that one.\n"
                "always: quantizes every call that can be.\n"
                "whatever is fastest: takes other packages' attention even where it is less exact.",
                "when to quantize",
            ),
            _input(
                "rotate",
                "Mixes the channels of queries and keys before rounding.\n"
                "auto: in the attention heads that get closer to full precision by it.",
                "rotate queries and keys",
            ),
            _input(
                "guard",
                "Looks for NaN and infinity while sampling. Layers that give them run again in precise or in full "
                "precision.",
            ),
            _input(
                "dense_percent",
                "Share of this sampler's steps in which sparse skips nothing yet. The first steps decide what the "
                "video shows.",
                "dense at first (share of steps)",
            ),
            _input(
                "respect_model_attention",
                "Some model files and LoRAs ask for an attention of their own in some layers. On: those layers keep "
                "it. Off: SageAttention2 computes them too.",
                "respect the model's own attention",
            ),
            _input(
                "backend",
                "auto: the fastest attention on this GPU that is exact enough.\n"
                "reference: the same computation in plain PyTorch, for comparisons. It is slow.\n"
                "auto or reference: the reference only where no kernel can run.",
            ),
        ],
        outputs=[OPTIONS.Output(display_name="options", tooltip="For the options input of SageAttention2.")],
    )


def sage_attention_2_report() -> io.Schema:
    """*SageAttention2 Report*."""
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
                tooltip="The sampler's output. It passes through. Connect it so that the report runs after sampling.",
            ),
            io.Image.Input(
                "images",
                optional=True,
                tooltip="The decoded images. They pass through. They may be connected in place of samples.",
            ),
            io.Boolean.Input(
                "measure_quality",
                display_name="measure quality",
                default=False,
                optional=True,
                tooltip="Compares a sample of every attention call with full precision. Sampling is slower while it is "
                "on.",
            ),
        ],
        outputs=[
            io.Latent.Output(display_name="samples", tooltip="The samples, unchanged."),
            io.Image.Output(display_name="images", tooltip="The images, unchanged."),
            io.String.Output(display_name="text", tooltip="The report as text."),
            io.Image.Output(display_name="chart", tooltip="The report's picture, with a map of the errors where closeness was measured."),
        ],
    )
