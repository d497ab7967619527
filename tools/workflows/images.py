"""The workflows of the image models that people run."""

from __future__ import annotations

from .graph import Graph
from .parts import (
    HUB,
    QWEN25_VL,
    STILL,
    guided_sampler_node,
    report_node,
    sage_node,
    sampler_node,
    save_image,
    texts_of,
    weights_note,
)

Z_IMAGE = f"{HUB}/Comfy-Org/z_image_turbo/resolve/main/split_files"
QWEN_IMAGE = f"{HUB}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
QWEN_EDIT = f"{HUB}/Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files"
KREA2 = f"{HUB}/Comfy-Org/Krea-2/resolve/main"
FLUX2 = f"{HUB}/Comfy-Org/flux2-dev/resolve/main/split_files"
QWEN_VAE = f"{QWEN_IMAGE}/vae/qwen_image_vae.safetensors"


def z_image_turbo_text_to_image(g: Graph) -> None:
    """Z-Image Turbo."""
    unet = g.loader("UNETLoader", 0, {"unet_name": f"{Z_IMAGE}/diffusion_models/z_image_turbo_bf16.safetensors"})
    clip = g.loader("CLIPLoader", 0, {"clip_name": f"{Z_IMAGE}/text_encoders/qwen_3_4b.safetensors"}, type="lumina2")
    vae = g.loader("VAELoader", 0, {"vae_name": f"{Z_IMAGE}/vae/ae.safetensors"})
    latent = g.node("EmptySD3LatentImage", 0, width=1024, height=1024)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip[0])
    nothing = g.node("ConditioningZeroOut", 1, conditioning=prompt[0])
    sage = sage_node(g, 2, unet[0])
    shift = g.node("ModelSamplingAuraFlow", 3, model=sage[0], shift=3.0)
    sampler = sampler_node(
        g, 3, shift[0], (prompt, nothing), latent[0],
        seed=1, steps=8, cfg=1.0, sampler_name="res_multistep", scheduler="simple",
    )  # fmt: skip
    report_node(g, 4, shift[0], sampler[0])
    save_image(g, 5, sampler[0], vae[0], "z_image")
    weights_note(g, 2, "For the base model exchange the model file, take 25 steps and cfg 4.")


def qwen_image_text_to_image(g: Graph) -> None:
    """Qwen-Image 2512."""
    unet = g.loader(
        "UNETLoader", 0, {"unet_name": f"{QWEN_IMAGE}/diffusion_models/qwen_image_2512_fp8_e4m3fn.safetensors"}
    )
    clip = g.loader("CLIPLoader", 0, {"clip_name": QWEN25_VL}, type="qwen_image")
    vae = g.loader("VAELoader", 0, {"vae_name": QWEN_VAE})
    latent = g.node("EmptySD3LatentImage", 0, width=1328, height=1328)
    texts = texts_of(g, 1, clip[0], STILL, "blurry, low quality, distorted, text")
    sage = sage_node(g, 2, unet[0])
    shift = g.node("ModelSamplingAuraFlow", 3, model=sage[0], shift=3.1)
    sampler = sampler_node(
        g, 3, shift[0], texts, latent[0], seed=1, steps=50, cfg=4.0, sampler_name="euler", scheduler="simple"
    )
    report_node(g, 4, shift[0], sampler[0])
    save_image(g, 5, sampler[0], vae[0], "qwen_image")
    weights_note(g, 2)


def qwen_image_edit(g: Graph) -> None:
    """Qwen-Image-Edit 2511."""
    unet = g.loader(
        "UNETLoader", 0, {"unet_name": f"{QWEN_EDIT}/diffusion_models/qwen_image_edit_2511_fp8mixed.safetensors"}
    )
    clip = g.loader("CLIPLoader", 0, {"clip_name": QWEN25_VL}, type="qwen_image")
    vae = g.loader("VAELoader", 0, {"vae_name": QWEN_VAE})
    image = g.node("LoadImage", 0, "Your picture", image="example.png")
    scaled = g.node("FluxKontextImageScale", 1, image=image[0])
    start = g.node("VAEEncode", 1, pixels=scaled[0], vae=vae[0])
    texts = []
    for title, prompt in (("What to change", "Let it snow, and light the windows"), ("Negative prompt", "")):
        text = g.node(
            "TextEncodeQwenImageEditPlus", 1, title, clip=clip[0], vae=vae[0], image1=scaled[0], prompt=prompt
        )
        method = "index_timestep_zero"
        texts.append(
            g.node("FluxKontextMultiReferenceLatentMethod", 1, conditioning=text[0], reference_latents_method=method)
        )
    sage = sage_node(g, 2, unet[0])
    shift = g.node("ModelSamplingAuraFlow", 3, model=sage[0], shift=3.1)
    normed = g.node("CFGNorm", 3, model=shift[0], strength=1.0)
    sampler = sampler_node(
        g, 3, normed[0], (texts[0], texts[1]), start[0],
        seed=1, steps=40, cfg=4.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    report_node(g, 4, normed[0], sampler[0])
    save_image(g, 5, sampler[0], vae[0], "qwen_image_edit")
    weights_note(g, 2)


def krea2_text_to_image(g: Graph) -> None:
    """Krea 2 Turbo."""
    unet = g.loader("UNETLoader", 0, {"unet_name": f"{KREA2}/diffusion_models/krea2_turbo_fp8_scaled.safetensors"})
    clip = g.loader(
        "CLIPLoader", 0, {"clip_name": f"{KREA2}/text_encoders/qwen3vl_4b_fp8_scaled.safetensors"}, type="krea2"
    )
    vae = g.loader("VAELoader", 0, {"vae_name": QWEN_VAE})
    latent = g.node("EmptyLatentImage", 0, width=1024, height=1024)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip[0])
    nothing = g.node("ConditioningZeroOut", 1, conditioning=prompt[0])
    sage = sage_node(g, 2, unet[0])
    sampler = sampler_node(
        g, 3, sage[0], (prompt, nothing), latent[0],
        seed=1, steps=8, cfg=1.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    report_node(g, 4, sage[0], sampler[0])
    save_image(g, 5, sampler[0], vae[0], "krea2")
    weights_note(g, 2)


def flux2_text_to_image(g: Graph) -> None:
    """Flux.2 dev."""
    unet = g.loader("UNETLoader", 0, {"unet_name": f"{FLUX2}/diffusion_models/flux2_dev_fp8mixed.safetensors"})
    clip = g.loader(
        "CLIPLoader", 0, {"clip_name": f"{FLUX2}/text_encoders/mistral_3_small_flux2_fp8.safetensors"}, type="flux2"
    )
    vae = g.loader("VAELoader", 0, {"vae_name": f"{FLUX2}/vae/flux2-vae.safetensors"})
    latent = g.node("EmptyFlux2LatentImage", 0, width=1024, height=1024)
    prompt = g.node("CLIPTextEncode", 1, "Prompt", text=STILL, clip=clip[0])
    guided = g.node("FluxGuidance", 1, conditioning=prompt[0], guidance=4.0)
    sage = sage_node(g, 2, unet[0])
    guider = g.node("BasicGuider", 3, model=sage[0], conditioning=guided[0])
    sigmas = g.node("Flux2Scheduler", 3, steps=20, width=1024, height=1024)
    sampler = guided_sampler_node(g, 3, guider, "euler", sigmas, latent[0])
    report_node(g, 4, sage[0], sampler[0])
    save_image(g, 5, sampler[0], vae[0], "flux2")
    weights_note(g, 2)
