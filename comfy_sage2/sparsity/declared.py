"""Sparse attention of a single call, which chooses its key blocks itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends.block_kernels import block_lists, block_scores, module_for
from ..block_mask import BlockMask, blocks_of
from ..call.signature import CallSignature
from ..call.tensors import OptionalTensors, mask_4d
from ..call.validation import check_call
from ..dispatch.operators import may_lack_values
from ..dispatch.registry import UnsupportedError
from ..options import EXACT, AttentionOptions, check_choice
from ..reference.block_scores import blocks_of_share
from ..system.readback import constant
from ..text import quoted
from . import levels, row_kernels
from .always_computed import TokenRange, blocks_with
from .call_blocks import CallBlocks, call_blocks
from .errors import Inputs
from .key_bias import add_to_scores, key_bias, without_hidden_keys
from .thresholds import choose


@dataclass(frozen=True)
class Sparse:
    """Lets a self-attention call leave out the blocks of 128 keys that matter least, by means of 16 tokens of Q and K.

    Attributes:
        bound: None, or the relative L2 error that each head may have on some sampled rows, against exact attention; the
            call leaves out as many blocks as that allows.
        share: None, or the share of the key blocks that each block of 128 queries attends to: the most probable ones.
        always: ranges of tokens, (first, end), such as those of text. Their blocks are always computed: as keys of all
            queries, and as queries with all keys.
        tail: each block that is left out contributes by one key and one value, the means of its tokens
            (`reference.pooled_tail`): with a share in all heads, with a bound in the heads that then compute fewer
            blocks. It is slow if a kernel module has no kernels for it.

    Raises:
        TypeError, ValueError: not exactly one of bound and share, or a value out of range.
    """

    bound: float | None = None
    share: float | None = None
    always: tuple[TokenRange, ...] = ()
    tail: bool = False

    def __post_init__(self) -> None:
        if (self.bound is None) == (self.share is None):
            raise ValueError(
                f"[SA-215] sparse needs exactly one of bound and share, got bound {self.bound} and share {self.share}"
            )
        for name in ("bound", "share"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"[SA-215] sparse: {name} must be a number, got {type(value).__name__}")
            if not 0.0 < value <= 1.0:
                raise ValueError(f"[SA-215] sparse: {name} must be above 0 and at most 1, got {quoted(value)}")
        if type(self.tail) is not bool:
            raise TypeError(f"[SA-215] sparse: tail must be True or False, got {type(self.tail).__name__}")
        if not isinstance(self.always, tuple):
            raise TypeError(
                "[SA-215] sparse: always must be a tuple of pairs of integers, such as ((0, 512),), got "
                f"{type(self.always).__name__}"
            )
        for number, tokens in enumerate(self.always):
            if not isinstance(tokens, tuple) or len(tokens) != 2 or not all(type(token) is int for token in tokens):
                raise TypeError(f"[SA-215] sparse: always[{number}] must be a pair of integers, got {tokens!r}")
            if not 0 <= tokens[0] < tokens[1]:
                raise ValueError(
                    f"[SA-215] sparse: always[{number}] must be (first, end) with 0 <= first < end, got {tokens}"
                )

    def reason_against(self, options: AttentionOptions, optional: OptionalTensors) -> str | None:
        """Why a call cannot be sparse in this way, in words for the user, or None.

        A mask that is the same for all queries is no obstacle: the call chooses among the visible keys.
        """
        mask = optional.attn_mask
        obstacles = {
            "is_causal": options.is_causal,
            "mode exact": options.mode == EXACT,
            "a mask that differs by query": mask is not None and mask.dim() > 1 and mask.shape[-2] != 1,
            "block_mask": optional.block_mask is not None,
            "attn_mask beside a tail": mask is not None and self.tail,
        }
        present = " and ".join(name for name, is_present in obstacles.items() if is_present)
        return f"[SA-215] calls with {present} cannot be sparse: leave out `sparse`" if present else None

    @classmethod
    def of(cls, sparse: object) -> Sparse | None:
        """The `Sparse` of a call's `sparse`, which may be the name of a level of the node; None for None and "off".

        TypeError, ValueError: it is none of these.
        """
        if sparse is None or isinstance(sparse, cls):
            return sparse
        if not isinstance(sparse, str):
            raise TypeError(
                f"[SA-215] sparse must be a comfy_sage2.Sparse, a level or None, got {type(sparse).__name__}"
            )
        if sparse == levels.OFF:
            return None
        check_choice("sparse", sparse, levels.LEVELS)
        return cls(**levels.LEVELS[sparse]._asdict())

    def block_mask(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, optional: OptionalTensors
    ) -> BlockMask | None:
        blocks = self.blocks(q, k, v, options, optional)
        return None if blocks is None else blocks.mask

    def blocks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, optional: OptionalTensors
    ) -> CallBlocks | None:
        """The blocks of a call; no wait for the device.

        None if the call stays dense: it has fewer than `levels.LEAST_BLOCKS` blocks of keys, or too few for a bound to
        save time; `always` covers all of it; or queries and keys differ in number, and so are not the same tokens.

        Args:
            q, k, v, options, optional: of the call, in the layout of the options.

        Raises:
            TypeError, ValueError: the call is not valid.
            UnsupportedError: its tensors may lack values, or there is a `reason_against` it.
        """
        if may_lack_values():  # what is kept between calls would hold such tensors
            raise UnsupportedError(
                "[SA-215] calls under a compiler, fake tensors or functionalize cannot be sparse: leave out `sparse`"
            )
        check_call(CallSignature.of(q, k, v, options, optional))
        reason = self.reason_against(options, optional)
        if reason is not None:
            raise UnsupportedError(reason)
        if options.layout == "BNHD":
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        length = k.shape[2]
        always = blocks_with(self.always, length)
        least = levels.LEAST_BLOCKS if self.bound is None else row_kernels.least_blocks(q)
        if q.shape[2] != length or blocks_of(length) < least or always.all():
            return None
        scale = q.shape[3] ** -0.5 if options.scale is None else options.scale
        attn_mask = mask_4d(optional.attn_mask)
        with torch.no_grad():
            bias = None if attn_mask is None else key_bias(attn_mask, length)
            if bias is not None:
                k, v = without_hidden_keys(k, v, bias, q_heads=q.shape[1])
            module = module_for(q.device)
            scores = block_scores(module, q, k, scale, block_means=self.tail and self.share is not None)
            if bias is not None:
                scores = add_to_scores(scores, bias)
            if self.share is not None:
                on_device = constant(q.device, blocks_with, self.always, length) if self.always else None
                count = blocks_of_share(self.share, scores.shape[3])
                dense = on_device
                if not self.tail:  # a tail passes on NaN of the other blocks
                    is_unknown = scores.isnan().any(dim=3).any(dim=1).any(dim=0)
                    dense = is_unknown if dense is None else is_unknown | dense
                mask = BlockMask(block_lists(module, scores, count=count, always=on_device, dense=dense))
                return CallBlocks(mask, mask.lists if self.tail else None)
            level = levels.Level(bound=self.bound, tail=self.tail)
            choice = choose(Inputs(q, k, v, scale, bias, self.always), scores, level)
            return call_blocks(choice.blocks, choice.lists)
