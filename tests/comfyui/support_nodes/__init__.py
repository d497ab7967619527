"""Nodes for these tests only: conditioning without a text encoder, other attention overrides, injected faults."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_management import InterruptProcessingException

from . import newer as newer
from . import sparse as sparse
from . import wan_wrapper as wan_wrapper
from .registered import COUNT, node
from .registered import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS

# MKL initializes its vector functions in a process's first call. If two threads make that call at once, one of them may
# compute its half less accurately, so the first sampling differs from the next. Here, one thread makes the call.
torch.exp(torch.zeros(1))


@node("TestRandomConditioning", "CONDITIONING", width=COUNT, tokens=COUNT, padded=COUNT, seed=COUNT)
def random_conditioning(width: int, tokens: int, padded: int, seed: int) -> Any:
    """A random text embedding; `padded` tokens at its end are masked out."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(1, tokens, width, generator=generator)
    options = {"pooled_output": torch.randn(1, 768, generator=generator)}
    if padded:
        mask = torch.ones(1, tokens, dtype=torch.long)
        mask[:, tokens - padded :] = 0
        options["attention_mask"] = mask
    return [[embedding, options]]


@node("TestHalvedAttention", "MODEL", model=("MODEL",))
def halved_attention(model: Any) -> Any:
    """Another pack's override: it computes every call with ComfyUI's attention and halves the output."""
    patched = model.clone()

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * func(*args, **kwargs)

    patched.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override
    return patched


@node("TestHiddenAttention", "MODEL", model=("MODEL",))
def hidden_attention(model: Any) -> Any:
    """A model whose attention bypasses all overrides, as in models that do not use ComfyUI's hook."""
    patched = model.clone()

    def wrapper(apply_model: Any, arguments: Any) -> Any:
        options = dict(arguments["c"]["transformer_options"])
        del options["optimized_attention_override"]
        conditions = {**arguments["c"], "transformer_options": options}
        return apply_model(arguments["input"], arguments["timestep"], **conditions)

    patched.set_model_unet_function_wrapper(wrapper)
    return patched


@contextmanager
def changed_outputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """In the context, `change` replaces the output of every call of the pack's backends."""
    call_plan: Any = sys.modules["comfy_sage2.dispatch.plan"].CallPlan

    def changing(run: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if run is None:
            return None

        def changed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: Any, *more: Any) -> Any:
            result = run(q, k, v, optional, *more)
            out, *lse = result if isinstance(result, tuple) else (result,)
            out = change(out)
            if optional.nonfinite is not None and not out.isfinite().all():
                optional.nonfinite.fill_(1)
            return (out, *lse) if isinstance(result, tuple) else out

        return changed

    def changing_attribute(name: str) -> property:
        return property(lambda plan: changing(vars(plan)[name]), lambda plan, run: vars(plan).update({name: run}))

    names = ("run", "run_reshaped")
    for name in names:
        setattr(call_plan, name, changing_attribute(name))
    try:
        yield
    finally:
        for name in names:
            delattr(call_plan, name)


@node("TestFault", "MODEL", model=("MODEL",), kind=("STRING", {}), place=("STRING", {}), number=COUNT)
def fault(model: Any, kind: str, place: str, number: int) -> Any:
    """One attention call or one pass of the sampling fails as `kind` says. A new `number` avoids a cached result.

    If `place` is "every call of the backend", `kind` is a number, and all results of the backend are that number.
    """
    patched = model.clone()
    if kind == "none":
        return patched
    fail = failure(kind, AT_CALL if place != "model" else 1)
    if place == "every call of the backend":
        patched.add_wrapper_with_key("outer_sample", "testing", backend_wrapper(lambda out: out.fill_(float(kind))))
    elif place == "backend":
        patched.add_wrapper_with_key("outer_sample", "testing", backend_wrapper(fail))
    elif place == "model":

        def forward(executor: Any, *args: Any, **kwargs: Any) -> Any:
            return fail(executor(*args, **kwargs))

        patched.add_wrapper_with_key("diffusion_model", "testing", forward)
    else:
        options = patched.model_options["transformer_options"]
        previous = options["optimized_attention_override"]

        def override(func: Any, *args: Any, **kwargs: Any) -> Any:
            return previous(lambda *inner, **named: fail(func(*inner, **named)), *args, **kwargs)

        options["optimized_attention_override"] = override
    return patched


@node("TestGivenValue", "*", text=("STRING", {}))
def given_value(text: str) -> Any:
    """The value that the JSON in `text` gives. Its output can be linked to every input."""
    return json.loads(text)


AT_CALL = 5  # the second self-attention of the second step or pass


def failure(kind: str, at_call: int) -> Any:
    """A function that returns its argument, except that its call number `at_call` fails as `kind` says."""
    errors = {
        "RuntimeError": RuntimeError,
        "TypeError": TypeError,
        "KeyError": KeyError,
        "AttributeError": AttributeError,
        "out of memory": torch.OutOfMemoryError,
        "interrupt": InterruptProcessingException,
    }
    calls = 0

    def fail(out: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls != at_call:
            return out
        if kind in errors:
            raise errors[kind](f"injected {kind}")
        return out.clone().fill_(float(kind))

    return fail


def backend_wrapper(fail: Any) -> Any:
    """A wrapper of the sampling in which `fail` changes the results of the pack's backends."""

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with changed_outputs(fail):
            return executor(*args, **kwargs)

    return sample


@node("TestModelState", model=("MODEL",))
def model_state(model: Any) -> str:
    """Everything that a model carries besides its weights, as text: patches, options, wrappers, callbacks, hooks."""
    kept = ("patches", "object_patches", "model_options", "callbacks", "wrappers", "injections", "attachments",
            "additional_models", "hook_patches", "forced_hooks", "weight_wrapper_patches")  # fmt: skip
    state = {name: describe(getattr(model, name)) for name in kept if hasattr(model, name)}
    return json.dumps(state, sort_keys=True)


def describe(value: float) -> Any:
    """Containers and simple values as they are; of everything else the type, because addresses differ between runs."""
    if isinstance(value, dict):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [describe(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
