"""The classes that vLLM-Omni makes its attention layers from. They extend its own, so it alone imports this."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata

from ..sageattention.functions import sageattn


class SageAttention2Backend(AttentionBackend):
    """What vLLM-Omni asks of a backend before it makes layers."""

    accept_output_buffer = False

    @staticmethod
    def get_name() -> str:
        """The name by which users choose it."""
        return "SAGE_ATTN"

    @staticmethod
    def get_impl_cls() -> type[SageAttention2Impl]:
        """The class of the layers."""
        return SageAttention2Impl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """The class of what comes with a call."""
        return AttentionMetadata  # type: ignore[no-any-return]

    @staticmethod
    def get_builder_cls() -> None:
        """None: a call needs nothing built."""
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """None in particular, which stands for all: torch serves what no kernel can."""
        return []

    @classmethod
    def supports_attention_mask(cls, *unused: object) -> bool:
        """Masks are obeyed."""
        return True


class SageAttention2Impl(AttentionImpl):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """As vLLM-Omni makes layers; the tensors of each call say how many heads there are.

        others: of later versions, for backends that know them.

        Raises:
            ValueError: tensors in another layout than (B, N, H, D), or options of another backend.
        """
        if qkv_layout not in (None, "BSND"):
            raise ValueError(f"SAGE_ATTN of SageAttention2 takes qkv_layout 'BSND' or None, got {qkv_layout!r}")
        if backend_kwargs:
            raise ValueError(
                f"SAGE_ATTN of SageAttention2 has no options, got {sorted(backend_kwargs)}: leave them out"
            )
        self.causal = causal
        self.softmax_scale = softmax_scale

    def forward_cuda(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attention of (B, N, H, D) tensors in mode "8b", with the mask of the metadata."""
        mask = None if attn_metadata is None else attn_metadata.attn_mask
        if mask is not None and mask.shape == (query.shape[0], key.shape[1]):  # which keys are no padding
            mask = mask.bool()[:, None, None, :]
        out = sageattn(query, key, value, "NHD", is_causal=self.causal, sm_scale=self.softmax_scale, attn_mask=mask)
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        return out
