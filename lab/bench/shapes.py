"""The attention shapes that are measured: the paper's setup, those of real models, and other kinds of calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Attention of `batch` x `heads` sequences of `length` queries and as many keys, or `key_length` of them.

    mask: None; "padding": the last 100 keys are hidden, (B, 1, 1, Nkv) bool; "queries": each query attends to its own
    random half of the keys, (1, 1, Nq, Nkv) bool.
    dtype: of q, k, v and the output: "bf16", "fp16" or "fp32".
    """

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool = False
    key_length: int | None = None
    mask: str | None = None
    dtype: str = "bf16"

    @property
    def keys(self) -> int:
        """The number of keys of a sequence."""
        return self.length if self.key_length is None else self.key_length

    @property
    def operations(self) -> float:
        """4 B H Nq Nkv D, halved when causal: the operations of the two matrix products, as in the paper.

        A mask saves none of them.
        """
        dense = 4 * self.batch * self.heads * self.length * self.keys * self.head_dim
        return dense / (2 if self.is_causal else 1)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output in 16 bits."""
        return 2 * self.batch * self.heads * self.length * self.head_dim

    def teraflops(self, milliseconds: float) -> float:
        """Operations in 10^12 a second."""
        return self.operations / milliseconds / 1e9

    def __str__(self) -> str:
        keys = f" Nkv{self.keys}" if self.key_length is not None else ""
        more = [self.dtype, *(["causal"] if self.is_causal else []), *([f"mask: {self.mask}"] if self.mask else [])]
        size = f"B{self.batch} H{self.heads} N{self.length}{keys} D{self.head_dim}"
        return f"{self.name}: {size}, {', '.join(more)}"


def _of_the_paper(head_dim: int, length: int, is_causal: bool) -> Shape:
    name = f"d{head_dim}-n{length}" + ("-causal" if is_causal else "")
    return Shape(name, batch=4, heads=32, length=length, head_dim=head_dim, is_causal=is_causal)


GROUPS: dict[str, tuple[Shape, ...]] = {
    "paper": tuple(
        _of_the_paper(head_dim, length, is_causal)
        for head_dim in (128, 64)
        for is_causal in (False, True)
        for length in (1024, 2048, 4096, 8192, 16384, 32768)
    ),
    "video": (
        Shape("wan-14b-720p", batch=1, heads=40, length=75_600, head_dim=128),
        Shape("wan-1.3b-480p", batch=1, heads=12, length=32_760, head_dim=128),
        Shape("hunyuan-720p", batch=1, heads=24, length=118_800, head_dim=128),
        Shape("cogvideox-2b", batch=1, heads=30, length=17_776, head_dim=64),
        Shape("ltxv-768x512", batch=1, heads=32, length=4_992, head_dim=64),
        Shape("flux-1024", batch=1, heads=24, length=4_608, head_dim=128),
    ),
}
_BY_NAME = {shape.name: shape for shapes in GROUPS.values() for shape in shapes}
GROUPS["calls"] = (
    replace(_BY_NAME["wan-14b-720p"], name="wan-14b-cross", key_length=512),
    replace(_BY_NAME["d128-n8192"], name="d128-n8192-padding", mask="padding"),
    replace(_BY_NAME["d64-n8192"], name="d64-n8192-padding", mask="padding"),
    replace(_BY_NAME["d128-n8192"], name="d128-n8192-queries", mask="queries"),
    replace(_BY_NAME["d128-n8192"], name="d128-n8192-fp16", dtype="fp16"),
    replace(_BY_NAME["wan-14b-720p"], name="wan-14b-720p-fp16", dtype="fp16"),
    replace(_BY_NAME["wan-1.3b-480p"], name="wan-1.3b-480p-fp16", dtype="fp16"),
)
# The shapes in which builds of the mma.sync kernels are compared with each other and with peers.
GROUPS["builds"] = tuple(
    Shape(f"d{head_dim}-h24-n{length}{'-causal' * is_causal}", batch, 24, length, head_dim, is_causal)
    for head_dim in (128, 64)
    for batch, length, is_causal in ((2, 4096, False), (1, 16384, False), (1, 32760, False), (1, 16384, True))
)
_BY_NAME |= {shape.name: shape for shapes in GROUPS.values() for shape in shapes}


def select(names: Iterable[str]) -> tuple[Shape, ...]:
    """The shapes of these names and groups, each once, in this order. ValueError lists the valid names."""
    chosen: dict[str, Shape] = {}
    for name in names:
        if name in GROUPS:
            chosen.update((shape.name, shape) for shape in GROUPS[name])
        elif name in _BY_NAME:
            chosen[name] = _BY_NAME[name]
        else:
            raise ValueError(f"shape must be one of {', '.join([*GROUPS, *_BY_NAME])}, got {name!r}")
    return tuple(chosen.values())
