"""Which tokens of a self-attention call do not belong to the image or video: text, sound, conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sparsity.always_computed import TokenRange

_VIDEO = "video"  # MiniMax H3's name for the tokens that become the video


@dataclass(frozen=True)
class TokenKinds:
    """What the inputs of a pass tell about the tokens of its self-attention calls.

    packed_length, packed_beside: the length of a packed sequence with known segments, and its ranges outside the video.
    beside: how many tokens of a joint sequence are text or other conditions that come as embeddings.
    """

    packed_length: int = 0
    packed_beside: tuple[TokenRange, ...] = ()
    beside: int = 0

    @classmethod
    def of(cls, inputs: Mapping[str, Any], *, cross_attends: bool) -> TokenKinds:
        """Read them from the model's inputs by name. cross_attends: text enters through cross-attention."""
        payload = inputs.get("minimax_payload")
        layout = payload.get("layout") if isinstance(payload, Mapping) else None
        segments = getattr(layout, "segments", None)
        if segments:
            beside_video = tuple((start, stop) for start, stop, kind in segments if kind != _VIDEO)
            return cls(max(stop for _, stop, _ in segments), beside_video)
        if cross_attends:
            return cls()
        embeddings = (value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() == 3)
        return cls(beside=sum(tensor.shape[1] for tensor in embeddings))

    def beside_picture(self, length: int) -> tuple[TokenRange, ...]:
        """The tokens of `length` outside the image. In a joint sequence both ends, as models do not tell which end."""
        if self.packed_length == length:
            return self.packed_beside
        if self.beside == 0:
            return ()
        beside = min(self.beside, length)
        return (0, beside), (length - beside, length)


ONE_KIND = TokenKinds()
