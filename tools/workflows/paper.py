"""The workflows of the families that the paper measures, and of others of their time."""

from __future__ import annotations

from .graph import Graph
from .parts import (
    BAD_VIDEO,
    FOX,
    HUB,
    SQUARE,
    STILL,
    WAN21_FILES,
    WAN21_LATENT,
    Files,
    finish,
    sage_node,
    texts_of,
)
from .plain import Plain

COGVIDEOX = f"{HUB}/Comfy-Org/void-model/resolve/main"
MOCHI = f"{HUB}/Comfy-Org/mochi_preview_repackaged/resolve/main/split_files"
TEXT_ENCODERS = f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main"
T5 = f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors"


def wan21_text_to_video(g: Graph) -> None:
    """Wan 2.1 1.3B."""
    Plain(
        WAN21_FILES, ("EmptyHunyuanLatentVideo", WAN21_LATENT), FOX, BAD_VIDEO,
        {"steps": 30, "cfg": 6.0, "sampler_name": "uni_pc", "scheduler": "simple"}, "wan21",
        shift=("ModelSamplingSD3", 8.0), fps=16.0, notes=("For Wan 2.1 14B, replace only the model file.",),
    ).build(g)  # fmt: skip


def ltx_video_text_to_video(g: Graph) -> None:
    """LTX-Video 2B."""
    unet, _, vae = Files(f"{HUB}/Lightricks/LTX-Video/resolve/main/ltx-video-2b-v0.9.5.safetensors").load(g)
    clip = g.loader("CLIPLoader", 0, {"clip_name": T5}, type="ltxv")
    latent = g.node("EmptyLTXVLatentVideo", 0, width=768, height=512, length=97)
    texts = texts_of(g, 1, clip[0], FOX, BAD_VIDEO)
    rate = g.node("LTXVConditioning", 1, positive=texts[0][0], negative=texts[1][0], frame_rate=25.0)
    sage = sage_node(g, 2, unet)
    sigmas = g.node("LTXVScheduler", 3, steps=30, latent=latent[0])
    solver = g.node("KSamplerSelect", 3, sampler_name="euler")
    sampler = g.node(
        "SamplerCustom", 3, model=sage[0], noise_seed=1, cfg=3.0, positive=rate[0], negative=rate[1],
        sampler=solver[0], sigmas=sigmas[0], latent_image=latent[0],
    )  # fmt: skip
    finish(g, sage[0], sampler[0], vae, "ltx", 25.0)


def mochi_text_to_video(g: Graph) -> None:
    """Mochi 1 preview."""
    Plain(
        Files(
            f"{MOCHI}/diffusion_models/mochi_preview_bf16.safetensors",
            (f"{MOCHI}/text_encoders/t5xxl_fp16.safetensors",), "mochi",
            f"{MOCHI}/vae/mochi_vae.safetensors",
        ),
        ("EmptyMochiLatentVideo", {"width": 848, "height": 480, "length": 37}), FOX, "",
        {"steps": 30, "cfg": 4.5, "sampler_name": "euler", "scheduler": "simple"}, "mochi", fps=24.0,
    ).build(g)  # fmt: skip


def cogvideox_object_removal(g: Graph) -> None:
    """CogVideoX 1.5 5B as finetuned to remove objects (VOID)."""
    unet, clip, vae = Files(
        f"{COGVIDEOX}/diffusion_models/void_pass1.safetensors", (T5,), "cogvideox",
        f"{COGVIDEOX}/vae/cogvideox_vae.safetensors",
    ).load(g)  # fmt: skip
    finder, finders_clip, _ = Files(
        f"{HUB}/Comfy-Org/sam3.1/resolve/main/checkpoints/sam3.1_multiplex_fp16.safetensors"
    ).load(g)
    source = g.node("LoadVideo", 0, "Your video", file="example.mp4")
    parts = g.node("GetVideoComponents", 0, video=source[0])
    frames = g.node("ImageFromBatch", 0, image=parts[0], batch_index=0, length=85)
    size = g.node("GetImageSize", 1, image=frames[0])
    texts = texts_of(g, 1, clip, "A snowy ridge at dawn, nobody there, camera tracking from the side", "")
    target = g.node("CLIPTextEncode", 1, "What to remove", text="fox", clip=finders_clip)
    mask = g.node("SAM3_Detect", 1, model=finder, image=frames[0], conditioning=target[0])
    filled = g.node(
        "VOIDInpaintConditioning", 2, positive=texts[0][0], negative=texts[1][0], vae=vae, video=frames[0],
        quadmask=mask[0], width=672, height=384, length=size[2],
    )  # fmt: skip
    sage = sage_node(g, 2, unet)
    noise = g.node("RandomNoise", 3, noise_seed=1)
    guider = g.node("CFGGuider", 3, model=sage[0], positive=filled[0], negative=filled[1], cfg=6.0)
    solver = g.node("VOIDSampler", 3)
    sigmas = g.node("BasicScheduler", 3, model=sage[0], scheduler="simple", steps=30, denoise=1.0)
    sampler = g.node(
        "SamplerCustomAdvanced", 3, noise=noise[0], guider=guider[0], sampler=solver[0], sigmas=sigmas[0],
        latent_image=filled[2],
    )  # fmt: skip
    finish(
        g, sage[0], sampler[0], vae, "cogvideox", parts[2],
        "In the prompt, write what the video shows after the object is gone. The workflow takes the first 85 frames. "
        "Other good lengths are 5, 13, 21 and so on (8 n + 5).",
        "ComfyUI's core nodes can read these CogVideoX weights. They cannot read the text-to-video files of the "
        "model's authors, in which the tensors have other names.",
    )  # fmt: skip


def flux1_text_to_image(g: Graph) -> None:
    """Flux.1 dev."""
    Plain(
        Files(
            f"{HUB}/Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors",
            (f"{TEXT_ENCODERS}/clip_l.safetensors", T5), "flux",
            f"{HUB}/Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors",
        ),
        ("EmptySD3LatentImage", SQUARE), STILL, None,
        {"steps": 20, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}, "flux1", guidance=3.5,
    ).build(g)  # fmt: skip


def sd35_text_to_image(g: Graph) -> None:
    """Stable Diffusion 3.5 large."""
    Plain(
        Files(f"{HUB}/Comfy-Org/stable-diffusion-3.5-fp8/resolve/main/sd3.5_large_fp8_scaled.safetensors"),
        ("EmptySD3LatentImage", SQUARE), STILL, "",
        {"steps": 20, "cfg": 4.0, "sampler_name": "euler", "scheduler": "sgm_uniform"}, "sd35",
        notes=("The checkpoint holds the text encoders and the VAE too.",),
    ).build(g)  # fmt: skip
