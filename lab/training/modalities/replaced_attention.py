"""Replaces the attention of models that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .transformer import AttentionFunction


class ReplacedAttention(TorchFunctionMode):
    """While it is entered, torch's scaled_dot_product_attention is ``attend``; ``calls`` counts how often that ran.

    Raises:
        ValueError: from the model's call, when it asks for more than plain attention.
    """

    def __init__(self, attend: AttentionFunction) -> None:
        super().__init__()
        self._attend = attend
        self.calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        asked = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) or value]
        if asked or len(args) != 3:
            raise ValueError(f"only plain attention can be replaced, the call has {len(args)} tensors and {asked}")
        self.calls += 1
        return self._attend(*args)
