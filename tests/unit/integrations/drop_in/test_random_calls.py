"""Random calls of the dense functions against float64: none raises where torch would not, and none is wrong.

Slow: a few hundred calls. Exhaustive: 10,000.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from comfy_sage2.integrations.sageattention import functions as typed
from comfy_sage2.integrations.sageattention import serving

functions: Any = typed
torchs: Any = F.scaled_dot_product_attention
FUNCTIONS = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
]
MANY = 10_000
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# The kinds that a few hundred calls must contain. A kind that is never drawn is not tested.
KINDS = {
    "torch's order", "torch's names", "keywords", "NHD", "LSE", "causal", "mask of bool", "mask of float",
    "mask of 4", "mask of 2", "mask of 1", "grouped", "2-D", "3-D", "5-D", "strided", "expanded", "other head_dim of v",
    "large head_dim", "odd scale", "scale", "autocast", "gradient", "no queries", "no keys", "batches broadcast",
    "row without keys",
    *map(str, DTYPES),
    *FUNCTIONS,
}  # fmt: skip


@dataclass
class Draw:
    """A call: q, k and v of shape (…, H, N, D); kinds: its properties, in words."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    kinds: set[str] = field(default_factory=set)


def draw_call(chance: random.Random) -> Draw:
    kinds: set[str] = set()

    def happens(kind: str, probability: float) -> bool:
        if chance.random() < probability:
            kinds.add(kind)
        return kind in kinds

    dims = chance.choices([4, 3, 2, 5], [20, 2, 1, 1])[0]
    if dims != 4:
        kinds.add(f"{dims}-D")
    batch, heads = chance.choice([1, 1, 2, 3]), chance.choice([1, 2, 4])
    queries, keys = chance.choice([1, 2, 17, 64, 130]), chance.choice([1, 3, 40, 65, 129])
    if happens("no queries", 0.02):
        queries = 0
    if happens("no keys", 0.02):
        keys = 0
    head_dim = chance.choice([16, 32, 64, 72, 128])
    if happens("large head_dim", 0.04):
        head_dim = 264
    v_head_dim = 24 if happens("other head_dim of v", 0.04) else head_dim
    kv_heads = heads
    if dims in (4, 5) and heads > 1 and happens("grouped", 0.15):
        kv_heads = chance.choice([n for n in (1, 2) if n < heads])
    dtype = chance.choice(DTYPES[:3]) if chance.random() < 0.95 else torch.float64
    kinds.add(str(dtype))
    leading_sizes = {2: (), 3: (heads,), 4: (batch, heads), 5: (2, batch, heads)}[dims]
    kv_leading_sizes = leading_sizes if dims in (2, 3) else (*leading_sizes[:-1], kv_heads)
    q = torch.randn(*leading_sizes, queries, head_dim).to(dtype)
    k = torch.randn(*kv_leading_sizes, keys, head_dim).to(dtype)
    v = torch.randn(*kv_leading_sizes, keys, v_head_dim).to(dtype)
    if dims == 4 and batch > 1 and kv_heads == heads and queries and keys and happens("batches broadcast", 0.1):
        q = q[:1]
    options: dict[str, Any] = {}
    if happens("scale", 0.2):
        options["scale"] = chance.choice([0.05, 0.2, 1.0 / 3])
    elif happens("odd scale", 0.04):
        options["scale"] = chance.choice([0.0, -0.2])
    if happens("causal", 0.25):
        options["is_causal"] = True
    mask = None
    if chance.random() < 0.35:
        shapes: list[tuple[int, ...]] = [(queries, keys), (1, keys)]
        if dims == 4:
            shapes += [
                (q.shape[0], 1, queries, keys),
                (q.shape[0], heads, queries, keys),
                (1, 1, 1, keys),
                (heads, 1, keys),
            ]
        if not happens("gradient", 0):
            shapes += [(keys,)]
        shape = chance.choice(shapes)
        kinds.add(f"mask of {len(shape)}")
        mask = torch.rand(shape) < 0.7
        if len(shape) > 1 and queries > 2 and shape[-2] > 2 and happens("row without keys", 0.2):
            mask[..., 1, :] = False
        else:
            mask[..., :1] = True
        if happens("mask of float", 0.5):
            mask = torch.where(mask, torch.randn(shape), -torch.inf).to(dtype)
        else:
            kinds.add("mask of bool")
    if happens("strided", 0.1):
        q, k, v = (tensor.mT.contiguous().mT for tensor in (q, k, v))
    elif happens("expanded", 0.03):
        v = v[..., :1].expand(v.shape)
    return Draw(q, k, v, mask, options, kinds)


