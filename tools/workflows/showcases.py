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
    """One sampling in full precision is measured, and a second one runs by the policy."""
    unet, vae, latent, texts = wan21_inputs(g)
    calibrate = g.node("SageAttention2Calibrate", 2, model=unet[0])
    shift = g.node("ModelSamplingSD3", 2, model=calibrate[0], shift=8.0)
    measured = sampler_node(g, 2, shift[0], texts, latent[0], "Calibrate", **WAN_SAMPLING)
    policy = g.node("SageAttention2MakePolicy", 3, model=shift[0], samples=measured[0], file="wan21_1.3B")
    sage = sage_node(g, 3, unet[0], policy=policy[0], measure_quality=True)
    shift = g.node("ModelSamplingSD3", 4, model=sage[0], shift=8.0)
    sampler = sampler_node(g, 4, shift[0], texts, latent[0], "Render", **{**WAN_SAMPLING, "seed": 2})
    report_node(g, 5, shift[0], sampler[0])
    save_video(g, 6, sampler[0], vae[0], 16.0, "by_policy")
    g.note(
        1, "How it works",
        "1. **Calibrate** samples in full precision and measures each layer along the way.\n"
        "2. **Make Policy** chooses the fastest mode that `quality` allows, and saves it under `file`. *Keep in this "
        "workflow* puts a *Load Policy* node with it into the graph.\n"
        "3. **SageAttention2** renders by the policy.\n\n"
        "Later renderings need only *Load Policy* and *SageAttention2*: mute the calibration.",
    )  # fmt: skip
    weights_note(g, 1)


def compare_with_full_precision(g: Graph) -> None:
    """The same seed in full precision and with the node."""
    unet, vae, latent, texts = wan21_inputs(g)
    for name, sage in (("full precision", None), ("SageAttention2", sage_node(g, 2, unet[0], measure_quality=True))):
        model = unet if sage is None else sage
        shift = g.node("ModelSamplingSD3", 3, model=model[0], shift=8.0)
        sampler = sampler_node(g, 3, shift[0], texts, latent[0], name, **WAN_SAMPLING)
        save_video(g, 5, sampler[0], vae[0], 16.0, name.replace(" ", "_").lower())
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
    caption = "a large red striped ball bounces and a white star spins over a drifting blue checkered floor"
    texts = (
        g.node("SageAttention2DemoCaption", 1, "Caption", codes=codes, caption=caption),
        g.node("SageAttention2DemoCaption", 1, "No caption", codes=codes, caption=""),
    )
    # Its calls are so short that exact attention would be faster.
    sage = sage_node(g, 2, unet[0], measure_quality=True, when="always")
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=3.0)
    sampler = sampler_node(
        g, 3, shift[0], texts, latent[0], seed=1, steps=20, cfg=4.0, sampler_name="euler", scheduler="simple"
    )
    report_node(g, 4, shift[0], sampler[0])
    save_video(g, 5, sampler[0], vae[0], 8.0, "demo")
    g.note(
        1, "Weights",
        "The model is in the folder of this pack, `models/demo`. Copy\n\n"
        "- `demo_wan21_t2v_fp16.safetensors` to ComfyUI's `models/diffusion_models`\n"
        "- `demo_wan21_vae_fp16.safetensors` to `models/vae`\n"
        "- `demo_captions.safetensors` to `models/text_encoders`\n\n"
        "It needs ComfyUI 0.8 or newer, and runs without a GPU too: choose backend *reference* then. It knows "
        "a few words only; change the colours and shapes in the caption.",
        360,
    )  # fmt: skip
