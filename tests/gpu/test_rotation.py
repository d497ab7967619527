"""Rotated Q and K: their integers, and the error that rotation saves. test_shapes.py tests shapes and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.backends import launches
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.groups import ADA
from comfy_sage2.quantize.quantizers import Quantized
from comfy_sage2.quantize.rotation import rotate as apply_rotation
from comfy_sage2.quantize.rotation import rotation_size
from comfy_sage2.quantize.rotation_choice import rotation_gains
from comfy_sage2.quantize.smoothing import SAMPLED_TOKENS, smooth_blocks, smooth_tokens
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.preparation import prepare

from .builds import bound, each_mode, exact, groups_of, random_qkv, relative_l1, run

pytestmark = pytest.mark.gpu

each_element = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"]
)


def _exact_qk(head_dim: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K (1, 1, tokens, head_dim), whose means are exact in float32 in any order of summation.

    They are multiples of 1/256, and `tokens` is a power of two; two groups of channels are large.
    """
    q, k = (torch.randn(1, 1, tokens, head_dim).mul(256).round().div(256) for _ in range(2))
    q[..., :4] += 10
    k[..., 2:8] -= 20
    return q.half().float(), k.half().float()


def _workspace_rows(workspace: torch.Tensor, columns: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized Q and K of one head, (tokens, columns) float32, as csrc/sm90/workspace.h lays them out."""
    size = tokens * columns
    second = (size + 255) // 256 * 256
    q, k = (workspace[start : start + size].view(torch.int8).view(tokens, columns) for start in (0, second))
    return q.float().cpu(), k.float().cpu()


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    """Rotated channels in the reference's order: thread l stores 4l to 4l + 3 of both halves side by side."""
    result: torch.Tensor = rows.unflatten(1, (-1, 2, 4)).transpose(1, 2).flatten(1)
    return result


def _smoothed(x: torch.Tensor, is_query: bool, mode: str, rotate: bool) -> torch.Tensor:
    """The values to quantize: x (1, 1, tokens, D) after smoothing and rotation."""
    if not is_query:
        x, _ = smooth_tokens(x, sampled=SAMPLED_TOKENS)
    elif mode == "4b":
        x, _ = smooth_blocks(x, ADA.block_q)
    return apply_rotation(x) if rotate else x


def _agree(integers: torch.Tensor, wanted: Quantized, values: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether they are equal, except where the quotient is so close to a half that its own rounding decides."""
    quotient = values.double() / scale.double()
    # The largest value of a group is no tie: at 8.5 it is clamped.
    tie = (((quotient - quotient.floor()) - 0.5).abs() < 1e-5) & (quotient.abs() < quotient.abs().amax() - 1e-3)
    return bool((integers == wanted.values[0, 0])[~tie[0, 0]].all()) and bool(tie.float().mean() < 5e-3)


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_integers_of_sm90_are_those_of_the_reference(mode: str, rotate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces: list[torch.Tensor] = []

    def keep(like: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        made = like.new_zeros(*sizes, **options)
        if made.dtype == torch.uint8:
            workspaces.append(made)
        return made

    tokens = 256
    for head_dim in range(8, 257, 8):
        q, k = _exact_qk(head_dim, tokens)
        numerics = ReferenceOptions.of(
            AttentionOptions(mode, rotate="on" if rotate else "off"), groups=groups_of("sm90", mode)
        )
        prepared = prepare(q, k, k, numerics)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", keep)
            # With an LSE the call has a pass over Q, which leaves its integers in the workspace.
            run("sm90", q.half().cuda(), k.half().cuda(), k.half().cuda(), mode=mode, rotate=rotate, return_lse=True)
        (workspace,) = workspaces
        workspaces.clear()
        padded = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
        columns = padded if rotate else (head_dim + 15) // 16 * 16
        rows = _workspace_rows(workspace, columns, tokens)
        for integers, wanted in zip(rows, (prepared.q, prepared.k), strict=True):
            integers = _in_order(integers) if rotate else integers[:, :head_dim]
            smooth = _smoothed(q if wanted is prepared.q else k, wanted is prepared.q, mode, rotate)
            scale = wanted.scale * rotation_size(head_dim) if rotate and wanted is prepared.q else wanted.scale
            assert _agree(integers, wanted, smooth, scale), f"head_dim {head_dim}"


@each_mode
@each_element
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_outliers_in_every_element_type(name: str, mode: str, head_dim: int, dtype: torch.dtype) -> None:
    """Four channels of K vary eight times as much as the others, against which smoothing alone does not help."""
    q, k, v = random_qkv((1, 4, 1024, head_dim), (1, 2, 1024, head_dim), torch.float32)
    k[..., [3, 17, 40, 61]] *= 8
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    wanted, _ = exact(q, k, v)
    plain, _ = run(name, q, k, v, mode=mode, rotate=False)
    rotated, _ = run(name, q, k, v, mode=mode, rotate=True)
    assert relative_l1(rotated, wanted) < 0.8 * relative_l1(plain, wanted)


def _heads_of_all_kinds(head_dim: int, q_length: int, kv_length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Q, K and V with four key heads: Gaussian, with loud channels, smooth, and loud after rotation."""
    q, k, v = random_qkv((2, 8, q_length, head_dim), (2, 4, kv_length, head_dim), torch.float32)
    k[:, 1, :, [1, head_dim // 2]] *= 12
    for tensor, heads in ((q, slice(4, 6)), (k, slice(2, 3))):
        token = torch.arange(tensor.shape[2], device="cuda") / tensor.shape[2]
        phase = 7 * torch.rand(2, tensor[:, heads].shape[1], 1, head_dim, device="cuda")
        tensor[:, heads] = torch.sin((8 * phase - 30) * token[:, None] + phase) + 0.05 * tensor[:, heads]
    size = rotation_size(head_dim)
    loud = torch.ones(size, device="cuda")
    loud[:3] = 15
    back = apply_rotation(torch.eye(head_dim)).cuda().T / size**0.5
    k[:, 3] = torch.randn(2, kv_length, size, device="cuda") * loud @ back
    return [tensor.to(dtype) for tensor in (q, k, v)]


@each_mode
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 200), (700, 1900), (130, 2600)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "lse", "causal", "padding"])
def test_auto_rotates_the_heads_that_gain(
    name: str, mode: str, head_dim: int, lengths: tuple[int, int], kind: str, fresh_seed: int
) -> None:
    """Each head has its output of rotate on or of rotate off; where one is far better, it has that one.

    The bits are equal, except in one row of some thousands, where the attention kernel that rotates Q itself rounds
    differently.
    """
    dtype = torch.bfloat16 if head_dim == 64 else torch.float16
    q, k, v = _heads_of_all_kinds(head_dim, *lengths, dtype)
    call: dict[str, Any] = {"mode": mode, "return_lse": kind == "lse", "is_causal": kind == "causal"}
    hidden = None
    if kind == "padding":
        call["attn_mask"] = torch.arange(lengths[1], device="cuda").view(1, 1, 1, -1) < lengths[1] * 2 // 3
        hidden = ~call["attn_mask"][:, 0, 0]
    outs = {rotate: run(name, q, k, v, rotate=rotate, **call)[0] for rotate in ("off", "on", "auto")}
    numerics = ReferenceOptions.of(AttentionOptions(mode, rotate="off"), groups=groups_of(name, mode))
    plain, rotated = (numerics.of_heads(rotated=choice) for choice in (False, True))
    gains = rotation_gains(
        q.float(),
        smooth_tokens(k, hidden, SAMPLED_TOKENS)[0],
        (plain.qk_format, rotated.qk_format),
        (plain.groups, rotated.groups),
        smooth_q=mode == "4b",
        hidden=hidden,
    )
    assert gains[:, 1].all()
    assert head_dim in (40, 96) or not gains[:, 3].any()
    for batch in range(2):
        for head in range(8):
            differing = {
                rotate: int((outs["auto"][batch, head] != outs[rotate][batch, head]).any(1).sum())
                for rotate in ("on", "off")
            }
            chosen = min(differing, key=differing.__getitem__)
            assert differing[chosen] <= 2, (batch, head, differing)
            assert relative_l1(outs["auto"][batch, head], outs[chosen][batch, head]) < 1e-4
            if head // 2 in (1, 3) and head_dim not in (40, 96):  # other heads may be near the margin
                assert chosen == ("on" if gains[batch, head // 2] else "off"), (batch, head)


@each_mode
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 200), (700, 1900), (130, 5000)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "lse", "causal", "padding"])
def test_rotated_heads_are_given_back_and_taken(
    name: str, mode: str, head_dim: int, lengths: tuple[int, int], kind: str, fresh_seed: int
) -> None:
    """With the choice of "auto" the bits are those of "auto"; with any choice each head has those of "on" or "off"."""
    q, k, v = _heads_of_all_kinds(head_dim, *lengths, torch.bfloat16 if head_dim == 64 else torch.float16)
    call: dict[str, Any] = {"mode": mode, "return_lse": kind == "lse", "is_causal": kind == "causal"}
    if kind == "padding":
        call["attn_mask"] = torch.arange(lengths[1], device="cuda").view(1, 1, 1, -1) < lengths[1] * 2 // 3
    chosen = torch.full((2, 4), 7, dtype=torch.int32, device="cuda")
    auto, auto_lse = run(name, q, k, v, rotate="auto", rotated_heads=chosen, **call)
    assert chosen.unique().tolist() in ([0, 1], [1])
    assert torch.equal(auto, run(name, q, k, v, rotate="auto", **call)[0])
    given, given_lse = run(name, q, k, v, rotate="given", rotated_heads=chosen, **call)
    assert torch.equal(given, auto)
    assert (given_lse is None and auto_lse is None) or torch.equal(given_lse, auto_lse)
    flags = torch.randint(2, (2, 4), dtype=torch.int32, device="cuda")
    out, _ = run(name, q, k, v, rotate="given", rotated_heads=flags, **call)
    outs = [run(name, q, k, v, rotate=rotate, **call)[0] for rotate in ("off", "on")]
    for batch in range(2):
        for head in range(8):
            wanted = outs[int(flags[batch, head // 2])][batch, head]
            # The attention kernel that rotates Q itself rounds differently in one row of some thousands.
            assert int((out[batch, head] != wanted).any(1).sum()) <= 2, (batch, head)
            assert relative_l1(out[batch, head], wanted) < 1e-4


@each_mode
@pytest.mark.parametrize("kv_length", [300, 5000])
def test_parts_and_phases_get_their_rotated_heads(
    name: str, mode: str, kv_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = _heads_of_all_kinds(128, 300, kv_length, torch.float16)
    flags = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.int32, device="cuda")
    optional = OptionalTensors(rotated_heads=flags)
    whole = bound(name, q, k, v, optional, mode=mode, rotate="given", return_lse=True)
    wanted, wanted_lse = whole.run(q, k, v, optional)
    assert wanted_lse is not None
    attend = whole.prequantize(q, k, v, optional)
    assert attend is not None
    out, lse = attend()
    assert relative_l1(out, wanted) < 1e-4  # another kernel quantizes Q, and may round differently
    assert lse is not None and torch.equal(lse, wanted_lse)
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: 1)
    in_parts = bound(name, q, k, v, optional, mode=mode, rotate="given", return_lse=True)
    out, lse = in_parts.run(q, k, v, optional)
    assert lse is not None and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    told = [torch.zeros_like(flags) for _ in range(2)]
    for heads in told:  # first in parts, then at once
        run(name, q, k, v, mode=mode, rotate="auto", rotated_heads=heads)
        monkeypatch.undo()
    assert torch.equal(*told)
