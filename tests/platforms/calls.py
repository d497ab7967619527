"""Run in the interpreter under test: every kind of call to one architecture's kernels, and every kind of error.

    python calls.py FOLDER ARCHITECTURE

FOLDER holds the unpacked wheel. The recording driver writes down what would reach the GPU; the addresses are made up.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import Counter
from typing import Any

Q, K, V, OUT, MASK, LSE, NONFINITE, WORKSPACE, LISTS, INVALID, MARGINS = (
    0x7F0000000000 + index * 0x1000000000 for index in range(11)
)
FP16, BF16, FP32 = 2, 3, 4
BOOL = 1


def description(
    *,
    batch: int = 1,
    q_heads: int = 4,
    kv_heads: int = 2,
    q_length: int = 300,
    kv_length: int = 517,
    head_dim: int = 128,
    element: int = FP16,
    mode: int = 8,
    rotate: bool = False,
    smooth_v: bool = False,
    causal: bool = False,
    mask: str | None = None,
    lse: bool = False,
    block_mask: str | None = None,
    block_margins: bool = False,
    pv_accumulator: int = 32,
    device: int = 0,
) -> dict[str, Any]:
    """The fields of a call but for the pointers of q, k, v, out and the workspace."""
    call: dict[str, Any] = dict(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, q_length=q_length, kv_length=kv_length, head_dim=head_dim,
        element=element, mode=mode, rotate=rotate, smooth_v=smooth_v, causal=causal,
        pv_accumulator=pv_accumulator, scale=head_dim**-0.5, device=device, stream=0x1234567890,
    )  # fmt: skip
    for view, heads, length in (("q", q_heads, q_length), ("k", kv_heads, kv_length), ("v", kv_heads, kv_length),
                                ("out", q_heads, q_length)):  # fmt: skip
        call[f"{view}_batch_stride"] = heads * length * head_dim
        call[f"{view}_head_stride"] = head_dim
        call[f"{view}_token_stride"] = heads * head_dim
    if mask is not None:
        full = mask == "full"
        call.update(
            mask_pointer=MASK, mask_element=FP16 if full else BOOL, mask_batch_stride=0,
            mask_head_stride=q_length * kv_length if full else 0, mask_query_stride=kv_length if full else 0,
            mask_key_stride=1,
        )  # fmt: skip
    if lse:
        call.update(lse=LSE, nonfinite=NONFINITE)
    if block_mask is not None:
        key_blocks = -(-kv_length // 128)
        lists = -(-q_length // 128) * (1 + key_blocks)
        own = block_mask == "own"
        call.update(
            tiles_pointer=LISTS, tiles_invalid=INVALID if own else 0, tiles_key_tiles=key_blocks,
            tiles_batch_stride=q_heads * lists if own else 0, tiles_head_stride=lists if own else 0,
        )  # fmt: skip
    if block_margins:
        call.update(block_margins=MARGINS)
    return call


def all_descriptions() -> list[dict[str, Any]]:
    grid = itertools.product(
        (64, 72, 256), (FP16, BF16, FP32), (8, 4, 16), (False, True), (False, True), (None, "keys", "full"),
        (False, True), (32, 16),
    )  # fmt: skip
    calls = [
        description(
            batch=2, head_dim=head_dim, element=element, mode=mode, rotate=smooth_v != lse, smooth_v=smooth_v,
            causal=causal, mask=mask, lse=lse, pv_accumulator=accumulator,
        )
        for head_dim, element, mode, smooth_v, causal, mask, lse, accumulator in grid
    ]  # fmt: skip
    listed = itertools.product((64, 72, 256), (8, 4, 16), (False, True), (None, "full"), ("own", "shared"))
    calls += [
        description(batch=2, head_dim=head_dim, mode=mode, causal=causal, mask=mask, block_mask=blocks, lse=True)
        for head_dim, mode, causal, mask, blocks in listed
    ]
    calls += [
        description(batch=2, head_dim=head_dim, mode=mode, block_margins=True)
        for head_dim, mode in itertools.product((64, 72, 256), (8, 4, 16))
    ]
    for q_length, kv_length, head_dim in ((1, 1, 8), (75_600, 75_600, 128), (300_000, 300_000, 64), (1024, 77, 200)):
        calls += [
            description(
                q_heads=40, kv_heads=40, q_length=q_length, kv_length=kv_length, head_dim=head_dim, element=BF16,
                mode=mode, lse=True, device=1,
            )
            for mode in (8, 4, 16)
        ]  # fmt: skip
    return calls


def attempt(function: Any, **fields: Any) -> str:
    """What a call returns or raises, as text."""
    try:
        return repr(function(**fields))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def enqueue(module: Any, call: dict[str, Any]) -> str:
    size = attempt(module.workspace_bytes, **call)
    if not size.isdecimal():
        return size
    pointers = dict(q_pointer=Q, k_pointer=K, v_pointer=V, out_pointer=OUT)
    return attempt(module.attention, **call, **pointers, workspace=WORKSPACE, workspace_bytes=int(size))


def main(folder: str, architecture: str) -> None:
    sys.path.insert(0, folder)
    module = importlib.import_module(f"comfy_sage2_{architecture}")
    outcomes = Counter(enqueue(module, call) for call in all_descriptions())
    for outcome, count in sorted(outcomes.items()):
        print(count, outcome)
    good = description()
    wrong: list[dict[str, Any]] = [
        {"head_dim": 320}, {"head_dim": 3.5}, {"scale": "large"}, {"scale": None}, {"unknown": 1}, {"q_length": 2**70},
        {"q_token_stride": -(2**40)}, {"stream": 2**64 - 1}, {"mode": 7}, {"pv_accumulator": 8}, {"element": 99},
    ]  # fmt: skip
    for change in wrong:
        print(change, attempt(module.workspace_bytes, **{**good, **change}))
    incomplete = {name: value for name, value in good.items() if name != "kv_length"}
    print("incomplete", attempt(module.workspace_bytes, **incomplete))
    print("without pointers", attempt(module.attention, **good))
    print("small workspace", attempt(module.attention, **good, q_pointer=Q, k_pointer=K, v_pointer=V, out_pointer=OUT))
    print(module.architecture, module.target, module.version, module.toolchain, module.minimum_driver_version)
    print("driver", attempt(module.driver_version))


if __name__ == "__main__":
    main(*sys.argv[1:])
