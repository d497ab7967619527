"""Make every kind of call to one architecture's kernels, and every kind of error, in the interpreter under test.

    python calls.py FOLDER ARCHITECTURE

FOLDER holds the unpacked wheels. The recording driver logs what would reach the GPU; the addresses are made
up.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import Counter
from functools import partial
from typing import Any

Q, K, V, OUT, MASK, LSE, NONFINITE, WORKSPACE, BLOCK_MASK, INVALID_BLOCKS = (
    0x7F0000000000 + index * 0x1000000000 for index in range(10)
)
STREAM = 0x1234567890
FP16, BF16, FP32 = 2, 3, 4
BOOL = 1


# A call's signature, as the keywords of `plan`, and its operands besides q, k, v, out and the workspace.
Call = tuple[dict[str, Any], dict[str, int]]


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
    rotate_by_head: bool = False,
    smooth_v: bool = False,
    causal: bool = False,
    mask: str | None = None,
    lse: bool = False,
    block_mask: str | None = None,
    pv: int = 0,
    pv_accumulator: int = 32,
    device: int = 0,
) -> Call:
    signature: dict[str, Any] = dict(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, q_length=q_length, kv_length=kv_length, head_dim=head_dim,
        element=element, mode=mode, rotate=rotate, rotate_by_head=rotate_by_head, smooth_v=smooth_v, causal=causal,
        pv=pv, pv_accumulator=pv_accumulator, scale=head_dim**-0.5, device=device, has_lse=lse,
    )  # fmt: skip
    operands: dict[str, int] = {}
    for view, heads, length in (("q", q_heads, q_length), ("k", kv_heads, kv_length), ("v", kv_heads, kv_length),
                                ("out", q_heads, q_length)):  # fmt: skip
        signature[f"{view}_batch_stride"] = heads * length * head_dim
        signature[f"{view}_head_stride"] = head_dim
        signature[f"{view}_token_stride"] = heads * head_dim
    if mask is not None:
        full, of_heads = mask == "full", mask == "keys of heads"
        operands["mask"] = MASK
        signature.update(
            mask_element=FP16 if full else BOOL, mask_batch_stride=q_heads * kv_length if of_heads else 0,
            mask_head_stride=q_length * kv_length if full else kv_length if of_heads else 0,
            mask_query_stride=kv_length if full else 0, mask_key_stride=1,
        )  # fmt: skip
    if lse:
        operands.update(lse=LSE, nonfinite=NONFINITE)
    if block_mask is not None:
        key_blocks = -(-kv_length // 128)
        lists = -(-q_length // 128) * (1 + key_blocks)
        own = block_mask == "own"
        operands.update(block_mask=BLOCK_MASK, **({"invalid_blocks": INVALID_BLOCKS} if own else {}))
        signature.update(
            block_mask_key_blocks=key_blocks, block_mask_batch_stride=q_heads * lists if own else 0,
            block_mask_head_stride=lists if own else 0,
        )  # fmt: skip
    return signature, operands


def all_descriptions() -> list[Call]:
    grid = itertools.product(
        (64, 72, 256), (FP16, BF16, FP32), (8, 4, 16), (False, True), (False, True), (None, "keys", "full"),
        (False, True), (32, 16),
    )  # fmt: skip
    calls = [
        description(
            batch=2, head_dim=head_dim, element=element, mode=mode, rotate=smooth_v != lse,
            rotate_by_head=smooth_v != lse and causal, smooth_v=smooth_v,
            causal=causal, mask=mask, lse=lse, pv_accumulator=accumulator,
        )
        for head_dim, element, mode, smooth_v, causal, mask, lse, accumulator in grid
    ]  # fmt: skip
    listed = itertools.product((64, 72, 256), (8, 4, 16), (False, True), (None, "full"), ("own", "shared"))
    calls += [
        description(batch=2, head_dim=head_dim, mode=mode, causal=causal, mask=mask, block_mask=lists, lse=True)
        for head_dim, mode, causal, mask, lists in listed
    ]
    calls += [
        description(batch=2, head_dim=head_dim, mode=mode, mask="keys of heads")
        for head_dim, mode in itertools.product((64, 72, 256), (8, 4, 16))
    ]
    calls += [
        description(batch=2, head_dim=head_dim, mode=mode, mask=mask, pv=pv)
        for head_dim, mode, mask, pv in itertools.product((64, 128, 256), (8, 4), (None, "keys"), (1, 2, 3, 4))
    ]
    # Calls with few keys have their own kernels.
    calls += [
        description(
            batch=2, q_length=900, kv_length=200, head_dim=head_dim, mode=mode, mask=mask, rotate=rotate,
            rotate_by_head=by_head,
        )
        for head_dim, mode, mask, (rotate, by_head) in itertools.product(
            (64, 128, 256), (8, 16), (None, "keys"), ((False, False), (True, False), (True, True))
        )
    ]  # fmt: skip
    # 4b calls that run in several parts.
    calls += [
        description(q_heads=20, kv_heads=10, q_length=40_000, kv_length=30_000, mode=4, block_mask=lists, mask="keys")
        for lists in (None, "own", "shared")
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


def attempt(function: Any, *arguments: Any, **fields: Any) -> str:
    """What a call returns or raises, as text."""
    try:
        return repr(function(*arguments, **fields))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def size(module: Any, signature: dict[str, Any], operands: dict[str, int]) -> str:
    """The bytes of a call's workspace, or the error, as text."""
    return attempt(lambda: module.plan(**signature).workspace_bytes)


