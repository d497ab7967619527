"""`sparse` of a single call, against float64 attention that masks the skipped blocks."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_oracle import oracle
from random_blocks import full_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

from comfy_sage2 import BlockMask, Sparse, UnsupportedError, attention
from comfy_sage2.backends.block_kernels import add_tail_
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.block_scores import block_scores
from comfy_sage2.sparsity import levels

TOKENS, HEADS, KV_HEADS = 1000, 4, 2


@pytest.fixture(autouse=True)
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels.LEAST_BLOCKS == 64
    monkeypatch.setattr(levels, "LEAST_BLOCKS", 4)


def local(seed: int, head_dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v whose scores fall with the distance of tokens, fast or slowly by head. The last block is ragged."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(TOKENS) / TOKENS
    sharpness = torch.tensor([400.0, 60.0, 400.0, 5.0])[:, None] * math.sqrt(head_dim)
    q = 0.1 * torch.randn(1, HEADS, TOKENS, head_dim, generator=generator)
    k = 0.1 * torch.randn(1, KV_HEADS, TOKENS, head_dim, generator=generator)
    q[..., 0], q[..., 1] = 2 * sharpness * place, -sharpness
    k[..., 0], k[..., 1] = place, place**2
    return q, k, torch.randn(1, KV_HEADS, TOKENS, head_dim, generator=generator)


def chosen(sparse: Sparse, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> BlockMask:
    blocks = sparse.block_mask(q, k, v, AttentionOptions(), OptionalTensors(mask))
    assert blocks is not None
    return blocks


def tokens_of(active: torch.Tensor) -> torch.Tensor:
    """The token mask of active blocks."""
    return active.repeat_interleave(128, 2)[:, :, :TOKENS].repeat_interleave(128, 3)[..., :TOKENS]


def relative(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The relative L2 error of each head."""
    error: torch.Tensor = (out.double() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
    return error


@pytest.mark.parametrize(("mode", "layout"), [("8b", "BHND"), ("4b", "BNHD"), ("precise", "BHND")])
def test_a_share_computes_the_most_probable_blocks(fresh_seed: int, mode: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    is_tied = True  # either of two blocks with equal scores may be taken
    while is_tied:
        q, k, v = (torch.randn(1, n, TOKENS, 64, generator=generator).half() for n in (HEADS, KV_HEADS, KV_HEADS))
        scores = block_scores(q, k, scale=q.shape[3] ** -0.5)
        best = scores.topk(3).values
        is_tied = bool((best[..., 1] == best[..., 2]).any())
    active = torch.zeros_like(scores, dtype=torch.bool)
    for head in range(HEADS):
        for row in range(scores.shape[2]):
            active[0, head, row, scores[0, head, row].topk(2).indices] = True
    inputs = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)] if layout == "BNHD" else [q, k, v]
    out = attention(*inputs, mode=mode, layout=layout, sparse=Sparse(share=0.25), backend="reference")
    expected = attention(q, k, v, mode=mode, block_mask=BlockMask.from_dense(active), backend="reference")
    assert torch.equal(out if layout == "BHND" else out.transpose(1, 2), expected)
    assert (
        relative(expected, oracle(q, k, v, attn_mask=tokens_of(active))[0]).max()
        < {"8b": 0.06, "4b": 0.4, "precise": 0.04}[mode]
    )


def test_a_call_with_all_blocks_equals_the_dense_call(fresh_seed: int) -> None:
    q, k, v = local(fresh_seed)
    dense, lse = attention(q, k, v, return_lse=True, backend="reference")
    for sparse in (Sparse(share=1.0), Sparse(share=1.0, tail=True), Sparse(bound=0.01, always=((0, TOKENS),))):
        out, its_lse = attention(q, k, v, sparse=sparse, return_lse=True, backend="reference")
        assert torch.equal(out, dense) and torch.equal(its_lse, lse)


@pytest.mark.parametrize("sparse", [Sparse(share=0.125), Sparse(bound=0.1)], ids=["share", "bound"])
def test_blocks_of_the_always_ranges_are_computed(fresh_seed: int, sparse: Sparse) -> None:
    q, k, v = local(fresh_seed)
    active = chosen(replace(sparse, always=((0, 3), (600, 700))), q, k, v).to_dense()
    for block in (0, 4, 5):
        assert active[..., block].all() and active[:, :, block].all()
    assert not active.all() and not chosen(sparse, q, k, v).to_dense()[..., 0].all()


