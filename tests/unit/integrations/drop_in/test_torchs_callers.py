"""`sageattn` in place of torch's scaled_dot_product_attention: it computes every call that torch accepts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.bias
from torch.nn import functional as F

from comfy_sage2 import attention
from comfy_sage2.integrations.sageattention import functions as typed
from comfy_sage2.integrations.sageattention import serving

pytestmark = [
    pytest.mark.torch_api,
    pytest.mark.usefixtures("reference", "fresh_seed"),
    pytest.mark.filterwarnings("ignore:.*vmap"),
]

functions: Any = typed  # the result is one tensor or two
REPOSITORY = Path(__file__).resolve().parents[4]
torchs: Any = F.scaled_dot_product_attention


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def random_mask(*shape: int) -> torch.Tensor:
    """A random bool mask that lets every query attend to the first key."""
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = True
    return mask


def is_close(out: torch.Tensor, wanted: torch.Tensor, most: float = 0.08) -> bool:
    out, wanted = out.detach(), wanted.detach()
    return out.shape == wanted.shape and float((out - wanted).abs().sum()) <= most * float(wanted.abs().sum())


q, k, v = random(2, 4, 9, 32), random(2, 4, 13, 32), random(2, 4, 13, 32)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "None by position": ((q, k, v, None), {}),
    "everything by position": ((q, k, v, None, 0.0, True), {}),
    "a mask by position": ((q, k, v, random_mask(9, 13)), {"scale": 0.1}),
    "names": ((), {"query": q, "key": k, "value": v, "attn_mask": random(4, 9, 13), "is_causal": False}),
    "some names": ((q, k), {"value": v}),
    "2-D": ((q[0, 0], k[0, 0], v[0, 0]), {}),
    "3-D": ((q[0], k[0], v[0]), {"attn_mask": random_mask(4, 9, 13)}),
    "3-D, a mask of 2": ((q[0], k[0], v[0], random_mask(9, 13)), {}),
    "5-D": ((q[None], k[None], v[None]), {}),
    "5-D, a mask of 5": ((q[None], k[None], v[None], random_mask(1, 2, 1, 9, 13)), {}),
    "6-D": ((q[None, None], k[None, None], v[None, None]), {"is_causal": True}),
    "head_dim 1 of v": ((q, k, random(2, 4, 13, 1)), {}),
    "heads that broadcast": ((q, k[:, :1], v[:, :1]), {}),
    "scale 0": ((q, k, v), {"scale": 0.0}),
    "5-D, no keys": ((q[None], k[None, :, :, :0], v[None, :, :, :0]), {}),
    "no batch": ((q[:0], k[:0], v[:0]), {}),
    "expanded rows": ((q[..., :1].expand(q.shape), k, v), {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("function", ["sageattn", "sageattn_qk_int8_pv_fp16_triton"])
def test_calls_in_torchs_form(name: str, function: str) -> None:
    args, kwargs = CALLS[name]
    assert is_close(getattr(functions, function)(*args, **kwargs), torchs(*args, **kwargs))
    assert len(serving.calls.lines()) <= 2, "one call, and at most one reason"


def test_most_forms_reach_a_kernel() -> None:
    for name in ("None by position", "a mask by position", "names", "2-D", "3-D", "5-D", "6-D", "expanded rows"):
        args, kwargs = CALLS[name]
        functions.sageattn(*args, **kwargs)
    assert serving.calls.lines() == ["Calls of sageattention since the start: 8 by reference, 8b"]


@pytest.mark.slow
def test_a_pack_that_replaced_torchs_function_before_the_import() -> None:
    """The replacement imports `sageattention` at its first call. Calls left to torch must not reach the replacement."""
    code = (
        "import torch\n"
        "from torch.nn import functional as F\n"
        "def replaced(*args, **options):\n"
        "    from comfy_sage2.integrations.sageattention.functions import sageattn\n"
        "    return sageattn(*args, **options)\n"
        "exact, F.scaled_dot_product_attention = F.scaled_dot_product_attention, replaced\n"
        "q = torch.randn(1, 2, 8, 300)\n"
        "torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), exact(q, q, q))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=300)


def test_all_eight_arguments_by_position() -> None:
    """torch takes the last two only by name, but a caller may pass them in torch's order."""
    grouped, mask = (q, k[:, :2], v[:, :2]), random_mask(9, 13)
    out = functions.sageattn(*grouped, mask, 0.0, False, 0.3, True)
    assert is_close(out, torchs(*grouped, mask, scale=0.3, enable_gqa=True))


