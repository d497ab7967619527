"""What the workflows have in common: where weights come from, prompts, and groups of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .graph import Graph, Node, Output, collapse

HUB = "https://huggingface.co"
WAN21 = f"{HUB}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
WAN22 = f"{HUB}/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
UMT5 = f"{WAN21}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"
QWEN25_VL = (
    f"{HUB}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors"
)
WAN_VAE = f"{WAN22}/vae/wan_2.1_vae.safetensors"
FOX = "A red fox trots along a snowy ridge at dawn, its breath steaming, camera tracking from the side"
STILL = "A glass greenhouse in a winter forest at dusk, warm light inside, snow on the roof, photograph"
SQUARE: dict[str, Any] = {"width": 1024, "height": 1024}  # pixels
BAD_VIDEO = "blurry, low quality, static, text, watermark"


@dataclass(frozen=True)
class Files:
    """The addresses of a model's files.

    Attributes:
        model: the diffusion model; alone it is a checkpoint, which has the others inside.
        text_encoders: one or two.
        kind: of the text encoders, as ComfyUI's loaders name it.
        vae: the VAE.
    """

    model: str
    text_encoders: tuple[str, ...] = ()
    kind: str = ""
    vae: str = ""

    def load(self, g: Graph) -> tuple[Output, Output, Output]:
        """Add the loaders: model, text encoder, VAE."""
        if not self.text_encoders:
            checkpoint = g.loader("CheckpointLoaderSimple", 0, {"ckpt_name": self.model})
            return checkpoint[0], checkpoint[1], checkpoint[2]
        unet = g.loader("UNETLoader", 0, {"unet_name": self.model})
        if len(self.text_encoders) == 1:
            clip = g.loader("CLIPLoader", 0, {"clip_name": self.text_encoders[0]}, type=self.kind)
        else:
            urls = {f"clip_name{number}": url for number, url in enumerate(self.text_encoders, 1)}
            clip = g.loader("DualCLIPLoader", 0, urls, type=self.kind)
        vae = g.loader("VAELoader", 0, {"vae_name": self.vae})
        return unet[0], clip[0], vae[0]


def weights_note(g: Graph, column: int, *more: str) -> None:
    """A note that says which files are needed, from where, and what else there is to know."""
    files = [model for node in g.nodes for model in node.models]
    lines = ["Files, by folder in ComfyUI's **models**:", ""]
    for model in {model["url"]: model for model in files}.values():
        source = "/".join(model["url"].split("/")[3:5])
        lines.append(f"- **{model['directory']}/{model['name']}** from [{source}]({model['url']})")
    g.note(column, f"{g.title}: weights", "\n".join([*lines, "", *more]))


def texts_of(g: Graph, column: int, clip: Output, positive: str, negative: str) -> tuple[Node, Node]:
    return (
        g.node("CLIPTextEncode", column, "Prompt", text=positive, clip=clip),
        g.node("CLIPTextEncode", column, "Negative prompt", text=negative, clip=clip),
    )


def sage_node(g: Graph, column: int, model: Output, **values: Any) -> Node:
    return g.node("SageAttention2", column, model=model, **values)


def report_node(g: Graph, column: int, model: Output, samples: Output, title: str | None = None) -> Node:
    return g.node("SageAttention2Report", column, title, model=model, samples=samples)


def save_video(
    g: Graph,
    column: int,
    samples: Output,
    vae: Output,
    fps: float | Output,
    name: str,
    *,
    audio: Output | None = None,
    tiled: bool = False,
) -> Node:
    """Decode, join and save. tiled: decode in parts, which long videos need."""
    frames = g.node("VAEDecodeTiled" if tiled else "VAEDecode", column, samples=samples, vae=vae)
    if tiled:
        collapse(frames)
    sound: dict[str, Any] = {} if audio is None else {"audio": audio}
    video = g.node("CreateVideo", column, images=frames[0], fps=fps, **sound)
    return g.node("SaveVideo", column, video=video[0], filename_prefix=f"sageattention2/{name}")


def save_image(g: Graph, column: int, samples: Output, vae: Output, name: str) -> None:
    image = g.node("VAEDecode", column, samples=samples, vae=vae)
    g.node("SaveImage", column, images=image[0], filename_prefix=f"sageattention2/{name}")


def finish(
    g: Graph, model: Output, samples: Output, vae: Output, name: str, fps: float | Output | None, *notes: str
) -> None:
    """The report, the saved image (fps: None) or video, and the note on the weights."""
    report_node(g, 4, model, samples)
    if fps is None:
        save_image(g, 5, samples, vae, name)
    else:
        save_video(g, 5, samples, vae, fps, name)
    weights_note(g, 2, *notes)


def sampler_node(
    g: Graph,
    column: int,
    model: Output,
    texts: tuple[Node, Node],
    latent: Output,
    title: str | None = None,
    **values: Any,
) -> Node:
    return g.node(
        "KSampler", column, title,
        model=model, positive=texts[0][0], negative=texts[1][0], latent_image=latent, **values,
    )  # fmt: skip


def guided_sampler_node(
    g: Graph, column: int, guider: Node, solver: str, sigmas: Node, latent: Output, title: str | None = None
) -> Node:
    """Core's sampler in parts, with its noise and solver."""
    noise = g.node("RandomNoise", column, noise_seed=1)
    chosen = g.node("KSamplerSelect", column, sampler_name=solver)
    return g.node(
        "SamplerCustomAdvanced", column, title,
        noise=noise[0], guider=guider[0], sampler=chosen[0], sigmas=sigmas[0], latent_image=latent,
    )  # fmt: skip


def another_sampler_node(g: Graph, column: int, first: Node, sigmas: Node, latent: Output, title: str) -> Node:
    """One with the noise, guider and solver of `first`."""
    shared = {name: first.values[name] for name in ("noise", "guider", "sampler")}
    return g.node("SamplerCustomAdvanced", column, title, **shared, sigmas=sigmas[0], latent_image=latent)


WAN21_FILES = Files(f"{WAN21}/diffusion_models/wan2.1_t2v_1.3B_fp16.safetensors", (UMT5,), "wan", WAN_VAE)
WAN21_LATENT: dict[str, Any] = {"width": 832, "height": 480, "length": 81}


def wan21_inputs(g: Graph) -> tuple[Output, Output, Node, tuple[Node, Node]]:
    """Loaders, latent and texts of Wan 2.1 1.3B: model, VAE, latent, texts."""
    unet, clip, vae = WAN21_FILES.load(g)
    latent = g.node("EmptyHunyuanLatentVideo", 0, **WAN21_LATENT)
    return unet, vae, latent, texts_of(g, 1, clip, FOX, BAD_VIDEO)
