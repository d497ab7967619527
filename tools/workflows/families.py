"""The shipped workflows: one function each, from the server's node definitions to a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graph import Graph, Node, Output

HUB = "https://huggingface.co"
WAN21 = f"{HUB}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
WAN22 = f"{HUB}/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
HUNYUAN = f"{HUB}/Comfy-Org/HunyuanVideo_1.5_repackaged/resolve/main/split_files"
COGVIDEOX = f"{HUB}/Comfy-Org/void-model/resolve/main"
MOCHI = f"{HUB}/Comfy-Org/mochi_preview_repackaged/resolve/main/split_files"
TEXT_ENCODERS = f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main"
UMT5 = f"{WAN21}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"
WAN_VAE = f"{WAN22}/vae/wan_2.1_vae.safetensors"

FOX = "A red fox trots along a snowy ridge at dawn, its breath steaming, camera tracking from the side"
BAD_VIDEO = "blurry, low quality, static, text, watermark"
STILL = "A glass greenhouse in a winter forest at dusk, warm light inside, snow on the roof, photograph"


def _weights(g: Graph, column: int, *more: str) -> None:
    """A note that says which files are needed, from where, and what else there is to know."""
    files = [model for node in g.nodes for model in node.models]
    lines = ["Files, by folder in ComfyUI's `models`:", ""]
    for model in {model["url"]: model for model in files}.values():
        source = "/".join(model["url"].split("/")[3:5])
        lines.append(f"- `{model['directory']}/{model['name']}` from [{source}]({model['url']})")
    g.note(column, "Weights", "\n".join([*lines, "", *more]), 90 + 50 * len(files) + 60 * len(more))


def _text(g: Graph, column: int, clip: Output, positive: str, negative: str) -> tuple[Node, Node]:
    return (
        g.node("CLIPTextEncode", column, "Prompt", text=positive, clip=clip),
        g.node("CLIPTextEncode", column, "Negative prompt", text=negative, clip=clip),
    )


def _sage(g: Graph, column: int, model: Output, **values: Any) -> Node:
    return g.node("SageAttention2", column, model=model, **values)


def _report(g: Graph, column: int, model: Output, samples: Output, title: str | None = None) -> Node:
    return g.node("SageAttention2Report", column, title, model=model, samples=samples)


def _video(g: Graph, column: int, samples: Output, vae: Output, fps: float | Output, name: str) -> Node:
    frames = g.node("VAEDecode", column, samples=samples, vae=vae)
    video = g.node("CreateVideo", column, images=frames[0], fps=fps)
    return g.node("SaveVideo", column, video=video[0], filename_prefix=f"sageattention2/{name}")


def _image(g: Graph, column: int, samples: Output, vae: Output, name: str) -> None:
    image = g.node("VAEDecode", column, samples=samples, vae=vae)
    g.node("SaveImage", column, images=image[0], filename_prefix=f"sageattention2/{name}")


def _sampler(g: Graph, column: int, model: Output, texts: tuple[Node, Node], latent: Output, **values: Any) -> Node:
    return g.node(
        "KSampler", column, model=model, positive=texts[0][0], negative=texts[1][0], latent_image=latent, **values
    )


def wan21_text_to_video(g: Graph) -> None:
    """Wan 2.1 1.3B."""
    unet = g.loader(
        "UNETLoader", 0, "diffusion_models",
        {"unet_name": f"{WAN21}/diffusion_models/wan2.1_t2v_1.3B_fp16.safetensors"},
    )  # fmt: skip
    clip = g.loader("CLIPLoader", 0, "text_encoders", {"clip_name": UMT5}, type="wan")
    vae = g.loader("VAELoader", 0, "vae", {"vae_name": WAN_VAE})
    latent = g.node("EmptyHunyuanLatentVideo", 0, width=832, height=480, length=81)
    texts = _text(g, 1, clip[0], FOX, BAD_VIDEO)
    sage = _sage(g, 2, unet[0])
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=8.0)
    sampler = _sampler(
        g, 3, shift[0], texts, latent[0], seed=1, steps=30, cfg=6.0, sampler_name="uni_pc", scheduler="simple"
    )
    _report(g, 4, shift[0], sampler[0])
    _video(g, 5, sampler[0], vae[0], 16.0, "wan21")
    _weights(g, 2, "For Wan 2.1 14B exchange the model file only.")


def _wan22(g: Graph, task: str, latent: Callable[[Node, tuple[Node, Node]], tuple[Output, Output, Output]]) -> None:
    """Wan 2.2 14B samples in two stages with a model each, and each model gets the node."""
    stages = [
        g.loader(
            "UNETLoader", 0, "diffusion_models",
            {"unet_name": f"{WAN22}/diffusion_models/wan2.2_{task}_{noise}_noise_14B_fp8_scaled.safetensors"},
        )
        for noise in ("high", "low")
    ]  # fmt: skip
    clip = g.loader("CLIPLoader", 0, "text_encoders", {"clip_name": UMT5}, type="wan")
    vae = g.loader("VAELoader", 0, "vae", {"vae_name": WAN_VAE})
    texts = _text(g, 1, clip[0], FOX, BAD_VIDEO)
    positive, negative, samples = latent(vae, texts)
    for number, unet in enumerate(stages):
        sage = _sage(g, 2, unet[0])
        shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=8.0)
        first = number == 0
        sampler = g.node(
            "KSamplerAdvanced", 3, "High noise" if first else "Low noise",
            model=shift[0], positive=positive, negative=negative, latent_image=samples,
            add_noise="enable" if first else "disable", noise_seed=1, steps=20, cfg=3.5,
            sampler_name="euler", scheduler="simple",
            start_at_step=0 if first else 10, end_at_step=10 if first else 10000,
            return_with_leftover_noise="enable" if first else "disable",
        )  # fmt: skip
        samples = sampler[0]
        _report(g, 4, shift[0], samples, "Report: high noise" if first else "Report: low noise")
    _video(g, 5, samples, vae[0], 16.0, f"wan22_{task}")
    _weights(g, 1, "Both stages have a model, so both have a *SageAttention2* node and a report.")


def wan22_text_to_video(g: Graph) -> None:
    """Wan 2.2 14B, text to video."""

    def latent(vae: Node, texts: tuple[Node, Node]) -> tuple[Output, Output, Output]:
        empty = g.node("EmptyHunyuanLatentVideo", 1, width=832, height=480, length=81)
        return texts[0][0], texts[1][0], empty[0]

    _wan22(g, "t2v", latent)


def wan22_image_to_video(g: Graph) -> None:
    """Wan 2.2 14B, image to video."""

    def latent(vae: Node, texts: tuple[Node, Node]) -> tuple[Output, Output, Output]:
        image = g.node("LoadImage", 0, "First frame", image="example.png")
        start = g.node(
            "WanImageToVideo", 1, positive=texts[0][0], negative=texts[1][0], vae=vae[0], start_image=image[0],
            width=832, height=480, length=81,
        )  # fmt: skip
        return start[0], start[1], start[2]

    _wan22(g, "i2v", latent)


def hunyuanvideo15_text_to_video(g: Graph) -> None:
    """HunyuanVideo 1.5, 720p."""
    unet = g.loader(
        "UNETLoader", 0, "diffusion_models",
        {"unet_name": f"{HUNYUAN}/diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors"},
    )  # fmt: skip
    clip = g.loader(
        "DualCLIPLoader", 0, "text_encoders",
        {
            "clip_name1": f"{HUNYUAN}/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
            "clip_name2": f"{HUNYUAN}/text_encoders/byt5_small_glyphxl_fp16.safetensors",
        },
        type="hunyuan_video_15",
    )  # fmt: skip
    vae = g.loader("VAELoader", 0, "vae", {"vae_name": f"{HUNYUAN}/vae/hunyuanvideo15_vae_fp16.safetensors"})
    latent = g.node("EmptyHunyuanVideo15Latent", 0, width=1280, height=720, length=121)
    texts = _text(g, 1, clip[0], FOX, "")
    sage = _sage(g, 2, unet[0])
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=7.0)
    sampler = _sampler(
        g, 3, shift[0], texts, latent[0], seed=1, steps=20, cfg=6.0, sampler_name="euler", scheduler="simple"
    )
    _report(g, 4, shift[0], sampler[0])
    _video(g, 5, sampler[0], vae[0], 24.0, "hunyuanvideo15")
    _weights(g, 2)


def ltx_text_to_video(g: Graph) -> None:
    """LTX-Video 2B."""
    checkpoint = g.loader(
        "CheckpointLoaderSimple", 0, "checkpoints",
        {"ckpt_name": f"{HUB}/Lightricks/LTX-Video/resolve/main/ltx-video-2b-v0.9.5.safetensors"},
    )  # fmt: skip
    clip = g.loader(
        "CLIPLoader", 0, "text_encoders", {"clip_name": f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors"}, type="ltxv"
    )
    latent = g.node("EmptyLTXVLatentVideo", 0, width=768, height=512, length=97)
    texts = _text(g, 1, clip[0], FOX, BAD_VIDEO)
    rate = g.node("LTXVConditioning", 1, positive=texts[0][0], negative=texts[1][0], frame_rate=25.0)
    sage = _sage(g, 2, checkpoint[0])
    sigmas = g.node("LTXVScheduler", 3, steps=30, latent=latent[0])
    solver = g.node("KSamplerSelect", 3, sampler_name="euler")
    sampler = g.node(
        "SamplerCustom", 3, model=sage[0], noise_seed=1, cfg=3.0, positive=rate[0], negative=rate[1],
        sampler=solver[0], sigmas=sigmas[0], latent_image=latent[0],
    )  # fmt: skip
    _report(g, 4, sage[0], sampler[0])
    _video(g, 5, sampler[0], checkpoint[2], 25.0, "ltx")
    _weights(g, 2)


def mochi_text_to_video(g: Graph) -> None:
    """Mochi 1 preview."""
    unet = g.loader(
        "UNETLoader", 0, "diffusion_models",
        {"unet_name": f"{MOCHI}/diffusion_models/mochi_preview_bf16.safetensors"},
    )  # fmt: skip
    clip = g.loader(
        "CLIPLoader", 0, "text_encoders", {"clip_name": f"{MOCHI}/text_encoders/t5xxl_fp16.safetensors"}, type="mochi"
    )
    vae = g.loader("VAELoader", 0, "vae", {"vae_name": f"{MOCHI}/vae/mochi_vae.safetensors"})
    latent = g.node("EmptyMochiLatentVideo", 0, width=848, height=480, length=37)
    texts = _text(g, 1, clip[0], FOX, "")
    sage = _sage(g, 2, unet[0])
    sampler = _sampler(
        g, 3, sage[0], texts, latent[0], seed=1, steps=30, cfg=4.5, sampler_name="euler", scheduler="simple"
    )
    _report(g, 4, sage[0], sampler[0])
    _video(g, 5, sampler[0], vae[0], 24.0, "mochi")
    _weights(g, 2)


def cogvideox_object_removal(g: Graph) -> None:
    """CogVideoX 1.5 5B as finetuned to remove objects (VOID)."""
    unet = g.loader(
        "UNETLoader", 0, "diffusion_models",
        {"unet_name": f"{COGVIDEOX}/diffusion_models/void_pass1.safetensors"},
    )  # fmt: skip
    clip = g.loader(
        "CLIPLoader", 0, "text_encoders", {"clip_name": f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors"}, type="cogvideox"
    )
    vae = g.loader("VAELoader", 0, "vae", {"vae_name": f"{COGVIDEOX}/vae/cogvideox_vae.safetensors"})
    finder = g.loader(
        "CheckpointLoaderSimple", 0, "checkpoints",
        {"ckpt_name": f"{HUB}/Comfy-Org/sam3.1/resolve/main/checkpoints/sam3.1_multiplex_fp16.safetensors"},
    )  # fmt: skip
    source = g.node("LoadVideo", 0, "Your video", file="example.mp4")
    parts = g.node("GetVideoComponents", 0, video=source[0])
    frames = g.node("ImageFromBatch", 0, image=parts[0], batch_index=0, length=85)
    size = g.node("GetImageSize", 1, image=frames[0])
    texts = _text(g, 1, clip[0], "A snowy ridge at dawn, nobody there, camera tracking from the side", "")
    target = g.node("CLIPTextEncode", 1, "What to remove", text="fox", clip=finder[1])
    mask = g.node("SAM3_Detect", 1, model=finder[0], image=frames[0], conditioning=target[0])
    filled = g.node(
        "VOIDInpaintConditioning", 2, positive=texts[0][0], negative=texts[1][0], vae=vae[0], video=frames[0],
        quadmask=mask[0], width=672, height=384, length=size[2],
    )  # fmt: skip
    sage = _sage(g, 2, unet[0])
    noise = g.node("RandomNoise", 3, noise_seed=1)
    guider = g.node("CFGGuider", 3, model=sage[0], positive=filled[0], negative=filled[1], cfg=6.0)
    solver = g.node("VOIDSampler", 3)
    sigmas = g.node("BasicScheduler", 3, model=sage[0], scheduler="simple", steps=30, denoise=1.0)
    sampler = g.node(
        "SamplerCustomAdvanced", 3, noise=noise[0], guider=guider[0], sampler=solver[0], sigmas=sigmas[0],
        latent_image=filled[2],
    )  # fmt: skip
    _report(g, 4, sage[0], sampler[0])
    _video(g, 5, sampler[0], vae[0], parts[2], "cogvideox")
    _weights(
        g, 2,
        "The prompt says what is to be seen once the object is gone. The first 85 frames are taken; other good lengths "
        "are 8 n + 5.",
        "These are the CogVideoX weights that ComfyUI's core nodes read: the text-to-video files of the model's "
        "authors name their tensors otherwise.",
    )  # fmt: skip


def flux_text_to_image(g: Graph) -> None:
    """Flux.1 dev."""
    unet = g.loader(
        "UNETLoader", 0, "diffusion_models",
        {"unet_name": f"{HUB}/Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors"},
    )  # fmt: skip
    clip = g.loader(
        "DualCLIPLoader", 0, "text_encoders",
        {
            "clip_name1": f"{TEXT_ENCODERS}/clip_l.safetensors",
            "clip_name2": f"{TEXT_ENCODERS}/t5xxl_fp16.safetensors",
        },
        type="flux",
    )  # fmt: skip
    vae = g.loader(
        "VAELoader", 0, "vae",
        {"vae_name": f"{HUB}/Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors"},
    )  # fmt: skip
    latent = g.node("EmptySD3LatentImage", 0, width=1024, height=1024)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip[0])
    guided = g.node("FluxGuidance", 1, conditioning=prompt[0], guidance=3.5)
    nothing = g.node("ConditioningZeroOut", 1, conditioning=prompt[0])
    sage = _sage(g, 2, unet[0])
    sampler = _sampler(
        g, 3, sage[0], (guided, nothing), latent[0],
        seed=1, steps=20, cfg=1.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    _report(g, 4, sage[0], sampler[0])
    _image(g, 5, sampler[0], vae[0], "flux")
    _weights(g, 2)


def sd35_text_to_image(g: Graph) -> None:
    """Stable Diffusion 3.5 large."""
    checkpoint = g.loader(
        "CheckpointLoaderSimple", 0, "checkpoints",
        {"ckpt_name": f"{HUB}/Comfy-Org/stable-diffusion-3.5-fp8/resolve/main/sd3.5_large_fp8_scaled.safetensors"},
    )  # fmt: skip
    latent = g.node("EmptySD3LatentImage", 0, width=1024, height=1024)
    texts = _text(g, 1, checkpoint[1], STILL, "")
    sage = _sage(g, 2, checkpoint[0])
    sampler = _sampler(
        g, 3, sage[0], texts, latent[0], seed=1, steps=20, cfg=4.0, sampler_name="euler", scheduler="sgm_uniform"
    )
    _report(g, 4, sage[0], sampler[0])
    _image(g, 5, sampler[0], checkpoint[2], "sd35")
    _weights(g, 2, "The checkpoint has its text encoders and its VAE inside.")


def _small_wan(g: Graph) -> tuple[Node, Node, Node, tuple[Node, Node]]:
    """Loaders, latent and texts of Wan 2.1 1.3B: model, VAE, latent, texts."""
    unet = g.loader(
        "UNETLoader", 0, "diffusion_models",
        {"unet_name": f"{WAN21}/diffusion_models/wan2.1_t2v_1.3B_fp16.safetensors"},
    )  # fmt: skip
    clip = g.loader("CLIPLoader", 0, "text_encoders", {"clip_name": UMT5}, type="wan")
    vae = g.loader("VAELoader", 0, "vae", {"vae_name": WAN_VAE})
    latent = g.node("EmptyHunyuanLatentVideo", 0, width=832, height=480, length=81)
    return unet, vae, latent, _text(g, 1, clip[0], FOX, BAD_VIDEO)


WAN_SAMPLING = {"seed": 1, "steps": 20, "cfg": 6.0, "sampler_name": "uni_pc", "scheduler": "simple"}


def calibrate_then_render(g: Graph) -> None:
    """One sampling in full precision is measured, and a second one runs by the policy."""
    unet, vae, latent, texts = _small_wan(g)
    calibrate = g.node("SageAttention2Calibrate", 2, model=unet[0])
    shift = g.node("ModelSamplingSD3", 2, model=calibrate[0], shift=8.0)
    measured = g.node(
        "KSampler", 2, "Calibrate",
        model=shift[0], positive=texts[0][0], negative=texts[1][0], latent_image=latent[0], **WAN_SAMPLING,
    )  # fmt: skip
    policy = g.node("SageAttention2MakePolicy", 3, model=shift[0], samples=measured[0], file="wan21_1.3B")
    sage = _sage(g, 3, unet[0], policy=policy[0], measure_quality=True)
    shift = g.node("ModelSamplingSD3", 4, model=sage[0], shift=8.0)
    sampler = g.node(
        "KSampler", 4, "Render",
        model=shift[0], positive=texts[0][0], negative=texts[1][0], latent_image=latent[0],
        **{**WAN_SAMPLING, "seed": 2},
    )  # fmt: skip
    _report(g, 5, shift[0], sampler[0])
    _video(g, 6, sampler[0], vae[0], 16.0, "by_policy")
    g.note(
        1, "How it works",
        "1. **Calibrate** samples in full precision and measures each layer along the way.\n"
        "2. **Make Policy** chooses the fastest mode that `quality` allows, and saves it under `file`. *Keep in this "
        "workflow* puts a *Load Policy* node with it into the graph.\n"
        "3. **SageAttention2** renders by the policy.\n\n"
        "Later renderings need only *Load Policy* and *SageAttention2*: mute the calibration.",
    )  # fmt: skip
    _weights(g, 1)


def compare_with_full_precision(g: Graph) -> None:
    """The same seed in full precision and with the node."""
    unet, vae, latent, texts = _small_wan(g)
    for name, sage in (("full precision", None), ("SageAttention2", _sage(g, 2, unet[0], measure_quality=True))):
        model = unet if sage is None else sage
        shift = g.node("ModelSamplingSD3", 3, model=model[0], shift=8.0)
        sampler = g.node(
            "KSampler", 3, name,
            model=shift[0], positive=texts[0][0], negative=texts[1][0], latent_image=latent[0], **WAN_SAMPLING,
        )  # fmt: skip
        _video(g, 5, sampler[0], vae[0], 16.0, name.replace(" ", "_").lower())
    _report(g, 4, shift[0], sampler[0])
    g.note(
        4, "What to look at",
        "Both videos start from the same noise. The report says how far each layer is from full precision, and what "
        "time was saved. Small differences in the picture are normal; another composition is not.",
    )  # fmt: skip
    _weights(g, 2)


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
    sage = _sage(g, 2, unet[0], measure_quality=True)
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=3.0)
    sampler = _sampler(
        g, 3, shift[0], texts, latent[0], seed=1, steps=20, cfg=4.0, sampler_name="euler", scheduler="simple"
    )
    _report(g, 4, shift[0], sampler[0])
    _video(g, 5, sampler[0], vae[0], 8.0, "demo")
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


WORKFLOWS = (
    wan22_text_to_video,
    wan22_image_to_video,
    wan21_text_to_video,
    hunyuanvideo15_text_to_video,
    ltx_text_to_video,
    mochi_text_to_video,
    cogvideox_object_removal,
    flux_text_to_image,
    sd35_text_to_image,
    demo_model,
    calibrate_then_render,
    compare_with_full_precision,
)