def test_torch_computes_dropout() -> None:
    torch.manual_seed(3)
    wanted = torchs(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(functions.sageattn(q, k, v, None, 0.5), wanted)
    assert "SA-602" in serving.calls.lines()[1]


@pytest.mark.parametrize("number", [9, 12])
def test_too_many_arguments_are_named(number: int) -> None:
    with pytest.raises(TypeError, match="SA-602"):
        functions.sageattn(q, k, v, *[None] * (number - 3))


MODULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "decoder": lambda x: torch.nn.TransformerDecoderLayer(64, 4, batch_first=True, dropout=0.0).eval()(x, x),
    "encoder": lambda x: torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)(
        x, src_key_padding_mask=torch.arange(32).expand(2, 32) > 20
    ),
    "transformer": lambda x: torch.nn.Transformer(64, 4, 1, 1, 64, 0.0, batch_first=True)(x, x),
    "multihead": lambda x: torch.nn.MultiheadAttention(64, 4, batch_first=True)(x, x, x, need_weights=False)[0],
    "causal multihead": lambda x: torch.nn.MultiheadAttention(64, 4, batch_first=True)(
        x, x, x, need_weights=False, attn_mask=torch.ones(32, 32, dtype=torch.bool).triu(1), is_causal=True
    )[0],
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("trains", [False, True])
def test_torchs_own_modules(name: str, trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text encoders are such modules, and a pack that replaces torch's function must not break them."""
    x = random(2, 32, 64)
    outputs = []
    for function in (torchs, functions.sageattn):
        monkeypatch.setattr(F, "scaled_dot_product_attention", function)
        torch.manual_seed(1)
        with torch.set_grad_enabled(trains):
            outputs.append(MODULES[name](x))
        assert outputs[-1].requires_grad == trains
    assert is_close(outputs[1], outputs[0])
    assert serving.calls.lines(), "the module called the function"


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": -0.3}, {"dropout_p": 0.0, "scale": 0.2}], ids=str)
def test_nested_tensors_with_options(layout: torch.layout, options: dict[str, Any]) -> None:
    if layout == torch.jagged:
        nested = torch.nested.nested_tensor([random(5, 4, 32), random(9, 4, 32)], layout=layout).transpose(1, 2)
    else:
        nested = torch.nested.nested_tensor([random(4, 5, 32), random(4, 9, 32)])
    out, wanted = functions.sageattn(nested, nested, nested, None, **options), torchs(nested, nested, nested, **options)
    for mine, theirs in zip(out.unbind(), wanted.unbind(), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    with pytest.raises(TypeError, match="return_lse q must be a plain dense tensor"):
        functions.sageattn(nested, nested, nested, return_lse=True)


@pytest.mark.parametrize("sizes", [(9, 13), (13, 13)], ids=str)
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_torchs_causal_bias(variant: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is uninitialized. Its class recognizes torch's attention by the attribute that `sageattn` replaced."""
    bias = getattr(torch.nn.attention.bias, variant)(*sizes)
    torch.Tensor.as_subclass(bias, torch.Tensor).fill_(torch.nan)  # the memory may hold anything
    queries = random(2, 4, sizes[0], 32)
    wanted = torchs(queries, k, v, bias._materialize())
    assert is_close(functions.sageattn(queries, k, v, bias), wanted)
    out, lse = functions.sageattn(queries, k, v, attn_mask=bias, return_lse=True)
    assert is_close(out, wanted) and lse.isfinite().all()
    monkeypatch.setattr(F, "scaled_dot_product_attention", functions.sageattn)
    assert is_close(F.scaled_dot_product_attention(queries, k, v, attn_mask=bias), wanted)
    with pytest.raises(ValueError, match="is_causal must be False with a CausalBias"):
        functions.sageattn(queries, k, v, bias, is_causal=True)


class OwnAttention(torch.Tensor):
    """A tensor class with its own attention."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torchs:
            return torch.full((1,), 7.0)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class NoAttention(torch.Tensor):
    """A tensor class without its own attention."""


def test_a_tensor_class_with_its_own_attention_computes_the_call() -> None:
    own: Any = q.as_subclass(OwnAttention)
    assert functions.sageattn(own, k, v).tolist() == functions.sageattn(q, own, own).tolist() == [7.0]
    assert is_close(functions.sageattn(q.as_subclass(NoAttention), k, v), torchs(q, k, v))
    served, special = serving.calls.lines()[:2]
    assert "1 by reference" in served and special.startswith(
        "  2 left to torch's attention: [SA-201] q, k and v must be"
    )


@pytest.mark.parametrize("wrong", [None, [1.0], "q"], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_argument_that_is_no_tensor_is_named(name: str, wrong: object) -> None:
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, name: wrong}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got {type(wrong).__name__}"):
        functions.sageattn(**tensors)
    starts = torch.tensor([0, 2])
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor"):
        functions.sageattn_varlen(**tensors, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.parametrize("mask", [[[1.0] * 13] * 9, 0.0, "mask"], ids=["list", "number", "text"])
def test_a_mask_that_is_no_tensor_is_named(mask: Any) -> None:
    with pytest.raises(TypeError, match=f"SA-204.*attn_mask must be a torch.Tensor or None, got {type(mask).__name__}"):
        functions.sageattn(q, k, v, attn_mask=mask)


def test_a_dropout_that_torch_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError):
        functions.sageattn(q, k, v, None, -0.5)


def test_torch_computes_meta_tensors() -> None:
    out = functions.sageattn(*(tensor.to("meta") for tensor in (q, k, v)))
    assert out.is_meta and out.shape == q.shape
    assert "SA-201" in serving.calls.lines()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["dropout", "head_dim of v", "batch of one", "gradient", "grouped, another head_dim", "scale"]
)
def test_torch_computes_calls_in_a_graph_of_dynamic_sizes(case: str) -> None:
    """Sizes are symbols there, and torch accepts no flag that is computed from them."""
    args: list[Any] = [random(2, 4, 9, 32), k, v, None]
    options: dict[str, Any] = {}
    if case == "dropout":
        options["dropout_p"] = 1.0
    elif case == "head_dim of v":
        args[2] = v[..., :8]
    elif case == "batch of one":
        args[0] = args[0][:1]
    elif case == "gradient":
        args[0].requires_grad_()
    elif case == "grouped, another head_dim":
        args[1], args[2], options["enable_gqa"] = k[:, :2], v[:, :2, :, :8], True
    else:
        options["scale"] = -0.1
    torch.compiler.reset()
    compiled: Any = torch.compile(functions.sageattn, backend="eager", fullgraph=True, dynamic=True)
    out, wanted = compiled(*args, **options), torchs(*args, **options)
    assert out.requires_grad == wanted.requires_grad
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("through", ["q", "k", "v", "attn_mask"])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"sm_scale": -0.1}, {"dropout_p": 0.5}], ids=str)
def test_forward_mode_derivatives_are_refused_as_by_attention(through: str, options: dict[str, Any]) -> None:
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "attn_mask": random(9, 13)}
    primal = tensors.pop(through)

    def out(tensor: torch.Tensor) -> Any:
        return functions.sageattn(**{through: tensor}, **tensors, **options)

    with pytest.raises(RuntimeError, match="SA-307"):
        torch.func.jvp(out, (primal,), (torch.ones_like(primal),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(primal, torch.ones_like(primal))
        with pytest.raises(RuntimeError, match="SA-307"):
            out(dual)
        with pytest.raises(RuntimeError, match="SA-307"):
            attention(**tensors, **{through: dual})
        out(primal)  # other tensors' derivatives do not matter to this call


@pytest.mark.parametrize("dtypes", [("f", "f", "b"), ("f", "f", "f"), ("b", "f", "b"), ("h", "f", "b")])
def test_the_output_dtype_under_autocast_is_torchs(dtypes: tuple[str, str, str]) -> None:
    """Under autocast, layer_norm leaves q and k in float32 while v has 16 bits."""
    names = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}
    args = [tensor.to(names[dtype]) for tensor, dtype in zip((q, k, v), dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        wanted, out = torchs(*args, random(9, 13) * 0), functions.sageattn(*args, random(9, 13) * 0)
        varlen = functions.sageattn_varlen(*(x[0].transpose(0, 1) for x in args), *[torch.tensor([0, 9])] * 2, 9, 9)
    assert out.dtype == wanted.dtype == varlen.dtype == torch.bfloat16
    assert is_close(out.float(), wanted.float())
    assert "reference, 8b" in serving.calls.lines()[0]
