"""The workflows of the video models that people run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .graph import Graph, Node, Output, collapse
from .parts import (
    BAD_VIDEO,
    FOX,
    HUB,
    QWEN25_VL,
    UMT5,
    WAN22,
    WAN_VAE,
    Files,
    another_sampler_node,
    guided_sampler_node,
    report_node,
    sage_node,
    save_video,
    texts_of,
    weights_note,
)
from .plain import Plain

MINIMAX = f"{HUB}/Comfy-Org/MiniMax-H3/resolve/main"
LTX25 = f"{HUB}/Lightricks/LTX-2.5/resolve/main"
LTX23 = f"{HUB}/Lightricks/LTX-2.3-fp8/resolve/main/ltx-2.3-22b-dev-fp8.safetensors"
HUNYUAN = f"{HUB}/Comfy-Org/HunyuanVideo_1.5_repackaged/resolve/main/split_files"
# The noise levels that the distilled LTX-2 models are made for: of the small video, and of the enlarged one.
LTX_SIGMAS = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
LTX_LAST_SIGMAS = "0.85, 0.725, 0.421875, 0.0"
LTX_FRAMES, LTX_RATE = 121, 24.0
H3_SIZE: dict[str, Any] = {"width": 1344, "height": 768, "length": 124}


H3_CLIP = f"{MINIMAX}/text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors"
H3_VAE = f"{MINIMAX}/vae/minimax_h3_video_vae_fp16.safetensors"
H3_AUDIO_VAE = f"{MINIMAX}/vae/minimax_h3_audio_vae_fp32.safetensors"
FASTH3 = f"{HUB}/FastVideo/FastVideo-FastH3-Comfy/resolve/main"
ANIMATE2 = f"{HUB}/Comfy-Org/Wan-Animate-2/resolve/main"


def _minimax_h3(g: Graph, name: str, prompt: str, *notes: str, **frames: Any) -> None:
    """Text or pictures to a video with sound. frames: outputs for `first_frame` and `last_frame`."""
    model = f"{MINIMAX}/diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors"
    unet, clip, vae = Files(model, (H3_CLIP,), "minimax", H3_VAE).load(g)
    audio_vae = g.loader("VAELoader", 0, {"vae_name": H3_AUDIO_VAE})
    task = g.node("MiniMaxH3ImageToVideo", 1, clip=clip, vae=vae, prompt=prompt, **H3_SIZE, **frames)
    _finish_h3(g, name, sage_node(g, 2, unet), task, vae, audio_vae, 20, *notes)


def _finish_h3(
    g: Graph, name: str, model: Node, task: Node, vae: Output, audio_vae: Node, steps: int, *notes: str
) -> None:
    """Sample what `task` gives, and save the video with its sound."""
    guider = g.node("BasicGuider", 3, model=model[0], conditioning=task[0])
    sigmas = g.node("BasicScheduler", 3, model=model[0], scheduler="simple", steps=steps)
    sampler = guided_sampler_node(g, 3, guider, "res_multistep", sigmas, task[1])
    report_node(g, 4, model[0], sampler[0])
    sound = g.node("VAEDecodeAudio", 5, samples=sampler[0], vae=audio_vae[0])
    save_video(g, 5, sampler[0], vae, 24.0, name, audio=sound[0])
    weights_note(
        g, 2, "Good lengths are 22, 39, 56 frames and so on (5 + 17 n). A second of video has 24 frames.", *notes
    )


def minimax_h3_text_to_video(g: Graph) -> None:
    """MiniMax H3."""
    _minimax_h3(g, "minimax_h3_t2v", f"{FOX}. Sound: paws on snow, wind.")


def minimax_h3_image_to_video(g: Graph) -> None:
    """MiniMax H3 from a first picture."""
    image = g.node("LoadImage", 0, "First frame", image="example.png")
    _minimax_h3(
        g, "minimax_h3_i2v", "The scene of <Picture 1> comes to life, the camera moves closer. Sound: wind.",
        first_frame=image[0],
    )  # fmt: skip


def minimax_h3_reference_to_video(g: Graph) -> None:
    """MiniMax H3 with pictures that the prompt refers to."""
    model = f"{MINIMAX}/diffusion_models/minimax_h3_ref2va_pruned_int8_convrot.safetensors"
    unet, clip, vae = Files(model, (H3_CLIP,), "minimax", H3_VAE).load(g)
    audio_vae = g.loader("VAELoader", 0, {"vae_name": H3_AUDIO_VAE})
    names = ("Picture 1", "Picture 2")
    pictures: dict[str, Any] = {
        f"ref_images.ref_image_{number}": g.node("LoadImage", 0, name, image="example.png")[0]
        for number, name in enumerate(names)
    }
    task = g.node(
        "MiniMaxH3ReferenceToVideo", 1, clip=clip, vae=vae, audio_vae=audio_vae[0],
        prompt="The one of <Picture 1> walks through the place of <Picture 2>. Sound: steps, wind.", **H3_SIZE,
        **pictures,
    )  # fmt: skip
    _finish_h3(g, "minimax_h3_r2v", sage_node(g, 2, unet), task, vae, audio_vae, 20)


def fasth3_text_to_video(g: Graph) -> None:
    """FastH3, which is trained for sparse attention: ComfyUI's node computes it, and this node the dense steps."""
    model = f"{FASTH3}/diffusion_models/fastvideo_fasth3_8step_v2_pruned_int8_convrot.safetensors"
    unet, clip, vae = Files(model, (H3_CLIP,), "minimax", H3_VAE).load(g)
    audio_vae = g.loader("VAELoader", 0, {"vae_name": H3_AUDIO_VAE})
    prompt = f"{FOX}. Sound: paws on snow, wind."
    task = g.node("MiniMaxH3ImageToVideo", 1, clip=clip, vae=vae, prompt=prompt, **H3_SIZE)
    shifted = g.node("MiniMaxH3SigmaShift", 1, model=unet, shift_video=10.0, shift_audio=3.0)
    sage = sage_node(g, 2, shifted[0])
    sparse = g.node("BlockSparseAttention", 2, model=sage[0], selection="vsa")
    dense = (
        "*Model Sparse Attention* works after the first fifth of the steps. SageAttention2 computes these first steps."
    )
    _finish_h3(g, "fasth3", sparse, task, vae, audio_vae, 8, dense, "Needs ComfyUI 0.43 or newer.")