def enqueue(module: Any, signature: dict[str, Any], operands: dict[str, int], *, in_phases: bool = False) -> str:
    """Enqueue a call, or its two phases in turn; return what the last one returns or raises, as text."""
    needed = size(module, signature, operands)
    if not needed.isdecimal():
        return needed
    run = partial(module.plan(**signature).run, Q, K, V, OUT, WORKSPACE, STREAM, **operands)
    outcomes = [attempt(run, phase=phase) for phase in ((1, 2) if in_phases else (0,))]
    return outcomes[-1]


def main(folder: str, architecture: str) -> None:
    sys.path.insert(0, folder)
    module = importlib.import_module(f"comfy_sage2_{architecture}")
    outcomes = Counter(enqueue(module, *call) for call in all_descriptions())
    for outcome, count in sorted(outcomes.items()):
        print(count, outcome)
    good, operands = description()
    wrong: list[dict[str, Any]] = [
        {"head_dim": 320}, {"head_dim": 3.5}, {"scale": "large"}, {"scale": None}, {"unknown": 1}, {"q_length": 2**70},
        {"q_token_stride": -(2**40)}, {"mode": 7}, {"pv_accumulator": 8}, {"element": 99},
    ]  # fmt: skip
    for change in wrong:
        print(change, size(module, good | change, operands))
    incomplete = {name: value for name, value in good.items() if name != "kv_length"}
    print("incomplete", size(module, incomplete, operands))
    plan = module.plan(**good)
    print(plan, plan.attention_reads, module.modes, module.pv_accumulators, module.capabilities)
    addresses: list[tuple[Any, ...]] = [
        (), (Q, K, V, OUT, WORKSPACE, 2**64), (Q, K, V, OUT, 0, STREAM), (Q, K, V, OUT + 8, WORKSPACE, STREAM),
        (Q, K, V, OUT, WORKSPACE, STREAM, LSE), (Q, K, V, OUT, WORKSPACE, 2**64 - 1),
    ]  # fmt: skip
    for arguments in addresses:
        print(arguments, attempt(plan.run, *arguments))
    print(module.architecture, module.target, module.version, module.toolchain, module.minimum_driver_version)
    print("driver", attempt(module.driver_version))


if __name__ == "__main__":
    main(*sys.argv[1:])
