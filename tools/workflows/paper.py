"""The workflows of the families that the paper measures, and of others of their time."""

from __future__ import annotations

from .graph import Graph
from .parts import (
    BAD_VIDEO,
    FOX,
    HUB,
    STILL,
    report_node,
    sage_node,
    sampler_node,
    save_image,
    save_video,
    texts_of,
    wan21_inputs,
    weights_note,
)

COGVIDEOX = f"{HUB}/Comfy-Org/void-model/resolve/main"
MOCHI = f"{HUB}/Comfy-Org/mochi_preview_repackaged/resolve/main/split_files"
TEXT_ENCODERS = f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main"


def wan21_text_to_video(g: Graph) -> None:
    """Wan 2.1 1.3B."""
    unet, vae, latent, texts = wan21_inputs(g)
    sage = sage_node(g, 2, unet[0])
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=8.0)
    sampler = sampler_node(
        g, 3, shift[0], texts, latent[0], seed=1, steps=30, cfg=6.0, sampler_name="uni_pc", scheduler="simple"
    )
    report_node(g, 4, shift[0], sampler[0])
    save_video(g, 5, sampler[0], vae[0], 16.0, "wan21")
    weights_note(g, 2, "For Wan 2.1 14B exchange the model file only.")


def ltx_video_text_to_video(g: Graph) -> None:
    """LTX-Video 2B."""
    checkpoint = g.loader(
        "CheckpointLoaderSimple", 0,
        {"ckpt_name": f"{HUB}/Lightricks/LTX-Video/resolve/main/ltx-video-2b-v0.9.5.safetensors"},
    )  # fmt: skip
    clip = g.loader("CLIPLoader", 0, {"clip_name": f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors"}, type="ltxv")
    latent = g.node("EmptyLTXVLatentVideo", 0, width=768, height=512, length=97)
    texts = texts_of(g, 1, clip[0], FOX, BAD_VIDEO)
    rate = g.node("LTXVConditioning", 1, positive=texts[0][0], negative=texts[1][0], frame_rate=25.0)
    sage = sage_node(g, 2, checkpoint[0])
    sigmas = g.node("LTXVScheduler", 3, steps=30, latent=latent[0])
    solver = g.node("KSamplerSelect", 3, sampler_name="euler")
    sampler = g.node(
        "SamplerCustom", 3, model=sage[0], noise_seed=1, cfg=3.0, positive=rate[0], negative=rate[1],
        sampler=solver[0], sigmas=sigmas[0], latent_image=latent[0],
    )  # fmt: skip
    report_node(g, 4, sage[0], sampler[0])
    save_video(g, 5, sampler[0], checkpoint[2], 25.0, "ltx")
    weights_note(g, 2)


def mochi_text_to_video(g: Graph) -> None:
    """Mochi 1 preview."""
    unet = g.loader(
        "UNETLoader", 0,
        {"unet_name": f"{MOCHI}/diffusion_models/mochi_preview_bf16.safetensors"},
    )  # fmt: skip
    clip = g.loader("CLIPLoader", 0, {"clip_name": f"{MOCHI}/text_encoders/t5xxl_fp16.safetensors"}, type="mochi")
    vae = g.loader("VAELoader", 0, {"vae_name": f"{MOCHI}/vae/mochi_vae.safetensors"})
    latent = g.node("EmptyMochiLatentVideo", 0, width=848, height=480, length=37)
    texts = texts_of(g, 1, clip[0], FOX, "")
    sage = sage_node(g, 2, unet[0])
    sampler = sampler_node(
        g, 3, sage[0], texts, latent[0], seed=1, steps=30, cfg=4.5, sampler_name="euler", scheduler="simple"
    )
    report_node(g, 4, sage[0], sampler[0])
    save_video(g, 5, sampler[0], vae[0], 24.0, "mochi")
    weights_note(g, 2)


def cogvideox_object_removal(g: Graph) -> None:
    """CogVideoX 1.5 5B as finetuned to remove objects (VOID)."""
    unet = g.loader(
        "UNETLoader", 0,
        {"unet_name": f"{COGVIDEOX}/diffusion_models/void_pass1.safetensors"},
    )  # fmt: skip
    clip = g.loader("CLIPLoader", 0, {"clip_name": f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors"}, type="cogvideox")
    vae = g.loader("VAELoader", 0, {"vae_name": f"{COGVIDEOX}/vae/cogvideox_vae.safetensors"})
    finder = g.loader(
        "CheckpointLoaderSimple", 0,
        {"ckpt_name": f"{HUB}/Comfy-Org/sam3.1/resolve/main/checkpoints/sam3.1_multiplex_fp16.safetensors"},
    )  # fmt: skip
    source = g.node("LoadVideo", 0, "Your video", file="example.mp4")
    parts = g.node("GetVideoComponents", 0, video=source[0])
    frames = g.node("ImageFromBatch", 0, image=parts[0], batch_index=0, length=85)
    size = g.node("GetImageSize", 1, image=frames[0])
    texts = texts_of(g, 1, clip[0], "A snowy ridge at dawn, nobody there, camera tracking from the side", "")
    target = g.node("CLIPTextEncode", 1, "What to remove", text="fox", clip=finder[1])
    mask = g.node("SAM3_Detect", 1, model=finder[0], image=frames[0], conditioning=target[0])
    filled = g.node(
        "VOIDInpaintConditioning", 2, positive=texts[0][0], negative=texts[1][0], vae=vae[0], video=frames[0],
        quadmask=mask[0], width=672, height=384, length=size[2],
    )  # fmt: skip
    sage = sage_node(g, 2, unet[0])
    noise = g.node("RandomNoise", 3, noise_seed=1)
    guider = g.node("CFGGuider", 3, model=sage[0], positive=filled[0], negative=filled[1], cfg=6.0)
    solver = g.node("VOIDSampler", 3)
    sigmas = g.node("BasicScheduler", 3, model=sage[0], scheduler="simple", steps=30, denoise=1.0)
    sampler = g.node(
        "SamplerCustomAdvanced", 3, noise=noise[0], guider=guider[0], sampler=solver[0], sigmas=sigmas[0],
        latent_image=filled[2],
    )  # fmt: skip
    report_node(g, 4, sage[0], sampler[0])
    save_video(g, 5, sampler[0], vae[0], parts[2], "cogvideox")
    weights_note(
        g, 2,
        "The prompt says what is to be seen once the object is gone. The first 85 frames are taken; other good lengths "
        "are 8 n + 5.",
        "These are the CogVideoX weights that ComfyUI's core nodes read: the text-to-video files of the model's "
        "authors name their tensors otherwise.",
    )  # fmt: skip


def flux1_text_to_image(g: Graph) -> None:
    """Flux.1 dev."""
    unet = g.loader(
        "UNETLoader", 0,
        {"unet_name": f"{HUB}/Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors"},
    )  # fmt: skip
    clip = g.loader(
        "DualCLIPLoader", 0,
        {
            "clip_name1": f"{TEXT_ENCODERS}/clip_l.safetensors",
            "clip_name2": f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors",
        },
        type="flux",
    )  # fmt: skip
    vae = g.loader(
        "VAELoader", 0,
        {"vae_name": f"{HUB}/Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors"},
    )  # fmt: skip
    latent = g.node("EmptySD3LatentImage", 0, width=1024, height=1024)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip[0])
    guided = g.node("FluxGuidance", 1, conditioning=prompt[0], guidance=3.5)
    nothing = g.node("ConditioningZeroOut", 1, conditioning=prompt[0])
    sage = sage_node(g, 2, unet[0])
    sampler = sampler_node(
        g, 3, sage[0], (guided, nothing), latent[0],
        seed=1, steps=20, cfg=1.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    report_node(g, 4, sage[0], sampler[0])
    save_image(g, 5, sampler[0], vae[0], "flux1")
    weights_note(g, 2)


def sd35_text_to_image(g: Graph) -> None:
    """Stable Diffusion 3.5 large."""
    checkpoint = g.loader(
        "CheckpointLoaderSimple", 0,
        {"ckpt_name": f"{HUB}/Comfy-Org/stable-diffusion-3.5-fp8/resolve/main/sd3.5_large_fp8_scaled.safetensors"},
    )  # fmt: skip
    latent = g.node("EmptySD3LatentImage", 0, width=1024, height=1024)
    texts = texts_of(g, 1, checkpoint[1], STILL, "")
    sage = sage_node(g, 2, checkpoint[0])
    sampler = sampler_node(
        g, 3, sage[0], texts, latent[0], seed=1, steps=20, cfg=4.0, sampler_name="euler", scheduler="sgm_uniform"
    )
    report_node(g, 4, sage[0], sampler[0])
    save_image(g, 5, sampler[0], checkpoint[2], "sd35")
    weights_note(g, 2, "The checkpoint has its text encoders and its VAE inside.")
