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
        "1. Press **Run**. *SageAttention2 Auto Policy* samples in full precision and measures each layer.\n"
        "2. Press **Run** again. Each layer now takes the fastest mode that **quality** allows. The report compares "
        "the result with full precision. Switch **measure quality** off afterwards, because it costs time.\n"
        "3. Press *Keep in this workflow*, which writes the policy into the node, and save the workflow. It then uses "
        "this policy without measuring.\n\n"
        "If you change the model, a LoRA or the size, the node measures again. If the node keeps a policy, delete the "
        "text in **policy** first.",
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
        "Both videos start from the same noise. The report says how far the worst layers are from full precision, and "
        "how much time the node saved. It is normal that small details differ. Another composition is not normal.",
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
        "Every clone of the pack holds this model, in **lab/models/demo**. You need not download or copy anything. The "
        "workflow needs ComfyUI 0.8 or newer.\n\n"
        "The workflow also runs without a GPU: with **backend** on *auto or reference*, the slow reference computes "
        "the attention if no kernel can.\n\n"
        "The model knows only a few words. You can change the colors and shapes in the caption.\n\n"
        "**To measure your GPU**, run the workflow and read the lines *measured on this GPU* in the report. They give "
        "the speed and error of each mode and of other attentions.",
    )  # fmt: skip
