"""SageAttention2 for diffusers models: `patch(transformer)`.

Attention modules of diffusers end, through their processors, in torch's scaled_dot_product_attention. A patch stands
around the forward of each such module and answers the calls made inside it; nothing outside the model is changed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import registry
from ..operators import run
from ..options import AttentionOptions, ModelChoices
from ..plan import Refusal, plan
from ..signature import CallSignature
from ..tensors import OptionalTensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

NOT_CALLED = (
    "the attention module did not call scaled_dot_product_attention: set the model's attention backend to 'native'"
)


class Patch:
    """Quantised attention in one model, from `patch` until `undo` or the end of a `with` block.

    calls: finished calls by backend name.
    fallbacks: calls left to torch's own attention, by reason in words.
    """

    def __init__(self, model: torch.nn.Module, options: AttentionOptions, backend: str | None) -> None:
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._options = options
        self._backend = backend
        self._forwards: list[tuple[torch.nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []
        for module in model.modules():
            if hasattr(module, "processor"):
                # Another library's wrapper lies in the instance too; the class's own forward does not.
                earlier = module.__dict__.get("forward")
                forward = self._answering(module.forward)
                self._forwards.append((module, forward, earlier))
                module.forward = forward
        if not self._forwards:
            raise ValueError(
                f"{type(model).__name__} has no attention modules (modules with a `processor`): "
                "pass a diffusers transformer or UNet, for example `pipeline.transformer`"
            )

    def undo(self) -> None:
        """Give the model its own attention back; a second call does nothing.

        RuntimeError when another library has wrapped an attention module's forward since: undo that first.
        """
        for module, forward, _ in self._forwards:
            if module.__dict__.get("forward") is not forward:
                raise RuntimeError(
                    f"cannot undo the patch of {type(module).__name__}: its forward was replaced after patch(); "
                    "undo the later change first"
                )
        for module, _, earlier in self._forwards:
            if earlier is None:
                del module.forward
            else:
                module.forward = earlier
        self._forwards = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def summary(self) -> str:
        """Calls by backend and fallbacks by reason, a line each."""
        lines = [f"{count} calls: {name}" for name, count in self.calls.most_common()]
        lines += [f"{count} calls left to torch: {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines) or "no attention call yet"

    def _answering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def answering(*args: Any, **kwargs: Any) -> Any:
            interceptor = _Interceptor(self)
            with interceptor:
                result = forward(*args, **kwargs)
            if not interceptor.asked:
                self.fallbacks[NOT_CALLED] += 1
            return result

        return answering

    def answer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        """The result of one scaled_dot_product_attention call, or None, counted, when torch has to compute it."""
        tensors = (query, key, value)
        if dropout_p > 0:
            reason = f"dropout_p must be 0, got {dropout_p}"
        elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            reason = "the call needs gradients, and quantised attention has none: use torch.no_grad()"
        elif not enable_gqa and query.shape[1] != key.shape[1]:
            reason = "q and k have different head counts without enable_gqa"
        else:
            return self._planned(tensors, attn_mask, is_causal, scale)
        self.fallbacks[reason] += 1
        return None

    def _planned(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor | None:
        """The result of a call by a backend, or None, counted, when no backend can compute it."""
        backend = self._backend
        try:
            options = replace(self._options, is_causal=is_causal, scale=scale)
            optional = OptionalTensors.of(attn_mask, None, None, None)
            signature = CallSignature.of(*tensors, options, optional, backend=backend, accelerated_only=backend is None)
        except (TypeError, ValueError) as error:
            self.fallbacks[str(error)] += 1
            return None
        found = plan(signature)
        if isinstance(found, Refusal):
            self.fallbacks[found.reason] += 1
            return None
        name = found.backend.name
        out, _ = run(found, *tensors, optional)
        self.calls[name] += 1
        return out


class _Interceptor(TorchFunctionMode):
    """Hands scaled_dot_product_attention calls of this thread to a patch."""

    def __init__(self, owner: Patch) -> None:
        super().__init__()
        self.asked = False
        self._owner = owner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.asked = True
            out = self._owner.answer(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


def patch(
    transformer: torch.nn.Module,
    *,
    backend: str | None = None,
    options: AttentionOptions | None = None,
    **choices: Unpack[ModelChoices],
) -> Patch:
    """Give a diffusers model SageAttention2 attention, in place.

    Made for WanTransformer3DModel; serves every model whose attention modules have a `processor` that calls
    scaled_dot_product_attention, as diffusers' "native" attention backend does. Calls that cannot be served go to torch
    and are counted with the reason.

    Args:
        transformer: the model, for example `pipeline.transformer`.
        backend: a name from `comfy_sage2.explain`; None takes the first accelerated one that can run, and leaves the
            call to torch when there is none.
        options, choices: as for `comfy_sage2.attention`, but for what each call decides: mode="4b", smooth_v=True.
            Without `options`, pv_accumulator is "auto".

    Returns:
        The patch: a context manager whose `undo` restores the model and whose `summary` says what ran.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown mode or backend, or a model without attention modules.
    """
    chosen = AttentionOptions.of_model(options or AttentionOptions(pv_accumulator="auto"), choices)
    if backend is not None:
        registry.get(backend)
    return Patch(transformer, chosen, backend)