@pytest.mark.parametrize(("mode", "layout"), [("8b", "BHND"), ("precise", "BNHD")])
def test_a_tail_corrects_the_result_of_a_call_with_the_lists(fresh_seed: int, mode: str, layout: str) -> None:
    q, k, v = local(fresh_seed)
    v += 2 * torch.linspace(-1, 1, TOKENS)[:, None]  # distant tokens differ from near ones
    sparse = Sparse(share=0.25, tail=True)
    mask = chosen(sparse, q, k, v)
    assert 0 < mask.to_dense().float().mean() < 0.3
    without, expected_lse = attention(q, k, v, mode=mode, block_mask=mask, return_lse=True, backend="reference")
    expected = without.clone()
    add_tail_(None, q, k, v, expected, expected_lse, mask.lists, 64**-0.5)
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v)] if layout == "BNHD" else [q, k, v]
    before = [x.clone() for x in inputs]
    out, lse = attention(*inputs, mode=mode, layout=layout, sparse=sparse, return_lse=True, backend="reference")
    alone = attention(*inputs, mode=mode, layout=layout, sparse=sparse, backend="reference")
    assert torch.equal(alone, out) and out.shape == inputs[0].shape and out.is_contiguous()
    halves = [inputs[0] / 2, *inputs[1:]]
    scaled = attention(*halves, mode=mode, layout=layout, sparse=sparse, scale=2 * 64**-0.5, backend="reference")
    assert torch.equal(scaled, out), "the caller's scale applies to the tail, too"
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))
    out = out.transpose(1, 2) if layout == "BNHD" else out
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    truth, _ = oracle(q, k, v)
    assert relative(out, truth)[0, 3] < 0.5 * relative(without, truth)[0, 3]  # the head with the flattest scores


def test_a_nan_in_the_tail_sets_the_flag(fresh_seed: int) -> None:
    q, k, v = local(fresh_seed)
    sparse = Sparse(share=0.25, tail=True)
    flag = torch.zeros(1, dtype=torch.int32)
    attention(q, k, v, sparse=sparse, nonfinite=flag, backend="reference")
    assert not flag
    block = int(chosen(sparse, q, k, v).to_dense()[0, :2].float().mean(dim=(0, 1)).argmin())
    v[0, 0, 128 * block] = torch.nan  # K is unchanged, and so are the lists
    out = attention(q, k, v, sparse=sparse, nonfinite=flag, backend="reference")
    assert flag == 1 and out[0, :2].isnan().any()


def padded(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """`local` inputs for two prompts of 900 and 333 tokens, with a mask that hides the keys of the largest scores."""
    if kind == "none":
        return *local(seed), None
    q, k, v = (torch.cat(both) for both in zip(local(seed), local(seed + 1), strict=True))
    shown = torch.arange(TOKENS) < torch.tensor([900, 333])[:, None, None, None]
    of_kv = shown.mT
    k = torch.where(of_kv, k, 50 * q.mean(dim=(1, 2), keepdim=True))
    v = torch.where(of_kv, v, 1e4)
    if kind == "bool":
        return q, k, v, shown
    bias = torch.zeros(2, HEADS if kind == "of heads" else 1, 1, TOKENS)
    bias += torch.linspace(7.0, 9.0, bias.shape[1])[:, None, None]  # the same for all keys: no effect
    bias[..., 100:200] += math.log(0.25)
    return q, k, v, bias.masked_fill(~shown, -math.inf)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("none", 0.02), ("none", 0.05), ("none", 0.1), ("bool", 0.02), ("additive", 0.1), ("of heads", 0.05)],
)
def test_heads_stay_within_the_bound(fresh_seed: int, bound: float, kind: str) -> None:
    q, k, v, mask = padded(fresh_seed, kind)
    active = chosen(Sparse(bound=bound), q, k, v, mask).to_dense()
    assert active.float().mean() < 0.8 and active[:, 0].float().mean() < active[:, 3].float().mean()
    left = tokens_of(active)
    if kind != "none":
        left = mask & left if kind == "bool" else mask.expand(left.shape).masked_fill(~left, -math.inf)
    error = relative(oracle(q, k, v, attn_mask=left)[0], oracle(q, k, v, attn_mask=mask)[0])
    assert error.mean() <= bound and error.max() <= 3 * bound


@pytest.mark.parametrize(("kind", "seed"), [("bool", 2), ("additive", 6)])
def test_every_query_block_keeps_some_keys_within_a_bound(kind: str, seed: int) -> None:
    """With these inputs a query block once kept none: its rows were zeros, yet the head's mean error met the bound."""
    q, k, v, mask = padded(seed, kind)
    assert chosen(Sparse(bound=0.1), q, k, v, mask).to_dense()[1].any(dim=2).all()