def exact(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and the magnitude to which errors are relative, from the definition in float64."""
    q, k, v = (tensor.detach().double() for tensor in (draw.q, draw.k, draw.v))
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (tensor.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for tensor in (k, v))
    scores = q @ k.mT * draw.options.get("scale", q.shape[-1] ** -0.5)
    if draw.mask is not None and draw.mask.dtype == torch.bool:
        scores = scores.masked_fill(~draw.mask, -torch.inf)
    elif draw.mask is not None:
        scores = scores + draw.mask.double()
    if draw.options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights @ v, lse, weights @ v.abs()


def call(draw: Draw, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output, (…, H, N, D), and the LSE if the call returns it."""
    name = chance.choice(FUNCTIONS)
    draw.kinds.add(name)
    function: Callable[..., Any] = getattr(functions, name)
    q, k, v, mask, options = draw.q, draw.k, draw.v, draw.mask, draw.options
    forms = ["torch's order", "torch's names", "keywords", *["LSE"] * 2]
    if q.dim() == 4:
        forms += ["NHD"] * 3
    form = chance.choice(forms)
    draw.kinds.add(form)
    more = {key: value for key, value in options.items() if key != "is_causal"}
    if form == "torch's order":
        is_grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
        return function(q, k, v, mask, 0.0, options.get("is_causal", False), **more, enable_gqa=is_grouped), None
    if form == "torch's names":
        return function(query=q, key=k, value=v, attn_mask=mask, **options), None
    if form == "keywords":
        return function(q, k, v=v, attn_mask=mask, smooth_k=True, **options), None
    if form == "LSE":
        out, lse = function(q, k, v, attn_mask=mask, return_lse=True, **options)
        return out, lse
    tensors = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    if chance.random() < 0.5:
        return function(*tensors, "NHD", attn_mask=mask, **options).transpose(1, 2), None
    draw.kinds.add("LSE")
    out, lse = function(*tensors, tensor_layout="NHD", attn_mask=mask, return_lse=True, **options)
    return out.transpose(1, 2), lse


def check_call(chance: random.Random) -> tuple[set[str], str]:
    """Draw and check one call; return its kinds, and what was wrong, if anything."""
    draw = draw_call(chance)
    casts = draw.q.dtype in (torch.float32, torch.bfloat16) and chance.random() < 0.1
    if casts:
        draw.kinds.add("autocast")
    needs_gradient = chance.random() < 0.06
    if needs_gradient:
        draw.kinds.add("gradient")
        draw.v = draw.v.detach().requires_grad_()
    wanted, lse, magnitude = exact(draw)
    described = f"{sorted(draw.kinds)} {tuple(draw.q.shape)} {tuple(draw.k.shape)} {draw.options}"
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            out, out_lse = call(draw, chance)
    except Exception as error:  # the test looks for every exception
        return draw.kinds, f"{described}: {type(error).__name__}: {error}"
    dtype = torch.bfloat16 if casts else draw.q.dtype
    wrong = differences(out, wanted, float(magnitude.sum()), dtype, needs_gradient)
    if out_lse is not None and not (
        out_lse.dtype == torch.float32 and torch.allclose(out_lse.detach().double(), lse, rtol=0.02, atol=0.3)
    ):
        wrong += f" an LSE of {out_lse.dtype} that is not the exact one"
    return draw.kinds, wrong and f"{described}:{wrong}"


def differences(
    out: torch.Tensor, wanted: torch.Tensor, magnitude: float, dtype: torch.dtype, needs_gradient: bool
) -> str:
    """What is wrong with an output, in words; empty if nothing is."""
    if out.shape != wanted.shape or out.dtype != dtype or out.requires_grad != needs_gradient:
        return f" {tuple(out.shape)} {out.dtype} requires_grad={out.requires_grad}"
    error = float((out.detach().double() - wanted).abs().sum())
    return "" if error <= 0.12 * magnitude + 1e-6 else f" a difference of {error} to values of {magnitude}"


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    "count", [pytest.param(400, marks=pytest.mark.slow), pytest.param(MANY, marks=pytest.mark.exhaustive)]
)
def test_random_calls(count: int) -> None:
    chance = random.Random(3)
    torch.manual_seed(3)
    seen: Counter[str] = Counter()
    problems = []
    for _ in range(count):
        kinds, wrong = check_call(chance)
        seen.update(kinds)
        problems += [wrong] if wrong else []
    assert not problems, "\n".join([f"{len(problems)} of {count}", *problems[:5]])
    assert seen.keys() >= KINDS, f"never drawn: {KINDS - seen.keys()}"
    served, *_ = serving.calls.lines()
    assert "by reference" in served and "by torch's attention" in served


@pytest.mark.slow
@pytest.mark.usefixtures("reference")
def test_calls_that_torch_accepts_are_accepted() -> None:
    """Random shapes and dtypes, of which not all fit. Calls that torch refuses may be refused."""
    chance = random.Random(5)
    torch.manual_seed(5)
    outcomes: Counter[bool] = Counter()
    for _ in range(600):

        def size(*choices: int) -> int:
            return chance.choice(choices)

        shapes = [[size(1, 2), size(1, 2, 4), size(3, 9), size(8, 16)][-size(2, 3, 4) :] for _ in range(3)]
        if chance.random() < 0.7:
            shapes[1] = [*shapes[0][:-2], 9, shapes[0][-1]]
            shapes[2] = [*shapes[1][:-1], size(8, 16)]
        dtypes = [chance.choice(DTYPES)] * 3 if chance.random() < 0.8 else [chance.choice(DTYPES) for _ in range(3)]
        args = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if chance.random() < 0.3:
            args.append(torch.randn(chance.choice([(9,), (3, 9), (1, 3, 9), (2, 1, 1, 9), (2, 4, 9, 9)])).to(dtypes[0]))
        options = {"is_causal": chance.random() < 0.2, "enable_gqa": chance.random() < 0.2}
        try:
            wanted = torchs(*args, **options)
        except (RuntimeError, ValueError, IndexError):
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        positional = args if len(args) > 3 else [*args, None]
        out = getattr(functions, chance.choice(FUNCTIONS))(*positional, **options)
        assert out.shape == wanted.shape and out.dtype == wanted.dtype
        scale = float(args[2].abs().sum() / args[2].numel()) * wanted.numel()
        assert float((out.double() - wanted.double()).nan_to_num().abs().sum()) <= 0.12 * scale + 1e-6
    assert min(outcomes[True], outcomes[False]) > 100, outcomes
