"""Which key blocks each block of queries attends to: block-sparse attention, as lists that kernels can walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 128  # queries or keys of a block
MOST_BLOCKS = torch.iinfo(torch.int16).max
_UNREAD = -1  # fills the entries after the active blocks in the lists made here


def blocks_of(length: int) -> int:
    """The number of blocks of `length` tokens; the last one may be ragged."""
    return -(-length // BLOCK_TOKENS)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The blocks of 128 keys to compute for each block of 128 queries.

    A query attends to a key exactly when the list of the query's block names the key's block, and mask and causal order
    allow it. A block with an empty list gives zeros, and -inf in the LSE. The order of a list affects only rounding:
    backends process the blocks in their own order. A NaN in a block that no list of a head names may or may not reach
    that head's output.

    Calls do not wait for the device to check the lists. They leave out numbers that are out of range or given twice,
    cut a count that is out of range, and note it in `invalid`. `check` and `comfy_sage2.explain` raise errors for them.

    The lists take 2 Tq (1 + Tk) bytes a head: at most 1.5 % of q, k and v up to 94,000 tokens of head_dim 128.

    Attributes:
        lists: (B, Hq, Tq, 1 + Tk) int16, contiguous, on q's device; B and Hq may be 1, to broadcast. Tq and Tk are the
            numbers of blocks of queries and of keys. Entry 0 is the number n of active blocks, entries 1 to n name
            them, and no call reads the entries after n. At most 32,767 blocks: 4,194,176 keys.
        invalid: None, or one int32 on their device that a call sets to 1 when it leaves out an entry or cuts a count.
            Otherwise the call leaves it unchanged, so that many lists can share it.

    Raises TypeError for lists that are not an int16 tensor, ValueError for other shapes and strides.
    """

    lists: torch.Tensor
    invalid: torch.Tensor | None = None

    def __post_init__(self) -> None:
        lists = self.lists
        if not isinstance(lists, torch.Tensor) or lists.dtype != torch.int16:
            raise TypeError(f"[SA-211] lists must be an int16 tensor, got {_kind(lists)}")
        if lists.dim() != 4 or lists.numel() == 0 or lists.shape[3] < 2:
            raise ValueError(
                "[SA-211] lists must be of shape (batch, q_heads, blocks of 128 queries, 1 + blocks of 128 keys), "
                f"got {tuple(lists.shape)}"
            )
        if lists.shape[3] - 1 > MOST_BLOCKS:
            raise ValueError(f"[SA-211] lists hold at most {MOST_BLOCKS} key blocks, got {lists.shape[3] - 1}")
        if not lists.is_contiguous():
            raise ValueError(
                f"[SA-211] lists must be contiguous, got strides {lists.stride()}; call lists.contiguous() first"
            )

    @classmethod
    def from_dense(cls, mask: torch.Tensor, *, is_causal: bool = False) -> BlockMask:
        """The lists of a bool (B, Hq, Tq, Tk) mask, True = compute, on its device; no wait for the device.

        Each list goes from the last block to the first. `is_causal`, for causal calls, leaves out the blocks above the
        diagonal.
        """
        _check_bool(mask)
        if mask.dim() != 4 or mask.numel() == 0:
            raise ValueError(
                "[SA-211] mask must be of shape (batch, q_heads, blocks of 128 queries, blocks of 128 keys), got "
                f"{tuple(mask.shape)}"
            )
        blocks = mask.shape[3]
        if blocks > MOST_BLOCKS:
            raise ValueError(f"[SA-211] mask must have at most {MOST_BLOCKS} key blocks, got {blocks}")
        if is_causal:
            mask = mask.tril()
        active = mask.flip(3)
        entry = active.cumsum(dim=3, dtype=torch.int32)
        lists = torch.full((*active.shape[:3], blocks + 2), _UNREAD, dtype=torch.int16, device=active.device)
        lists[..., 0] = entry[..., -1]
        numbers = torch.arange(blocks - 1, -1, -1, dtype=torch.int16, device=active.device)
        # Skipped blocks go into one extra entry at the end, which is cut off.
        lists.scatter_(3, entry.where(active, blocks + 1).long(), numbers.expand_as(active))
        return cls(lists[..., :-1].contiguous())

    @classmethod
    def from_blocks(
        cls,
        mask: torch.Tensor,
        block_size: tuple[int, int],
        q_length: int,
        kv_length: int,
        *,
        is_causal: bool = False,
    ) -> BlockMask:
        """The lists of a mask of other block sizes than 128, in the order of `from_dense`; no wait for the device.

        A list names a block of 128 keys if any True block of `mask` overlaps it. So the call attends to all that the
        mask allows, and also to the rest of these blocks. If both sizes are multiples of 128, there is no rest.

        Args:
            mask: bool (B, Hq, blocks of queries, blocks of keys), True = compute; the last blocks may be ragged.
            block_size: the tokens of a block of queries and of a block of keys: (128, 64) for SpargeAttn's masks.
            q_length, kv_length: tokens of q, and of k and v.
            is_causal: as for `from_dense`.

        Raises TypeError for a wrong type of mask, size or length, ValueError for those that do not fit or are below 1.
        """
        _check_bool(mask)
        if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
            raise TypeError(f"[SA-211] block_size must be two integers, of queries and of keys, got {block_size!r:.80}")
        sizes = {"q_block": block_size[0], "kv_block": block_size[1], "q_length": q_length, "kv_length": kv_length}
        for name, value in sizes.items():
            if not hasattr(value, "__index__"):  # integers of NumPy and of the compiler have it
                raise TypeError(f"[SA-211] {name} must be an integer, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"[SA-211] {name} must be at least 1, got {value}")
        blocks = -(-q_length // block_size[0]), -(-kv_length // block_size[1])
        if mask.dim() != 4 or mask.numel() == 0 or tuple(mask.shape[2:]) != blocks:
            raise ValueError(
                f"[SA-211] mask must be of shape (batch, q_heads, {blocks[0]}, {blocks[1]}) for {q_length} "
                f"queries in blocks of {block_size[0]} and {kv_length} keys in blocks of {block_size[1]}, got "
                f"{tuple(mask.shape)}"
            )
        rows = _overlapping_blocks(mask, 2, block_size[0], q_length)
        return cls.from_dense(_overlapping_blocks(rows, 3, block_size[1], kv_length), is_causal=is_causal)

    def to_dense(self) -> torch.Tensor:
        """The active blocks as bool (B, Hq, Tq, Tk), from the valid entries only; no wait for the device."""
        entries, read, outside = _read(self.lists)
        *sizes, blocks = entries.shape
        active = torch.zeros((*sizes, blocks + 1), dtype=torch.bool, device=entries.device)
        return active.scatter_(3, entries.where(read & ~outside, blocks), True)[..., :blocks]

    def flag_invalid(self) -> None:
        """Set `invalid`, if there is one, to 1 where `check` would raise; no wait for the device. Calls do this."""
        if self.invalid is not None:
            counts, outside, twice = _wrong(self.lists)
            self.invalid.masked_fill_(counts.any() | outside.any() | twice.any(), 1)

    def check(self) -> None:
        """Raise ValueError for the first count or number that is out of range or given twice; waits for the device."""
        lists = self.lists.cpu()
        blocks = lists.shape[3] - 1
        counts, outside, twice = _wrong(lists)
        for wrong, first_entry, problem in (
            (counts, 0, f"is the count {{}}, expected 0 to {blocks}"),
            (outside, 1, f"is block {{}}, expected 0 to {blocks - 1}"),
            (twice, 1, "is block {} a second time, expected each block once"),
        ):
            for batch, head, block, place in wrong.nonzero()[:1].tolist():
                entry = place + first_entry
                raise ValueError(
                    f"[SA-211] lists of batch {batch}, head {head}, block of queries {block}: entry {entry} "
                    + problem.format(int(lists[batch, head, block, entry]))
                )


def _check_bool(mask: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"[SA-211] mask must be a bool tensor (True = compute), got {_kind(mask)}")


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, torch.Tensor) else type(value).__name__


def _overlapping_blocks(blocks: torch.Tensor, axis: int, block_tokens: int, length: int) -> torch.Tensor:
    """`blocks` with `axis` in blocks of 128 tokens instead of `block_tokens`: True where a True block overlaps."""
    first = torch.arange(blocks_of(length), device=blocks.device) * BLOCK_TOKENS
    last = (first + BLOCK_TOKENS - 1).clamp(max=length - 1)
    up_to = blocks.cumsum(axis, dtype=torch.int32)
    # Count the True blocks from the one with the first token to the one with the last token.
    before = up_to - blocks.to(torch.int32)
    return up_to.index_select(axis, last // block_tokens) > before.index_select(axis, first // block_tokens)


def _read(lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The int64 entries of lists (B, Hq, Tq, 1 + Tk) without the counts; which the count covers; which name no block.

    A count that is out of range is cut, and only entries that it covers are said to name no block.
    """
    entries = lists[..., 1:].long()
    read = torch.arange(entries.shape[3], device=lists.device) < lists[..., :1]
    return entries, read, read & ((entries < 0) | (entries >= entries.shape[3]))


def _wrong(lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bool: counts out of range (B, Hq, Tq, 1); entries that name no block, and repeated entries (B, Hq, Tq, Tk)."""
    entries, read, outside = _read(lists)
    count, blocks = lists[..., :1], entries.shape[3]
    # Give each entry that is not read a unique number, so that it repeats none.
    apart = MOST_BLOCKS + 1 + torch.arange(blocks, device=lists.device)
    ordered, order = entries.where(read, apart).sort(dim=3, stable=True)
    again = torch.zeros_like(read)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return (count < 0) | (count > blocks), outside, torch.zeros_like(read).scatter_(3, order, again)
