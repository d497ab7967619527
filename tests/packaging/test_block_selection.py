"""The launches of scores, lists and tails of key blocks, with a driver that writes them down."""

from __future__ import annotations

from binding import Binding

SIZES = """
sizes = dict(batch=2, q_heads=4, kv_heads=2, q_length=300, kv_length=517, head_dim=72, element=3, scale=0.1, device=0)
strides = dict(q_strides=(86400, 21600, 72), k_strides=(74448, 37224, 72))
of_tail = dict(v_strides=(74448, 37224, 72), out_strides=(86400, 21600, 72), list_strides=(0, 18))
"""


def test_scores_pool_k_about_its_center_then_q(kernels: Binding) -> None:
    kernels.run(
        SIZES
        + """
plan = kernels.block_score_plan(**sizes, **strides)
means = kernels.block_score_plan(**sizes, **strides, block_means=True)
assert 0 < plan.workspace_bytes < means.workspace_bytes < 1 << 22
plan.run(q=16, k=32, scores=48, workspace=256, stream=77)
means.run(q=16, k=32, scores=48, workspace=256, stream=77)
"""
    )
    scores = ["pool_center_bf16", "pool_tokens_bf16", "pool_tokens_bf16", "block_scores_d128"]
    with_means = [*scores[:2], "block_means", *scores[2:]]
    launched = kernels.calls("cuLaunchKernelEx")
    assert [line.split()[0] for line in launched] == [*scores, *with_means]
    assert all(" stream 77 " in line for line in launched)


def test_lists_are_one_launch(kernels: Binding) -> None:
    kernels.run("""
given = dict(batch=2, heads=4, query_blocks=3, key_blocks=5, scores=16, lists=32, stream=77, device=0)
kernels.block_lists(**given, count=2)
kernels.block_lists(**given, threshold=64, always=80, dense=96, is_union=True)
""")
    launched = kernels.calls("cuLaunchKernelEx")
    assert [line.split()[0] for line in launched] == ["block_lists"] * 2
    assert "grid 3,1,1 " in launched[0] and "grid 2,1,1 " in launched[1]  # 24 and 12 lists, 8 a thread block


def test_a_tail_makes_means_of_k_and_v_first(kernels: Binding) -> None:
    kernels.run(
        SIZES
        + """
plan = kernels.pooled_tail_plan(**sizes, **strides, **of_tail)
assert 0 < plan.workspace_bytes < 1 << 20
plan.run(q=16, k=32, v=48, out=64, lse=80, lists=96, workspace=256, stream=77)
"""
    )
    launched = [line.split()[0] for line in kernels.calls("cuLaunchKernelEx")]
    means = ["pool_tokens_bf16", "block_means"]
    assert launched == ["pool_center_bf16", *means, *means, "pooled_tail_bf16_d128"]


def test_what_the_kernels_cannot_read_is_refused_in_words(kernels: Binding) -> None:
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
    assert not kernels.log.exists()  # no call of the driver
