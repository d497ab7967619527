"""The patch of a diffusers Wan transformer: what it serves, what it leaves alone, and how it is undone."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from sequence_parallel.launch import start
from torch.nn import functional as F

from comfy_sage2 import Sparse
from comfy_sage2.backends.reference import ReferenceCall
from comfy_sage2.call.signature import ANY, IGNORED, NO_LESS_EXACT, CallSignature
from comfy_sage2.dispatch.plan import CallPlan, Refusal, plan
from comfy_sage2.integrations import diffusers
from comfy_sage2.integrations.diffusers import NOT_CALLED, patch
from comfy_sage2.options import EXACT, AttentionOptions
from comfy_sage2.sparsity import levels

pytestmark = [pytest.mark.torch_api, pytest.mark.slow]

LAYERS = 2


@pytest.fixture
def transformer() -> Any:
    torch.manual_seed(1)
    make: Any = WanTransformer3DModel  # has no annotations
    model = make(num_attention_heads=2, attention_head_dim=32, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=LAYERS)
    return model.eval().requires_grad_(False)


def run(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    latent = torch.randn(1, 16, 3, 16, 16, generator=generator)
    text = torch.randn(1, 16, 32, generator=generator)
    result: torch.Tensor = model(latent, torch.tensor([500.0]), text, return_dict=False)[0]
    return result


@pytest.mark.parametrize(("mode", "least"), [("8b", 0.999), ("4b", 0.99)])
def test_the_output_is_close_to_the_unpatched_one_but_not_equal(transformer: Any, mode: str, least: float) -> None:
    full = run(transformer)
    with patch(transformer, mode=mode, backend="reference") as patched:
        quantized = run(transformer)
    assert patched.calls == {"reference": 2 * LAYERS}  # self- and cross-attention of each layer
    assert not patched.fallbacks
    assert not torch.equal(quantized, full)
    assert F.cosine_similarity(quantized.flatten(), full.flatten(), dim=0) > least


def test_undo_restores_the_model(transformer: Any) -> None:
    full = run(transformer)
    patched = patch(transformer, backend="reference")
    patched.undo()
    patched.undo()
    assert torch.equal(run(transformer), full)
    assert not patched.calls
    assert all("forward" not in module.__dict__ for module in transformer.modules())


def test_an_error_in_the_block_undoes_the_patch(transformer: Any) -> None:
    with pytest.raises(KeyError), patch(transformer, backend="reference"):
        raise KeyError
    assert all("forward" not in module.__dict__ for module in transformer.modules())


def test_patches_must_be_undone_last_first(transformer: Any) -> None:
    first = patch(transformer, backend="reference")
    second = patch(transformer, mode="4b", backend="reference")
    with pytest.raises(RuntimeError, match="replaced after patch"):
        first.undo()
    second.undo()
    first.undo()
    assert all("forward" not in module.__dict__ for module in transformer.modules())


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerated backend may serve the calls here")
def test_a_copy_of_a_patched_model_computes_with_its_own_weights(transformer: Any) -> None:
    full = run(transformer)
    with patch(transformer, backend="reference") as patched:
        copied = copy.deepcopy(transformer)
        assert torch.equal(run(copied), run(transformer)) and patched.calls == {"reference": 4 * LAYERS}
        for parameter in transformer.parameters():
            parameter.mul_(2.0)
        assert F.cosine_similarity(run(copied).flatten(), full.flatten(), dim=0) > 0.999
    assert torch.equal(run(copied), full)  # the copy's attention is unpatched, too
    assert not torch.equal(run(transformer), full) and patched.calls == {"reference": 6 * LAYERS}


def test_the_latest_patch_serves(transformer: Any) -> None:
    """For example, a notebook cell that patches the model is run again."""
    with patch(transformer, mode="4b", backend="reference"):
        wanted = run(transformer)
    first = patch(transformer, backend="reference")
    with patch(transformer, mode="4b", backend="reference") as second:
        assert torch.equal(run(transformer), wanted)
        assert second.calls == {"reference": 2 * LAYERS} and not second.fallbacks and not first.calls
    run(transformer)
    assert first.calls == {"reference": 2 * LAYERS}


@pytest.mark.parametrize("below", ["a patch", "a method", "a partial"])
def test_a_copy_of_a_model_with_a_replaced_forward_uses_its_own_weights(transformer: Any, below: str) -> None:
    if below == "a patch":
        patch(transformer, backend="reference")
    for module in transformer.modules():
        if hasattr(module, "processor") and below != "a patch":
            bound = MethodType(type(module).forward, module)
            module.forward = bound if below == "a method" else partial(bound)
    with patch(transformer, backend="reference"):
        copied = copy.deepcopy(transformer)
        for block in copied.blocks:
            for parameter in (*block.attn1.parameters(), *block.attn2.parameters()):
                parameter.zero_()
        for block in copied.blocks:
            assert not block.attn1(torch.randn(1, 8, 64)).any()


def test_attention_outside_the_model_is_not_served(transformer: Any) -> None:
    q = torch.randn(1, 2, 32, 64)
    with patch(transformer, backend="reference") as patched:
        F.scaled_dot_product_attention(q, q, q)
    assert patched.summary() == "no attention call yet"


def test_processors_that_do_not_call_torchs_attention_are_reported(transformer: Any) -> None:
    transformer.set_attention_backend("_native_math")
    for module in transformer.modules():
        if hasattr(module, "processor"):
            module.processor = lambda attn, hidden_states, *rest: hidden_states
    with patch(transformer, backend="reference") as patched:
        run(transformer)
    assert patched.fallbacks == {NOT_CALLED: 2 * LAYERS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "2b"}, "mode must be one of '8b', '4b', "),
        ({"when": "never"}, "when must be one of 'where it is faster', 'always', "),
        ({"backend": "fast"}, "backend must be one of"),
        ({"rotate": "given"}, "rotate must be one of 'auto', 'on', 'off', got 'given'"),
    ],
)
def test_bad_options(transformer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch(transformer, **options)


def test_model_without_attention() -> None:
    with pytest.raises(ValueError, match=r"no attention modules .*`pipeline\.transformer`"):
        patch(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("target", [SimpleNamespace(transformer=torch.nn.Linear(2, 2)), None, "Wan"], ids=repr)
def test_a_target_that_is_no_module_is_refused(target: Any) -> None:
    """Users often pass a whole pipeline, so the error names the part to pass."""
    with pytest.raises(TypeError, match=r"got (SimpleNamespace|NoneType|str): .*`pipeline\.transformer`"):
        patch(target)


@pytest.fixture
def signatures(monkeypatch: pytest.MonkeyPatch) -> list[CallSignature]:
    """The signatures of the planned calls."""
    seen: list[CallSignature] = []

    def recording(signature: CallSignature) -> CallPlan | Refusal:
        seen.append(signature)
        return plan(signature)

    monkeypatch.setattr(diffusers, "plan", recording)
    return seen


AUTO = AttentionOptions("auto", pv_accumulator="auto")


@pytest.mark.parametrize(
    ("choices", "options", "where_faster", "peers"),
    [
        ({}, AUTO, True, NO_LESS_EXACT),
        ({"mode": "4b", "smooth_v": True}, replace(AUTO, mode="4b", smooth_v=True), True, NO_LESS_EXACT),
        ({"options": AttentionOptions(rotate="off")}, AttentionOptions(rotate="off"), True, NO_LESS_EXACT),
        ({"when": "always"}, AUTO, False, IGNORED),
        ({"when": "whatever is fastest"}, AUTO, True, ANY),
        ({"mode": EXACT}, replace(AUTO, mode=EXACT), False, NO_LESS_EXACT),
        ({"backend": "reference"}, AUTO, False, IGNORED),
    ],
    ids=str,
)
def test_options_and_routing_of_the_calls(
    transformer: Any,
    signatures: list[CallSignature],
    choices: dict[str, Any],
    options: AttentionOptions,
    where_faster: bool,
    peers: str,
) -> None:
    with patch(transformer, **choices) as patched:
        run(transformer)
    assert patched.options == options
    assert [signature.options for signature in signatures] == [options] * (2 * LAYERS)
    routings = {signature.routing for signature in signatures}
    assert {(routing.where_faster, routing.peers, routing.own_is_torchs) for routing in routings} == {
        (where_faster, peers, True)
    }


def test_the_gpu_is_timed_before_its_first_call(transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.device] = []
    monkeypatch.setattr(diffusers, "ensure_timed", timed.append)
    with patch(transformer) as patched:
        assert not timed
        run(transformer)
    assert set(timed) == {torch.device("cpu")}
    assert "auto, head_dim 32: 8b, as nothing was measured on this device" in patched.summary()


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_divided_model_gives_the_same_output(processes: int, tmp_path: Path) -> None:
    start(processes, "sequence_parallel.diffusers_worker", ["--device=cpu", "--backend=reference", f"--out={tmp_path}"])
    for rank in range(processes):
        outputs = load_file(tmp_path / f"rank{rank}.safetensors")
        counts = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert counts == {"calls": {"reference": 4}, "fallbacks": {}}  # self- and cross-attention of two layers
        quantization = (outputs["undivided"] - outputs["full"]).abs().mean()
        division = (outputs["divided"] - outputs["undivided"]).abs().mean()
        assert quantization > 0
        assert division < 0.1 * quantization


def test_sparse_self_attention_chooses_its_blocks_in_each_call(
    transformer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_patch = patch(transformer, backend="reference")
    dense = run(transformer)
    dense_patch.undo()
    monkeypatch.setattr(levels, "LEAST_BLOCKS", 1)  # the video has 192 tokens
    with patch(transformer, backend="reference", sparse=Sparse(share=0.5)) as patched:
        sparse = run(transformer)
    assert patched.calls == {"reference": LAYERS, "reference, sparse": LAYERS} and not patched.dense
    assert not torch.equal(sparse, dense)
    monkeypatch.setattr(Sparse, "blocks", _fails)
    with patch(transformer, backend="reference", sparse="draft 20 %") as patched:
        assert torch.equal(run(transformer), dense)
    assert patched.dense == {"no memory": LAYERS} and "computed all key blocks: no memory" in patched.summary()


def _fails(*args: Any) -> None:
    raise RuntimeError("no memory")


def test_a_call_whose_kernel_fails_goes_to_torch(transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full = run(transformer)
    monkeypatch.setattr(ReferenceCall, "compute", _fails)
    with patch(transformer, backend="reference") as patched:
        assert torch.equal(run(transformer), full)
    assert patched.fallbacks == {"[SA-310] the kernel failed: no memory": 2 * LAYERS} and not patched.calls


def test_short_calls_and_unknown_levels(transformer: Any) -> None:
    with patch(transformer, backend="reference", sparse="strong") as patched:
        run(transformer)
    assert patched.dense == {"[SA-215] this call is too short to save time": LAYERS}
    with pytest.raises(ValueError, match="sparse must be one of"):
        patch(transformer, sparse="draft")
    with patch(transformer, backend="reference", sparse="off") as patched:
        run(transformer)
    assert patched.calls == {"reference": 2 * LAYERS} and not patched.dense
