"""The host's attention call, in all its argument forms, and its translation to the layouts of the attention API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# The order of the host's attention functions; any of them may come positionally.
_POSITIONAL = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")
_KEYWORDS = ("scale", "enable_gqa", "low_precision_attention")
# preferred_attention names a backend of the host; it does not change what is computed.
_WITHOUT_MEANING_HERE = ("transformer_options", "_inside_attn_wrapper", "preferred_attention")


@dataclass(frozen=True)
class HostCall:
    """One call of the host's attention function.

    Attributes:
        q, k, v: (B, N, H * D), or (B, H, N, D) with `skip_reshape`.
        heads: number of query heads.
        mask: None, or bool (True = attend) or additive float; 2-D (Nq, Nkv), 3-D (B, Nq, Nkv) or 4-D (B, H, Nq, Nkv),
            each dimension may be 1.
        attn_precision: the host's wish for its own scores; only the fallback gets it.
        skip_output_reshape: the caller wants (B, H, N, D) back instead of (B, N, H * D).
        scale: softmax scale; None means 1/sqrt(D).
        enable_gqa: k and v may have fewer heads than q.
        low_precision: False where the model forbids a quantised attention.
        unknown: names of arguments that this adapter does not understand.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: int
    mask: torch.Tensor | None = None
    attn_precision: torch.dtype | None = None
    skip_reshape: bool = False
    skip_output_reshape: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    low_precision: bool = True
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HostCall:
        """Bind what the host passed to an override; raises TypeError when q, k, v or heads are missing."""
        given = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        missing = [name for name in _POSITIONAL[:4] if name not in given]
        if missing:
            raise TypeError(f"the attention call lacks {', '.join(missing)}; it has {', '.join(given)}")
        known = _POSITIONAL + _KEYWORDS + _WITHOUT_MEANING_HERE
        return cls(
            q=given["q"],
            k=given["k"],
            v=given["v"],
            heads=given["heads"],
            mask=given.get("mask"),
            attn_precision=given.get("attn_precision"),
            skip_reshape=bool(given.get("skip_reshape", False)),
            skip_output_reshape=bool(given.get("skip_output_reshape", False)),
            scale=given.get("scale"),
            enable_gqa=bool(given.get("enable_gqa", False)),
            low_precision=given.get("low_precision_attention") is not False,
            unknown=tuple(name for name in given if name not in known),
        )

    def keywords(self) -> dict[str, Any]:
        """The call after q, k, v and heads as keyword arguments for a host function.

        What only newer hosts know is left out unless it was given.
        """
        keywords: dict[str, Any] = {
            "mask": self.mask,
            "attn_precision": self.attn_precision,
            "skip_reshape": self.skip_reshape,
            "skip_output_reshape": self.skip_output_reshape,
        }
        if self.scale is not None:
            keywords["scale"] = self.scale
        if self.enable_gqa:
            keywords["enable_gqa"] = True
        if not self.low_precision:
            keywords["low_precision_attention"] = False
        return keywords

    @property
    def token_dim(self) -> int:
        """The dimension of q, k and v that counts tokens."""
        return 2 if self.skip_reshape else 1

    @property
    def head_dim(self) -> int:
        """Channels of one query head; of no use when the sizes do not fit `heads`, which `tensors` reports."""
        return self.q.shape[-1] if self.skip_reshape else self.q.shape[-1] // self.heads

    @property
    def is_self_attention(self) -> bool:
        """Whether q and k have equally many tokens; joint text and video attention counts as self-attention."""
        return self.q.shape[self.token_dim] == self.k.shape[self.token_dim]

    @property
    def needs_gradient(self) -> bool:
        """Whether the host trains: a gradient is asked for, and quantised attention has none."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (self.q, self.k, self.v))

    @property
    def layout(self) -> str:
        """The layout in which the output needs no copy: "BHND" or "BNHD"."""
        return "BHND" if self.skip_output_reshape else "BNHD"

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as views in `layout`; raises ValueError when their sizes do not fit `heads`."""
        if self.skip_reshape:
            q, k, v = self.q, self.k, self.v
            return (q, k, v) if self.skip_output_reshape else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        q, k, v = self._split_heads()
        return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if self.skip_output_reshape else (q, k, v)

    def _split_heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, N, H * D) -> (B, N, H, D) for q, k and v; the number of key heads follows from D."""
        head_dim, rest = divmod(self.q.shape[-1], self.heads)
        if rest or head_dim == 0:
            raise ValueError(
                f"the last dimension of q must be a multiple of heads ({self.heads}), got {self.q.shape[-1]}"
            )
        for name, tensor in (("k", self.k), ("v", self.v)):
            if tensor.shape[-1] % head_dim:
                raise ValueError(
                    f"the last dimension of {name} must be a multiple of head_dim ({head_dim}), got {tensor.shape[-1]}"
                )
        return (
            self.q.unflatten(-1, (self.heads, head_dim)),
            self.k.unflatten(-1, (self.k.shape[-1] // head_dim, head_dim)),
            self.v.unflatten(-1, (self.v.shape[-1] // head_dim, head_dim)),
        )

    def mask_4d(self) -> torch.Tensor | None:
        """The mask with batch and head dimensions added as the host does: (…) -> (B | 1, H | 1, Nq | 1, Nkv | 1)."""
        if self.mask is None or self.mask.ndim == 4:
            return self.mask
        return self.mask[None, None] if self.mask.ndim == 2 else self.mask[:, None]

    def output(self, out: torch.Tensor) -> torch.Tensor:
        """An output in `layout` in the form that the caller expects: (B, N, H * D), or (B, H, N, D)."""
        return out if self.skip_output_reshape else out.flatten(2)
