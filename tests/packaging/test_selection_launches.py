"""The launches of scores, lists and tails of key blocks: every field of the kernels' parameters.

The fake driver logs the bytes of the structures.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_released_launches
from kernel_parameters import structures
from platforms import calls
from test_released_launches import Run

from tools import kernel_table

made, released, run = (getattr(test_released_launches, fixture) for fixture in ("made", "released", "run"))

SELECT = """
for number, (sizes, strides, block_means, of_tail, of_lists) in enumerate(json.load(open(sys.argv[3]))):
    scores = module.block_score_plan(**sizes, **strides, block_means=block_means)
    scores.run(calls.Q, calls.K, calls.OUT, calls.WORKSPACE, 3 * number)
    given = dict(scores=calls.OUT, lists=calls.BLOCK_MASK, stream=3 * number + 1, device=0)
    module.block_lists(**given, **of_lists)
    tail = module.pooled_tail_plan(**sizes, **strides, **of_tail)
    tail.run(calls.Q, calls.K, calls.V, calls.OUT, calls.LSE, calls.BLOCK_MASK, calls.WORKSPACE, 3 * number + 2)
    print(scores.workspace_bytes, tail.workspace_bytes)
"""

CHOOSE = """
for number, (sample, rows, cuts) in enumerate(json.load(open(sys.argv[3]))):
    module.row_sample(**sample, stream=4 * number)
    module.row_errors(**rows, stream=4 * number + 1)
    module.chosen_cuts(**cuts, stream=4 * number + 2)
