"""What decides how an attention call is computed: all its arguments except the values in its tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..options import AttentionOptions
from .tensors import NO_TENSORS, OptionalTensors

# What a plan does with another package's faster attention: ignore it; name it in its reason; use it if it is no less
# exact than the mode; always use it. Each rule includes those before it.
PEER_RULES = IGNORED, NAMED, NO_LESS_EXACT, ANY = ("ignored", "named", "no less exact", "any")


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def contiguous(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> TensorForm:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return cls(shape, tuple(strides), dtype, device)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def require_tensors(q: object, k: object, v: object) -> None:
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"[SA-201] {name} must be a torch.Tensor, got {type(tensor).__name__}")


class Routing(NamedTuple):
    """Which backends may compute a call: the same for all calls of a node, of a patch or of a function.

    backend: the name of the backend that must serve the call; None takes the first that can.
    accelerated_only: with `backend` None, the reference is not a candidate.
    where_faster: an exact attention replaces a mode where it was measured to be faster; a call in mode "exact" is
        refused unless an exact attention was measured to be faster than ComfyUI's own.
    peers: one of PEER_RULES; in mode "exact" another package's attention is always ignored.
    own_is_torchs: the caller's own attention is torch's: with `where_faster` it gets the calls for which it is fastest.
    """

    backend: str | None = None
    accelerated_only: bool = False
    where_faster: bool = False
    peers: str = IGNORED
    own_is_torchs: bool = False


ANYONE = Routing()


class CallSignature(NamedTuple):
    """The key of the plan cache: calls of equal signatures are validated, decided and laid out once.

    The properties require a valid call (`validation.check_call`); a constraint may read all of them. Flags that a call
    may set are not part of the signature: they only add an address.

    options: the caller's, which may contain "auto". In a plan's own signature they are settled.
    """

    options: AttentionOptions
    routing: Routing
    q: TensorForm
    k: TensorForm
    v: TensorForm
    attn_mask: TensorForm | None = None
    block_mask: TensorForm | None = None
    rotated_heads: TensorForm | None = None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
        optional: OptionalTensors = NO_TENSORS,
        routing: Routing = ANYONE,
    ) -> CallSignature:
        """The signature of a call, which need not be valid; TypeError for an argument that is not a tensor."""
        try:
            return cls(
                options,
                routing,
                TensorForm(q.shape, q.stride(), q.dtype, q.device),
                TensorForm(k.shape, k.stride(), k.dtype, k.device),
                TensorForm(v.shape, v.stride(), v.dtype, v.device),
                None if optional.attn_mask is None else TensorForm.of(optional.attn_mask),
                None if optional.block_mask is None else TensorForm.of(optional.block_mask),
                None if optional.rotated_heads is None else TensorForm.of(optional.rotated_heads),
            )
        except (AttributeError, TypeError):
            require_tensors(q, k, v)
            raise

    @classmethod
    def minimal(cls, device: torch.device, options: AttentionOptions, routing: Routing = ANYONE) -> CallSignature:
        """A call that every kernel supports: if a backend refuses it, the cause is the machine or `options`."""
        sizes = {"B": 1, "H": 8, "N": 1024, "D": 128}
        shape = torch.Size(sizes[axis] for axis in options.layout)
        form = TensorForm.contiguous(shape, torch.float16, device)
        return cls(options, routing, form, form, form)

    @property
    def layout(self) -> str:
        return self.options.layout

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, None on other devices."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def q_heads(self) -> int:
        return self.q.shape[self.layout.index("H")]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[self.layout.index("H")]

    @property
    def q_length(self) -> int:
        return self.q.shape[self.layout.index("N")]

    @property
    def kv_length(self) -> int:
        return self.k.shape[self.layout.index("N")]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def mask_shape(self) -> tuple[int, ...] | None:
        mask = self.attn_mask
        return None if mask is None else (1,) * (4 - len(mask.shape)) + tuple(mask.shape)

    @property
    def mask_dtype(self) -> torch.dtype | None:
        return None if self.attn_mask is None else self.attn_mask.dtype

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.options.scale is None else self.options.scale

    @property
    def heads_first(self) -> bool:
        """Whether q's memory keeps the tokens of a head together; else it keeps the heads of a token together."""
        heads, tokens = self.layout.index("H"), self.layout.index("N")
        return bool(self.q.stride) and self.q.stride[heads] > self.q.stride[tokens]
