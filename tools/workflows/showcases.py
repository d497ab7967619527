"""The workflows that show what this pack adds: the demo model, calibration, and a comparison."""

from __future__ import annotations

from .graph import Graph
from .parts import (
    report_node,
    sage_node,
    sampler_node,
    save_video,
    wan21_inputs,
    weights_note,
)

WAN_SAMPLING = {"seed": 1, "steps": 20, "cfg": 6.0, "sampler_name": "uni_pc", "scheduler": "simple"}


def calibrate_then_render(g: Graph) -> None:
    """The first run is measured in full precision, and later ones run by the policy."""
    unet, vae, latent, texts = wan21_inputs(g)
    auto = g.node("SageAttention2AutoPolicy", 2, model=unet, measure_quality=True)
    shift = g.node("ModelSamplingSD3", 3, model=auto[0], shift=8.0)
    sampler = sampler_node(g, 3, shift[0], texts, latent[0], None, **WAN_SAMPLING)
    report_node(g, 4, shift[0], sampler[0])
    save_video(g, 5, sampler[0], vae, 16.0, "by_policy")
    g.note(
        2, "How it works",
        "1. **Run**: the node samples in full precision and measures each layer along the way.\n"
        "2. **Run** again: each layer takes the fastest mode that **quality** allows. The report compares the result "
        "with full precision; switch **measure_quality** off afterwards.\n"
        "3. *Keep in this workflow* writes the policy into the node. Save the workflow: it renders by it at once.\n\n"
        "With another model, LoRA or size the node measures anew.",
    )  # fmt: skip
    weights_note(g, 1)


def compare_with_full_precision(g: Graph) -> None:
    """The same seed in full precision and with the node."""
    unet, vae, latent, texts = wan21_inputs(g)
    for name, sage in (("Full precision", None), ("With SageAttention2", sage_node(g, 2, unet, measure_quality=True))):
        model = unet if sage is None else sage[0]
        shift = g.node("ModelSamplingSD3", 3, model=model, shift=8.0)
        sampler = sampler_node(g, 3, shift[0], texts, latent[0], name, **WAN_SAMPLING)
        save_video(g, 5, sampler[0], vae, 16.0, name.replace(" ", "_").lower())
    report_node(g, 4, shift[0], sampler[0])
    g.note(
        4, "What to look at",
        "Both videos start from the same noise. The report says how far each layer is from full precision, and what "
        "time was saved. Small differences in the picture are normal; another composition is not.",
    )  # fmt: skip
    weights_note(g, 2)


def demo_model(g: Graph) -> None:
    """The tiny model that comes with the pack."""
    unet = g.node("UNETLoader", 0, unet_name="demo_wan21_t2v_fp16.safetensors")
    vae = g.node("VAELoader", 0, vae_name="demo_wan21_vae_fp16.safetensors")
    latent = g.node("EmptyHunyuanLatentVideo", 0, width=256, height=256, length=33)
    codes = "demo_captions.safetensors"
    caption = "a large white star rises and a red striped square falls over a drifting blue checkered floor"
    texts = (
        g.node("SageAttention2DemoCaption", 1, "Caption", codes=codes, caption=caption),
        g.node("SageAttention2DemoCaption", 1, "No caption", codes=codes, caption=""),
    )
    # Its calls are so short that exact attention would be faster.
    sage = sage_node(g, 2, unet[0], backend="auto or reference", measure_quality=True, when="always")
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=3.0)
    sampler = sampler_node(
        g, 3, shift[0], texts, latent[0], seed=1, steps=20, cfg=4.0, sampler_name="euler", scheduler="simple"
    )
    report_node(g, 4, shift[0], sampler[0])
    save_video(g, 5, sampler[0], vae[0], 8.0, "demo")
    g.note(
        1, "About this model",
        "The model comes with the pack, in **lab/models/demo**: there is nothing to download and nothing to copy. It "
        "needs ComfyUI 0.8 or newer.\n\n"
        "It runs without a GPU too: with **backend** *auto or reference* the slow reference computes what no kernel "
        "can.\n\n"
        "It knows a few words only; change the colors and shapes in the caption.\n\n"
        "**To measure your GPU**, run it and read the lines *measured on this GPU* in the report: speed and error of "
        "each mode and of other attentions.",
    )  # fmt: skip
