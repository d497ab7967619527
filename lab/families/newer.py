"""Configurations for models whose file a ComfyUI has but whose configuration it lacks: an overlay of single files."""

from __future__ import annotations

from typing import Any


def model_config(name: str) -> Any:
    """The class of ComfyUI's `supported_models` of this name, or a stand-in for it; None if there is neither.

    A stand-in has what sampling needs, but nothing that loading files needs.
    """
    import comfy.supported_models

    return getattr(comfy.supported_models, name, None) or _STAND_INS.get(name, lambda: None)()


def is_stand_in(name: str) -> bool:
    """Whether ComfyUI has no configuration of this name."""
    import comfy.supported_models

    return not hasattr(comfy.supported_models, name)


def _qwen_image21() -> Any:
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models
    from comfy.ldm.qwen_image21.model import QwenImage21Transformer2DModel

    class QwenImage21Latents(comfy.latent_formats.LatentFormat):
        latent_channels = 64

    class QwenImage21(comfy.supported_models.QwenImage):
        unet_config = {"image_model": "qwen_image21"}
        latent_format = QwenImage21Latents

        def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> Any:
            return comfy.model_base.QwenImage(self, device=device, unet_model=QwenImage21Transformer2DModel)

    return QwenImage21


_STAND_INS = {"QwenImage21": _qwen_image21}
