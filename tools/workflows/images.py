"""The workflows of the image models that people run."""

from __future__ import annotations

from typing import Any

from .graph import Graph
from .parts import HUB, QWEN25_VL, SQUARE, STILL, Files, finish, guided_sampler_node, sage_node, sampler_node
from .plain import Plain

Z_IMAGE = f"{HUB}/Comfy-Org/z_image_turbo/resolve/main/split_files"
QWEN_IMAGE = f"{HUB}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
QWEN_EDIT = f"{HUB}/Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files"
QWEN21 = f"{HUB}/Comfy-Org/Qwen-Image-2.1/resolve/main"
FLUX3 = f"{HUB}/black-forest-labs/flux-3-image-klein-comfy/resolve/main"
KLEIN = f"{HUB}/Comfy-Org/flux2-klein/resolve/main/split_files"
KREA2 = f"{HUB}/Comfy-Org/Krea-2/resolve/main"
FLUX2 = f"{HUB}/Comfy-Org/flux2-dev/resolve/main/split_files"
QWEN_VAE = f"{QWEN_IMAGE}/vae/qwen_image_vae.safetensors"


def z_image_turbo_text_to_image(g: Graph) -> None:
    """Z-Image Turbo."""
    Plain(
        Files(
            f"{Z_IMAGE}/diffusion_models/z_image_turbo_bf16.safetensors",
            (f"{Z_IMAGE}/text_encoders/qwen_3_4b.safetensors",), "lumina2",
            f"{Z_IMAGE}/vae/ae.safetensors",
        ),
        ("EmptySD3LatentImage", SQUARE), STILL, None,
        {"steps": 8, "cfg": 1.0, "sampler_name": "res_multistep", "scheduler": "simple"}, "z_image",
        shift=("ModelSamplingAuraFlow", 3.0),
        notes=("For the base model, replace the model file, and set 25 steps and cfg 4.",),
    ).build(g)  # fmt: skip


