"""The models of the paper's end-to-end table, in its sizes: see `declared` for what the fields mean."""

from __future__ import annotations

from .declared import DeclaredModel, Family

_COGVIDEOX = {
    "image_model": "cogvideox", "attention_head_dim": 64, "in_channels": 16, "text_embed_dim": 4096,
    "time_embed_dim": 512, "use_learned_positional_embeddings": False, "use_rotary_positional_embeddings": True,
}  # fmt: skip
_HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768,
    "axes_dim": [16, 56, 56], "meanflow": False, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0,
    "num_heads": 24, "theta": 256, "qkv_bias": True, "byt5": False, "guidance_embed": True,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
_MOCHI = {
    "image_model": "mochi_preview", "patch_size": 2, "num_heads": 24, "hidden_size_x": 3072, "hidden_size_y": 1536,
    "mlp_ratio_x": 4.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12, "qk_norm": True,
    "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True, "posenc_preserve_area": True,
    "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0, "use_t5": True,
    "t5_feat_dim": 4096, "t5_token_length": 256, "rope_theta": 10000.0,
}  # fmt: skip
_FLUX = {
    "image_model": "flux", "axes_dim": [16, 56, 56], "num_heads": 24, "mlp_ratio": 4.0, "theta": 10000,
    "in_channels": 16, "out_channels": 16, "patch_size": 2, "hidden_size": 3072, "context_in_dim": 4096,
    "vec_in_dim": 768, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
_SD35: dict[str, object] = {
    "in_channels": 16, "out_channels": 16, "patch_size": 2, "input_size": None, "adm_in_channels": 2048,
    "num_patches": 36864, "pos_embed_max_size": 192, "pos_embed_scaling_factor": None, "qk_norm": "rms",
    "x_block_self_attn_layers": [],
}  # fmt: skip


def _embedder(channels: int) -> dict[str, object]:
    return {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": channels}}


_POOLED = "pooled_output"
_JOINT = "one joint call a block"
_MODES = "`8b`"

MODELS = (
    Family(
        "CogVideoX-2B, 480p", "CogVideoX_T2V",
        DeclaredModel({**_COGVIDEOX, "num_attention_heads": 30, "num_layers": 30}, ((1, 16, 13, 60, 90),), (226, 4096)),
        DeclaredModel({**_COGVIDEOX, "num_attention_heads": 2, "num_layers": 2}, ((1, 16, 3, 16, 16),), (32, 4096)),
        _JOINT, _MODES,
    ),
    Family(
        "CogVideoX1.5-5B, 768p", "CogVideoX_T2V",
        DeclaredModel(
            {**_COGVIDEOX, "num_attention_heads": 48, "num_layers": 42, "patch_size": 2, "patch_size_t": 2},
            ((1, 16, 22, 96, 170),), (226, 4096), fewer={"num_layers": 5},
        ),
        DeclaredModel(
            {**_COGVIDEOX, "num_attention_heads": 2, "num_layers": 2, "patch_size": 2, "patch_size_t": 2},
            ((1, 16, 4, 16, 16),), (32, 4096),
        ),
        _JOINT, _MODES, steps=1,
    ),
    Family(
        "HunyuanVideo, 720p, 129 frames", "HunyuanVideo",
        DeclaredModel(
            {**_HUNYUAN, "depth": 20, "depth_single_blocks": 40}, ((1, 16, 33, 90, 160),), (256, 4096),
            more={_POOLED: (1, 768)}, fewer={"depth": 1, "depth_single_blocks": 1},
        ),
        DeclaredModel(
            {**_HUNYUAN, "depth": 1, "depth_single_blocks": 1, "hidden_size": 256, "num_heads": 2},
            ((1, 16, 3, 16, 16),), (32, 4096), more={_POOLED: (1, 768)},
        ),
        _JOINT, _MODES, steps=1,
    ),
    Family(
        "Mochi, 480p, 163 frames", "GenmoMochi",
        DeclaredModel({**_MOCHI, "depth": 48}, ((1, 12, 28, 60, 106),), (256, 4096), padded=64, fewer={"depth": 8}),
        # Of the real width, which its classes ask for.
        DeclaredModel({**_MOCHI, "depth": 1}, ((1, 12, 3, 16, 16),), (256, 4096), padded=64),
        _JOINT, _MODES, steps=1,
    ),
    Family(
        "Flux.1, 1024 x 1024", "Flux",
        DeclaredModel(
            {**_FLUX, "depth": 19, "depth_single_blocks": 38}, ((1, 16, 128, 128),), (512, 4096),
            more={_POOLED: (1, 768)},
        ),
        DeclaredModel(
            {**_FLUX, "depth": 1, "depth_single_blocks": 1, "hidden_size": 256, "num_heads": 2}, ((1, 16, 16, 16),),
            (32, 4096), more={_POOLED: (1, 768)},
        ),
        _JOINT, _MODES,
    ),
    Family(
        "Stable Diffusion 3.5 large, 1024 x 1024", "SD3",
        DeclaredModel(
            {**_SD35, "depth": 38, "context_embedder_config": _embedder(2432)}, ((1, 16, 128, 128),), (154, 4096),
            more={_POOLED: (1, 2048)},
        ),
        DeclaredModel(
            {**_SD35, "depth": 2, "context_embedder_config": _embedder(128)}, ((1, 16, 16, 16),), (32, 4096),
            more={_POOLED: (1, 2048)},
        ),
        _JOINT, _MODES,
    ),
)  # fmt: skip
