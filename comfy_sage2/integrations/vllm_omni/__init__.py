"""SageAttention2 in vLLM-Omni: its diffusion backend SAGE_ATTN, with masks and every head size.

vLLM-Omni calls `register` in each of its processes, by an entry point of the group "vllm_omni.general_plugins".
"""

from __future__ import annotations

import logging

from ..sageattention.offer import NAME, other_package

log = logging.getLogger("comfy_sage2")

BACKEND = f"{__name__}.backend.SageAttention2Backend"


def register() -> None:
    """Have vLLM-Omni take this library for SAGE_ATTN, unless another `sageattention` is installed: that stays."""
    installed = other_package()
    if installed is not None:
        log.info("SageAttention2: %s is installed at %s and serves vLLM-Omni", NAME, installed)
        return
    try:
        from vllm_omni.diffusion.attention.backends.registry import (
            DiffusionAttentionBackendEnum,
            register_diffusion_backend,
        )
    except ImportError as error:
        log.warning("SageAttention2: this vLLM-Omni has no registry of diffusion backends as of 0.14: %s", error)
        return
    register_diffusion_backend(DiffusionAttentionBackendEnum.SAGE_ATTN, BACKEND)