def qwen_image_text_to_image(g: Graph) -> None:
    """Qwen-Image 2512."""
    Plain(
        Files(
            f"{QWEN_IMAGE}/diffusion_models/qwen_image_2512_fp8_e4m3fn.safetensors",
            (QWEN25_VL,), "qwen_image", QWEN_VAE,
        ),
        ("EmptySD3LatentImage", {"width": 1328, "height": 1328}), STILL, "blurry, low quality, distorted, text",
        {"steps": 50, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple"}, "qwen_image",
        shift=("ModelSamplingAuraFlow", 3.1),
    ).build(g)  # fmt: skip


def qwen_image_edit(g: Graph) -> None:
    """Qwen-Image-Edit 2511."""
    unet, clip, vae = Files(
        f"{QWEN_EDIT}/diffusion_models/qwen_image_edit_2511_fp8mixed.safetensors", (QWEN25_VL,), "qwen_image", QWEN_VAE
    ).load(g)
    image = g.node("LoadImage", 0, "Your picture", image="example.png")
    scaled = g.node("FluxKontextImageScale", 1, image=image[0])
    start = g.node("VAEEncode", 1, pixels=scaled[0], vae=vae)
    texts = []
    for title, prompt in (("What to change", "Let it snow, and light the windows"), ("Negative prompt", "")):
        text = g.node("TextEncodeQwenImageEditPlus", 1, title, clip=clip, vae=vae, image1=scaled[0], prompt=prompt)
        method = "index_timestep_zero"
        texts.append(
            g.node("FluxKontextMultiReferenceLatentMethod", 1, conditioning=text[0], reference_latents_method=method)
        )
    sage = sage_node(g, 2, unet)
    shift = g.node("ModelSamplingAuraFlow", 3, model=sage[0], shift=3.1)
    normed = g.node("CFGNorm", 3, model=shift[0], strength=1.0)
    sampler = sampler_node(
        g, 3, normed[0], (texts[0], texts[1]), start[0],
        seed=1, steps=40, cfg=4.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    finish(g, normed[0], sampler[0], vae, "qwen_image_edit", None)


def _qwen_image21(g: Graph, name: str, prompt: str, picture: bool) -> None:
    """Qwen-Image 2.1. picture: change one, and take its size; else the latent is empty."""
    unet, clip, vae = Files(
        f"{QWEN21}/diffusion_models/qwen_image_2.1_int8_convrot.safetensors",
        (f"{QWEN21}/text_encoders/qwen3vl_8b_int8_convrot.safetensors",), "qwen_image",
        f"{QWEN21}/vae/qwen_image_2.1_vae_bf16.safetensors",
    ).load(g)  # fmt: skip
    given: dict[str, Any] = {}
    if picture:
        given = {"images.image_1": g.node("LoadImage", 0, "Your picture", image="example.png")[0], "vae": vae}
    text = g.node("TextEncodeQwenImage21", 1, clip=clip, prompt=prompt, **given)
    start = text[2] if picture else g.node("EmptyLatentImage", 1, **SQUARE)[0]
    sage = sage_node(g, 2, unet)
    cache = g.node("QwenImage21Cache", 3, model=sage[0])
    sampler = g.node(
        "KSampler", 3, model=cache[0], positive=text[0], negative=text[1], latent_image=start,
        seed=1, steps=25, cfg=1.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    finish(g, cache[0], sampler[0], vae, name, None, "Needs ComfyUI 0.39 or newer.")


def qwen_image21_text_to_image(g: Graph) -> None:
    """Qwen-Image 2.1."""
    _qwen_image21(g, "qwen_image21", STILL, picture=False)


def qwen_image21_edit(g: Graph) -> None:
    """Qwen-Image 2.1, a picture to change."""
    _qwen_image21(g, "qwen_image21_edit", "Let it snow, and light the windows", picture=True)


def krea2_text_to_image(g: Graph) -> None:
    """Krea 2 Turbo."""
    Plain(
        Files(
            f"{KREA2}/diffusion_models/krea2_turbo_fp8_scaled.safetensors",
            (f"{KREA2}/text_encoders/qwen3vl_4b_fp8_scaled.safetensors",), "krea2", QWEN_VAE,
        ),
        ("EmptyLatentImage", SQUARE), STILL, None,
        {"steps": 8, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}, "krea2",
    ).build(g)  # fmt: skip


def flux2_text_to_image(g: Graph) -> None:
    """Flux.2 dev."""
    unet, clip, vae = Files(
        f"{FLUX2}/diffusion_models/flux2_dev_fp8mixed.safetensors",
        (f"{FLUX2}/text_encoders/mistral_3_small_flux2_fp8.safetensors",), "flux2",
        f"{FLUX2}/vae/flux2-vae.safetensors",
    ).load(g)  # fmt: skip
    latent = g.node("EmptyFlux2LatentImage", 0, **SQUARE)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip)
    guided = g.node("FluxGuidance", 1, conditioning=prompt[0], guidance=4.0)
    sage = sage_node(g, 2, unet)
    guider = g.node("BasicGuider", 3, model=sage[0], conditioning=guided[0])
    sigmas = g.node("Flux2Scheduler", 3, steps=20, **SQUARE)
    sampler = guided_sampler_node(g, 3, guider, "euler", sigmas, latent[0])
    finish(g, sage[0], sampler[0], vae, "flux2", None)


def flux2_klein_text_to_image(g: Graph) -> None:
    """Flux.2 Klein 4B, distilled."""
    unet, clip, vae = Files(
        f"{KLEIN}/diffusion_models/flux-2-klein-4b.safetensors",
        (f"{KLEIN}/text_encoders/qwen_3_4b.safetensors",), "flux2",
        f"{FLUX2}/vae/flux2-vae.safetensors",
    ).load(g)  # fmt: skip
    latent = g.node("EmptyFlux2LatentImage", 0, **SQUARE)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip)
    nothing = g.node("ConditioningZeroOut", 1, conditioning=prompt[0])
    sage = sage_node(g, 2, unet)
    guider = g.node("CFGGuider", 3, model=sage[0], positive=prompt[0], negative=nothing[0], cfg=1.0)
    sigmas = g.node("Flux2Scheduler", 3, steps=4, **SQUARE)
    sampler = guided_sampler_node(g, 3, guider, "euler", sigmas, latent[0])
    base = "For the base model, replace the model file, set 20 steps and cfg 5, and leave the negative prompt empty."
    finish(g, sage[0], sampler[0], vae, "flux2_klein", None, base)


def flux3_text_to_image(g: Graph) -> None:
    """FLUX.3 Image Klein."""
    Plain(
        Files(
            f"{FLUX3}/diffusion_models/flux3-image-klein-int8-convrot.safetensors",
            (f"{FLUX3}/text_encoders/qwen3vl_4b_int8_convrot.safetensors",), "flux3",
            f"{FLUX3}/vae/flux2-vae.safetensors",
        ),
        ("EmptyFlux2LatentImage", SQUARE), STILL, "",
        {"steps": 15, "cfg": 1.0, "sampler_name": "er_sde", "scheduler": "simple"}, "flux3",
        notes=("Needs ComfyUI 0.41 or newer.",),
    ).build(g)  # fmt: skip