def _ltx2(
    g: Graph,
    name: str,
    models: tuple[Output, Output, Output, Output],
    upscaler: str,
    solver: str,
    guide: Callable[[Output, Output, Output], Node],
    *notes: str,
    pictured: bool = False,
) -> None:
    """A small video with sound, then the same enlarged, by the same guider.

    models: diffusion model, text encoder, both VAEs. guide: adds a guider to column 3. pictured: begins with a picture.
    """
    picture = _first_frame(g) if pictured else None
    model, clip, vae, audio_vae = models
    enlarge = g.loader("LatentUpscaleModelLoader", 0, {"model_name": upscaler})
    texts = texts_of(g, 1, clip, f"{FOX}. Paws crunch on snow, wind.", BAD_VIDEO)
    rate = g.node("LTXVConditioning", 1, positive=texts[0][0], negative=texts[1][0], frame_rate=LTX_RATE)
    empty = g.node("EmptyLTXVLatentVideo", 1, width=640, height=352, length=LTX_FRAMES)
    silence = g.node("LTXVEmptyLatentAudio", 1, audio_vae=audio_vae, frames_number=LTX_FRAMES, frame_rate=LTX_RATE)
    begun = empty if picture is None else _begun_with(g, 1, vae, picture, empty[0], 0.7)
    start = g.node("LTXVConcatAVLatent", 1, video_latent=begun[0], audio_latent=silence[0])
    sage = sage_node(g, 2, model)
    guider = guide(sage[0], rate[0], rate[1])
    sigmas = g.node("ManualSigmas", 3, sigmas=LTX_SIGMAS)
    small = guided_sampler_node(g, 3, guider, solver, sigmas, start[0], "Small video")
    parts = g.node("LTXVSeparateAVLatent", 4, av_latent=small[0])
    large = g.node("LTXVLatentUpsampler", 4, samples=parts[0], upscale_model=enlarge[0], vae=vae)
    begun = large if picture is None else _begun_with(g, 4, vae, picture, large[0], 1.0)
    joined = g.node("LTXVConcatAVLatent", 4, video_latent=begun[0], audio_latent=parts[1])
    sigmas = g.node("ManualSigmas", 4, sigmas=LTX_LAST_SIGMAS)
    sampler = another_sampler_node(g, 4, small, sigmas, joined[0], "Enlarged video")
    report_node(g, 5, sage[0], sampler[0], "Report: enlarged video")
    done = g.node("LTXVSeparateAVLatent", 6, av_latent=sampler[0])
    sound = g.node("LTXVAudioVAEDecode", 6, samples=done[1], audio_vae=audio_vae)
    save_video(g, 6, done[0], vae, LTX_RATE, name, audio=sound[0], tiled=True)
    collapse(start, parts, large, joined, done, sound)
    weights_note(g, 0, "One *SageAttention2* node works in both samplings. The report is about the second one.", *notes)


