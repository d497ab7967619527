"""ComfyUI's attention call: its argument forms, and its translation to the layouts of the attention API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from ...call.signature import CallSignature, Routing
from ...call.tensors import NO_TENSORS, NO_VALUES, OptionalTensors, overrides_torch, with_dense_rows
from ...options import AttentionOptions

Override = Callable[..., torch.Tensor]  # a node's replacement of an attention function
Fallback = Callable[[], torch.Tensor]

_POSITIONAL = 8  # ComfyUI's attention functions also accept the first eight fields below by position
OVERRIDE = "optimized_attention_override"  # the override's key in ComfyUI's `transformer_options`
INSIDE = "_inside_attn_wrapper"  # with this argument an attention function skips the override


@dataclass(eq=False)
class AttentionCall:
    """One call of ComfyUI's attention function; the fields have the names and the order of its arguments.

    Attributes:
        q, k, v: (B, N, H * D), or (B, H, N, D) with `skip_reshape`; k and v may have fewer heads with `enable_gqa`.
        mask: None, or bool (True = attend) or additive float; 2-D (Nq, Nkv), 3-D (B, Nq, Nkv) or 4-D (B, H, Nq, Nkv),
            each dimension may be 1.
        attn_precision: the dtype that the model requests for the scores; only ComfyUI's attention receives it.
        skip_output_reshape: the caller wants (B, H, N, D) back instead of (B, N, H * D).
        low_precision_attention: False if the model forbids quantized attention. With a mask, False only means that the
            model distrusts the mask support of another package's kernels: LTX sets it for its guides.
        unknown: names of the arguments that this adapter does not understand.
        declared: the attention, in words, that the model's file asks for and that serves the calls this node leaves.
        containers: the containers of q, k and v, if ComfyUI passes containers. Emptying one frees its tensor.
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
    low_precision_attention: bool = True
    unknown: tuple[str, ...] = ()
    declared: str | None = None
    containers: tuple[Any, ...] = ()
    _views: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    @classmethod
    def of_containers(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionCall:
        """Like `of`, for q, k and v in containers, which keep their tensors."""
        containers = args[:3]
        call = cls.of((*(container.peek() for container in containers), *args[3:]), kwargs)
        call.containers = containers
        return call

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionCall:
        """Bind what ComfyUI passed to an override; raises TypeError when q, k, v or heads are missing."""
        return _bound(*args, **kwargs)

    def keywords(self) -> dict[str, Any]:
        """The arguments after q, k, v and heads; omits default values of arguments that older ComfyUI versions lack."""
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
        if not self.low_precision_attention:
            keywords["low_precision_attention"] = False
        return keywords

    def values(self) -> list[Any]:
        """The values of ARGUMENTS; `AttentionCall(*values)` makes an equal call."""
        return [getattr(self, name) for name in ARGUMENTS]

    def release(self) -> None:
        """Drop the references to q, k and v, so that their other holders decide when the memory is freed."""
        del self.q, self.k, self.v
        self._views = None

    @property
    def is_released(self) -> bool:
        return not hasattr(self, "q")

    def empty_containers(self) -> None:
        """Empty the containers, as the caller expects. A released call cannot be computed any more after this."""
        for container in self.containers:
            container.tensor = None

    def signature(self, options: AttentionOptions, routing: Routing) -> CallSignature:
        """options: with the call's layout and scale. ValueError if the sizes do not fit `heads`."""
        mask = self.mask_4d()
        optional = NO_TENSORS if mask is None else OptionalTensors(mask)
        return CallSignature.of(*self.tensors(), options, optional, routing)

    @cached_property
    def form(self) -> CallForm:
        """The form that this call shares with calls whose arguments are equal, apart from the tensors' values."""
        q, k, v, mask = self.q, self.k, self.v, self.mask
        if not (type(q) is type(k) is type(v) is torch.Tensor and (mask is None or type(mask) is torch.Tensor)):
            return CallForm(self, is_repeatable=False)
        key: tuple[Any, ...] = (
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
            None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
            self.heads, self.skip_reshape, self.skip_output_reshape, self.scale, type(self.scale),
            self.enable_gqa, self.low_precision_attention, self.unknown, self.declared,
        )  # fmt: skip
        try:
            form = _forms.get(key)
        except TypeError:  # an unhashable argument
            return CallForm(self, is_repeatable=False)
        if form is None:
            if len(_forms) >= _MAX_FORMS:
                _forms.clear()  # calls keep the forms that they hold
            form = _forms[key] = CallForm(self, is_repeatable=True)
        return form

    @property
    def lengths(self) -> tuple[int, int]:
        tokens = 2 if self.skip_reshape else 1
        return self.q.shape[tokens], self.k.shape[tokens]

    @property
    def head_dim(self) -> int:
        """Channels of one query head. Meaningless if the sizes do not fit `heads`; `tensors` raises then."""
        return self.q.shape[-1] if self.skip_reshape else self.q.shape[-1] // self.heads

    @property
    def needs_gradient(self) -> bool:
        """Whether the call needs a gradient, as in training; quantized attention has none."""
        if not torch.is_grad_enabled():
            return False
        # A mask without values has no gradient, and torch 2.6 cannot read its requires_grad.
        masks = () if self.mask is None or overrides_torch(self.mask) else (self.mask,)
        return any(tensor.requires_grad for tensor in (self.q, self.k, self.v, *masks))

    @property
    def reason_against_quantizing(self) -> str | None:
        """Why ComfyUI's attention must compute the call on every machine, or None."""
        if self.unknown:
            return f"[SA-308] the model passes arguments that this version does not know: {', '.join(self.unknown)}"
        if not self.low_precision_attention and self.mask is None:
            return "[SA-306] the model asks for full precision here (low_precision_attention=False)"
        if self.needs_gradient:
            return "[SA-307] the call needs gradients, and quantized attention has none"
        if self.mask is not None and overrides_torch(self.mask):
            return NO_VALUES.format(type(self.mask).__name__)
        return None

    @property
    def layout(self) -> str:
        """The layout in which the output needs no copy: "BHND" or "BNHD"."""
        return "BHND" if self.skip_output_reshape else "BNHD"

    def tensors(self, layout: str | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v in `layout` (None: the call's own), views if possible; ValueError if sizes do not fit `heads`."""
        views = self._views
        if views is None:
            q, k, v = (self.q, self.k, self.v) if self.skip_reshape else self._split_heads()
            if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
                q, k, v = with_dense_rows(q), with_dense_rows(k), with_dense_rows(v)
            views = (q, k, v)
            if self.skip_reshape != self.skip_output_reshape:
                views = _transposed(views)
            self._views = views
        return views if layout is None or layout == self.layout else _transposed(views)

    def _split_heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, N, H * D) -> (B, N, H, D) for q, k and v; the number of key heads follows from D."""
        channels = self.q.shape[-1]
        head_dim = channels // self.heads
        if head_dim == 0 or channels != head_dim * self.heads:
            raise ValueError(
                f"[SA-210] the last dimension of q must be a multiple of heads ({self.heads}), got {channels}"
            )
        q = self.q.view(*self.q.shape[:-1], self.heads, head_dim)
        return q, _heads_of("k", self.k, head_dim), _heads_of("v", self.v, head_dim)

    def mask_4d(self) -> torch.Tensor | None:
        """A 2-D or 3-D mask with the dimensions that ComfyUI adds; other masks unchanged, for validation to check."""
        if self.mask is None or self.mask.ndim not in (2, 3):
            return self.mask
        return self.mask[None, None] if self.mask.ndim == 2 else self.mask[:, None]

    def as_bhnd(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.skip_output_reshape else out.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def output(self, out: torch.Tensor) -> torch.Tensor:
        """`out`, in the call's layout, in the shape that the caller expects: (B, N, H * D) or (B, H, N, D)."""
        return out if self.skip_output_reshape else out.flatten(2)

    def output_shape(self) -> tuple[int, ...]:
        """The shape of `output`, also while a compiler traces."""
        q_length, _ = self.lengths
        if self.skip_output_reshape:
            return (self.q.shape[0], self.heads, q_length, self.head_dim)
        return (self.q.shape[0], q_length, self.heads * self.head_dim)


class CallForm:
    """What calls with equal arguments share, whatever values their tensors hold. Compared by identity.

    is_repeatable: False for tensor subclasses and unhashable arguments: each such call has its own form.
    is_dense: the channels of q, k and v have stride 1, so that nothing has to be copied.
    """

    __slots__ = ("is_dense", "is_repeatable", "lengths", "output_shape")

    def __init__(self, call: AttentionCall, *, is_repeatable: bool) -> None:
        self.is_repeatable = is_repeatable
        self.lengths = call.lengths
        self.is_dense = call.q.stride(-1) == call.k.stride(-1) == call.v.stride(-1) == 1
        self.output_shape = call.output_shape()


# Threads may add and clear concurrently: if two make the same form, it is only decided twice.
_forms: dict[tuple[Any, ...], CallForm] = {}
_MAX_FORMS = 1024


def _bound(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    heads: Any = None,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: Any = False,
    skip_output_reshape: Any = False,
    *further: Any,
    scale: Any = None,
    enable_gqa: Any = False,
    low_precision_attention: Any = None,
    transformer_options: Any = None,
    preferred_attention: Any = None,
    _inside_attn_wrapper: Any = None,
    **unknown: Any,
) -> AttentionCall:
    """The call with these arguments; Python binds them faster than a loop does. Drops those without a meaning here.

    `preferred_attention` is what a model's file asks for; `declared_attention` reads it from the caller's frame.
    """
    names = tuple(unknown)
    if further:
        names += tuple([f"argument {_POSITIONAL + number + 1}" for number in range(len(further))])
    if q is None or k is None or v is None or heads is None:
        missing = [name for name, value in (("q", q), ("k", k), ("v", v), ("heads", heads)) if value is None]
        raise TypeError(f"[SA-210] the attention call lacks {', '.join(missing)}")
    call = AttentionCall(q, k, v, heads, mask, attn_precision, bool(skip_reshape), bool(skip_output_reshape), scale)
    call.enable_gqa, call.low_precision_attention = bool(enable_gqa), low_precision_attention is not False
    call.unknown = names
    return call


def _heads_of(name: str, tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """k or v as (B, N, H, D). Some models, such as Stable Diffusion 3, pass it so, together with q (B, N, H * D)."""
    *sizes, channels = tensor.shape
    if len(sizes) == 3 and channels == head_dim:
        return tensor
    if len(sizes) != 2 or channels % head_dim:
        raise ValueError(
            f"[SA-210] {name} must be (B, N, H * {head_dim}) or (B, N, H, {head_dim}), as q's head_dim is {head_dim}, "
            f"got shape {tuple(tensor.shape)}"
        )
    return tensor.view(*sizes, channels // head_dim, head_dim)


def _transposed(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = tensors
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


ARGUMENTS = tuple(
    field.name for field in fields(AttentionCall) if field.name not in ("unknown", "declared", "containers", "_views")
)


def comfyui_attention(name: str = "optimized_attention") -> Callable[..., torch.Tensor]:
    """ComfyUI's attention function `name`, or the one it chose at startup. INSIDE makes it skip the override."""
    from comfy.ldm.modules import attention

    function: Callable[..., torch.Tensor] = getattr(attention, name, attention.optimized_attention)
    return function
