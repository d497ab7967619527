"""The public attention call, which plans a call and runs the plan; and `explain`: which backends can run a call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, overload

import torch

from .autotune.auto_mode import with_mode
from .block_mask import BlockMask
from .call.signature import ANYONE, CallSignature, Routing
from .call.tensors import NO_TENSORS, OptionalTensors
from .call.validation import check_call, check_flags
from .dispatch import registry
from .dispatch.operators import has_observer, observed, without_gradient
from .dispatch.plan import Refusal, plan
from .options import AttentionOptions
from .sparsity.call_blocks import CallBlocks, add_tail_
from .sparsity.declared import Sparse


# For type checkers; `arguments` stands for the keyword arguments of the implementation below.
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False, **arguments: Any
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    sparse: Sparse | str | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    rotated_heads: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    **choices: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """SageAttention2: softmax(q k^T * scale + mask) v with quantized matrix products.

    Inference only: the op has no gradient. It never writes to the inputs. A NaN in the inputs gives NaN in the
    output; the quantized modes ignore NaN in keys that a mask hides from all queries.

    Args:
        q: (B, Hq, Nq, D), or (B, Nq, Hq, D) with layout "BNHD"; float16, bfloat16 or float32; any strides with a
            contiguous last dimension; D from 1 to 256.
        k, v: (B, Hkv, Nkv, D) in the same layout, dtype and device; Hq is a multiple of Hkv.
        attn_mask: bool (True = attend) or additive float, 2-D to 4-D, broadcast to (B, Hq, Nq, Nkv); it combines with
            `is_causal`. A row that attends to nothing gives zeros, and -inf in the LSE.
        block_mask: which blocks of keys each block of queries attends to (`BlockMask`), in addition to the mask and
            `is_causal`; None means all. In both layouts its lists have the shape (B, Hq, Tq, 1 + Tk). The call does not
            check their entries: it leaves out invalid ones, and flags them in `BlockMask.invalid`.
        sparse: the call finds and leaves out the key blocks that matter least (`Sparse`), up to a bound on each head's
            error or down to a share of the blocks; or the name of a level of the node, which takes no mask. None and
            "off" compute all. The call stays dense for fewer than 64 key blocks, or for unequal numbers of queries and
            keys. Not with block_mask, `is_causal`, mode "exact" or a mask that differs by query; not under a compiler.
        backend: a name from `explain`; None picks the first accelerated one that can run, else "reference".
        nonfinite: one int32 on q's device. The call sets it to 1 when an output value is NaN or infinite, and else
            leaves it unchanged, so that many calls can share it; no call waits for the device.
        rotated_heads: int32 (B, Hkv) on q's device, contiguous. With rotate="auto" the call writes 1 for each head that
            it rotates and 0 for the rest; with rotate="given" it rotates the heads whose entry is not 0, and takes no
            sample.
        options: the choices of `AttentionOptions`; None takes their defaults.
        choices: fields of `AttentionOptions` by name, which override `options`: mode="4b", return_lse=True.

    Returns:
        The output, a tensor in q's shape, layout and dtype; with `return_lse` a tuple of the output and the natural log
        of the sum of exponentials of the scaled, masked scores, (B, Hq, Nq) float32.

    Raises:
        TypeError: wrong types or dtypes, or an unknown option.
        ValueError: shapes, strides, devices or options that do not fit; the message names the argument.
        UnsupportedError: a ValueError that says why the requested backend cannot run this call.
    """
    optional = OptionalTensors.of(attn_mask, block_mask, nonfinite, rotated_heads)
    if backend is not None and not isinstance(backend, str):
        registry.get(backend)  # raises here, as neither the plan cache nor an operator takes such a value
    selection = None if sparse is None else Sparse.of(sparse)
    if selection is not None:
        chosen = options if type(options) is AttentionOptions and not choices else _options(options, choices)
        blocks = selection.blocks(q, k, v, chosen, optional)
        if blocks is not None and blocks.tail_lists is not None:
            return _with_tail(q, k, v, blocks, backend, optional, chosen)
        if blocks is not None:
            optional = optional._replace(block_mask=blocks.mask.lists)
    if has_observer(q, k, v, attn_mask):
        out, lse = observed(q, k, v, optional, backend, AttentionOptions.of(options, choices))
        return out if lse is None else (out, lse)
    chosen = options if type(options) is AttentionOptions and not choices else _options(options, choices)
    routing = ANYONE if backend is None else Routing(backend)
    signature = CallSignature.of(q, k, v, chosen, optional, routing)
    if optional is not NO_TENSORS:
        check_flags(optional, q.device)
    planned = plan(signature)
    if isinstance(planned, Refusal):
        planned.throw()
    out, lse = planned.run(q, k, v, optional)
    return out if lse is None else (out, lse)


def _with_tail(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: CallBlocks,
    backend: str | None,
    optional: OptionalTensors,
    options: AttentionOptions,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the active key blocks; the other blocks contribute by the means of their tokens."""
    nonfinite, scale = optional.nonfinite, q.shape[3] ** -0.5 if options.scale is None else options.scale
    with torch.no_grad():  # autograd would refuse to add the tail in place
        out, lse = attention(
            q,
            k,
            v,
            block_mask=blocks.mask,
            backend=backend,
            nonfinite=nonfinite,
            rotated_heads=optional.rotated_heads,
            options=options,
            return_lse=True,
        )
        add_tail_(blocks, q, k, v, out, lse, options.layout, scale, nonfinite)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        out, lse = without_gradient(out, lse, q, k, v)
    return (out, lse) if options.return_lse else out


def _options(options: AttentionOptions | None, choices: dict[str, Any]) -> AttentionOptions:
    """`AttentionOptions.of`, cached so that equal choices are checked once."""
    try:
        return _checked_options(options, **choices)
    except TypeError:  # a value is wrong or not hashable
        return AttentionOptions.of(options, choices)


# Typed, because 1 == True, and a flag of 1 is an error.
@lru_cache(maxsize=256, typed=True)
def _checked_options(options: AttentionOptions | None, /, **choices: Any) -> AttentionOptions:
    return AttentionOptions.of(options, choices)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    backend: str | None = None,
    rotated_heads: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    **choices: Any,
) -> dict[str, str | None]:
    """Which backends can run this call: name -> None if it can, else the reason, in order of preference.

    Raises the errors of `attention`, and ValueError for invalid entries of `block_mask`, a check that waits for the
    device.
    """
    optional = OptionalTensors.of(attn_mask, block_mask, None, rotated_heads)
    signature = CallSignature.of(q, k, v, AttentionOptions.of(options, choices), optional)
    check_call(signature)
    check_flags(optional, q.device)
    if block_mask is not None:
        block_mask.check()
    signature = with_mode(signature)
    if backend is None:
        return registry.explain(signature)
    return {backend: registry.get(backend).reason_against(signature)}