def _first_frame(g: Graph) -> Output:
    image = g.node("LoadImage", 0, "First frame", image="example.png")
    compressed = g.node("LTXVPreprocess", 0, image=image[0], img_compression=18)
    collapse(compressed)
    return compressed[0]


def _begun_with(g: Graph, column: int, vae: Output, picture: Output, latent: Output, strength: float) -> Node:
    return g.node("LTXVImgToVideoInplace", column, vae=vae, image=picture, latent=latent, strength=strength)


def ltx25_text_to_video(g: Graph) -> None:
    """LTX-2.5, distilled."""
    _ltx25(g, "ltx25", pictured=False)


def ltx25_image_to_video(g: Graph) -> None:
    """LTX-2.5, distilled, from a first picture."""
    _ltx25(g, "ltx25_i2v", pictured=True)


def _ltx25(g: Graph, name: str, *, pictured: bool) -> None:
    unet, clip, vae = Files(
        f"{LTX25}/diffusion_models/ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors",
        (f"{LTX25}/text_encoders/gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors",), "ltxv",
        f"{LTX25}/vae/ltx-2.5-video-vae-bf16.safetensors",
    ).load(g)  # fmt: skip
    audio_vae = g.loader("VAELoader", 0, {"vae_name": f"{LTX25}/vae/ltx-2.5-audio-vae-bf16.safetensors"})

    def guide(model: Output, positive: Output, negative: Output) -> Node:
        return g.node(
            "LTXVDualCFGGuider", 3, model=model, positive=positive, negative=negative, video_cfg=1.0, audio_cfg=1.0
        )

    _ltx2(
        g, name, (unet, clip, vae, audio_vae[0]),
        f"{LTX25}/latent_upscale_models/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors",
        "euler_ancestral", guide, pictured=pictured,
    )  # fmt: skip


def ltx23_text_to_video(g: Graph) -> None:
    """LTX-2.3 with its distilled LoRA."""
    _ltx23(g, "ltx23", pictured=False)


def ltx23_image_to_video(g: Graph) -> None:
    """LTX-2.3 with its distilled LoRA, from a first picture."""
    _ltx23(g, "ltx23_i2v", pictured=True)


def _ltx23(g: Graph, name: str, *, pictured: bool) -> None:
    checkpoint = g.loader("CheckpointLoaderSimple", 0, {"ckpt_name": LTX23})
    lora = "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors"
    fast = g.loader(
        "LoraLoaderModelOnly", 0,
        {"lora_name": f"{HUB}/Comfy-Org/ltx-2.3/resolve/main/split_files/loras/{lora}"},
        model=checkpoint[0], strength_model=0.5,
    )  # fmt: skip
    encoder = "gemma_3_12B_it_fp4_mixed.safetensors"
    clip = g.loader(
        "LTXAVTextEncoderLoader", 0,
        {
            "text_encoder": f"{HUB}/Comfy-Org/ltx-2/resolve/main/split_files/text_encoders/{encoder}",
            "ckpt_name": LTX23,
        },
    )  # fmt: skip
    audio_vae = g.loader("LTXVAudioVAELoader", 0, {"ckpt_name": LTX23})

    def guide(model: Output, positive: Output, negative: Output) -> Node:
        return g.node("CFGGuider", 3, model=model, positive=positive, negative=negative, cfg=1.0)

    _ltx2(
        g, name, (fast[0], clip[0], checkpoint[2], audio_vae[0]),
        f"{HUB}/Lightricks/LTX-2.3/resolve/main/ltx-2.3-spatial-upscaler-x2-1.1.safetensors", "euler", guide,
        "Put LoRAs before *SageAttention2*.", pictured=pictured,
    )  # fmt: skip


