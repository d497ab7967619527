"""Containers that a model passes, if another pack's attention comes after or before this node."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE, Override
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.watcher import watching
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session

from .calls import Container, ones, qkv, session_with

CPU = torch.device("cpu")


def test_containers_are_passed_on_and_freed() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def other(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("it takes containers")

    def container_function(q: Container, k: Container, v: Container, heads: int, **kwargs: Any) -> torch.Tensor:
        held.extend(weakref.ref(container.peek()) for container in (q, k, v))
        shape = q.take().shape
        k.take()
        v.take()
        gc.collect()
        assert not any(ref() is not None for ref in held), "nothing else refers to them"
        return torch.zeros(shape)

    other.container_function = container_function  # type: ignore[attr-defined]
    session, options = session_with(), {OVERRIDE: other}
    containers = tuple(map(Container, qkv()))
    with watching(session, options), model_passes.running(0, session.begin_pass(1.0, CPU, options)):
        out = options[OVERRIDE].container_function(*containers, 4, transformer_options=options)  # type: ignore[attr-defined]
    assert not out.any() and session.record.summary().calls == 1
    with watching(session, plain := {OVERRIDE: ones}):
        assert not hasattr(plain[OVERRIDE], "container_function")


def sparse(previous: Override, dense: bool, name: str = "/ComfyUI/comfy_extras/nodes_sparse_attention") -> Override:
    """An override like that of *Model Sparse Attention*, without container_function. dense: it passes the call on."""

    def override(func: Override, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any) -> Any:
        if dense:
            return previous(func, q, k, v, heads, **kwargs)
        return torch.full_like(q, 3.0)

    override.__module__ = name
    return override


class TestContainersWithSparseAttention:
    """*Model Sparse Attention* passes dense calls on to the node, which frees q, k and v as early as without it."""

    @pytest.fixture(autouse=True)
    def comfyui(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("comfy_sage2.comfyui.hooks.watcher", "comfy_sage2.comfyui.hooks.override"):
            monkeypatch.setattr(f"{module}.comfyui_attention", lambda: ones)

    def attend(
        self, session: Session, installed: Override, length: int = 64
    ) -> tuple[torch.Tensor, list[weakref.ref[torch.Tensor]], list[Container]]:
        tensors = list(qkv(length))
        seen = [weakref.ref(tensor) for tensor in tensors]
        containers = [Container(tensors.pop(0)) for _ in range(3)]
        options: dict[str, Any] = {OVERRIDE: installed}
        with (
            model_passes.running(0, session.begin_pass(1.0, CPU, options)),
            watching(session, options),
        ):
            out = options[OVERRIDE].container_function(
                *containers, 2, _inside_attn_wrapper=True, transformer_options=options
            )
        return out, seen, containers

    def test_the_node_gets_the_containers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = session_with()
        ours: Any = make_override(session)
        calls: list[tuple[Any, ...]] = []
        container_function = ours.container_function

        def recording(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return container_function(*args, **kwargs)

        ours.container_function = recording
        out, seen, containers = self.attend(session, sparse(ours, dense=True))
        received = [container for args in calls for container in args[:3]]
        assert received == containers and all(container.tensor is None for container in containers)
        summary = session.record.summary()
        assert [share.decision.backend for share in summary.shares] == ["reference"] and summary.calls == 1
        calls.clear()
        gc.collect()
        assert out.isfinite().all() and all(tensor() is None for tensor in seen)

    def test_sparse_attention_computes_its_sparse_calls(self) -> None:
        session = session_with()
        out, _, containers = self.attend(session, sparse(make_override(session), dense=False))
        assert torch.equal(out, torch.full_like(out, 3.0)) and all(container.tensor is None for container in containers)
        assert [share.decision.by for share in session.record.summary().shares] == ["ComfyUI's Model Sparse Attention"]

    @pytest.mark.parametrize("between", ["another pack", "another override"])
    def test_containers_do_not_reach_the_node_past_another_override(self, between: str) -> None:
        """Another override may change the node's output."""
        session = session_with()
        ours = make_override(session)
        installed = (
            sparse(ours, dense=True, name="custom_nodes.other")
            if between == "another pack"
            else sparse(lambda func, *args, **kwargs: 0.5 * ours(func, *args, **kwargs), dense=True)
        )
        with watching(session, options := {OVERRIDE: installed}):
            assert not hasattr(options[OVERRIDE], "container_function")

    def test_an_error_of_the_other_override_is_raised(self) -> None:
        session = session_with()
        ours = make_override(session)

        def failing(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise KeyError(str(ours))

        failing.__module__ = "comfy_extras.nodes_sparse_attention"
        with pytest.raises(KeyError):
            self.attend(session, failing)
        out, *_ = self.attend(session, sparse(ours, dense=True))
        assert out.isfinite().all(), "the node raises HandedBack only while the watcher runs the other override"
