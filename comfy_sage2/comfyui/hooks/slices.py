"""Attention whose q, k and v are projected and quantized in slices of the tokens, so that they never exist as wholes.

ComfyUI's own function makes each slice: the module's forward runs on some of the tokens, with an override that takes q,
k and v and leaves by an exception. For the last slice the override returns the output of all tokens, which forward then
projects. This only relies on forward computing each token by itself before and after the attention, as it does in the
models named here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...backends.base import Slices
from ...dispatch.operators import has_observer
from ..adapter import packs, prefetched
from ..adapter.attention_call import OVERRIDE, AttentionCall, Fallback, Override
from ..session import model_passes
from ..session.session import Session
from . import forwards

SLICE_TOKENS = 4096
# Python module of a model's class -> its blocks' self-attention, called with x (N, C) or (B, N, C) and rope (1, N, …).
_ATTENTIONS = {"comfy.ldm.minimax.model": "attn", "comfy.ldm.wan.model": "self_attn"}
_BLOCKS = ("blocks", "vace_blocks")  # of a model; Wan's VACE blocks have as many tokens as the others

Take = Callable[[AttentionCall], torch.Tensor]
Part = Callable[[int, Take], torch.Tensor]  # computes the slice that begins at this token


class _Taken(Exception):
    """Leaves a forward function after its q, k and v were taken."""


@contextmanager
def slicing(session: Session, diffusion_model: Any) -> Iterator[None]:
    """Within the block, the model's attention modules run in slices if the session of their override allows it."""
    modules = () if session.compiled else _attention_modules(session, diffusion_model)
    with forwards.replaced({module: _in_slices(module) for module in modules}):
        yield


def blocks_of(model: Any) -> list[Any]:
    """The transformer blocks of a model that this module names."""
    return [block for name in _BLOCKS for block in getattr(model, name, ())]


def _attention_modules(session: Session, model: Any) -> Iterator[Any]:
    """The blocks' self-attention modules; none if another pack has replaced functions in them."""
    source = type(model).__module__
    if source not in _ATTENTIONS:
        return
    blocks = [block for block in blocks_of(model) if hasattr(block, _ATTENTIONS[source])]
    modules = [getattr(block, _ATTENTIONS[source]) for block in blocks]
    functions = packs.replaced_methods([*blocks, *modules])
    functions += [function for module in modules if (function := type(module).forward).__module__ != source]
    if not functions:
        yield from modules
    elif not hasattr(functions[0], "makes_slices"):  # another node of this pack slices them already
        session.note_whole(
            f"[SA-324] {packs.owner_of(functions[0])} has put a function of its own into the model's blocks"
        )


def _in_slices(module: Any) -> Callable[..., torch.Tensor]:
    whole: Callable[..., torch.Tensor] = module.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        options = kwargs.get("transformer_options") or {}
        session = getattr(options.get(OVERRIDE), "session", None)
        ropes = [*args, *(value for name, value in kwargs.items() if name != "transformer_options")]
        axis = x.dim() - 2
        tokens = x.shape[axis]
        is_long = tokens >= 2 * SLICE_TOKENS and _is_one_rope(ropes, tokens)
        # Patches receive the whole q and k.
        if session is None or not is_long or options.get("patches") or torch.compiler.is_compiling():
            return whole(x, *args, **kwargs)

        def part(start: int, take: Take) -> torch.Tensor:
            size = min(SLICE_TOKENS, tokens - start)
            x_slice, rope = x.narrow(axis, start, size), ropes[0].narrow(1, start, size)
            return whole(x_slice, rope, transformer_options={**options, OVERRIDE: _override(take)})

        def plain() -> torch.Tensor:
            without_override = {name: value for name, value in options.items() if name != OVERRIDE}
            return whole(x, ropes[0], transformer_options=without_override)

        projected = None
        if prefetched.may_be_called_again(module, x.dtype):
            key = id(module), x.shape, x.dtype
            projected = _projected(session, x.device, tokens, part, plain, options, key)
        else:
            session.note_whole("[SA-324] ComfyUI would add the LoRAs to weights in RAM once for each slice")
        return whole(x, *args, **kwargs) if projected is None else projected

    forward.makes_slices = True  # type: ignore[attr-defined]
    return forward


def _is_one_rope(ropes: list[Any], tokens: int) -> bool:
    """Whether the only argument besides x and the options is a rope for all tokens."""
    is_rope = len(ropes) == 1 and isinstance(ropes[0], torch.Tensor) and ropes[0].dim() > 1
    return is_rope and ropes[0].shape[1] == tokens


def _projected(
    session: Session,
    device: torch.device,
    tokens: int,
    part: Part,
    plain: Fallback,
    options: dict[str, Any],
    key: Hashable,
) -> torch.Tensor | None:
    """The module's output for all tokens, from calls of `part` for each slice; None if it must run on the whole."""
    model_pass = model_passes.current(session.slot)
    if model_pass is None or not session.takes_slices(model_pass, device, key):
        return None
    first = [_call(part, 0)]
    if has_observer(*first[0].tensors()):  # the stand-in for the whole call would hide a gradient
        session.note_whole("[SA-324] a gradient, a trace or a torch dispatch mode needs q, k and v of all tokens")
        return None
    one_token = (tensor.new_empty((*tensor.shape[:2], 1, tensor.shape[3])) for tensor in first[0].tensors("BHND"))
    q, k, v = (tensor.expand(-1, -1, tokens, -1) for tensor in one_token)  # the whole's shapes, without its memory
    whole = replace(first[0], q=q, k=k, v=v, skip_reshape=True)
    projected: list[torch.Tensor] = []

    def feed(slices: Slices) -> None:
        slices.add(*first.pop().tensors())
        last = (tokens - 1) // SLICE_TOKENS * SLICE_TOKENS
        for start in range(SLICE_TOKENS, last, SLICE_TOKENS):
            slices.add(*_call(part, start).tensors())

        def attend(call: AttentionCall) -> torch.Tensor:
            slices.add(*call.tensors())
            call.release()
            return call.output(slices.attend()[0])

        projected.append(part(last, attend))

    served = session.attend_slices(whole, model_pass, feed, plain, options, key)
    return projected[0] if served else None


def _call(part: Part, start: int) -> AttentionCall:
    """The attention call of the slice that begins at token `start`; its attention is not computed."""
    calls: list[AttentionCall] = []

    def take(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        raise _Taken

    try:
        part(start, take)
    except _Taken:
        return calls[0]
    raise RuntimeError("the attention module has not called its attention")


def _override(take: Take) -> Override:
    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        return take(AttentionCall.of(args, kwargs))

    def container_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        return take(AttentionCall.of((*(container.take() for container in args[:3]), *args[3:]), kwargs))

    override.container_function = container_function  # type: ignore[attr-defined]
    return override
