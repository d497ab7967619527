"""Attention calls through the override, with stand-ins for ComfyUI's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_pass
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision, Summary
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.selector import ModeSelector

REFERENCE = Decision("reference", AttentionOptions())
SIGMAS = [1.0, 0.75, 0.5, 0.25, 0.0]


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


def ones(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """ComfyUI's attention: recognizable, and as strict as ComfyUI about what must be forwarded."""
    assert kwargs["_inside_attn_wrapper"] and "transformer_options" in kwargs
    return torch.ones_like(q)


def qkv(length: int = 64, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, length, 128), torch.randn(1, keys or length, 128), torch.randn(1, keys or length, 128)


def node_session(
    settings: Settings,
    slot: int = 0,
    previous: Any = None,
    selector: ModeSelector | None = None,
    expected: Decision = REFERENCE,
) -> Session:
    """A session of the node with these settings, in no sampling yet."""
    return Session(Dispatcher(settings, expected, selector), slot, previous)


def session_with(previous: Any = None, slot: int = 0, **options: Any) -> Session:
    session = node_session(Settings(**{"backend": "reference", **options}), slot, previous)
    session.begin_sampling(SIGMAS)
    return session


def call(session: Session, *args: Any, sigma: float = 1.0, func: Any = ones, **kwargs: Any) -> torch.Tensor:
    """One attention call inside a forward pass at noise level `sigma`."""
    override = make_override(session)
    with model_pass.running(session.slot, session.begin_forward(sigma, torch.device("cpu"), {})):
        return override(func, *args, **kwargs, _inside_attn_wrapper=True, transformer_options={})


def reasons(summary: Summary) -> list[str]:
    return [share.decision.reason for share in summary.shares if share.decision.reason is not None]


class Executor:
    """What ComfyUI gives to a wrapper of a method: calls `method`, which is one of the object `class_obj`."""

    def __init__(self, method: Callable[..., Any], class_obj: object = None) -> None:
        self.method = method
        self.class_obj = class_obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)
