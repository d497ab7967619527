"""The patch of a diffusers model under torch.compile: one operator per call, which decides at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention.bias import causal_upper_left

from comfy_sage2.integrations.diffusers import HEADS_DIFFER, NOT_CALLED, patch
from comfy_sage2.integrations.torch_attention import HAS_DROPOUT, IS_SPECIAL, NEEDS_DERIVATIVE

pytestmark = [pytest.mark.torch_api, pytest.mark.usefixtures("fresh_compiler")]

torchs = F.scaled_dot_product_attention
eager_and_compiled = pytest.mark.parametrize(
    "compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


def wan() -> Any:
    make: Any = WanTransformer3DModel
    model = make(num_attention_heads=2, attention_head_dim=32, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2)
    return model.eval().requires_grad_(False)


def run_wan(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    latent, text = (torch.randn(shape, generator=generator) for shape in ((1, 16, 2, 8, 8), (1, 16, 32)))
    out: torch.Tensor = model(latent, torch.tensor([500.0]), text, return_dict=False)[0]
    return out


@pytest.mark.slow
def test_one_graph_gives_the_results_of_the_eager_model() -> None:
    """Like inductor, this compiler backend uses the operator's schema and its fake results."""
    model = wan()
    with patch(model, backend="reference") as patched:
        eager = run_wan(model)
        calls = dict(patched.calls)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for turn in (1, 2):
            torch.testing.assert_close(run_wan(compiled), eager, rtol=1e-3, atol=1e-3)
            assert patched.calls == {"reference": (turn + 1) * calls["reference"]}, "each run counts"
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not patched.fallbacks
    assert F.scaled_dot_product_attention is torchs


@pytest.mark.slow
def test_repeated_blocks() -> None:
    """diffusers recommends compiling only the repeated blocks."""
    model = wan()
    with patch(model, backend="reference") as patched:
        eager = run_wan(model)
        calls = patched.calls["reference"]
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        torch.testing.assert_close(run_wan(model), eager, rtol=1e-3, atol=1e-3)
        assert patched.calls["reference"] == 2 * calls
    assert not counters["graph_break"]


def test_reasons_reach_the_summary() -> None:
    """No kernel can serve here. The operator decides that when the model runs, so the graph is the same."""
    model = Attention(attended)
    x = torch.randn(2, 4, 24, 32)
    full = model(x)
    with patch(model) as patched:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(x), full, atol=1e-4)
        if not torch.cuda.is_available():
            assert not patched.calls and "SA-103" in patched.summary() and sum(patched.fallbacks.values()) == 1


def test_undo_restores_a_compiled_model() -> None:
    model = Attention(attended)
    x = torch.randn(2, 4, 24, 32)
    full = model(x)
    compiled = torch.compile(model, backend="eager")
    patched = patch(model, backend="reference")
    assert not torch.equal(compiled(x), full)
    before = patched.calls.total()
    patched.undo()
    assert torch.equal(compiled(x), full)
    assert patched.calls.total() == before


def test_the_operators_fake_result_is_right_if_torch_computes() -> None:
    """The compiler assumes contiguous outputs. Torch computes here, because no patch is named "gone"."""
    q = torch.randn(1, 8, 2, 16).transpose(1, 2)
    operator = torch.ops.comfy_sage2.diffusers_attention.default
    torch.library.opcheck(operator, (q, q, q, None, False, None, "gone"), test_utils=("test_schema", "test_faketensor"))


class Attention(torch.nn.Module):
    """What the patch uses of a diffusers attention module; `call` stands in for the processor."""

    processor = None

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x) + 1


