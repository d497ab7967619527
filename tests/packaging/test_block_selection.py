"""Calls that scores, lists and tails of key blocks refuse."""

from __future__ import annotations

from binding import Binding

SIZES = """
sizes = dict(batch=2, q_heads=4, kv_heads=2, q_length=300, kv_length=517, head_dim=72, element=3, scale=0.1, device=0)
strides = dict(q_strides=(86400, 21600, 72), k_strides=(74448, 37224, 72))
of_tail = dict(v_strides=(74448, 37224, 72), out_strides=(86400, 21600, 72), list_strides=(0, 18))
"""


def test_arguments_that_kernels_cannot_read_are_named(kernels: Binding) -> None:
    output = kernels.run(
        SIZES
        + """
attempt(kernels.block_score_plan, **{**sizes, "kv_heads": 3}, **strides)
attempt(kernels.pooled_tail_plan, **sizes, **strides, **{**of_tail, "v_strides": (74448, 37224, 73)})
attempt(kernels.block_score_plan(**sizes, **strides).run, q=0, k=32, scores=48, workspace=256, stream=77)
attempt(kernels.pooled_tail_plan(**sizes, **strides, **of_tail).run, 16, 32, 48, 64, 80, 97, 256, 77)
given = dict(batch=2, heads=4, query_blocks=3, scores=16, lists=32, stream=77, device=0)
attempt(kernels.block_lists, **given, key_blocks=5)
attempt(kernels.block_lists, **given, key_blocks=5, count=6)
attempt(kernels.block_lists, **given, key_blocks=40000, count=6)
"""
    )
    messages = output.splitlines()
    assert [line.partition(":")[0] for line in messages] == ["ValueError"] * 7
    words = ["q_heads must be a multiple", "v_token_stride must be", "q must be an address", "lists must be an address"]
    words += ["count must be from 1 to 5", "count must be from 1 to 5", "key_blocks must be from 1 to 32767"]
    assert all(expected in line for expected, line in zip(words, messages, strict=True))
    assert not kernels.log.exists()  # the driver was not called
