"""What decides how an attention call is computed: all of its arguments but the values in its tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .options import AttentionOptions
from .tensors import NO_TENSORS, OptionalTensors

# What becomes of a faster attention of another package: nobody looks for one; the plan names it in its reason; it takes
# the mode's place where it is no less exact; or wherever it is faster. Each includes those before it.
PEER_RULES = IGNORED, NAMED, NO_LESS_EXACT, ANY = ("ignored", "named", "no less exact", "any")


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """The form of `tensor`."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def contiguous(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> TensorForm:
        """The form of a contiguous tensor."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return cls(shape, tuple(strides), dtype, device)


def require_tensors(q: object, k: object, v: object) -> None:
    """Raise TypeError unless all three are tensors."""
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"[SA-201] {name} must be a torch.Tensor, got {type(tensor).__name__}")


class CallSignature(NamedTuple):
    """The key of the one cache of plans: calls of equal signatures are validated, decided and laid out once.

    Attributes:
        options: the caller's, in which pv_accumulator may still be "auto".
        backend: the name of the one that has to serve the call, or None: the first that can.
        accelerated_only: with `backend` None, the reference is no candidate.
        where_faster: an exact attention takes the place of a mode that it was measured to be faster than; a call in
            mode "exact" is refused unless one was measured to be faster than ComfyUI's own.
        own_is_torchs: the caller's own attention is torch's: with `where_faster`, calls are refused for which it was
            measured to be the fastest.
        peers: of PEER_RULES; in mode "exact" another package's attention is always ignored.
        q, k, v: in the layout of the options.
        attn_mask, block_mask: as in `OptionalTensors`, None where the call has none. The flags that a
            call may set are no part of it: whether there is one changes nothing but an address.
    """

    options: AttentionOptions
    backend: str | None
    accelerated_only: bool
    where_faster: bool
    q: TensorForm
    k: TensorForm
    v: TensorForm
    attn_mask: TensorForm | None = None
    block_mask: TensorForm | None = None
    peers: str = IGNORED
    own_is_torchs: bool = False

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
        optional: OptionalTensors = NO_TENSORS,
        *,
        backend: str | None = None,
        accelerated_only: bool = False,
        where_faster: bool = False,
        peers: str = IGNORED,
        own_is_torchs: bool = False,
    ) -> CallSignature:
        """The signature of a call, which need not be valid.

        Raises:
            TypeError: an argument is no tensor.
        """
        try:
            return cls(
                options,
                backend,
                accelerated_only,
                where_faster,
                TensorForm(q.shape, q.stride(), q.dtype, q.device),
                TensorForm(k.shape, k.stride(), k.dtype, k.device),
                TensorForm(v.shape, v.stride(), v.dtype, v.device),
                None if optional.attn_mask is None else TensorForm.of(optional.attn_mask),
                None if optional.block_mask is None else TensorForm.of(optional.block_mask),
                peers,
                own_is_torchs,
            )
        except (AttributeError, TypeError):
            require_tensors(q, k, v)
            raise

    @property
    def layout(self) -> str:
        """The order of the dimensions of q, k and v: "BHND" or "BNHD"."""
        return self.options.layout
