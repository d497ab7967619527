"""The attention that a model's file declares, with a stand-in for the function of ComfyUI that calls overrides."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE
from comfy_sage2.comfyui.adapter.declared_attention import declared, declared_layers, of_caller
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import base_of, session_report, status
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session

from .calls import Container, install_module, qkv, session_with

INT8 = {"attention": "comfy_kitchen_int8"}
SOL = {"attention": "comfy_kitchen_sol", "tau": 1.0}
LISTED = "comfy_kitchen_sol (tau 1.0), else comfy_kitchen_int8"


class Child(torch.nn.Module):
    """The module that ComfyUI makes of a declaration; `function` returns sevens and records its calls."""

    def __init__(self, config: object, *, available: bool = True) -> None:
        super().__init__()
        self.config = config
        self.calls: list[dict[str, Any]] = []
        self.function: Callable[..., torch.Tensor] | None = self.sevens if available else None

    def sevens(self, q: Any, k: Any, v: Any, heads: int, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        self.calls.append(kwargs)
        q = q.take() if isinstance(q, Container) else q
        return torch.full_like(q, 7.0)


class Layer(torch.nn.Module):
    def __init__(self, child: Child) -> None:
        super().__init__()
        self.comfy_attention = child


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`comfy.ldm.modules.attention`: calls the override first, and does not show it the declared attention."""

    def wrap_attn(func: Any) -> Any:
        @functools.wraps(func)
        def asking(*args: Any, **kwargs: Any) -> Any:
            preferred_attention = kwargs.pop("preferred_attention", None)
            if "_inside_attn_wrapper" in kwargs:
                return func(*args, **kwargs)
            kwargs["_inside_attn_wrapper"] = True
            override = (kwargs.get("transformer_options") or {}).get(OVERRIDE)
            if override is not None and isinstance(args[0], Container):
                return override.container_function(*args, **kwargs)
            if override is not None:
                return override(func, *args, **kwargs)
            if preferred_attention is not None and preferred_attention.function is not None:
                return preferred_attention.function(*args, **kwargs)
            return func(*args, **kwargs)

        return asking

    @wrap_attn
    def optimized_attention(q: Any, k: Any, v: Any, heads: int, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        q = q.take() if isinstance(q, Container) else q
        return torch.ones_like(q)

    members = {"wrap_attn": wrap_attn, "optimized_attention": optimized_attention}
    return install_module(monkeypatch, "comfy.ldm.modules.attention", **members)


def model_of(*children: Child) -> Any:
    return types.SimpleNamespace(diffusion_model=torch.nn.Sequential(*(Layer(child) for child in children)))


def attend(
    host: Any,
    session: Session,
    child: Child | None,
    *,
    sigma: float = 1.0,
    contained: bool = False,
    front: Any = None,
    keys: int | None = None,
) -> torch.Tensor:
    """One call of a layer with this child.

    front: makes another pack's override, which calls the node's. keys: their number, if it differs from the queries'.
    """
    session.declared = declared_layers(model_of(*([] if child is None else [child])))
    override = make_override(session)
    options = {OVERRIDE: override if front is None else front(override)}
    tensors = [Container(tensor) if contained else tensor for tensor in qkv(keys=keys)]
    with model_passes.running(session.slot, session.begin_pass(sigma, torch.device("cpu"), options)):
        out: torch.Tensor = host.optimized_attention(
            *tensors, 2, transformer_options=options, preferred_attention=child
        )
    return out


def test_the_declared_attention_is_timed_in_its_own_layers(host: Any) -> None:
    """The second call of a form is timed."""
    child, session = Child(INT8), session_with()
    for of_call in (None, child, child):
        assert not child.calls
        attend(host, session, of_call)
    assert len(child.calls) == 1


@pytest.mark.parametrize("contained", [False, True], ids=["tensors", "containers"])
@pytest.mark.parametrize("config", [INT8, [SOL, INT8]], ids=["one", "list"])
@pytest.mark.parametrize(
    ("options", "served", "left", "code"),
    [
        ({"start_percent": 0.5}, {"sigma": 0.25}, {"sigma": 1.0}, "SA-302"),
        ({"apply_to": "self only"}, {}, {"keys": 24}, "SA-303"),
    ],
    ids=["steps", "cross-attention"],
)
def test_calls_that_the_node_leaves_go_to_the_declared_attention(
    host: Any,
    options: dict[str, Any],
    served: dict[str, Any],
    left: dict[str, Any],
    code: str,
    config: object,
    contained: bool,
) -> None:
    child, session = Child(config), session_with(**options)
    out = attend(host, session, child, **served, contained=contained)
    assert not child.calls and not torch.equal(out, torch.full_like(out, 7.0))
    out = attend(host, session, child, **left, contained=contained)
    assert torch.equal(out, torch.full_like(out, 7.0))
    assert len(child.calls) == 1 and OVERRIDE not in child.calls[0]["transformer_options"]
    by_kernel, by_file = (share.decision for share in session.record.summary().shares)
    assert by_kernel.by is None and by_file.by == ("comfy_kitchen_int8" if config is INT8 else LISTED)
    assert by_file.reason is not None and by_file.reason.startswith(f"[{code}]")


def test_the_declared_attention_is_found_through_another_packs_override(host: Any) -> None:
    def front(ours: Any) -> Any:
        return lambda func, *args, **kwargs: (lambda: ours(func, *args, **kwargs))()

    child = Child(INT8)
    attend(host, session_with(start_percent=0.5), child, front=front)
    assert len(child.calls) == 1


def test_an_earlier_node_goes_before_the_declared_attention(host: Any) -> None:
    """ComfyUI prefers an override, such as an earlier node's, to the declared attention."""
    child = Child(INT8)

    def twos(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = 2.0 * func(*args, **kwargs)
        return out

    session = session_with(twos, start_percent=0.5)
    out = attend(host, session, child)
    assert torch.equal(out, torch.full_like(out, 2.0)) and not child.calls
    assert "An attention node before this one replaces it." in status(session)


def test_the_models_own_attention_is_respected(host: Any) -> None:
    child, session = Child(INT8), session_with(respect_model_attention=True)
    out = attend(host, session, child)
    assert torch.equal(out, torch.full_like(out, 7.0))
    assert (session.record.summary().shares[0].decision.reason or "").startswith("[SA-321]")
    attend(host, session, None)
    assert session.record.summary().shares[0].decision.backend == "reference"


def test_the_report_names_the_declared_attention_and_the_comparison(host: Any) -> None:
    session = session_with(start_percent=0.5, measures_quality=True)
    for _ in range(2):
        attend(host, session, Child(INT8), sigma=0.25)
    attend(host, session, child := Child(INT8), sigma=1.0)
    session.end_sampling()
    text = session_report(session)
    assert "The model's file asks for comfy_kitchen_int8 in 1 attention layers. This node replaces it" in text
    assert "Left to comfy_kitchen_int8\n  1 calls" in text
    assert "whose time with the model's own attention (comfy_kitchen_int8) is known too" in text
    assert "Compared with full precision, not comfy_kitchen_int8, on samples:" in text
    assert len(child.calls) == 1


def test_the_status_says_that_the_device_lacks_the_attention(host: Any) -> None:
    session = session_with()
    session.declared = declared_layers(model_of(Child(INT8, available=False), Child(None)))
    assert not session.declared.served and session.declared.missing == {"comfy_kitchen_int8": 1}
    assert declared(Child(INT8, available=False)) is None
    assert "This device does not have it" in status(session)


def test_the_status_says_that_the_model_is_compiled(host: Any) -> None:
    session = session_with()
    session.declared, session.compiled = declared_layers(model_of(Child(INT8))), True
    assert "The model is compiled" in status(session) and not session.leaves_to_declared
    assert base_of(session) == "ComfyUI's attention", "times are compared with what gets the calls that are left"


def test_object_patches_replace_declarations(host: Any) -> None:
    """A LoRA may add such a patch, which ComfyUI applies when it loads the model."""
    layers = declared_layers(model_of(Child(INT8), Child(INT8)), {"diffusion_model.0.comfy_attention": Child([SOL])})
    assert layers.served == {"comfy_kitchen_int8": 1, "comfy_kitchen_sol (tau 1.0)": 1}


@pytest.mark.parametrize("config", [None, "int8", {}, {"attention": ""}, [], [3, {}], {"tau": 1.0}])
def test_configurations_that_name_no_attention(config: object) -> None:
    assert declared(Child(config)) is None


def test_long_texts_of_a_declaration_are_cut() -> None:
    declaration = declared(Child({"attention": "a" * 1000 + "\n"}))
    assert declaration is not None and len(declaration.label) == 60


def test_versions_of_comfyui_without_declarations(host: Any) -> None:
    def wrap_attn(func: Any) -> Any:
        return lambda *args, **kwargs: func(*args, **kwargs)

    host.wrap_attn = wrap_attn
    assert of_caller() is None
    del host.wrap_attn
    assert of_caller() is None
