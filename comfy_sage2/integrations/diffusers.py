"""SageAttention2 for diffusers models: `patch(transformer)`.

The processors of diffusers' attention modules call torch's scaled_dot_product_attention. A patch wraps the forward of
each such module and serves the calls that are made inside it; it changes nothing outside the model.

There are two ways to see such a call. In eager mode a TorchFunctionMode around the forward intercepts torch's function
in this thread. A compiler cannot trace such a mode. While it traces the forward, another function therefore replaces
torch's own in torch's module; it puts one opaque operator into the graph, so that the graph does not break. The patch
decides and counts who serves the call when the compiled model runs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..autotune.auto_mode import auto_mode
from ..call.signature import ANY, IGNORED, NO_LESS_EXACT, CallSignature, Routing
from ..call.tensors import OptionalTensors, with_dense_rows
from ..dispatch import registry
from ..dispatch.operators import define, like_q, run, run_by_the_compiler
from ..dispatch.plan import CallPlan, Refusal, plan
from ..options import AUTO, EXACT, AttentionOptions, check_choice
from ..sparsity.call_blocks import run_sparse
from ..sparsity.declared import Sparse
from ..system.memory import is_out_of_memory
from ..text import error_text
from ..timing.measure import ensure_timed
from .torch_attention import CallTensors, autocast, fitted

NOT_CALLED = (
    "the attention module did not call scaled_dot_product_attention: set the model's attention backend to 'native'"
)
WHICH_MODEL = "pass a diffusers transformer or UNet, for example `pipeline.transformer`"
HEADS_DIFFER = "[SA-201] q and k have different head counts without enable_gqa"
DEFAULTS = AttentionOptions(mode=AUTO, pv_accumulator=AUTO)  # the same as for the SageAttention2 node
# `when` -> how to treat another package's attention that was measured to be faster: of `signature.PEER_RULES`.
WHERE_FASTER, ALWAYS = "where it is faster", "always"
_WHEN: Mapping[str, str] = {WHERE_FASTER: NO_LESS_EXACT, ALWAYS: IGNORED, "whatever is fastest": ANY}

# The keys are names, since the compiler may treat a number in a compiled model as a dynamic size.
_patches: WeakValueDictionary[str, Patch] = WeakValueDictionary()
_numbers = itertools.count()


class Patch:
    """Quantized attention in one model, from `patch` until `undo` or the end of a `with` block.

    Attributes:
        options: of all calls, except for what each call sets.
        calls: finished calls by backend name.
        fallbacks: calls left to torch's own attention, by reason in words. A call that a compiled graph always leaves
            to torch because of its form is counted when the graph is made.
        auto_modes: by head_dim, the mode that "auto" chose, and why.
        dense: self-attention calls that computed all key blocks in spite of `sparse`, by reason in words.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: AttentionOptions,
        when: str,
        backend: str | None,
        sparse: Sparse | None,
    ) -> None:
        self.options = options
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.auto_modes: dict[int, str] = {}
        self.dense: Counter[str] = Counter()
        self._sparse = sparse
        self._routing = Routing(
            backend,
            accelerated_only=backend is None,
            where_faster=backend is None and when != ALWAYS and options.mode != EXACT,
            peers=IGNORED if backend is not None or sparse is not None else _WHEN[when],
            own_is_torchs=True,
        )
        self._name = f"patch {next(_numbers)}"
        _patches[self._name] = self
        self._forwards: list[tuple[torch.nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []
        for module in model.modules():
            if hasattr(module, "processor") and not hasattr(module, "_orig_mod"):  # not the compiled wrapper around it
                # Another library's wrapper is an attribute of the instance too; the class's own forward is not.
                earlier = module.__dict__.get("forward")
                below: Any = MethodType(type(module).forward, module) if earlier is None else earlier
                while getattr(below, "is_of_a_patch", False):  # only the latest patch serves calls
                    below = below.args[0]
                # A partial, so that in a copy of the model it wraps the copy's forward.
                forward: Any = functools.update_wrapper(functools.partial(self._wrapper(), below), below)
                forward.is_of_a_patch = True
                self._forwards.append((module, forward, earlier))
                module.forward = forward
        if not self._forwards:
            raise ValueError(
                f"{type(model).__name__} has no attention modules (modules with a `processor`): {WHICH_MODEL}"
            )

    def undo(self) -> None:
        """Restore the attention of the model and its copies; RuntimeError if a later wrapper is still there."""
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

    def __exit__(self, *error: object) -> None:
        self.undo()

    def summary(self) -> str:
        """Calls by backend, fallbacks by reason, and the modes that "auto" chose, a line each."""
        lines = [f"{count} calls: {name}" for name, count in self.calls.most_common()]
        lines += [f"{count} calls left to torch: {reason}" for reason, count in self.fallbacks.most_common()]
        lines += [f"{count} calls computed all key blocks: {reason}" for reason, count in self.dense.most_common()]
        lines += [f"auto, head_dim {head_dim}: {reason}" for head_dim, reason in self.auto_modes.items()]
        return "\n".join(lines) or "no attention call yet"

    def _wrapper(self) -> Callable[..., Any]:
        def wrapper(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if not self._forwards:  # undone, and this is a copy of the model
                return forward(*args, **kwargs)
            if torch.compiler.is_compiling():
                return _traced(self._name, forward, args, kwargs)
            interceptor = _Interceptor(self)
            with interceptor:
                result = forward(*args, **kwargs)
            if not interceptor.was_called:
                self.fallbacks[NOT_CALLED] += 1
            return result

        return wrapper

    def count_fallback(self, reason: str) -> None:
        self.fallbacks[reason] += 1

    def planned(self, inputs: CallTensors, is_causal: bool, scale: float | None) -> torch.Tensor | None:
        """A backend's output for a call; None, with the reason counted, if torch has to compute it."""
        q, k, v = (with_dense_rows(tensor) for tensor in inputs[:3])
        ensure_timed(q.device)
        try:
            options = _call_options(self.options, is_causal, scale)
        except (TypeError, ValueError) as error:  # a scale that no kernel takes
            self.fallbacks[str(error)] += 1
            return None
        if options.mode == AUTO and q.shape[-1] not in self.auto_modes:
            self.auto_modes[q.shape[-1]] = auto_mode(options, q.device, q.dtype, q.shape[-1]).reason
        optional = OptionalTensors(inputs.mask)
        try:
            call_plan = plan(CallSignature.of(q, k, v, options, optional, self._routing))
            if isinstance(call_plan, Refusal):
                self.fallbacks[call_plan.reason] += 1
                return None
            sparse = self._attend_sparsely(call_plan, q, k, v, optional)
            out = run(call_plan, q, k, v, optional)[0] if sparse is None else sparse
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            self.fallbacks[f"[SA-310] the kernel failed: {error_text(error)}"] += 1
            return None
        self.calls[f"{call_plan.backend.name}{'' if sparse is None else ', sparse'}"] += 1
        return out

    def _attend_sparsely(
        self, dense: CallPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors
    ) -> torch.Tensor | None:
        """The output with the blocks that this call chooses; None, with the reason counted, if it must be dense."""
        if self._sparse is None or q.shape[2] != k.shape[2]:
            return None
        out: torch.Tensor | str = "[SA-215] this call is too short to save time"
        try:
            blocks = self._sparse.blocks(q, k, v, dense.options, optional)
            if blocks is not None:
                out = run_sparse(dense, blocks, q, k, v, optional)
        except (RuntimeError, ValueError) as error:
            out = error_text(error)
        if isinstance(out, str):
            self.dense[out] += 1
            return None
        return out


@functools.lru_cache(maxsize=256)
def _call_options(options: AttentionOptions, is_causal: bool, scale: float | None) -> AttentionOptions:
    return replace(options, is_causal=is_causal, scale=scale)


def _served(
    planned: Callable[[CallTensors, bool, float | None], torch.Tensor | None],
    count_fallback: Callable[[str], object],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """What `planned` returns for a call of torch's function; None, with a reason counted, if no plan can serve it."""
    inputs = autocast(CallTensors(query, key, value, attn_mask))
    fitting = fitted(inputs, dropout_p)
    if not isinstance(fitting, str) and fitting.q.shape[1] != fitting.k.shape[1] and not enable_gqa:
        fitting = HEADS_DIFFER
    if isinstance(fitting, str):
        count_fallback(fitting)
        return None
    out = planned(fitting, is_causal, scale)
    return None if out is None else out.reshape(inputs.q.shape)


class _Interceptor(TorchFunctionMode):
    """Passes the scaled_dot_product_attention calls of this thread to a patch."""

    def __init__(self, owner: Patch) -> None:
        super().__init__()
        self.was_called = False
        self._owner = owner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.was_called = True
            out = _served(self._owner.planned, self._owner.count_fallback, *args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


class _TracedAttention:
    """Replaces torch's function while a compiler traces a module, and puts an operator into the graph."""

    def __init__(self, name: str, original: Callable[..., Any]) -> None:
        self.was_called = False
        self._name = name
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        name = self._name
        out = _served(
            lambda inputs, is_causal, scale: _operator(*inputs, is_causal, scale, name),
            lambda reason: _count_compiled(name, reason),
            *args,
            **kwargs,
        )
        if out is not None:
            return out
        # Torch's own again: the class of a tensor may look up torch's attention in the module.
        F.scaled_dot_product_attention = self._original
        try:
            return self._original(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = self


def _traced(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the compiler traces for a module's forward: it traces the change of torch's module without making it.

    It cannot trace a TorchFunctionMode around tensor methods that are written in Python, such as unflatten.
    """
    original = F.scaled_dot_product_attention
    attention = _TracedAttention(name, original)
    F.scaled_dot_product_attention = attention
    try:
        result = forward(*args, **kwargs)
    finally:
        F.scaled_dot_product_attention = original
    if not attention.was_called:
        _count_compiled(name, NOT_CALLED)
    return result


def _count_compiled(name: str, reason: str) -> bool:
    owner = _patches.get(name)
    if owner is not None:
        owner.fallbacks[reason] += 1
    return True


run_by_the_compiler(_count_compiled)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    name: str,
) -> torch.Tensor:
    owner = _patches.get(name)
    # Without an owner the patch is gone, but a graph with its operator still runs.
    out = None if owner is None else owner.planned(CallTensors(q, k, v, mask), is_causal, scale)
    if out is None:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.contiguous()  # as `like_q` promises the compiler


_operator = define(
    "diffusers_attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, bool is_causal, float? scale, str name)"
    " -> Tensor",
    _run,
    like_q,
)


def patch(
    transformer: torch.nn.Module,
    *,
    when: str = WHERE_FASTER,
    backend: str | None = None,
    sparse: Sparse | str | None = None,
    options: AttentionOptions | None = None,
    **choices: Any,
) -> Patch:
    """Give a diffusers model SageAttention2 attention, in place.

    Made for WanTransformer3DModel; serves every model whose attention modules have a `processor` that calls
    scaled_dot_product_attention, as diffusers' "native" attention backend does. Calls that cannot be served go to torch
    and are counted with the reason. The model may be compiled after the patch, also with fullgraph=True and by
    compile_repeated_blocks; after `undo` it is compiled again.

    The defaults are those of the SageAttention2 node. A patch lacks the node's inputs `guard`, `apply_to` and the
    shares of the steps, because a call of diffusers does not tell its step and layer. The first call on a GPU times
    that GPU.

    Args:
        transformer: the model, for example `pipeline.transformer`.
        when: "where it is faster" leaves a call to an exact attention, or to another package's that is no less exact,
            if that was measured to be faster; "always" does not; "whatever is fastest" takes a less exact one too.
        backend: a name from `comfy_sage2.explain`, which serves all calls, whatever `when` says; None takes the first
            accelerated one that can run, and leaves the call to torch if there is none.
        sparse: as for `comfy_sage2.attention`. Each self-attention call chooses its own blocks, also in the first
            steps, where the node computes all of them. Text tokens need `Sparse.always`.
        options, choices: as for `comfy_sage2.attention`, except for what each call sets: mode="4b", smooth_v=True.
            Without `options`, mode and pv_accumulator are "auto".

    Returns:
        The patch: a context manager whose `undo` restores the model and whose `summary` says what ran.

    Raises:
        TypeError: `transformer` is no module, such as a whole pipeline, or an unknown option.
        ValueError: an unknown mode, `when` or backend, or a model without attention modules.
    """
    if not isinstance(transformer, torch.nn.Module):
        raise TypeError(f"transformer must be a torch.nn.Module, got {type(transformer).__name__}: {WHICH_MODEL}")
    chosen = AttentionOptions.of_model(DEFAULTS if options is None else options, choices)
    check_choice("when", when, _WHEN)
    if backend is not None:
        registry.get(backend)
    return Patch(transformer, chosen, when, backend, Sparse.of(sparse))