"""


STRUCTURES = structures("common/views.h", "common/block_selection.h")
KINDS = {
    "pool_": "PoolParams", "block_means": "BlockMeanParams", "block_scores": "BlockScoreParams",
    "block_lists": "BlockListParams", "pooled_tail": "TailParams", "row_sample": "SampleParams",
    "row_masses": "RowParams", "row_errors": "RowParams", "chosen_cuts": "CutParams",
}  # fmt: skip


# Sizes for kernels whose images are plain text: released kernels may have other parameters.
PARAMETER_BYTES = "\n".join(f"{prefix} {ctypes.sizeof(STRUCTURES[kind])}" for prefix, kind in KINDS.items())
IMAGES = ("token_pools", "block_scores", "block_lists", "pooled_tail", "row_errors")


@pytest.fixture
def select(made: Path, architecture: kernel_table.Architecture, run: Run, tmp_path: Path) -> Callable[..., Any]:
    """Runs code with cases as JSON; returns what it printed, and its launches."""
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    for image in IMAGES:
        (folder / f"comfy_sage2_{architecture.name}" / f"{image}.cubin.xz").write_bytes(lzma.compress(image.encode()))

    def select(code: str, cases: list[Any]) -> Any:
        path = tmp_path / "cases.json"
        path.write_text(json.dumps(cases))
        return run(folder, code, str(path), FAKE_CUDA_PARAMETER_BYTES=PARAMETER_BYTES)

    return select


def read(line: str) -> tuple[str, int, Any]:
    """The kernel, how many blocks its grid has, and its parameters by name."""
    name = line.split()[1]
    kind = STRUCTURES[next(kind for prefix, kind in KINDS.items() if name.startswith(prefix))]
    blocks, *other_axes = map(int, line.partition(" grid ")[2].split()[0].split(","))
    assert other_axes == [1, 1]
    values = kind.from_buffer_copy(bytes.fromhex(line.partition(" parameters ")[2]))
    assert getattr(values, "padding", 0) == 0
    return name, blocks, values


def assert_disjoint(parts: dict[int, int], end: int) -> None:
    """Parts of a workspace (address -> bytes) lie in it one after the other."""
    places = sorted((address - calls.WORKSPACE, size) for address, size in parts.items())
    behind = [place for place, _ in places[1:]] + [end]
    assert places[0][0] == 0
    assert all(place + size <= after for (place, size), after in zip(places, behind, strict=True)), (places, end)


def blocks_of(tokens: int, of: int) -> int:
    return -(-tokens // of)


def one_case() -> list[Any]:
    kv_heads, head_dim = random.choice((1, 2, 3)), 8 * random.randint(1, 32)
    q_length, kv_length = (random.choice((1, 127, 517, random.randint(1, 9000))) for _ in "qk")
    sizes = dict(
        batch=random.randint(1, 3), q_heads=kv_heads * random.randint(1, 3), kv_heads=kv_heads, q_length=q_length,
        kv_length=kv_length, head_dim=head_dim, element=random.choice((2, 3, 4)), scale=random.uniform(0.01, 2.0),
        device=0,
    )  # fmt: skip

    def strides() -> list[int]:
        return [8 * random.randint(10**6, 10**7), 8 * random.randint(32, 99), 8 * random.randint(100, 999)]

    query_blocks, key_blocks = blocks_of(q_length, 128), blocks_of(kv_length, 128)
    of_lists = dict(
        batch=random.randint(1, 3), heads=5, query_blocks=query_blocks, key_blocks=key_blocks,
        is_union=random.random() < 0.5,
    )  # fmt: skip
    of_lists |= random.choice(
        (
            {"threshold": calls.Q, "always": calls.K, "dense": calls.V},
            {"counts": calls.Q, "forced": calls.K, "dense": calls.V, "bits": calls.MASK},
            {"active": calls.Q},
            {"count": random.randint(1, key_blocks)},
        )
    )
    of_tail = dict(v_strides=strides(), out_strides=strides(), list_strides=[random.randint(0, 99), 7])
    return [sizes, dict(q_strides=strides(), k_strides=strides()), random.random() < 0.5, of_tail, of_lists]


def test_selections_pass_all_parameters_to_their_kernels(select: Callable[..., Any], fresh_seed: int) -> None:
    random.seed(fresh_seed)
    cases = [one_case() for _ in range(40)]
    ends, lines = select(SELECT, cases)
    launched: list[list[tuple[str, int, Any]]] = [[] for _ in range(3 * len(cases))]
    for line in lines:
        launched[int(line.partition(" stream ")[2].split()[0])].append(read(line))
    for number, (sizes, strides, block_means, of_tail, of_lists) in enumerate(cases):
        size = Sizes(sizes, strides, of_tail)
        end_of_scores, end_of_tail = map(int, ends[number].split())
        check_scores(size, launched[3 * number], block_means, end_of_scores)
        check_lists(of_lists, launched[3 * number + 1])
        check_tail(size, launched[3 * number + 2], end_of_tail)


class Sizes:
    """The sizes of a case, and values that follow from them."""

    def __init__(self, sizes: dict[str, Any], strides: dict[str, Any], of_tail: dict[str, Any]) -> None:
        self.given, self.strides = sizes, {**strides, **of_tail}
        self.channels = next(size for size in (64, 128, 256) if sizes["head_dim"] <= size)
        self.kv_bh, self.q_bh = (sizes["batch"] * sizes[name] for name in ("kv_heads", "q_heads"))
        self.query_blocks, self.key_blocks = (blocks_of(sizes[name], 128) for name in ("q_length", "kv_length"))
        self.element = {2: "fp16", 3: "bf16", 4: "fp32"}[sizes["element"]]
        self.factor = ctypes.c_float(sizes["scale"] * math.log2(math.e)).value

    def check_same(self, values: Any, *names: str) -> None:
        assert [getattr(values, name) for name in names] == [self.given[name] for name in names]

    def check_pools(self, launch: tuple[str, int, Any], of: str, address: int, factor: float = 1.0) -> Any:
        """Checks one of the passes over the tokens of q, k or v; returns its parameters."""
        name, blocks, values = launch
        heads, length = ("q_heads", "q_length") if of == "q" else ("kv_heads", "kv_length")
        bh = self.given["batch"] * self.given[heads]
        assert name.removeprefix("pool_") in (f"center_{self.element}", f"tokens_{self.element}")
        rows_of_block = 256 // (self.channels // 8)
        assert blocks == bh * (1 if "center" in name else blocks_of(values.pool_rows, rows_of_block))
        assert list(values.tokens) == [address, *self.strides[f"{of}_strides"]]
        assert (values.heads, values.length) == (self.given[heads], self.given[length])
        assert (values.head_dim, values.channels) == (self.given["head_dim"], self.channels)
        assert values.pool_rows >= blocks_of(values.length, 16) and math.isclose(values.factor, factor, rel_tol=1e-6)
        return values

    def check_means(self, launch: tuple[str, int, Any], pools: Any, copies: int) -> Any:
        name, blocks, values = launch
        assert name == "block_means" and values.mean_rows >= self.key_blocks and values.copies == copies
        assert blocks == self.kv_bh * blocks_of(values.mean_rows, 256 // (self.channels // 8))
        assert (values.pools, values.pool_rows) == (pools.pools, pools.pool_rows)
        assert (values.length, values.channels) == (self.given["kv_length"], self.channels)
        return values


def check_scores(size: Sizes, launched: list[tuple[str, int, Any]], block_means: bool, end: int) -> None:
    names = ["pool_center", "pool_tokens", *["block_means"] * block_means, "pool_tokens", "block_scores"]
    assert [name.rsplit("_", 1)[0] if "pool" in name or "score" in name else name for name, *_ in launched] == names
    k = [size.check_pools(launch, "k", calls.K) for launch in launched[:2]][1]
    q = size.check_pools(launched[-2], "q", calls.Q, size.factor)
    assert q.center == 0 and k.center == launched[0][2].center and k.pools == launched[0][2].pools
    name, blocks, values = launched[-1]
    assert name == f"block_scores_d{size.channels}"
    size.check_same(values, "q_heads", "kv_heads", "q_length", "kv_length")
    assert (values.query_blocks, values.key_blocks) == (size.query_blocks, size.key_blocks)
    assert (values.query_pools, values.query_rows, values.key_rows) == (q.pools, q.pool_rows, k.pool_rows)
    rows = 128 if size.channels <= 128 else 64  # of Q's means per work item
    assert values.works * rows == size.q_bh * values.query_rows and 1 <= blocks <= values.works
    assert values.scores == calls.OUT and values.key_rows % 64 == 0
    of_keys = size.kv_bh * k.pool_rows * size.channels * 2
    parts = {k.center: size.kv_bh * size.channels * 4, k.pools: of_keys}
    parts[q.pools] = size.q_bh * q.pool_rows * size.channels * 2
    parts[values.sums] = blocks * (values.key_rows // 64) * rows * 8 * 2  # 8 blocks' sums per step, in 16 bits
    if block_means:
        means = size.check_means(launched[2], k, copies=8)
        assert values.key_pools == means.means and means.mean_rows * 8 == k.pool_rows
        parts[means.means] = of_keys
    else:
        assert values.key_pools == k.pools
    assert len(parts) == 4 + block_means
    assert_disjoint(parts, end)


def check_lists(given: dict[str, Any], launched: list[tuple[str, int, Any]]) -> None:
    ((name, blocks, values),) = launched
    assert name == "block_lists" and (values.scores, values.lists) == (calls.OUT, calls.BLOCK_MASK)
    of_tensors = ("threshold", "counts", "forced", "always", "dense", "active", "bits")
    for field in ("batch", "heads", "query_blocks", "key_blocks", "count", *of_tensors):
        assert getattr(values, field) == given.get(field, 0), field
    assert values.list_batch == (1 if given["is_union"] else given["batch"])
    assert blocks == blocks_of(values.list_batch * values.heads * values.query_blocks, 8)


def check_tail(size: Sizes, launched: list[tuple[str, int, Any]], end: int) -> None:
    assert len(launched) == 6
    k = [size.check_pools(launch, "k", calls.K) for launch in launched[:2]][1]
    v = size.check_pools(launched[3], "v", calls.V)
    key_means = size.check_means(launched[2], k, copies=1)
    value_means = size.check_means(launched[4], v, copies=1)
    assert v.center == 0 and v.pools == k.pools and v.pool_rows == k.pool_rows
    name, blocks, values = launched[5]
    assert name == f"pooled_tail_{size.element}_d{size.channels}"
    assert blocks == size.q_bh * blocks_of(size.given["q_length"], 1024)
    size.check_same(values, "q_heads", "kv_heads", "q_length", "kv_length", "head_dim")
    assert list(values.q) == [calls.Q, *size.strides["q_strides"]]
    assert list(values.out) == [calls.OUT, *size.strides["out_strides"]]
    assert (values.lse, values.lists, values.center) == (calls.LSE, calls.BLOCK_MASK, k.center)
    assert [values.list_batch_stride, values.list_head_stride] == size.strides["list_strides"]
    assert (values.key_means, values.value_means) == (key_means.means, value_means.means)
    assert values.mean_rows == key_means.mean_rows == value_means.mean_rows and values.mean_rows % 64 == 0
    assert (values.query_blocks, values.key_blocks) == (size.query_blocks, size.key_blocks)
    assert math.isclose(values.factor, size.factor, rel_tol=1e-6)
    of_means = size.kv_bh * values.mean_rows * size.channels * 2
    parts = {k.center: size.kv_bh * size.channels * 4, k.pools: size.kv_bh * k.pool_rows * size.channels * 2}
    assert_disjoint(parts | {key_means.means: of_means, value_means.means: of_means}, end)


def one_choice(most_counts: int) -> list[Any]:
    """A call without counts or a tail need not give their tensors."""
    addresses = iter(range(1 << 40, 2 << 40, 1 << 32))
    head_dim, element, length = 8 * random.randint(1, 32), random.choice((2, 3)), random.randint(129, 9000)
    strides = [8 * random.randint(1, 999) for _ in range(3)]
    counts = sorted(random.sample(range(1, 99), random.randint(0, most_counts)), reverse=True)
    heads, rows, unlike = random.randint(1, 9), random.randint(65, 256), random.randint(0, 64)
    sample = dict(
        batch=2, heads=heads, head_dim=head_dim, element=element, q_strides=strides, heads_of_group=8,
        spread_rows=rows - unlike, unlike=unlike, pools_of_part=7, device=0,
        **{name: next(addresses) for name in ("q", "spread", "pools", "tokens", "rows")},
    )  # fmt: skip
    tensors = ["outs", "last_outs", "lses", "last_lses", "q", "tokens", "scores", "always", "compared", "center"]
    tensors += ["key_means", "value_means", "forced", "totals", "norms"]
    of_rows = dict(
        element=element, head_dim=head_dim, q_heads=heads, group=2, rows=rows, q_length=length, kv_length=length,
        first_head=heads, heads=random.randint(1, heads), out_strides=strides[::-1], last_strides=strides[1:],
        q_strides=strides, counts=counts, popular=random.uniform(4, 40), scale=random.uniform(0.01, 1), mean_rows=64,
        device=0, **{name: next(addresses) for name in tensors},
    )  # fmt: skip
    names = ("norms", "compared_by_tail", "chosen", "by_tail", "errors", "compared_errors")
    cuts = dict(
        heads=2 * heads, rows=rows, unlike=unlike, counts=counts, bound=random.uniform(-1, 1), tail_cost=1.5,
        has_tail=random.random() < 0.5, device=0, **{name: next(addresses) for name in names},
    )  # fmt: skip
    cuts |= {} if counts else {"chosen": 0, "errors": 0}
    cuts |= {} if cuts["has_tail"] else {"by_tail": 0}
    return [sample, of_rows, cuts]


def assert_parameters(values: Any, given: dict[str, Any], **further: Any) -> None:
    """Each field of the structure equals the argument of that name."""
    for name, _ in values._fields_:
        if name not in ("padding", "counts", "cuts"):
            wanted = further[name] if name in further else given[name]
            found = list(getattr(values, name)) if isinstance(wanted, list) else getattr(values, name)
            assert found == pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else found == wanted, name
    if hasattr(values, "cuts"):
        assert list(values.counts)[: values.cuts] == given["counts"]


def test_choices_pass_all_parameters_to_their_kernels(select: Callable[..., Any], fresh_seed: int) -> None:
    random.seed(fresh_seed)
    choices = [one_choice(12 if number else 0) for number in range(20)]
    launched = [read(line) for line in select(CHOOSE, choices)[1]]
    for number, (sample, rows, cuts) in enumerate(choices):
        (of_sample, of_masses, of_rows, of_cuts) = launched[4 * number : 4 * number + 4]
        element = {2: "fp16", 3: "bf16"}[sample["element"]]
        channels = next(size for size in (64, 128, 256) if rows["head_dim"] <= size)
        assert of_sample[:2] == (f"row_sample_{element}", 2 * sample["heads"] * (sample["unlike"] + 1))
        assert_parameters(of_sample[2], sample, q=[sample["q"], *sample["q_strides"]])
        assert of_masses[:2] == ("row_masses", rows["heads"])
        assert of_rows[:2] == (f"row_errors_{element}_d{channels}", rows["heads"] * rows["rows"])
        names = ("out_block_stride", "out_head_stride", "out_row_stride", "last_head_stride", "last_row_stride")
        further = dict(zip(names, rows["out_strides"] + rows["last_strides"], strict=True))
        further |= {"q": [rows["q"], *rows["q_strides"]], "key_blocks": blocks_of(rows["kv_length"], 128)}
        for values in (of_masses[2], of_rows[2]):
            assert_parameters(values, rows, scale=rows["scale"] * math.log2(math.e), **further)
        assert of_cuts[:2] == ("chosen_cuts", cuts["heads"])
        assert_parameters(of_cuts[2], cuts)