@pytest.mark.parametrize("kind", ["bool", "additive", "of heads"])
def test_blocks_of_hidden_keys_do_not_count_towards_a_share(fresh_seed: int, kind: str) -> None:
    q, k, v, mask = padded(fresh_seed, kind)
    active = chosen(Sparse(share=0.25), q, k, v, mask).to_dense()
    assert (active.sum(dim=3) == 2).all()
    assert active[0, ..., :8].sum() == active[0].sum() and not active[1, ..., 3:].any()


def test_a_component_common_to_all_keys_does_not_affect_the_choice_of_blocks(fresh_seed: int) -> None:
    q, k, v, mask = padded(fresh_seed, "bool")
    lists = []
    for common in (0.0, -8.0, 8.0):
        k[:, :, :, 2] = common  # where q is about 1
        q[..., 2] = 1.0
        lists.append(chosen(Sparse(share=0.25), q, k, v, mask).lists)
    assert all(torch.equal(each, lists[0]) for each in lists)


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e3])
def test_a_bias_affects_shares_as_it_affects_the_softmax(fresh_seed: int, shift: float) -> None:
    """Shares are exact if a block's queries are equal, and a sub-pool's keys. The last block has five tokens."""
    generator = torch.Generator().manual_seed(fresh_seed)
    tokens, blocks = 1029, 9
    q = torch.randn(1, HEADS, blocks, 64, generator=generator).repeat_interleave(128, dim=2)[:, :, :tokens]
    k = torch.randn(1, KV_HEADS, 65, 64, generator=generator).repeat_interleave(16, dim=2)[:, :, :tokens]
    of_blocks = torch.randn(blocks, generator=generator)
    of_blocks[-1] += math.log(128 / 5)
    bias = (of_blocks.repeat_interleave(128)[:tokens] + shift).view(1, 1, 1, tokens)
    scores = q[:, :, ::128].double() @ k.double().repeat_interleave(HEADS // KV_HEADS, 1).mT / 8 + bias.double()
    shares = torch.nn.functional.pad(scores.softmax(dim=3), (0, -tokens % 128)).unflatten(3, (blocks, 128)).sum(dim=4)
    expected = torch.zeros_like(shares, dtype=torch.bool).scatter_(3, shares.topk(3).indices, True)
    assert torch.equal(chosen(Sparse(share=1 / 3), q, k, k, bias).to_dense(), expected)


def test_a_call_whose_keys_are_all_hidden_gives_zeros(fresh_seed: int) -> None:
    q, k, v, mask = padded(fresh_seed, "bool")
    mask[1] = False
    for sparse in (Sparse(share=0.25), Sparse(bound=0.1)):
        out = attention(q, k, v, attn_mask=mask, sparse=sparse, backend="reference")
        assert not out[1].any() and out[0].any(dim=-1).all()


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"is_causal": True}, "is_causal"),
        ({"mode": "exact"}, "mode exact"),
        ({"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool)}, "a mask that differs by query"),
        ({"block_mask": full_blocks(TOKENS, TOKENS)}, "block_mask"),
        (
            {"attn_mask": torch.ones(1, TOKENS, dtype=torch.bool), "sparse": Sparse(share=0.5, tail=True)},
            "attn_mask beside a tail",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_that_cannot_be_sparse_are_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"\[SA-215\] calls with {reason} cannot be sparse"):
        attention(*local(0), **{"sparse": Sparse(share=0.5), **keywords})


def test_a_traced_call_is_refused_and_leaves_nothing_behind() -> None:
    """What is kept between calls, such as sampled rows, must have values."""
    sparse = Sparse(bound=0.1, always=((0, 200),))
    q, k, v = local(0)
    with FakeTensorMode() as fake, pytest.raises(UnsupportedError, match=r"\[SA-215\] calls under a compiler"):
        attention(*(fake.from_tensor(tensor) for tensor in (q, k, v)), sparse=sparse)
    with pytest.raises(UnsupportedError, match=r"\[SA-215\] calls under a compiler"):
        torch.func.functionalize(partial(attention, sparse=sparse))(q, k, v)
    assert attention(q, k, v, sparse=sparse).isfinite().all()


@pytest.mark.parametrize("sparse", [Sparse(share=0.3), Sparse(bound=0.1)], ids=["share", "bound"])
@pytest.mark.parametrize("content", [1e4, 1e30, math.inf, math.nan])
@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [(torch.float32, torch.finfo(torch.float32).min), (torch.float16, torch.finfo(torch.float16).min)]
    + [(torch.float32, -math.inf), (torch.bool, False)],
)
def test_hidden_keys_do_not_affect_the_choice_of_blocks(
    fresh_seed: int, dtype: torch.dtype, lowest: float, content: float, sparse: Sparse
) -> None:
    """A padding mask of the dtype's lowest value hides keys like one of minus infinity."""
    q, k, v = local(fresh_seed)
    mask = torch.full((1, TOKENS), dtype == torch.bool).to(dtype)
    mask[:, 700:] = lowest
    wanted = attention(q, k, v, attn_mask=mask, backend="reference", sparse=sparse)
    k[:, :, 700:], v[:, :, 700:] = content, content
    flag = torch.zeros(1, dtype=torch.int32)
    out = attention(q, k, v, attn_mask=mask, backend="reference", sparse=sparse, nonfinite=flag)
    assert torch.equal(out, wanted) and not flag


@pytest.mark.parametrize("where", ["k", "mask"])
@pytest.mark.parametrize("content", [math.nan, math.inf])
@pytest.mark.parametrize("always", [(), ((0, 100),)], ids=["", "always"])
def test_a_share_does_not_hide_nonfinite_values(where: str, content: float, always: Any, fresh_seed: int) -> None:
    """The choice might otherwise skip the block that has such a value."""
    q, k, v = local(fresh_seed)
    mask = torch.zeros(1, TOKENS)
    (k[0, 0, 900] if where == "k" else mask[0, 900:901]).fill_(content)
    given: dict[str, Any] = {} if where == "k" else {"attn_mask": mask}
    flag = torch.zeros(1, dtype=torch.int32)
    sparse = Sparse(share=0.3, always=always)
    out = attention(q, k, v, backend="reference", sparse=sparse, nonfinite=flag, **given)
    dense = attention(q, k, v, backend="reference", **given)
    assert flag and torch.equal(out.isnan(), dense.isnan()) and dense.isnan().any()


def test_cross_attention_and_few_keys_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = local(1)
    for queries in (q[:, :, :900], q):
        dense = attention(queries, k, v, backend="reference")
        assert torch.equal(attention(queries, k, v, sparse=Sparse(share=0.1), backend="reference"), dense) == (
            queries is not q
        )
    monkeypatch.setattr(levels, "LEAST_BLOCKS", 64)
    for sparse in (Sparse(share=0.1), Sparse(share=0.1, tail=True)):
        assert torch.equal(attention(q, k, v, sparse=sparse, backend="reference"), dense)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "exactly one of bound and share"),
        ({"bound": 0.1, "share": 0.1}, ValueError, "exactly one of bound and share"),
        ({"share": 0.0}, ValueError, "share must be above 0"),
        ({"bound": 1.5}, ValueError, "bound must be above 0"),
        ({"bound": math.nan}, ValueError, "bound must be above 0"),
        ({"share": 10**5000}, ValueError, "share must be above 0 and at most 1, got an integer of 16610 bits"),
        ({"share": "0.1"}, TypeError, "share must be a number, got str"),
        ({"share": True}, TypeError, "share must be a number, got bool"),
        ({"share": 0.1, "tail": 1}, TypeError, "tail must be True or False, got int"),
        ({"share": 0.1, "always": ((5, 5),)}, ValueError, r"always\[0\] must be \(first, end\)"),
        ({"share": 0.1, "always": ((0, 1), (0.5, 2))}, TypeError, r"always\[1\] must be a pair"),
        ({"share": 0.1, "always": [(0, 1)]}, TypeError, "always must be a tuple of pairs of integers.*got list"),
        ({"share": 0.1, "always": None}, TypeError, "always must be a tuple of pairs of integers.*got NoneType"),
    ],
)
def test_errors_name_the_wrong_value(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"\[SA-215\].*{text}"):
        Sparse(**arguments)


def test_checked_values_cannot_be_changed() -> None:
    sparse = Sparse(share=0.1)
    with pytest.raises(FrozenInstanceError):
        sparse.share = 2.0  # type: ignore[misc]


def test_sparse_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sparse must be a comfy_sage2\.Sparse, a level or None, got float"):
        attention(*local(0), sparse=0.1)
    with pytest.raises(ValueError, match=r"sparse must be one of 'light', .*'draft 10 %', got 'draft'"):
        attention(*local(0), sparse="draft")
    with pytest.raises(TypeError, match=r"\[SA-208\] options must be an AttentionOptions or None, got str"):
        attention(*local(0), sparse="light", options="8b")


def test_levels_have_the_names_of_the_node(fresh_seed: int) -> None:
    q, k, v = local(fresh_seed)
    for level, sparse in (("draft 20 %", Sparse(share=0.2, tail=True)), ("strong", Sparse(bound=0.1, tail=True))):
        by_name, by_values = (attention(q, k, v, sparse=each, backend="reference") for each in (level, sparse))
        assert torch.equal(by_name, by_values)
    assert torch.equal(attention(q, k, v, backend="reference"), attention(q, k, v, backend="reference", sparse="off"))
