"""What caches of blocks take."""

from __future__ import annotations

from comfy_sage2.sparsity.mask_cache import BlockMaskCache, CachedMask
from comfy_sage2.sparsity.selections import Selection, Selections


def bytes_of(cache: BlockMaskCache | Selections) -> int:
    """Of all blocks that are kept, those too that may have to stand again."""
    return sum(map(_bytes, cache._calls.values()))


def _bytes(found: CachedMask | Selection | None) -> int:
    if found is None:
        return 0
    blocks = [found.blocks]
    if isinstance(found, CachedMask) and found._before_addition is not None:
        blocks.append(found._before_addition[1])
    return sum(one._packed.numel() for one in blocks) + _bytes(getattr(found, "previous", None))
