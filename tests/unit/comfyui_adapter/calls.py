"""Attention calls through the override, with stand-ins for ComfyUI's functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.autotune import store
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.backends.base import Backend, BoundCall, Constraint
from comfy_sage2.backends.reference import ReferenceBackend
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision, Summary
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.dispatch import registry
from comfy_sage2.options import AttentionOptions

REFERENCE = Decision("reference", AttentionOptions())
SIGMAS = [1.0, 0.75, 0.5, 0.25, 0.0]


Attention = Callable[..., torch.Tensor]


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    options: AttentionOptions,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    nonfinite: torch.Tensor | None = None,
    rotated_heads: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of the reference, even while `serve_by` replaces that backend."""
    optional = OptionalTensors.of(attn_mask, block_mask, nonfinite, rotated_heads)
    signature = CallSignature.of(q, k, v, options, optional)
    return ReferenceBackend().bind(signature).run(q, k, v, optional)[0]


class StandIn(ReferenceBackend):
    """A backend that computes its calls with `attention`, which has the parameters of `reference_attention`."""

    def __init__(self, attention: Attention, replaced: Backend) -> None:
        self.attention = attention
        self.constraints: tuple[Constraint, ...] = replaced.constraints

    def bind(self, signature: CallSignature) -> BoundCall:
        return _StandInCall(self.attention, signature.options)


class _StandInCall(BoundCall):
    def __init__(self, attention: Attention, options: AttentionOptions) -> None:
        self.attention, self.options = attention, options

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Any:
        mask = None if optional.block_mask is None else BlockMask(optional.block_mask, optional.invalid_blocks)
        keywords = {
            "attn_mask": optional.attn_mask,
            "block_mask": mask,
            "nonfinite": optional.nonfinite,
            "rotated_heads": optional.rotated_heads,
        }
        present = {name: value for name, value in keywords.items() if value is not None}
        return self.attention(q, k, v, options=self.options, **present), None


def serve_by(monkeypatch: pytest.MonkeyPatch, attention: Attention) -> None:
    """Make the backend "reference" compute its calls with `attention`; see `StandIn`."""
    backends = [
        StandIn(attention, backend) if backend.name == "reference" else backend for backend in registry.backends()
    ]
    monkeypatch.setattr(registry, "BACKENDS", tuple(backends))


def with_times(monkeypatch: pytest.MonkeyPatch, choices: TunedChoices | None) -> None:
    """Make `choices` the timings of every device; None: nothing was timed."""
    for module in ("dispatch.plan", "dispatch.registry", "autotune.auto_mode", "comfyui.session.dispatcher"):
        monkeypatch.setattr(f"comfy_sage2.{module}.choices_of", lambda device: choices or store.NOTHING_TIMED)
    store.changed()


def install_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> Any:
    """Install a module of ComfyUI with these members, in otherwise empty packages."""
    packages = name.split(".")[:-1]
    for count in range(1, len(packages) + 1):
        package = ".".join(packages[:count])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    module: Any = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    if packages:
        setattr(sys.modules[".".join(packages)], name.split(".")[-1], module)
    return module


class Container:
    """ComfyUI's single-owner tensor holder, as the override sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor

    def take(self) -> torch.Tensor:
        tensor, self.tensor = self.peek(), None
        return tensor


def added(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """An attention whose gradients are all ones."""
    return q + k + v


def ones(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """ComfyUI's attention: returns ones, and requires the arguments that an override must forward."""
    assert kwargs["_inside_attn_wrapper"] and "transformer_options" in kwargs
    return torch.ones_like(q)


def raising(error: Exception) -> Callable[..., Any]:
    """A function that raises `error`."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def qkv(length: int = 64, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, length, 128), torch.randn(1, keys or length, 128), torch.randn(1, keys or length, 128)


def settings(**options: Any) -> Settings:
    """Settings with the reference in 8b for every call and all other features off, except for `options`."""
    plain = {"mode": "8b", "backend": "reference", "when": ALWAYS, "rotate": "off", "guard": False}
    return Settings(**{**plain, **options})


def node_session(settings: Settings, slot: int = 0, previous: Any = None, expected: Decision = REFERENCE) -> Session:
    """A session of the node with these settings, before any sampling."""
    return Session(Dispatcher(settings, expected), slot, previous)


def session_with(previous: Any = None, slot: int = 0, *, measures_quality: bool = False, **options: Any) -> Session:
    session = node_session(settings(**options), slot, previous)
    session.begin_sampling(SIGMAS, measures_quality=measures_quality)
    return session


def call(session: Session, *args: Any, sigma: float = 1.0, func: Any = ones, **kwargs: Any) -> torch.Tensor:
    """One attention call inside a forward pass at noise level `sigma`."""
    override = make_override(session)
    with model_passes.running(session.slot, session.begin_pass(sigma, torch.device("cpu"), {})):
        return override(func, *args, **kwargs, _inside_attn_wrapper=True, transformer_options={})


def reasons(summary: Summary) -> list[str]:
    return [share.decision.reason for share in summary.shares if share.decision.reason is not None]


class Executor:
    """The executor that ComfyUI passes to a wrapper: it calls `method` of the object `class_obj`."""

    def __init__(self, method: Callable[..., Any], class_obj: object = None) -> None:
        self.method = method
        self.class_obj = class_obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


def guider_of(diffusion_model: Any = None, model_options: Any = None, object_patches: Any = None) -> Any:
    """A stand-in for ComfyUI's guider of a sampling with this model."""
    model = SimpleNamespace(diffusion_model=diffusion_model)
    patcher = SimpleNamespace(model=model, object_patches=object_patches or {})
    return SimpleNamespace(model_patcher=patcher, model_options=model_options or {})
