"""The nodes themselves, with a stand-in for ComfyUI's node API."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.integrations import diffusers

from .test_patch import Patcher

ROOT = Path(__file__).parents[3]


class Input:
    """An input of any type."""

    def __init__(self, id: str, io_type: str, **options: Any) -> None:
        self.id, self.io_type, self.options = id, io_type, options


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    description: str = ""
    hidden: list[Any] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    is_output_node: bool = False


class NodeOutput:
    def __init__(self, *values: Any, ui: Any = None) -> None:
        self.values, self.ui = values, ui


def io_type(name: str) -> Any:
    return SimpleNamespace(Input=lambda id, **options: Input(id, name, **options), Output=lambda **options: options)


class ComfyNode:
    hidden: Any = None


def modules() -> dict[str, ModuleType]:
    """What the nodes import of ComfyUI."""
    latest: Any = ModuleType("comfy_api.latest")
    types = {
        name: io_type(name.upper()) for name in ("Model", "Combo", "Boolean", "Float", "Latent", "Image", "String")
    }
    latest.io = SimpleNamespace(
        **types, ComfyNode=ComfyNode, NodeOutput=NodeOutput, Schema=Schema, Custom=io_type,
        Hidden=Enum("Hidden", ["unique_id", "extra_pnginfo", "dynprompt"]),
    )  # fmt: skip
    latest.ui = SimpleNamespace(PreviewImage=lambda *given, **options: SimpleNamespace(as_dict=lambda: {}))
    latest.ComfyExtension = object
    graph: Any = ModuleType("comfy_execution.graph_utils")
    graph.ExecutionBlocker = lambda message: "blocked"
    found = {"comfy_api.latest": latest, "comfy_execution.graph_utils": graph}
    return {**{name: ModuleType(name) for name in ("comfy_api", "comfy_execution")}, **found}


@pytest.fixture
def comfyui(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in list(sys.modules):
        if name.startswith("comfy_sage2.comfyui.nodes."):
            del sys.modules[name]


@pytest.fixture
def nodes(comfyui: None) -> Any:
    """The pack's module nodes.py."""
    spec = importlib.util.spec_from_file_location("nodes_of_the_pack", ROOT / "nodes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(node: Any, prompt: dict[str, Any] | None = None, **inputs: Any) -> NodeOutput:
    """A run of `node` with these inputs. prompt: the inputs that its prompt has; None: the same."""
    entry = {"inputs": inputs if prompt is None else prompt}
    dynprompt = SimpleNamespace(get_node=lambda number: {"7": entry}[number])
    hidden = SimpleNamespace(unique_id="7", extra_pnginfo=None, dynprompt=dynprompt)
    prepared: Any = type(node.__name__, (node,), {"hidden": hidden})
    output: NodeOutput = prepared.execute(**inputs)
    return output


def settings_of(output: NodeOutput) -> Settings:
    return sessions_of(output.values[0])[-1].dispatcher.settings


def shown(output: NodeOutput) -> str:
    (text,) = output.ui["text"]
    return str(text)


def defaults(node: Any) -> dict[str, Any]:
    """The values of a node as it is dragged in."""
    return {
        node_input.id: node_input.options["default"]
        for node_input in node.define_schema().inputs
        if "default" in node_input.options
    }


def test_one_set_of_defaults(nodes: Any) -> None:
    """A prompt with a model alone, the node as dragged in, both nodes so, and diffusers' patch."""
    model = Patcher()
    alone = settings_of(run(nodes.SageAttention2, model=model))
    dragged = settings_of(run(nodes.SageAttention2, model=model, **defaults(nodes.SageAttention2)))
    options = run(nodes.SageAttention2Options, **defaults(nodes.SageAttention2Options)).values[0]
    both = settings_of(run(nodes.SageAttention2, model=model, options=options))
    assert alone == dragged == both == Settings()
    module = torch.nn.Linear(1, 1)
    module.processor = object()  # type: ignore[assignment]
    with diffusers.patch(module) as patch:
        assert (patch.options, patch.when) == (Settings().options(Settings().mode), Settings().when)


def test_the_node_has_three_widgets_and_the_options_node_the_others(nodes: Any) -> None:
    ids = [node_input.id for node_input in nodes.SageAttention2.define_schema().inputs]
    assert ids == ["model", "mode", "smooth_v", "sparse", "options"]
    others = [node_input.id for node_input in nodes.SageAttention2Options.define_schema().inputs]
    assert {*ids[1:4], *others} == set(Settings.__dataclass_fields__) - {"notes"}
    for node in nodes.NODES:
        for node_input in node.define_schema().inputs:
            assert node_input.id == "model" or node_input.options["optional"], node_input.id


def test_values_of_both_nodes_reach_the_model(nodes: Any) -> None:
    options = run(nodes.SageAttention2Options, rotate="off", guard=False, backend="reference").values[0]
    output = run(nodes.SageAttention2, model=Patcher(), mode="4b", smooth_v=True, sparse="light", options=options)
    wanted = Settings("4b", smooth_v=True, sparse="light", rotate="off", guard=False, backend="reference")
    assert settings_of(output) == wanted


@pytest.mark.parametrize(
    ("inputs", "note"),
    [
        ({"policy": ["3", 0]}, "SageAttention2 has no input 'policy'; it was ignored"),
        ({"skip": "off", "guard": True}, "SageAttention2 has no inputs 'skip', 'guard'; they were ignored"),
        ({"x" * 1000: 1}, "SageAttention2 has no input 'xxx"),
    ],
    ids=["a link", "values", "a long name"],
)
def test_unknown_inputs_are_named_and_ignored(nodes: Any, inputs: dict[str, Any], note: str) -> None:
    """ComfyUI passes on what a link gives, and drops values."""
    linked = {name: object() for name, value in inputs.items() if isinstance(value, list)}
    output = run(nodes.SageAttention2, {"model": ["1", 0], **inputs}, model=Patcher(), mode="4b", **linked)
    (found,) = settings_of(output).notes
    assert found.startswith(note) and len(found) < 200 and found in shown(output)
    assert settings_of(output).mode == "4b"


def test_an_unknown_choice_marks_the_node_that_has_it_and_the_model(nodes: Any) -> None:
    options = run(nodes.SageAttention2Options, rotate="sometimes")
    assert shown(options).startswith("[SA-401] rotate 'sometimes' of this workflow is unknown, so auto is used")
    output = run(nodes.SageAttention2, model=Patcher(), mode="2b", options=options.values[0])
    assert settings_of(output).mode == "auto" and settings_of(output).rotate == "auto"
    assert "[SA-401] mode '2b' of this workflow is unknown, so auto is used" in shown(output)
    assert shown(options) in shown(output)


@pytest.mark.parametrize("value", [7, "8b", {}])
def test_a_link_of_a_wrong_type_is_refused(nodes: Any, value: object) -> None:
    with pytest.raises(ValueError, match=r"\[SA-401\] the input options must be the output of SageAttention2 Options"):
        run(nodes.SageAttention2, model=Patcher(), options=value)
    with pytest.raises(ValueError, match=r"\[SA-401\] the input model must be a model"):
        run(nodes.SageAttention2, model=value)


def test_steps_that_cannot_be_are_refused_by_the_node_that_has_them(nodes: Any) -> None:
    with pytest.raises(ValueError, match=r"\[SA-402\] 'start percent' \(start_percent\) must not be above"):
        run(nodes.SageAttention2Options, start_percent=0.9, end_percent=0.1)


def test_where_the_library_cannot_be_imported_the_nodes_keep_their_inputs_and_say_why(nodes: Any) -> None:
    from comfy_sage2.comfyui.nodes.unavailable import nodes_of

    standing_in = nodes_of(OSError("libtorch.so is missing"))
    for mine, other in zip(nodes.NODES, standing_in, strict=True):
        assert mine.__name__ == other.__name__
        one, two = mine.define_schema(), other.define_schema()
        assert one.node_id == two.node_id
        assert [vars(entry) for entry in one.inputs] == [vars(entry) for entry in two.inputs]
    node, options, report = standing_in
    assert run(node, model="the model", mode="8b").values == ("the model",)
    assert "[SA-111] comfy_sage2 could not be imported (OSError: libtorch.so is missing)" in shown(run(node, model=1))
    assert "SA-111" in shown(run(options, guard=True))
    samples, images, text, chart = run(report, model="the model", samples="latent").values
    assert (samples, images, chart) == ("latent", "blocked", "blocked") and "SA-111" in text
