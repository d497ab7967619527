"""The orders in which kernels take the keys, from their own sources compiled for the host, against the reference."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import Any

import pytest
from binding import CSRC, NATIVE, compile_native

from comfy_sage2.block_mask import BLOCK_TOKENS, blocks_of
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.steps import key_steps

Call = tuple[int, int, bool]  # lengths of queries and keys, and whether it is causal

CALLS = 60
_KEY_BLOCK = 64  # kKeyBlock of csrc/sm80/tiles.h
_MOST_STEPS = 64


@pytest.fixture(scope="module")
def kernels_order(tmp_path_factory: pytest.TempPathFactory, compiler: None) -> ctypes.CDLL:
    """The functions of native/key_order.cpp."""
    library = tmp_path_factory.mktemp("key_order") / "key_order.so"
    arguments = ["-shared", "-std=c++20", "-pthread", "-fvisibility=default"]
    arguments += [f"-I{CSRC}", f"-I{NATIVE}", "-include", "host_cuda.h"]
    return ctypes.CDLL(str(compile_native(library, *arguments, str(NATIVE / "key_order.cpp"))))


@pytest.fixture
def calls(fresh_seed: int) -> list[Call]:
    """Lengths of queries and keys, mostly equal, in whole or ragged tiles; and whether the call is causal."""
    random.seed(fresh_seed)
    drawn = []
    for _ in range(CALLS):
        q_length, kv_length = (
            random.choice([random.randint(1, 2000), BLOCK_TOKENS * random.randint(1, 12)]) for _ in "qk"
        )
        drawn.append((q_length, q_length if random.random() < 0.7 else kv_length, random.random() < 0.4))
    return drawn


def hopper_order(library: ctypes.CDLL, rows: int, step: int, call: Call, work_tile: int) -> list[int]:
    """The tiles of `step` keys for a work tile of `rows` queries."""
    out = (ctypes.c_int * _MOST_STEPS)()
    count = library.sm90_order(rows, step, call[2], call[0], call[1], work_tile, out)
    assert count > 0
    return list(out[:count])


def mma_order(library: ctypes.CDLL, call: Call, block: int, linked: tuple[Any, int] | None = None) -> list[int]:
    """The key blocks for a block of queries. `linked`: the entries and the first tile of a linked list."""
    q_length, kv_length, causal = call
    keys = min(kv_length, (block + 1) * BLOCK_TOKENS) if causal else kv_length
    out = (ctypes.c_int * _MOST_STEPS)()
    count = library.sm80_order(
        causal or q_length == kv_length, -(-keys // _KEY_BLOCK), block, *(linked or (None, 0)), out
    )
    assert count >= 0, "the order does not end"
    return list(out[:count])


def reference_order(step: int, call: Call, block: int, *, last_keys_first: bool) -> list[int]:
    """The numbers of the reference's steps for a block of queries."""
    numerics = ReferenceOptions(keys_per_step=step, last_keys_first=last_keys_first, diagonal_early=True)
    rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)  # a ragged block too, as in the kernels
    return [keys.start // step for keys in key_steps(rows, *call[:2], numerics, is_causal=call[2])]


@pytest.mark.parametrize("step", [64, 128, 192])
def test_hopper_takes_keys_in_the_order_of_the_reference(
    kernels_order: ctypes.CDLL, calls: list[Call], step: int
) -> None:
    moved = 0
    for q_length, kv_length, causal in calls:
        call = (q_length, kv_length, causal and step != 192)  # no causal kernel takes 192 keys per step
        for block in range(blocks_of(q_length)):
            order = hopper_order(kernels_order, BLOCK_TOKENS, step, call, block)
            assert order == reference_order(step, call, block, last_keys_first=True), (call, block)
            assert sorted(order) == list(range(len(order)))
            moved += order != sorted(order, reverse=True)
    assert moved > 0  # the drawn calls exercise the assertions above


def test_three_warpgroups_take_the_tile_at_their_middle_second(kernels_order: ctypes.CDLL, calls: list[Call]) -> None:
    rows, step = 192, 64
    for q_length, kv_length, causal in calls:
        for work_tile in range(-(-q_length // rows)):
            order = hopper_order(kernels_order, rows, step, (q_length, kv_length, causal), work_tile)
            assert sorted(order) == list(range(len(order)))
            tiles = list(dict.fromkeys(place // 2 for place in order))  # of 128 keys, which stay together
            assert [place // 2 for place in order] == sorted((place // 2 for place in order), key=tiles.index)
            wanted = sorted(tiles, reverse=True)
            middle = (work_tile * rows + rows // 2) // BLOCK_TOKENS
            if not causal and q_length == kv_length and middle in wanted[1:]:
                wanted.remove(middle)
                wanted.insert(1, middle)
            assert tiles == wanted


def test_mma_takes_keys_in_the_order_of_the_reference(kernels_order: ctypes.CDLL, calls: list[Call]) -> None:
    moved = 0
    for call in calls:
        for block in range(blocks_of(call[0])):
            order = mma_order(kernels_order, call, block)
            assert order == reference_order(_KEY_BLOCK, call, block, last_keys_first=False), (call, block)
            moved += order != sorted(order)
    assert moved > 0  # the drawn calls exercise the assertions above


def random_lists(blocks: int, tiles: int) -> tuple[list[set[int]], Any]:
    """The live tiles of each block of queries, and the caller's lists of them, some with invalid entries."""
    live, lists = [], []
    for _ in range(blocks):
        chosen = random.sample(range(tiles), random.randint(0, tiles))
        live.append(set(chosen))
        entries = chosen + [random.choice([-1, tiles, *chosen]) for _ in range(random.randint(0, tiles - len(chosen)))]
        random.shuffle(entries)
        lists.append([len(entries), *entries, *[31000] * (tiles - len(entries))])
    return live, (ctypes.c_short * (blocks * (1 + tiles)))(*itertools.chain(*lists))


@pytest.mark.parametrize("linked", [False, True], ids=["Hopper", "mma"])
def test_lists_keep_the_order_of_dense_calls(kernels_order: ctypes.CDLL, calls: list[Call], linked: bool) -> None:
    for q_length, kv_length, causal in calls[:20]:
        call = (q_length, kv_length, causal)
        blocks, tiles = blocks_of(q_length), blocks_of(kv_length)
        live, lists = random_lists(blocks, tiles)
        entries, counts, invalid = (ctypes.c_ushort * (blocks * tiles))(), (ctypes.c_int * blocks)(), ctypes.c_int()
        has_diagonal = causal or q_length == kv_length
        kernels_order.prepare(
            lists, blocks, tiles, causal, has_diagonal, linked, entries, counts, ctypes.byref(invalid)
        )
        for block in range(blocks):
            of_block = (ctypes.c_ushort * tiles)(*entries[block * tiles : (block + 1) * tiles])
            if linked:
                order = mma_order(kernels_order, call, block, (of_block, counts[block]))
                dense = mma_order(kernels_order, call, block)
                assert order == [place for place in dense if place // 2 in live[block]], (call, block)
            else:
                order = list(of_block[: counts[block]])
                dense = hopper_order(kernels_order, BLOCK_TOKENS, BLOCK_TOKENS, call, block)
                assert order == [place for place in dense if place in live[block]], (call, block)
