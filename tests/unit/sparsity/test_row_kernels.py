"""The arguments of the kernels that choose blocks: mere addresses, so that a wrong one would go unnoticed.

The tests use a module on the CPU whose kernels read and write what csrc/common/block_selection.h says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.block_mask import blocks_of
from comfy_sage2.sparsity import row_kernels
from comfy_sage2.sparsity.always_computed import blocks_with
from comfy_sage2.sparsity.errors import Inputs, popular_mass
from comfy_sage2.sparsity.levels import Level, tail_cost
from comfy_sage2.sparsity.packed_blocks import Blocks
from comfy_sage2.sparsity.sampled_rows import sampled_rows
from comfy_sage2.sparsity.thresholds import Choice

STREAM = 77
ELEMENTS = {torch.float16: 2, torch.bfloat16: 3}
COUNTS = (5, 3, 1)
MEANS = 5000  # bytes of the tail's means


def at(address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an address."""
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(shape, stride)


def dense(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return at(address, shape, torch.empty(shape, device="meta").stride(), dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Like torch's flash attention, whose output is token-major in memory."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * scale
    out = (scores.softmax(3) @ v).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, scores.logsumexp(3), None


class Kernels:
    """A stand-in for a module that checks the arguments of a call and writes its results."""

    def __init__(self, inputs: Inputs, sample: int) -> None:
        self.inputs, self.batch, self.heads, self.length = inputs, *inputs.q.shape[:3]
        self.rows = sampled_rows(inputs.q, sample, inputs.always)
        self.count = self.rows.tokens.shape[2]
        self.blocks = blocks_of(self.length)
        self.pieces: dict[str, tuple[int, int]] = {}
        self.measured: list[int] = []
        self.args: dict[str, dict[str, Any]] = {}
        of_heads = self.batch, self.heads
        self.shapes = {
            "tokens": ((*of_heads, self.count), torch.int32),
            "totals": ((*of_heads, self.count), torch.float32),
            "norms": ((*of_heads, self.count, 27), torch.float32),
            "forced": ((*of_heads, self.blocks), torch.uint8),
            "chosen": (of_heads, torch.int32),
            "errors": (of_heads, torch.float32),
            "compared_errors": (of_heads, torch.float32),
            "by_tail": (of_heads, torch.uint8),
            "bits": ((*of_heads, self.blocks, -(-self.blocks // 32) * 4), torch.uint8),
            "lists": ((*of_heads, self.blocks, 1 + self.blocks), torch.int16),
        }

    def module(self) -> ModuleType:
        module = ModuleType("kernels")
        names = ("row_sample", "row_errors", "chosen_cuts", "block_lists", "pooled_tail_plan")
        vars(module).update({name: getattr(self, name) for name in names})
        return module

    def piece(self, name: str, address: int) -> torch.Tensor:
        """The tensor of this name; all kernels must get the same address for it."""
        shape, dtype = self.shapes[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        assert self.pieces.setdefault(name, (address, size)) == (address, size)
        return dense(address, shape, dtype)

    def row_sample(self, **args: Any) -> None:
        q, tokens = self.inputs.q, self.rows.tokens
        assert (args["batch"], args["heads"], args["head_dim"]) == (self.batch, self.heads, q.shape[3])
        assert (args["element"], args["q_strides"], args["q"]) == (ELEMENTS[q.dtype], q.stride()[:3], q.data_ptr())
        assert (args["unlike"], args["spread_rows"]) == (self.rows.unlike, self.count - self.rows.unlike)
        assert args["stream"] == STREAM and args["device"] == -1
        groups = -(-self.heads // args["heads_of_group"])
        spread = dense(args["spread"], (groups, args["spread_rows"]), torch.int64)
        wanted = spread.repeat_interleave(args["heads_of_group"], 0)[: self.heads].expand(self.batch, -1, -1)
        assert torch.equal(wanted, tokens[..., : args["spread_rows"]])
        if self.rows.unlike:
            pools = dense(args["pools"], (args["unlike"], args["pools_of_part"]), torch.int64)
            found = tokens[..., args["spread_rows"] :, None]
            assert ((pools <= found) & (found < pools + 16)).any(dim=3).all()
        self.piece("tokens", args["tokens"]).copy_(tokens)
        shape = (*tokens.shape, q.shape[3])
        dense(args["rows"], shape, q.dtype).copy_(q.gather(2, tokens[..., None].expand(shape)))

    def pooled_tail_plan(self, **args: Any) -> SimpleNamespace:
        assert args["v_strides"] == self.inputs.v.stride()[:3]

        def run_means(k: int, v: int, workspace: int, stream: int) -> None:
            assert (k, v, stream) == (self.inputs.k.data_ptr(), self.inputs.v.data_ptr(), STREAM)
            self.pieces["means"] = workspace, MEANS

        return SimpleNamespace(workspace_bytes=MEANS, means_offsets=(0, 512, 768), mean_rows=64, run_means=run_means)

    def row_errors(self, **args: Any) -> None:
        q, k, v, scale = self.inputs[:4]
        heads, full = args["heads"], self.length // 128
        assert args["q_strides"] == q.stride()[:3] and args["q"] == q.data_ptr() and args["stream"] == STREAM
        assert (args["scale"], args["popular"]) == (scale, popular_mass(self.count, self.blocks))
        assert (args["q_length"], args["kv_length"], args["rows"]) == (self.length, self.length, self.count)
        assert (args["q_heads"], args["group"]) == (self.heads, self.heads // k.shape[1])
        entry, first = divmod(args["first_head"], self.heads)
        assert args["tokens"] == self.pieces["tokens"][0]
        of_rows = self.rows.tokens[entry, first : first + heads, :, None].expand(-1, -1, q.shape[3])
        queries = q[entry, first : first + heads].gather(1, of_rows)
        kv = slice(first // args["group"], (first + heads) // args["group"])
        of_k, of_v = k[entry, kv], v[entry, kv]
        shape = heads, self.count
        if full:
            outs = at(args["outs"], (full, *shape, q.shape[3]), (*args["out_strides"], 1), q.dtype)
            lses = dense(args["lses"], (full, *shape), torch.float32)
        for block in range(self.blocks):
            part = slice(128 * block, 128 * block + 128)
            out, lse, _ = attend(queries[None], of_k[None, :, part], of_v[None, :, part], scale=scale)
            if block < full:
                found, of_found = outs[block], lses[block]
            else:
                found = at(args["last_outs"], (*shape, q.shape[3]), (*args["last_strides"], 1), q.dtype)
                of_found = dense(args["last_lses"], shape, torch.float32)
            torch.testing.assert_close(found, out[0])
            torch.testing.assert_close(of_found, lse[0])
        for name in ("totals", "norms", "forced"):
            self.piece(name, args[name])
        if args["center"]:
            start = self.pieces["means"][0]
            assert [args[name] - start for name in ("center", "key_means", "value_means")] == [0, 512, 768]
        assert args["mean_rows"] == (64 if args["center"] else 0)
        self.check_always(args["always"])
        self.measured += range(args["first_head"], args["first_head"] + heads)
        self.args["row_errors"] = args

    def check_always(self, address: int) -> None:
        wanted = blocks_with(self.inputs.always, self.length)
        assert torch.equal(dense(address, wanted.shape, torch.bool), wanted) if self.inputs.always else address == 0

    def chosen_cuts(self, **args: Any) -> None:
        assert self.measured == list(range(self.batch * self.heads))
        assert (args["heads"], args["rows"]) == (self.batch * self.heads, self.count)
        assert (args["unlike"], args["stream"]) == (self.rows.unlike, STREAM)
        self.piece("norms", args["norms"])
        for number, name in enumerate(("chosen", "errors", "by_tail", "compared_errors")):
            if args[name]:
                self.piece(name, args[name]).fill_(number)
        self.args["chosen_cuts"] = args

    def block_lists(self, **args: Any) -> None:
        assert (self.piece("chosen", args["counts"]) == 0).all()
        self.piece("forced", args["forced"])
        self.piece("bits", args["bits"]).fill_(9)
        self.piece("lists", args["lists"]).fill_(-7)
        self.check_always(args["dense"])
        assert (args["batch"], args["heads"]) == (self.batch, self.heads) and args["stream"] == STREAM
        assert args["query_blocks"] == args["key_blocks"] == self.blocks
        self.args["block_lists"] = args

    def check_pieces(self, allocated: list[torch.Tensor]) -> None:
        """They lie in allocated memory, and none overlaps another one."""
        pieces = sorted(self.pieces.values())
        assert all(start + size <= after for (start, size), (after, _) in pairwise(pieces))
        spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in allocated]
        for start, size in pieces:
            assert any(begin <= start and start + size <= end for begin, end in spans)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_kernels, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", attend)
    yield
    torch.set_default_dtype(torch.float32)


CALLS = [
    # batch, heads of q and of k, tokens, always, heads of k whose rows are in memory at once
    (1, 6, 6, 1024, (), 2),
    (1, 9, 9, 720, ((0, 5),), 4),
    (2, 6, 3, 1000, ((130, 140), (900, 1000)), 2),
    (2, 4, 2, 200, (), 9),
]


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "length", "always", "at_once"), CALLS, ids=str)
def test_kernels_read_and_write_their_own_tensors(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    always: tuple[tuple[int, int], ...],
    at_once: int,
    tail: bool,
    token_major: bool,
    monkeypatch: pytest.MonkeyPatch,
    fresh_seed: int,
) -> None:
    random = torch.Generator().manual_seed(fresh_seed)
    shapes = [(batch, count, length, 16) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=random).to(torch.bfloat16) for shape in shapes)
    if token_major:
        packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2)
        q, k, v = (x.transpose(1, 2) for x in packed.split([heads, kv_heads, kv_heads], dim=2))
    inputs = Inputs(q, k, v, 0.25, always=always)
    kernels = Kernels(inputs, sample=3)
    of_kv_head = kernels.count * kernels.blocks * 16 * 2 * (heads // kv_heads)
    monkeypatch.setattr(row_kernels, "_OUTPUT_BYTES", at_once * of_kv_head)
    scores = torch.randn(batch, heads, kernels.blocks, kernels.blocks, generator=random)
    by_tail = torch.rand(batch, heads, generator=random) < 0.5 if tail else None
    compared = Blocks.of(scores > 0, by_tail)
    level = Level(bound=0.1, tail=tail)
    allocated = []
    empty = torch.empty

    def recorded(*given: Any, **options: Any) -> torch.Tensor:
        allocated.append(empty(*given, **options))
        return allocated[-1]

    monkeypatch.setattr(torch, "empty", recorded)
    torch.set_default_dtype(torch.float16)  # another pack may have set it
    choice = Choice(*row_kernels.choose(kernels.module(), inputs, scores, level, COUNTS, 3, compared))
    blocks, errors, compared_errors, lists = choice
    assert compared_errors is not None and lists is not None and lists.dtype == torch.int16 and lists.eq(-7).all()
    kernels.check_pieces([*allocated, compared_errors])
    rows, cuts, listed = (kernels.args[name] for name in ("row_errors", "chosen_cuts", "block_lists"))
    assert rows["counts"] == cuts["counts"] == COUNTS and rows["compared"] == compared.bits.data_ptr()
    assert rows["scores"] == listed["scores"] == scores.data_ptr()
    assert (cuts["bound"], cuts["has_tail"], cuts["tail_cost"]) == (0.1, tail, kernels.blocks * tail_cost(length))
    assert cuts["compared_by_tail"] == (0 if by_tail is None else by_tail.data_ptr())
    assert blocks.bits.eq(9).all() and errors.eq(1).all()
    assert compared_errors.eq(3).all()
    assert blocks.by_tail is None if by_tail is None else blocks.by_tail is not None and blocks.by_tail.all()
    assert (blocks.bits.dtype, errors.dtype, compared_errors.dtype) == (torch.uint8, torch.float32, torch.float32)
    assert blocks.by_tail is None or blocks.by_tail.dtype == torch.bool

    kernels = Kernels(inputs, sample=8)
    error = row_kernels.blocks_error(kernels.module(), inputs, compared, sample=8)
    kernels.check_pieces(allocated)
    cuts = kernels.args["chosen_cuts"]
    assert kernels.args["row_errors"]["counts"] == cuts["counts"] == () and not kernels.args["row_errors"]["scores"]
    assert cuts["compared_errors"] == error.data_ptr() and not cuts["chosen"] and error.eq(3).all()
