"""SageAttention2 Auto Policy in real ComfyUI versions: measured once, rendered by the policy from the next run on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.policy.document import from_text
from tools.comfyui.server import ComfyServer, Prompt

from .installations import Installation
from .prompts import LATENT, REPORT, sampling, with_report

STEPS = 4
MEASURING, RENDERING = "calibration measured", "auto policy: by the policy"


def auto(name: str, **options: Any) -> Prompt:
    """The node under test, alone in a workflow as `name`: nodes of equal ids are the same node."""
    defaults = {
        "quality": "fast",
        "policy": "",
        "cost_limit": 500.0,
        "rotate": True,
        "backend": "reference",
        "measure_quality": False,
        "guard": False,
    }
    return {name: {"class_type": "SageAttention2AutoPolicy", "inputs": {"model": ["loader", 0], **defaults, **options}}}


def prompt(name: str, seed: int = 42, size: int = 128, steps: int = STEPS, **options: Any) -> Prompt:
    made = with_report(sampling("wan", auto(name, **options), steps=steps, seed=seed))
    made["empty"]["inputs"]["width"] = size
    return made


def said(server: ComfyServer, prompt: Prompt) -> str:
    """The report on a run."""
    text: str = server.run(prompt).outputs[REPORT]["text"][0]
    return text


def plain(server: ComfyServer, seed: int = 42) -> torch.Tensor:
    return server.latent(server.run(sampling("wan", steps=STEPS, seed=seed)), LATENT)


def test_the_same_prompt_measures_and_then_renders(server: ComfyServer) -> None:
    """ComfyUI would answer the second run from its cache, and the third one it does."""
    first, second, third = (server.run(prompt("same")) for _ in range(3))
    assert MEASURING in first.outputs[REPORT]["text"][0] and "From the next run on" not in first.outputs[LATENT]
    assert torch.equal(server.latent(first, LATENT), plain(server))  # full precision
    text = second.outputs[REPORT]["text"][0]
    assert RENDERING in text and "policy: fast" in text and MEASURING not in text, text
    assert not torch.equal(server.latent(second, LATENT), server.latent(first, LATENT))
    assert "next sampling is in full precision" in first.outputs["same"]["text"][0]
    assert "Renders by the policies" in second.outputs["same"]["text"][0]
    assert {"same", "sampler", REPORT} <= third.cached


def test_a_cached_node_renders_with_another_seed(server: ComfyServer) -> None:
    """Only the sampler runs again; the node learns of the policy all the same."""
    assert MEASURING in said(server, prompt("seeds", seed=1, cost_limit=400.0))
    assert RENDERING in said(server, prompt("seeds", seed=2, cost_limit=400.0))
    run = server.run(prompt("seeds", seed=3, cost_limit=400.0))
    assert "seeds" in run.cached and RENDERING in run.outputs[REPORT]["text"][0]


def test_another_size_or_quality(server: ComfyServer) -> None:
    assert MEASURING in said(server, prompt("sizes", cost_limit=300.0))
    assert MEASURING in said(server, prompt("sizes", cost_limit=300.0, size=192))
    assert "the size" in server.tail()
    assert RENDERING in said(server, prompt("sizes", cost_limit=300.0, size=192, seed=5))
    assert RENDERING in said(server, prompt("sizes", cost_limit=300.0, seed=5))  # both are known
    # Another quality is another choice from the same measurements.
    text = said(server, prompt("sizes", cost_limit=300.0, seed=5, quality="lossless"))
    assert RENDERING in text and "policy: lossless" in text


def test_two_nodes_in_one_workflow_do_not_mix(server: ComfyServer) -> None:
    """They have different settings; each measures, and each renders by its own."""

    def both() -> Prompt:
        made = prompt("one", cost_limit=250.0, rotate=True)
        made |= auto("two", cost_limit=250.0, rotate=False, quality="lossless")
        made["shift2"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["two", 0], "shift": 3.0}}
        made["sampler2"] = {
            "class_type": "KSampler",
            "inputs": {**made["sampler"]["inputs"], "model": ["shift2", 0]},
        }
        inputs = {"model": ["shift2", 0], "samples": ["sampler2", 0]}
        made["report2"] = {"class_type": "SageAttention2Report", "inputs": inputs}
        return made

    first = server.run(both())
    assert all(MEASURING in first.outputs[name]["text"][0] for name in (REPORT, "report2"))
    second = server.run(both())
    one, two = (second.outputs[name]["text"][0] for name in (REPORT, "report2"))
    assert RENDERING in one and "policy: fast" in one and "measured with rotate on" in one, one
    assert RENDERING in two and "policy: lossless" in two and "measured with rotate" not in two, two
    third = server.run(both())
    assert {"one", "two", "sampler", "sampler2"} <= third.cached


def test_a_kept_policy_renders_at_once(server: ComfyServer) -> None:
    """Its text is what the node gives after a run, and it travels with the workflow."""
    server.run(prompt("keeper", cost_limit=200.0))
    second = server.run(prompt("keeper", cost_limit=200.0))
    (text,) = second.outputs["keeper"]["policy"]
    assert from_text(text).target == "fast"
    fresh = server.run(prompt("elsewhere", cost_limit=201.0, policy=text))
    assert "kept in this workflow" in fresh.outputs[REPORT]["text"][0]
    assert torch.equal(server.latent(fresh, LATENT), server.latent(second, LATENT))


def test_a_kept_policy_of_another_model_is_measured_anew(server: ComfyServer) -> None:
    server.run(prompt("other", cost_limit=150.0))
    (text,) = server.run(prompt("other", cost_limit=150.0)).outputs["other"]["policy"]
    text = text.replace('"num_layers": 2', '"num_layers": 30')
    assert MEASURING in said(server, prompt("third", cost_limit=151.0, policy=text))
    assert "num_layers is 30 in the policy and 2 in the model" in server.tail()


@pytest.mark.parametrize("text", ["no policy", '{"schema": "something"}'])
def test_a_text_that_is_no_policy_is_refused(server: ComfyServer, text: str) -> None:
    with pytest.raises(RuntimeError, match="SA-50"):
        server.run(prompt("bad", policy=text))


def test_without_a_kernel_the_model_passes_through(server: ComfyServer) -> None:
    run = server.run(prompt("idle", backend="auto", seed=77))
    assert "passes through unchanged" in run.outputs["idle"]["text"][0]
    assert torch.equal(server.latent(run, LATENT), plain(server, 77))


def offered(server: ComfyServer, workflow: str, node: str) -> str:
    """The policy that the page of `workflow` can keep in its node of this number after the last run."""
    entries = server.get(f"/comfy_sage2/node_status?workflow={workflow}")
    return next((entry.get("policy", "") for entry in entries if entry["node"] == node), "")


def test_two_tabs_and_a_size_that_goes_back(server: ComfyServer, installation: Installation) -> None:
    """Two workflows with a node of the same number, and one of them that changes its size and back."""
    if not installation.is_newest:
        pytest.skip("older versions let no pack answer a page")
    small, large = (prompt("12", cost_limit=450.0, size=size) for size in (128, 192))
    assert MEASURING in server.run(small, workflow="tab-a").outputs[REPORT]["text"][0]
    first = offered(server, "tab-a", "12")
    assert from_text(first).target == "fast" and offered(server, "tab-b", "12") == ""
    run = server.run(large, workflow="tab-b")
    assert MEASURING in run.outputs[REPORT]["text"][0]
    other = offered(server, "tab-b", "12")
    assert other not in ("", first) and offered(server, "tab-a", "12") == first
    assert RENDERING in server.run(small, workflow="tab-a").outputs[REPORT]["text"][0]
    assert offered(server, "tab-a", "12") == first
    # The first tab takes the other size, whose measurements are known, and then its own again.
    large["sampler"]["inputs"]["seed"] = small["sampler"]["inputs"]["seed"] = 7
    assert RENDERING in server.run(large, workflow="tab-a").outputs[REPORT]["text"][0]
    assert offered(server, "tab-a", "12") == other
    assert RENDERING in server.run(small, workflow="tab-a").outputs[REPORT]["text"][0]
    assert offered(server, "tab-a", "12") == first
    assert offered(server, "tab-b", "12") == other


def test_prompts_that_wait_in_the_queue(server: ComfyServer) -> None:
    """Queued before the first one has measured; each is asked only when its turn comes."""
    same = [server.queue(prompt("queued", cost_limit=460.0, seed=seed)) for seed in (1, 2)]
    other = server.queue(prompt("queued", cost_limit=460.0, size=192, seed=1))
    again = server.queue(prompt("queued", cost_limit=460.0, seed=3))
    texts = [server.finished(number).outputs[REPORT]["text"][0] for number in (*same, other, again)]
    assert [MEASURING in text for text in texts] == [True, False, True, False], texts
    assert [RENDERING in text for text in texts] == [False, True, False, True], texts


def test_tabs_whose_prompts_wait_in_the_queue(server: ComfyServer, installation: Installation) -> None:
    """Two tabs with a node of the same number, both queued at once and twice: each can keep its own policy."""
    if not installation.is_newest:
        pytest.skip("older versions let no pack answer a page")
    tabs = [(tab, prompt("12", cost_limit=470.0, size=size)) for tab, size in (("queue-a", 128), ("queue-b", 192))]
    for expected in (MEASURING, RENDERING):
        numbers = [server.queue(made, workflow=tab) for tab, made in tabs]
        texts = [server.finished(number).outputs[REPORT]["text"][0] for number in numbers]
        assert all(expected in text for text in texts), texts
        a, b = (offered(server, tab, "12") for tab, _ in tabs)
        assert from_text(a).target == from_text(b).target == "fast" and a != b
        kept = [
            server.run(prompt("fresh", cost_limit=471.0, policy=text, size=size)) for text, size in ((a, 128), (b, 192))
        ]
        assert all("kept in this workflow" in run.outputs[REPORT]["text"][0] for run in kept)
