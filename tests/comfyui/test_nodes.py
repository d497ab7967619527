"""The nodes in the graph: the report's outputs, caching, unknown and invalid inputs, tooltips and defaults."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.integrations.diffusers import patch
from tools.comfyui.server import ComfyServer, PromptRefused

from .prompts import LATENT, REPORT, sage, sampling, with_report

NODES = (
    "SageAttention2",
    "SageAttention2Options",
    "SageAttention2Report",
    "SageAttention2DemoCaption",
)


def info(server: ComfyServer, node: str) -> dict[str, Any]:
    result: dict[str, Any] = server.get(f"/object_info/{node}")[node]
    return result


def inputs(server: ComfyServer, node: str) -> dict[str, Any]:
    described = info(server, node)["input"]
    return {**described.get("required", {}), **described.get("optional", {})}


def picture(server: ComfyServer, shown: dict[str, str]) -> Image.Image:
    query = f"filename={shown['filename']}&subfolder={shown['subfolder']}&type={shown['type']}"
    return Image.open(io.BytesIO(server.get_bytes(f"/view?{query}")))


def test_report_text_and_picture_arrive(server: ComfyServer) -> None:
    run = server.run(with_report(sampling("wan", sage("loader"), seed=7), measure_quality=True))
    text = run.outputs[REPORT]["text"][0]
    assert "reference · 8b" in text and "cosine 0.99" in text, text
    assert text.splitlines()[0].startswith("No speed-up: the slow reference ran, not a GPU kernel"), text
    assert re.search(r" full precision \(0\.\d{4}; 1 is identical\)$", text.splitlines()[0]), text
    (shown,) = run.outputs[REPORT]["images"]
    image = picture(server, shown)
    assert 1.9 < image.width / image.height < 2.1
    assert len(image.convert("RGB").getcolors(maxcolors=1 << 20) or ()) > 20


def test_report_passes_samples_and_images_through(server: ComfyServer) -> None:
    prompt = with_report(sampling("wan", sage("loader"), seed=8))
    prompt["picture"] = {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 32, "batch_size": 1, "color": 255},
    }
    prompt[REPORT]["inputs"]["images"] = ["picture", 0]
    prompt["after"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": [REPORT, 0], "filename_prefix": "test/after"},
    }
    prompt["image"] = {"class_type": "PreviewImage", "inputs": {"images": [REPORT, 1]}}
    prompt["chart"] = {"class_type": "PreviewImage", "inputs": {"images": [REPORT, 3]}}
    run = server.run(prompt)
    assert server.latent(run, "after").equal(server.latent(run, LATENT))
    assert picture(server, run.outputs["image"]["images"][0]).size == (64, 32)
    assert picture(server, run.outputs["chart"]["images"][0]).size == (800, 400)


def test_report_on_a_model_without_the_node(server: ComfyServer) -> None:
    run = server.run(with_report(sampling("wan", seed=9)))
    assert "did not go through a SageAttention2 node" in run.outputs[REPORT]["text"][0]


def test_second_run_comes_from_the_cache(server: ComfyServer) -> None:
    prompt = with_report(sampling("wan", sage("loader"), seed=10))
    assert REPORT not in server.run(prompt).cached
    assert {"sage", "sampler", REPORT} <= server.run(prompt).cached


def test_choices_are_the_same_on_every_machine(server: ComfyServer) -> None:
    both = {**inputs(server, "SageAttention2"), **inputs(server, "SageAttention2Options")}
    choices = {name: spec[1].get("options", spec[0]) for name, spec in both.items()}
    assert choices["mode"] == ["auto", "8b", "4b", "precise", "exact", "off"]
    assert choices["sparse"] == ["off", "light", "medium", "strong", "draft 20 %", "draft 10 %"]
    assert choices["when"] == ["where it is faster", "always", "whatever is fastest"]
    assert choices["apply_to"] == ["self and cross", "self only"]
    assert choices["rotate"] == ["auto", "on", "off"]
    assert choices["backend"] == ["auto", "reference", "auto or reference"]


def test_a_prompt_with_only_a_model_uses_the_defaults(server: ComfyServer) -> None:
    node = {"class_type": "SageAttention2", "inputs": {"model": ["loader", 0]}}
    plain = server.run(sampling("wan", {"sage": node}, steps=1)).outputs["sage"]["text"]
    options = {"class_type": "SageAttention2Options", "inputs": {}}
    explicit = {"class_type": "SageAttention2", "inputs": {"model": ["loader", 0], "options": ["options", 0]}}
    chain = {"options": options, "sage": explicit}
    assert server.run(sampling("wan", chain, steps=1)).outputs["sage"]["text"] == plain


def test_unknown_inputs_are_named(server: ComfyServer) -> None:
    """Prompts of other versions have unknown values and links."""
    prompt = with_report(sampling("wan", sage("loader"), steps=1))
    prompt["sage"]["inputs"] |= {"tiles": 16, "guide": ["positive", 0]}
    prompt["sage_options"]["inputs"]["level"] = "high"
    outputs = server.run(prompt).outputs
    lines = ["SageAttention2 has no inputs 'guide', 'tiles'; they were ignored"]
    lines += ["SageAttention2 Options has no input 'level'; it was ignored"]
    for text in (outputs["sage"]["text"][0], outputs[REPORT]["text"][0]):
        assert set(lines) <= set(text.splitlines()), text


def test_thousands_of_unknown_inputs_get_a_short_line(server: ComfyServer) -> None:
    prompt = sampling("wan", sage("loader"), steps=1)
    prompt["sage"]["inputs"] |= {f"{'x' * 1000}{number}": 1 for number in range(3000)}
    line = server.run(prompt).outputs["sage"]["text"][0].splitlines()[-1]
    assert line.endswith(" and 2980 others; they were ignored") and len(line) < 2000, line


def test_an_unknown_choice_becomes_the_default(server: ComfyServer) -> None:
    """The node, the report and the log each say so in one line."""
    mode = "8b\n\x1b[31mbroken\ud800" + "x" * 500
    run = server.run(with_report(sampling("wan", sage("loader", mode=mode), steps=1)))
    report = run.outputs[REPORT]["text"][0]
    for text in (run.outputs["sage"]["text"][0], report, server.log.read_text(errors="replace")):
        line = [line for line in text.splitlines() if "SA-401" in line][-1]
        assert r"[SA-401] mode '8b\n\x1b[31mbroken" in line and "is unknown, so auto is used" in line, line
        assert len(line) < 250, line
    assert "mode auto" in report


@pytest.mark.parametrize(
    ("first", "last", "words"), [(0.9, 0.1, "(start_percent) must not be above"), (-0.5, 1.0, "must be from 0 to 1")]
)
def test_an_impossible_range_of_steps_is_refused_before_the_run(
    server: ComfyServer, first: float, last: float, words: str
) -> None:
    """ComfyUI shows one error, in one sentence."""
    prompt = sampling("wan", sage("loader", start_percent=first, end_percent=last))
    with pytest.raises(PromptRefused) as refused:
        server.run(prompt)
    errors = json.loads(str(refused.value))["node_errors"]["sage_options"]["errors"]
    assert len(errors) == 1 and "[SA-402]" in errors[0]["details"] and words in errors[0]["details"], errors


def test_a_step_percent_from_another_node_is_checked_in_the_run(server: ComfyServer) -> None:
    """Its value is unknown before the run, so the node checks the range of steps when it runs."""
    prompt = sampling("wan", sage("loader", end_percent=0.4), steps=1)
    prompt["share"] = {"class_type": "PrimitiveFloat", "inputs": {"value": 0.25}}
    prompt["sage_options"]["inputs"]["start_percent"] = ["share", 0]
    server.run(prompt)
    prompt["share"]["inputs"]["value"] = 0.75
    with pytest.raises(RuntimeError, match="SA-402"):
        server.run(prompt)


def test_auto_or_reference_uses_the_reference_if_no_kernel_can_run(server: ComfyServer) -> None:
    run = server.run(with_report(sampling("wan", sage("loader", backend="auto or reference"), steps=1)))
    shown = run.outputs["sage"]["text"][0].splitlines()
    assert shown[0].startswith("The slow reference version computes the attention")
    assert "SA-10" in shown[1] and "The slow reference version runs instead of a kernel" in shown[1]
    assert "reference · 8b" in run.outputs[REPORT]["text"][0]


@pytest.mark.parametrize("node", NODES)
def test_every_input_and_output_has_a_tooltip(server: ComfyServer, node: str) -> None:
    assert all(spec[1].get("tooltip") for spec in inputs(server, node).values())
    assert [name for name, spec in inputs(server, node).items() if ";" in spec[1]["tooltip"]] == [], "whole sentences"
    assert all(info(server, node)["output_tooltips"])
    if node != "SageAttention2DemoCaption":  # the classic design shows two lines; Nodes 2.0 covers other nodes
        assert [name for name, spec in inputs(server, node).items() if len(spec[1]["tooltip"]) > 120] == []


def test_there_is_one_set_of_defaults(server: ComfyServer) -> None:
    """A new node, a prompt with only a model (it uses Settings' defaults) and a diffusers patch agree."""
    both = {**inputs(server, "SageAttention2"), **inputs(server, "SageAttention2Options")}
    new_node = {name: spec[1]["default"] for name, spec in both.items() if name not in ("model", "options")}
    assert new_node == {field.name: field.default for field in fields(Settings) if field.name != "notes"}
    for node in NODES[:2]:
        assert set(info(server, node)["input"].get("required", {})) <= {"model"}
    module, settings = torch.nn.Module(), Settings()
    module.processor = torch.nn.Identity()
    with patch(module) as patched:
        assert patched.options == settings.options(settings.mode)
    assert signature(patch).parameters["when"].default == settings.when


@pytest.mark.parametrize("node", NODES)
def test_input_names_have_no_underscores(server: ComfyServer, node: str) -> None:
    """The user sees an input's display_name, or else its name."""
    shown = {name: spec[1].get("display_name", name) for name, spec in inputs(server, node).items()}
    assert [name for name, words in shown.items() if "_" in words] == []


def test_the_server_returns_what_a_node_shows(server: ComfyServer) -> None:
    server.run(sampling("wan", sage("loader"), steps=1), workflow="asked for")
    (status,) = server.get("/comfy_sage2/node_status?workflow=asked+for")
    assert status["type"] == "SageAttention2" and status["badge"].endswith("8b reference · CPU")
    assert server.get("/comfy_sage2/node_status?workflow=another") == []


def test_the_log_says_at_startup_that_no_kernel_can_run(server: ComfyServer) -> None:
    assert server.log.read_text(errors="replace").count(": no kernel can run here: ") == 1
