"""The families: their real shapes, tiny ones of the same structure, and what is recommended for them.

The real shapes are those that ComfyUI's model classes and its detection of weights state. Tiny ones keep head_dim, the
ratio of query to key heads, and every kind of block, with few heads and layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class DeclaredModel:
    """A model and what it samples.

    Attributes:
        config: of the diffusion model, in ComfyUI's names.
        fewer: fields of `config` with a number of layers -> how many are made, only to save time.
        latents: sizes of each stream: the video or picture, then the sound.
        text: tokens and channels of the text.
        padded: tokens at the text's end that a mask hides.
        picture: the size of the latents of two pictures to which the prompt refers, or ().
        given: frames at the start of the video that are given, not sampled.
        more: further tensors of the conditioning, by name.
    """

    config: Mapping[str, Any]
    latents: tuple[Sizes, ...]
    text: tuple[int, int]
    padded: int = 0
    picture: Sizes = ()
    given: int = 0
    more: Mapping[str, Sizes] = field(default_factory=dict)
    fewer: Mapping[str, int] = field(default_factory=dict)

    @property
    def layers(self) -> str:
        """As "1 + 1 of 20 + 40", or "all"."""
        made, whole = (" + ".join(str(numbers[name]) for name in self.fewer) for numbers in (self.fewer, self.config))
        return f"{made} of {whole}" if self.fewer else "all"


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: as people write it.
        model: the class in ComfyUI's `supported_models`.
        real: the shape to be timed; large ones with fewer layers.
        tiny: runs on a CPU in a moment.
        structure: what its attention is, in words.
        advice: mode and options to begin with, in words.
        before: what attends before the first step, where ComfyUI calls no hook; "" if nothing does.
        options: plain values of the conditioning.
        needs: the file of ComfyUI that has the model, where releases up to 0.33 do not have it.
        stated: its files say which model they are; the names and sizes of the weights fit another model.
        edits: the picture to change is a reference in the conditioning, of the latent's size.
        steps: to time in a round.
        cfg: of the sampling; above 1 a step computes the positive and the negative prompt together.
    """

    name: str
    model: str
    real: DeclaredModel
    tiny: DeclaredModel
    structure: str
    advice: str
    before: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    edits: bool = False
    needs: str = ""
    stated: bool = False
    steps: int = 2
    cfg: float = 1.0


_DEFAULTS = "the defaults"
_QWEN_ADVICE = f"{_DEFAULTS}; keep the guard on (other kernels gave black pictures: QwenLM/Qwen-Image#32)"
_H3_ADVICE = f"{_DEFAULTS}; keep `rotate` on auto (INT8 without rotation spoils this model: Comfy-Org/docs#1698)"

_H3 = {
    "image_model": "minimax_h3", "hidden_size": 5376, "token_refiner_num_layers": 2, "num_attention_heads": 56,
    "attention_head_dim": 128, "ffn_hidden_size": 14336, "text_dim": 5120, "time_embed_hidden_size": 5376,
    "time_embed_dim": 2688,
}  # fmt: skip
_LTX2 = {
    "image_model": "ltxav", "attention_head_dim": 128, "audio_attention_head_dim": 64, "num_attention_heads": 32,
    "audio_num_attention_heads": 32, "cross_attention_dim": 4096, "audio_cross_attention_dim": 2048,
    "caption_channels": 3840, "connector_num_attention_heads": 30,
}  # fmt: skip
_LTX2_TINY = {
    **_LTX2, "num_layers": 2, "num_attention_heads": 2, "audio_num_attention_heads": 2, "cross_attention_dim": 256,
    "audio_cross_attention_dim": 128, "caption_channels": 256, "connector_num_attention_heads": 2,
}  # fmt: skip
_Z_IMAGE = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 3840, "cap_feat_dim": 2560, "qk_norm": True,
    "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
}  # fmt: skip
_QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_attention_heads": 24}
_KREA2 = {"image_model": "krea2", "features": 6144, "heads": 48, "kvheads": 12, "txtlayers": 12, "txtdim": 2560}
_FLUX2 = {
    "image_model": "flux2", "axes_dim": [32, 32, 32, 32], "num_heads": 48, "hidden_size": 6144, "mlp_ratio": 3.0,
    "theta": 2000, "in_channels": 128, "out_channels": 128, "patch_size": 1, "context_in_dim": 15360,
    "vec_in_dim": None, "guidance_embed": True, "global_modulation": True, "mlp_silu_act": True, "qkv_bias": False,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
}  # fmt: skip
_WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "in_dim": 16,
    "out_dim": 16, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True,
    "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip
_HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1],
    "vec_in_dim": None, "axes_dim": [16, 56, 56], "meanflow": False, "context_in_dim": 3584, "hidden_size": 2048,
    "mlp_ratio": 4.0, "num_heads": 16, "depth_single_blocks": 0, "theta": 256, "qkv_bias": True, "byt5": True,
    "guidance_embed": False, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
}  # fmt: skip
_KLEIN = {
    **_FLUX2, "num_heads": 24, "hidden_size": 3072, "context_in_dim": 7680, "guidance_embed": False
}  # fmt: skip
_H3_TINY = {
    **_H3, "num_layers": 2, "hidden_size": 256, "num_attention_heads": 2, "ffn_hidden_size": 512, "text_dim": 64,
    "time_embed_hidden_size": 64, "time_embed_dim": 32,
}  # fmt: skip
_QWEN21 = {"image_model": "qwen_image21", "in_channels": 64, "out_channels": 64, "context_in_dim": 4096}
_QWEN21_TINY = {**_QWEN21, "num_layers": 2, "num_attention_heads": 2}
_QWEN21_FILE = "comfy/ldm/qwen_image21/model.py"
_QWEN_TINY = {**_QWEN, "num_layers": 2, "num_attention_heads": 2}
_WAN_TINY = {**_WAN, "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2}
_BYT5 = "conditioning_byt5small"
_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
    "legacy": False, "use_temporal_attention": False, "use_temporal_resblock": False,
}  # fmt: skip
_SD15 = {
    **_UNET, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4], "context_dim": 768, "num_heads": 8,
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1, "adm_in_channels": None,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "use_linear_in_transformer": False,
}  # fmt: skip
_SDXL = {
    **_UNET, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "context_dim": 2048, "num_head_channels": 64,
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10, "adm_in_channels": 2816,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "use_linear_in_transformer": True,
    "num_classes": "sequential",
}  # fmt: skip
_WAN_SMALL = {**_WAN, "dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}
_Z_IMAGE_TINY = {**_Z_IMAGE, "n_layers": 2, "dim": 256, "n_heads": 2, "n_kv_heads": 2}
_SPATIAL = "self and cross a block, in few blocks"

# Steps of many short calls, for which the host needs about as long as the GPU.
SHORT_STEPS = (
    Family(
        "Stable Diffusion 1.5, 512 x 512", "SD15",
        DeclaredModel(_SD15, ((1, 4, 64, 64),), (77, 768)),
        DeclaredModel({**_SD15, "model_channels": 64}, ((1, 4, 8, 8),), (77, 768)),
        _SPATIAL, _DEFAULTS, stated=True, steps=4, cfg=7.0,
    ),
    Family(
        "Stable Diffusion XL, 1024 x 1024", "SDXL",
        DeclaredModel(_SDXL, ((1, 4, 128, 128),), (77, 2048), more={"pooled_output": (1, 1280)}),
        DeclaredModel(
            {**_SDXL, "model_channels": 64, "transformer_depth": [0, 0, 1, 1, 1, 1], "transformer_depth_middle": 1,
             "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1]},
            ((1, 4, 8, 8),), (77, 2048), more={"pooled_output": (1, 1280)},
        ),
        _SPATIAL, _DEFAULTS, stated=True, steps=4, cfg=7.0,
    ),
    *(
        Family(
            f"Z-Image, {8 * side} x {8 * side}", "ZImage",
            DeclaredModel({**_Z_IMAGE, "n_layers": 30}, ((1, 16, side, side),), (128, 2560)),
            DeclaredModel(_Z_IMAGE_TINY, ((1, 16, 16, 16),), (40, 2560)),
            "one joint call a block", _DEFAULTS, steps=4,
        )
        for side in (64, 128)
    ),
    *(
        Family(
            f"Wan 2.1 1.3B, {side * side // 4} tokens", "WAN21_T2V",
            DeclaredModel(_WAN_SMALL, ((1, 16, 1, side, side),), (512, 4096)),
            DeclaredModel(_WAN_TINY, ((1, 16, 1, 16, 16),), (64, 4096)),
            "self and cross a block", _DEFAULTS, steps=4,
        )
        for side in (64, 128)
    ),
)  # fmt: skip

FAMILIES = (
    Family(
        "MiniMax H3", "MiniMaxH3",
        DeclaredModel(
            {**_H3, "num_layers": 50}, ((1, 24, 37, 48, 84), (1, 32, 2, 207)), (300, 5120), fewer={"num_layers": 25}
        ),
        DeclaredModel(
            _H3_TINY, ((1, 24, 7, 16, 16), (1, 32, 2, 40)), (20, 64)
        ),
        "one self-attention a block over text, sound and video, in containers",
        _H3_ADVICE,
        before="the text refiner", steps=1,
    ),
    Family(
        "MiniMax H3, pictures to refer to", "MiniMaxH3",
        DeclaredModel(
            {**_H3, "num_layers": 50}, ((1, 24, 37, 48, 84), (1, 32, 2, 207)), (300, 5120), picture=(1, 24, 1, 48, 84),
            fewer={"num_layers": 25},
        ),
        DeclaredModel(_H3_TINY, ((1, 24, 7, 16, 16), (1, 32, 2, 40)), (20, 64), picture=(1, 24, 1, 16, 16)),
        "as MiniMax H3, with the tokens of two pictures",
        _H3_ADVICE,
        before="the text refiner", steps=1,
    ),
    Family(
        "LTX-2", "LTXAV",
        DeclaredModel({**_LTX2, "num_layers": 48}, ((1, 128, 16, 22, 40), (1, 8, 126, 16)), (1024, 3840)),
        DeclaredModel(_LTX2_TINY, ((1, 128, 4, 12, 12), (1, 8, 40, 16)), (128, 256)),
        "six a block: video and sound each to itself and to the text, and each to the other",
        _DEFAULTS,
        before="the connectors of the text", options={"frame_rate": 24.0},
    ),
    Family(
        "LTX-2, image to video", "LTXAV",
        DeclaredModel({**_LTX2, "num_layers": 48}, ((1, 128, 16, 22, 40), (1, 8, 126, 16)), (1024, 3840), given=1),
        DeclaredModel(_LTX2_TINY, ((1, 128, 4, 12, 12), (1, 8, 40, 16)), (128, 256), given=1),
        "as LTX-2; the first frame is given, and its tokens have a time step of their own",
        _DEFAULTS,
        before="the connectors of the text", options={"frame_rate": 24.0},
    ),
    Family(
        "Wan 2.1 1.3B, 480p", "WAN21_T2V",
        DeclaredModel(_WAN_SMALL, ((1, 16, 21, 60, 104),), (512, 4096)),
        DeclaredModel({**_WAN_TINY}, ((1, 16, 3, 24, 24),), (64, 4096)),
        "self and cross a block", _DEFAULTS,
    ),
    Family(
        "Wan 2.1 14B, 720p", "WAN21_T2V",
        DeclaredModel({**_WAN, "num_layers": 40}, ((1, 16, 21, 90, 160),), (512, 4096), fewer={"num_layers": 20}),
        DeclaredModel({**_WAN_TINY}, ((1, 16, 3, 24, 24),), (64, 4096)),
        "self and cross a block", _DEFAULTS, steps=1,
    ),
    Family(
        "Wan 2.2 14B, text to video", "WAN21_T2V",
        DeclaredModel({**_WAN, "num_layers": 40}, ((1, 16, 21, 60, 104),), (512, 4096), fewer={"num_layers": 20}),
        DeclaredModel({**_WAN_TINY}, ((1, 16, 3, 24, 24),), (64, 4096)),
        "self and cross a block", f"{_DEFAULTS}; both stages", steps=1,
    ),
    Family(
        "Wan 2.2 14B, image to video", "WAN21_T2V",
        DeclaredModel(
            {**_WAN, "in_dim": 36, "num_layers": 40}, ((1, 16, 21, 60, 104),), (512, 4096), fewer={"num_layers": 10}
        ),
        DeclaredModel({**_WAN_TINY, "in_dim": 36}, ((1, 16, 3, 24, 24),), (64, 4096)),
        "self and cross a block", f"{_DEFAULTS}; both stages", steps=1,
    ),
    Family(
        "Wan Animate 2", "WAN_Animate2",
        DeclaredModel(
            {**_WAN, "model_type": "animate2", "in_dim": 36, "num_layers": 40}, ((1, 16, 22, 60, 104),), (512, 4096),
            more={"pose_video_latent": (1, 16, 21, 60, 104)}, fewer={"num_layers": 10},
        ),
        DeclaredModel(
            {**_WAN_TINY, "model_type": "animate2", "in_dim": 36}, ((1, 16, 4, 24, 24),), (64, 4096),
            more={"pose_video_latent": (1, 16, 3, 24, 24)},
        ),
        "self and cross a block for the motion; self of each frame with its motion, and cross, for the video",
        _DEFAULTS, steps=1, stated=True,
    ),
    Family(
        "HunyuanVideo 1.5", "HunyuanVideo15",
        DeclaredModel(
            {**_HUNYUAN, "depth": 54}, ((1, 32, 31, 45, 80),), (300, 3584), more={_BYT5: (1, 32, 1472)},
            fewer={"depth": 18},
        ),
        DeclaredModel(
            {**_HUNYUAN, "depth": 2, "hidden_size": 256, "num_heads": 2}, ((1, 32, 3, 12, 12),), (40, 3584),
            padded=8,  # without quoted text: ComfyUI cannot mask both
        ),
        "one joint call a block; a mask where the text is padded", _DEFAULTS,
        options={"pooled_output": None}, steps=1,
    ),
    Family(
        "Z-Image", "ZImage",
        DeclaredModel({**_Z_IMAGE, "n_layers": 30}, ((1, 16, 128, 128),), (128, 2560)),
        DeclaredModel(_Z_IMAGE_TINY, ((1, 16, 32, 32),), (40, 2560), padded=8),
        "one joint call a block, refiners of text and picture before; ComfyUI pads with learned tokens, without a mask",
        _DEFAULTS,
    ),
    Family(
        "Qwen-Image 2.1", "QwenImage21",
        DeclaredModel({**_QWEN21, "num_layers": 32}, ((1, 64, 128, 128),), (300, 4096)),
        DeclaredModel(_QWEN21_TINY, ((1, 64, 20, 20),), (40, 4096)),
        "two a block: the text to itself with a causal mask, the picture to text and picture", _DEFAULTS,
        needs=_QWEN21_FILE,
    ),
    Family(
        "Qwen-Image 2.1, edit", "QwenImage21",
        DeclaredModel({**_QWEN21, "num_layers": 32}, ((1, 64, 64, 64),), (500, 4096)),
        DeclaredModel(_QWEN21_TINY, ((1, 64, 20, 20),), (40, 4096)),
        "as Qwen-Image 2.1, and one more a block: the picture to change to the text and itself", _DEFAULTS,
        edits=True, needs=_QWEN21_FILE,
    ),
    Family(
        "Qwen-Image", "QwenImage",
        DeclaredModel({**_QWEN, "num_layers": 60}, ((1, 16, 1, 166, 166),), (200, 3584)),
        DeclaredModel(_QWEN_TINY, ((1, 16, 1, 32, 32),), (40, 3584), padded=8),
        "one joint call a block; a mask where the text is padded", _QWEN_ADVICE,
    ),
    Family(
        "Qwen-Image-Edit", "QwenImage",
        DeclaredModel({**_QWEN, "num_layers": 60}, ((1, 16, 1, 128, 128),), (400, 3584)),
        DeclaredModel(_QWEN_TINY, ((1, 16, 1, 24, 24),), (60, 3584), padded=8),
        "as Qwen-Image, with the tokens of the picture to change", _QWEN_ADVICE,
        options={"reference_latents_method": "index_timestep_zero"}, edits=True,
    ),
    Family(
        "Krea 2", "Krea2",
        DeclaredModel({**_KREA2, "layers": 28}, ((1, 16, 1, 128, 128),), (200, 12 * 2560)),
        DeclaredModel(
            {**_KREA2, "layers": 2, "features": 512, "heads": 4, "kvheads": 1, "txtlayers": 3, "txtdim": 256,
             "txtheads": 2, "txtkvheads": 2},
            ((1, 16, 1, 32, 32),), (40, 3 * 256),
        ),
        "one joint call a block; its text is mixed by four short calls a step, two of them over 12 tokens",
        _DEFAULTS,
    ),
    Family(
        "Flux.2", "Flux2",
        DeclaredModel({**_FLUX2, "depth": 8, "depth_single_blocks": 48}, ((1, 128, 64, 64),), (512, 15360)),
        DeclaredModel(
            {**_FLUX2, "depth": 1, "depth_single_blocks": 2, "hidden_size": 256, "num_heads": 2,
             "context_in_dim": 128},
            ((1, 128, 16, 16),), (40, 128),
        ),
        "one joint call a block", _DEFAULTS,
        options={"guidance": 4.0},
    ),
    Family(
        "Flux.2 Klein", "Flux2",
        DeclaredModel({**_KLEIN, "depth": 5, "depth_single_blocks": 20}, ((1, 128, 64, 64),), (512, 7680)),
        DeclaredModel(
            {**_KLEIN, "depth": 1, "depth_single_blocks": 2, "hidden_size": 256, "num_heads": 2,
             "context_in_dim": 128},
            ((1, 128, 16, 16),), (40, 128),
        ),
        "one joint call a block", _DEFAULTS,
    ),
)  # fmt: skip