def _wan22(g: Graph, task: str, latent: Callable[[Node, tuple[Node, Node]], tuple[Output, Output, Output]]) -> None:
    """Wan 2.2 14B samples in two stages with a model each, and each model gets the node."""
    stages = [
        g.loader(
            "UNETLoader",
            0,
            {"unet_name": f"{WAN22}/diffusion_models/wan2.2_{task}_{noise}_noise_14B_fp8_scaled.safetensors"},
        )
        for noise in ("high", "low")
    ]
    clip = g.loader("CLIPLoader", 0, {"clip_name": UMT5}, type="wan")
    vae = g.loader("VAELoader", 0, {"vae_name": WAN_VAE})
    texts = texts_of(g, 1, clip[0], FOX, BAD_VIDEO)
    positive, negative, samples = latent(vae, texts)
    for number, unet in enumerate(stages):
        sage = sage_node(g, 2, unet[0])
        shift = g.node("ModelSamplingSD3", 3, "Shift 8", model=sage[0], shift=8.0)
        collapse(shift)
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
        report_node(g, 4, shift[0], samples, "Report: high noise" if first else "Report: low noise")
    save_video(g, 5, samples, vae[0], 16.0, f"wan22_{task}")
    weights_note(g, 1)


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


def wan_animate2(g: Graph) -> None:
    """Wan Animate 2: the motion of a video for the character of a picture, with the LoRA for six steps."""
    unet = g.loader(
        "UNETLoader", 0, {"unet_name": f"{ANIMATE2}/diffusion_models/wan_animate_2_int8_convrot.safetensors"}
    )
    lora = "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors"
    fast = g.loader(
        "LoraLoaderModelOnly", 0, {"lora_name": f"{ANIMATE2}/loras/{lora}"}, model=unet[0], strength_model=1.0
    )
    encoder = f"{ANIMATE2}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    clip = g.loader("CLIPLoader", 0, {"clip_name": encoder}, type="wan")
    vae = g.loader("VAELoader", 0, {"vae_name": f"{ANIMATE2}/vae/Wan2_1_VAE_bf16.safetensors"})
    vision = g.loader("CLIPVisionLoader", 0, {"clip_name": f"{ANIMATE2}/clip_vision/clip_vision_h.safetensors"})
    character = g.node("LoadImage", 0, "The character", image="example.png")
    motion = g.node("GetVideoComponents", 0, video=g.node("LoadVideo", 0, "The motion", file="example.mp4")[0])
    first = g.node("ImageFromBatch", 1, image=motion[0], batch_index=0, length=1)
    seen = [
        g.node("CLIPVisionEncode", 1, clip_vision=vision[0], image=image, crop="none")
        for image in (character[0], first[0])
    ]
    texts = texts_of(g, 1, clip[0], "The character dances on an empty stage", BAD_VIDEO)
    task = g.node(
        "WanAnimate2ToVideo", 1, positive=texts[0][0], negative=texts[1][0], vae=vae[0], width=832,
        height=480, length=81, reference_image=character[0], pose_video=motion[0], clip_vision_output=seen[0][0],
        clip_vision_output_pose=seen[1][0],
    )  # fmt: skip
    sage = sage_node(g, 2, fast[0])
    shift = g.node("ModelSamplingSD3", 3, model=sage[0], shift=5.0)
    sampler = g.node(
        "KSampler", 3, model=shift[0], positive=task[0], negative=task[1], latent_image=task[2],
        seed=1, steps=6, cfg=1.0, sampler_name="lcm", scheduler="simple",
    )  # fmt: skip
    trimmed = g.node("TrimVideoLatent", 4, samples=sampler[0], trim_amount=task[3])
    report_node(g, 4, shift[0], sampler[0])
    save_video(g, 5, trimmed[0], vae[0], motion[2], "wan_animate2")
    collapse(first, *seen)
    weights_note(g, 2, "Put LoRAs before *SageAttention2*.")


def hunyuanvideo15_text_to_video(g: Graph) -> None:
    """HunyuanVideo 1.5, 720p."""
    Plain(
        Files(
            f"{HUNYUAN}/diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors",
            (QWEN25_VL, f"{HUNYUAN}/text_encoders/byt5_small_glyphxl_fp16.safetensors"), "hunyuan_video_15",
            f"{HUNYUAN}/vae/hunyuanvideo15_vae_fp16.safetensors",
        ),
        ("EmptyHunyuanVideo15Latent", {"width": 1280, "height": 720, "length": 121}), FOX, "",
        {"steps": 20, "cfg": 6.0, "sampler_name": "euler", "scheduler": "simple"}, "hunyuanvideo15",
        shift=("ModelSamplingSD3", 7.0), fps=24.0,
    ).build(g)  # fmt: skip