def attended(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


BIAS = causal_upper_left(24, 24)  # its memory is uninitialized
CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str | None]] = {
    "plain": (attended, None),
    "three dimensions": (lambda x: attended(x[0])[None], None),
    "names": (lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=None), None),
    "a mask": (lambda x: attended(x, attn_mask=torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()), None),
    "causal": (lambda x: attended(x, is_causal=True, scale=0.3), None),
    "grouped heads": (lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True), None),
    "heads that broadcast": (lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1]), HEADS_DIFFER),
    "strided": (lambda x: attended(x.mT.contiguous().mT), None),
    "dropout": (lambda x: attended(x, dropout_p=1e-9), HAS_DROPOUT),
    "another head_dim of v": (lambda x: F.scaled_dot_product_attention(x, x, x[..., :8]), "SA-201"),
    "not called": (lambda x: x * 2, NOT_CALLED),
    "a negative scale": (lambda x: attended(x, scale=-0.2), "SA-205"),
    "a causal bias": (lambda x: attended(x, attn_mask=BIAS), IS_SPECIAL),
}


@eager_and_compiled
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_form(name: str, compiles: bool) -> None:
    """Compiled with dynamic=True: the compiler treats every number as a dynamic size. A second patch works, too."""
    call, reason = CALLS[name]
    x = torch.randn(2, 4, 24, 32)
    for _ in range(2):
        model = Attention(call)
        wanted = model(x)
        with patch(model, backend="reference") as patched:
            out = (torch.compile(model, fullgraph=True, backend="eager", dynamic=True) if compiles else model)(x)
        assert out.shape == wanted.shape
        assert float((out - wanted).abs().sum()) < 0.05 * float((wanted - 1).abs().sum())
        if reason is None:
            assert patched.calls == {"reference": 1} and not patched.fallbacks
        else:  # counted once per tracing; the compiler may trace several times
            assert not patched.calls and [reason in fallback for fallback in patched.fallbacks] == [True]


@eager_and_compiled
def test_torch_computes_gradients(compiles: bool) -> None:
    model = Attention(attended)
    x = torch.randn(2, 4, 24, 32, requires_grad=True)
    with patch(model, backend="reference") as patched:
        (torch.compile(model, fullgraph=True, backend="eager") if compiles else model)(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert patched.fallbacks == {NEEDS_DERIVATIVE: 1}


@eager_and_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_determines_the_output_dtype(compiles: bool, dtype: torch.dtype) -> None:
    """After a layer_norm, q and k are in float32 while v may have 16 bits."""
    model = Attention(lambda x: F.scaled_dot_product_attention(x, x, x.to(dtype)))
    x = torch.randn(2, 4, 24, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        with patch(model, backend="reference") as patched:
            out = (torch.compile(model, fullgraph=True, backend="eager") if compiles else model)(x)
    assert out.dtype == wanted.dtype == torch.bfloat16
    assert float((out - wanted).abs().sum()) < 0.05 * float((wanted - 1).abs().sum())
    assert patched.calls == {"reference": 1}


def test_a_graph_break_within_a_module_leaves_torch_as_it_was() -> None:
    def breaking(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        out = attended(x)
        torch._dynamo.graph_break()
        return attended(out)

    model = Attention(breaking)
    x = torch.randn(1, 2, 24, 32)
    wanted = model(x)
    with patch(model, backend="reference") as patched:
        out = torch.compile(model, backend="eager")(x)
    assert F.scaled_dot_product_attention is torchs
    assert float((out - wanted).abs().sum()) < 0.05 * float((wanted - 1).abs().sum())
    assert patched.calls == {"reference": 2}


def test_a_module_that_raises_leaves_torch_as_it_was() -> None:
    def raising(x: torch.Tensor) -> torch.Tensor:
        attended(x)
        raise ValueError("on purpose")

    model = Attention(raising)
    message = r"on purpose|dynamic_attributes"  # the latter is an error of torch 2.6's compiler
    with patch(model, backend="reference"), pytest.raises(Exception, match=message):
        torch.compile(model, backend="eager")(torch.randn(1, 2, 24, 32))
    assert F.scaled_dot_product_attention is torchs


def test_a_separately_compiled_attention_module_counts_once() -> None:
    model = wan()
    model.blocks[0].attn1 = torch.compile(model.blocks[0].attn1, backend="eager")
    with patch(model, backend="reference") as patched:
        run_wan(model)
    assert patched.calls == {"reference": 4} and not patched.fallbacks
