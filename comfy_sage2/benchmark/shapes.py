"""The attention shapes that are measured: the paper's setup, and those of real video and image models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Self-attention of `batch` x `heads` sequences of `length` tokens."""

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool = False

    @property
    def operations(self) -> float:
        """4 B H Nq Nkv D, halved when causal: the operations of the two matrix products, as in the paper."""
        return 4 * self.batch * self.heads * self.length**2 * self.head_dim / (2 if self.is_causal else 1)

    @property
    def qkv_bytes(self) -> int:
        """Bytes of q, k and v in 16 bits."""
        return 3 * 2 * self.batch * self.heads * self.length * self.head_dim

    def teraflops(self, milliseconds: float) -> float:
        """Operations in 10^12 a second."""
        return self.operations / milliseconds / 1e9

    def __str__(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return f"{self.name}: B{self.batch} H{self.heads} N{self.length} D{self.head_dim}{causal}"


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
GROUPS["quick"] = tuple(
    _BY_NAME[name] for name in ("d128-n1024", "d128-n8192", "d64-n8192", "d128-n8192-causal", "wan-1.3b-480p")
)


def select(names: Iterable[str]) -> tuple[Shape, ...]:
    """The shapes of these names and groups, each once, in the order asked for. ValueError lists what there is."""
    chosen: dict[str, Shape] = {}
    for name in names:
        if name in GROUPS:
            chosen.update((shape.name, shape) for shape in GROUPS[name])
        elif name in _BY_NAME:
            chosen[name] = _BY_NAME[name]
        else:
            raise ValueError(f"shape must be one of {', '.join([*GROUPS, *_BY_NAME])}, got {name!r}")
    return tuple(chosen.values())
