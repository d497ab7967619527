"""Which key tiles each block of queries attends to: block-sparse attention, as lists that kernels can walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_TOKENS = 128  # queries of a block, and keys of a tile
MOST_TILES = torch.iinfo(torch.int16).max
_UNREAD = -1  # what lies behind the count in the lists that are made here


def tiles_of(length: int) -> int:
    """The tiles of `length` tokens; the last one may be ragged."""
    return -(-length // TILE_TOKENS)


@dataclass(frozen=True, eq=False)
class TileLists:
    """For each block of 128 queries the tiles of 128 keys to compute.

    A query attends to a key exactly when the key's tile is in its block's list, and mask and causal order allow it. A
    block with an empty list gives zeros, and -inf in the LSE. The order is that of processing, and changes no more
    than rounding: a backend may take the tiles in another one, and the reference does.

    A NaN of a tile that no list of a head names may reach that head's output or not: backends skip the tile or mask it.

    Every backend leaves out numbers that are out of range or given twice, and cuts a count that is out of range to it,
    without a wait for the device; `invalid` notes it. `check`, and `comfy_sage2.explain`, make errors of them.

    The lists take Tq (1 + Tk) numbers of 2 bytes a head. Of q, k and v in 16 bits, of N tokens and as many heads each,
    that is the share N / (49,152 D) and a little: at most 1.5 % up to 94,000 tokens of head_dim 128, and it grows with
    N. Heads that share their lists (Hq = 1) share the memory too.

    Attributes:
        lists: (B, Hq, Tq, 1 + Tk) int16, contiguous, on q's device; B and Hq may be 1 and then stand for all. Tq and Tk
            are the blocks of queries and the tiles of keys. Entry 0 is the number of live tiles n, entries 1 to n are
            their numbers, and what lies behind them is not read. At most 32,767 tiles: 4,194,176 keys.
        invalid: None, or one int32 on their device, which a call sets to 1 when it leaves out an entry or cuts a count,
            and else leaves as it is, so that one of them can serve many lists. The call checks dtype, size and device.

    Raises:
        TypeError: `lists` is no int16 tensor.
        ValueError: it is not 4-D, empty or not contiguous.
    """

    lists: torch.Tensor
    invalid: torch.Tensor | None = None

    def __post_init__(self) -> None:
        lists = self.lists
        if not isinstance(lists, torch.Tensor) or lists.dtype != torch.int16:
            found = lists.dtype if isinstance(lists, torch.Tensor) else type(lists).__name__
            raise TypeError(f"[SA-211] tile lists must be an int16 tensor, got {found}")
        if lists.dim() != 4 or lists.numel() == 0 or lists.shape[3] < 2:
            raise ValueError(
                "[SA-211] tile lists must be of shape (batch, q_heads, blocks of 128 queries, 1 + tiles of 128 keys), "
                f"got {tuple(lists.shape)}"
            )
        if lists.shape[3] - 1 > MOST_TILES:
            raise ValueError(f"[SA-211] tile lists hold at most {MOST_TILES} key tiles, got {lists.shape[3] - 1}")
        if not lists.is_contiguous():
            raise ValueError(
                f"[SA-211] tile lists must be contiguous, got strides {lists.stride()}; call lists.contiguous() first"
            )

    @classmethod
    def of_mask(cls, block_mask: torch.Tensor, *, is_causal: bool = False) -> TileLists:
        """The lists of a bool (B, Hq, Tq, Tk) mask, True = compute, on its device; no wait for the device.

        Tiles go from the last to the first; kernels bring them into an order of their own. With `is_causal`, for calls
        that have it, tiles above the diagonal are left out.
        """
        _check_bool(block_mask)
        if block_mask.dim() != 4 or block_mask.numel() == 0:
            raise ValueError(
                "[SA-211] block_mask must be of shape (batch, q_heads, blocks of 128 queries, tiles of 128 keys), got "
                f"{tuple(block_mask.shape)}"
            )
        tiles = block_mask.shape[3]
        if tiles > MOST_TILES:
            raise ValueError(f"[SA-211] block_mask must have at most {MOST_TILES} key tiles, got {tiles}")
        if is_causal:
            block_mask = block_mask.tril()
        live = block_mask.flip(3)
        entry = live.cumsum(dim=3, dtype=torch.int32)
        lists = torch.full((*live.shape[:3], tiles + 2), _UNREAD, dtype=torch.int16, device=live.device)
        lists[..., 0] = entry[..., -1]
        numbers = torch.arange(tiles - 1, -1, -1, dtype=torch.int16, device=live.device)
        # Dead tiles go into an entry behind the others, which is cut off.
        lists.scatter_(3, entry.where(live, tiles + 1).long(), numbers.expand_as(live))
        return cls(lists[..., :-1].contiguous())

    @classmethod
    def of_blocks(
        cls,
        block_mask: torch.Tensor,
        block_size: tuple[int, int],
        q_length: int,
        kv_length: int,
        *,
        is_causal: bool = False,
    ) -> TileLists:
        """The lists of a mask whose blocks are not of 128 tokens, in the order of `of_mask`; no wait for the device.

        A tile is in a list when any block that overlaps it is to be computed. So the call attends to all that the mask
        allows, and to the rest of such tiles too. Where both sizes are multiples of 128 there is no such rest.

        Args:
            block_mask: bool (B, Hq, blocks of queries, blocks of keys), True = compute; the last blocks may be ragged.
            block_size: the queries and the keys of a block, in tokens: (128, 64) for SpargeAttn's masks.
            q_length, kv_length: tokens of q, and of k and v.
            is_causal: as for `of_mask`.

        Raises:
            TypeError: `block_mask` is no bool tensor.
            ValueError: a size or length is below 1, or the mask does not fit them.
        """
        _check_bool(block_mask)
        _check_at_least_1(q_block=block_size[0], kv_block=block_size[1], q_length=q_length, kv_length=kv_length)
        blocks = -(-q_length // block_size[0]), -(-kv_length // block_size[1])
        if block_mask.dim() != 4 or block_mask.numel() == 0 or tuple(block_mask.shape[2:]) != blocks:
            raise ValueError(
                f"[SA-211] block_mask must be of shape (batch, q_heads, {blocks[0]}, {blocks[1]}) for {q_length} "
                f"queries in blocks of {block_size[0]} and {kv_length} keys in blocks of {block_size[1]}, got "
                f"{tuple(block_mask.shape)}"
            )
        rows = _overlapping_tiles(block_mask, 2, block_size[0], q_length)
        return cls.of_mask(_overlapping_tiles(rows, 3, block_size[1], kv_length), is_causal=is_causal)

    @classmethod
    def dense(
        cls,
        q_length: int,
        kv_length: int,
        *,
        is_causal: bool = False,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str | None = None,
    ) -> TileLists:
        """All tiles of `q_length` queries and `kv_length` keys, in the order of `of_mask`."""
        _check_at_least_1(q_length=q_length, kv_length=kv_length, batch=batch, heads=heads)
        shape = (batch, heads, tiles_of(q_length), tiles_of(kv_length))
        return cls.of_mask(torch.ones(shape, dtype=torch.bool, device=device), is_causal=is_causal)

    def to_mask(self) -> torch.Tensor:
        """The live tiles as bool (B, Hq, Tq, Tk), made of the valid entries alone; no wait for the device."""
        entries, read, outside = _read(self.lists)
        tiles = entries.shape[3]
        live = torch.zeros((*entries.shape[:3], tiles + 1), dtype=torch.bool, device=entries.device)
        return live.scatter_(3, entries.where(read & ~outside, tiles), True)[..., :tiles]

    def note_invalid(self) -> None:
        """Set `invalid`, where there is one, to 1 if `check` would raise; no wait for the device. Calls do it."""
        if self.invalid is not None:
            counts, outside, twice = _wrong(self.lists)
            self.invalid.masked_fill_(counts.any() | outside.any() | twice.any(), 1)

    def check(self) -> None:
        """Raise ValueError for the first count or tile that is out of range, or tile given twice; waits for the device.

        The message names batch, head, block of queries and entry.
        """
        lists = self.lists.cpu()
        count, entries = lists[..., :1], lists[..., 1:]
        tiles = entries.shape[3]
        counts, outside, twice = _wrong(lists)
        self._refuse(count, counts, 0, f"is the count {{}}, expected 0 to {tiles}")
        self._refuse(entries, outside, 1, f"is tile {{}}, expected 0 to {tiles - 1}")
        self._refuse(entries, twice, 1, "is tile {} a second time, expected each tile once")

    @staticmethod
    def _refuse(values: torch.Tensor, wrong: torch.Tensor, first_entry: int, found: str) -> None:
        """Raise for the first of `values` that is wrong; the last axis begins with entry `first_entry` of the lists."""
        places = wrong.nonzero()
        if not len(places):
            return
        batch, head, block, entry = places[0].tolist()
        raise ValueError(
            f"[SA-211] tile list of batch {batch}, head {head}, block of queries {block}: entry {entry + first_entry} "
            + found.format(int(values[batch, head, block, entry]))
        )


def _check_bool(block_mask: torch.Tensor) -> None:
    if not isinstance(block_mask, torch.Tensor) or block_mask.dtype != torch.bool:
        found = block_mask.dtype if isinstance(block_mask, torch.Tensor) else type(block_mask).__name__
        raise TypeError(f"[SA-211] block_mask must be a bool tensor (True = compute), got {found}")


def _check_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"[SA-211] {name} must be at least 1, got {value}")


def _overlapping_tiles(blocks: torch.Tensor, axis: int, block_tokens: int, length: int) -> torch.Tensor:
    """Along `axis`, of blocks of so many tokens, the tiles of `length` tokens that a True block overlaps."""
    first = torch.arange(tiles_of(length), device=blocks.device) * TILE_TOKENS
    last = (first + TILE_TOKENS - 1).clamp(max=length - 1)
    up_to = blocks.cumsum(axis, dtype=torch.int32)
    # True blocks up to the one of the tile's last token, without those before that of its first.
    before = up_to - blocks.to(torch.int32)
    return up_to.index_select(axis, last // block_tokens) > before.index_select(axis, first // block_tokens)


def _read(lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The entries of lists (B, Hq, Tq, 1 + Tk) without the counts, int64; which the count covers; which are no tile.

    A count that is out of range is cut to it, and what it does not cover is not called wrong.
    """
    entries = lists[..., 1:].long()
    read = torch.arange(entries.shape[3], device=lists.device) < lists[..., :1]
    return entries, read, read & ((entries < 0) | (entries >= entries.shape[3]))


def _wrong(lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is wrong with lists (B, Hq, Tq, 1 + Tk), on their device.

    Bool: the counts out of range (B, Hq, Tq, 1); the entries that are no tile, and those that an entry before them has
    too, both (B, Hq, Tq, Tk).
    """
    entries, read, outside = _read(lists)
    count, tiles = lists[..., :1], entries.shape[3]
    # What is not read gets a number of its own each.
    apart = MOST_TILES + 1 + torch.arange(tiles, device=lists.device)
    ordered, order = entries.where(read, apart).sort(dim=3, stable=True)
    again = torch.zeros_like(read)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return (count < 0) | (count > tiles), outside, torch.zeros_like(read).scatter_(3, order, again)
