"""The pre-processing before the attention loop: smooth, rotate and quantize Q, K and V."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from ..quantize.groups import key_groups, query_groups
from ..quantize.quantizers import HEAD_ROOM, TILE_HEAD_ROOM, Quantized, quantize_channels, quantize_groups
from ..quantize.rotation import rotate, rotation_size
from ..quantize.rotation_choice import rotation_gains
from ..quantize.smoothing import smooth_blocks, smooth_tokens, without_hidden
from .options import ReferenceOptions


@dataclass(frozen=True)
class Prepared:
    """What the attention loop reads, all float32.

    q: (B, Hq, Nq, n), scale (B, Hq, Nq, 1); k: (B, Hkv, Nkv, n), scale (B, Hkv, Nkv, 1); n is D, or with rotation
    rotation_size(D). v: (B, Hkv, Nkv, D), scale (B, Hkv, 1, D), token_term (B, Hkv, Nkv, 1) with `v_tile`.
    q_block_means: (B, Hq, blocks, D) with smooth Q, and k_smooth (B, Hkv, Nkv, D) before rotation and quantization:
    their product is the paper's Delta S. k_mean: (B, Hkv, 1, D) with smooth K. v_mean: (B, Hkv, 1, D) with smooth V.
    """

    q: Quantized
    k: Quantized
    v: Quantized
    k_smooth: torch.Tensor
    q_block_means: torch.Tensor | None
    k_mean: torch.Tensor | None
    v_mean: torch.Tensor | None


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions,
    hidden: torch.Tensor | None = None,
    rotated_heads: torch.Tensor | None = None,
) -> Prepared:
    """Smooth and quantize q (B, Hq, Nq, D), k and v (B, Hkv, Nkv, D) of any float dtype.

    hidden: None, or bool (B | 1, Nkv) of `hidden_keys`: keys whose K and V become zeros after smoothing.
    rotated_heads: None, or bool (B, Hkv): the heads to rotate with rotate=None, instead of those that gain.
    """
    q, k, v = q.float(), k.float(), v.float()
    unsmoothed_q = q
    q_block_means = k_mean = v_mean = None
    if options.smooth_q:
        q, q_block_means = smooth_blocks(q, options.groups.block_q)
    if options.smooth_k:
        k, k_mean = smooth_tokens(k, hidden, options.k_mean_tokens, options.slice_tokens)
    if options.smooth_v:
        v, v_mean = smooth_tokens(v, hidden, counted=options.slice_tokens)
    k, v = without_hidden(k, hidden), without_hidden(v, hidden)
    plain, rotated = options.of_heads(rotated=False), options.of_heads(rotated=True)
    if options.rotate is None:
        heads = _gains(unsmoothed_q, k, options, hidden) if rotated_heads is None else rotated_heads
        plain_qk, rotated_qk = _quantized(q, k, plain), _quantized(q, k, rotated)
        q_quantized = _chosen(heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1), rotated_qk[0], plain_qk[0])
        k_quantized = _chosen(heads, rotated_qk[1], plain_qk[1])
    else:
        q_quantized, k_quantized = _quantized(q, k, rotated if options.rotate else plain)
    return Prepared(
        q=q_quantized,
        k=k_quantized,
        v=quantize_channels(
            v,
            options.v_format,
            options.v_maximum,
            powers_of_two=options.v_powers_of_two,
            tile=options.v_tile,
            counted=options.slice_tokens,
            hidden=hidden,
        ),
        k_smooth=k,
        q_block_means=q_block_means,
        k_mean=k_mean,
        v_mean=v_mean,
    )


def heads_that_gain(
    q: torch.Tensor, k: torch.Tensor, options: ReferenceOptions, hidden: torch.Tensor | None
) -> torch.Tensor:
    """Which heads of q (B, Hq, Nq, D) and k (B, Hkv, Nkv, D) rotate=None rotates: bool (B, Hkv).

    hidden: as for `prepare`.
    """
    k = k.float()
    if options.smooth_k:
        k, _ = smooth_tokens(k, hidden, options.k_mean_tokens, options.slice_tokens)
    return _gains(q.float(), without_hidden(k, hidden), options, hidden)


def leaves_head_room(v: torch.Tensor, options: ReferenceOptions) -> torch.Tensor:
    """Whether V (B, H, N, D) anywhere exceeds the head room above its first `slice_tokens` tokens: bool ()."""
    v = v.float()
    if options.smooth_v:
        v, _ = smooth_tokens(v, counted=options.slice_tokens)
    first = v[:, :, : options.slice_tokens].abs().amax(dim=2, keepdim=True)
    return (v.abs() > first * (HEAD_ROOM if options.v_tile is None else TILE_HEAD_ROOM)).any()


def _gains(
    q: torch.Tensor, k_smooth: torch.Tensor, options: ReferenceOptions, hidden: torch.Tensor | None
) -> torch.Tensor:
    plain, rotated = options.of_heads(rotated=False), options.of_heads(rotated=True)
    return rotation_gains(
        q[:, :, : options.slice_tokens],
        k_smooth[:, :, : options.slice_tokens],
        (plain.qk_format, rotated.qk_format),
        (plain.groups, rotated.groups),
        smooth_q=options.smooth_q,
        hidden=hidden,
    )


def _quantized(q: torch.Tensor, k: torch.Tensor, options: ReferenceOptions) -> tuple[Quantized, Quantized]:
    """Smoothed Q and K, rotated as `options` say."""
    size = rotation_size(q.shape[3])
    if options.rotate:
        q, k = rotate(q), rotate(k)
    q_quantized = quantize_groups(q, query_groups(q.shape[2], options.groups, q.device), options.qk_format)
    if options.rotate:
        q_quantized = replace(q_quantized, scale=q_quantized.scale / size)
    return q_quantized, quantize_groups(k, key_groups(k.shape[2], options.groups, k.device), options.qk_format)


def _chosen(heads: torch.Tensor, rotated: Quantized, plain: Quantized) -> Quantized:
    """`rotated` in the `heads` (B, H), else `plain`, whose values are padded with zeros."""
    heads = heads[:, :, None, None]
    values = pad(plain.values, (0, rotated.values.shape[3] - plain.values.shape[3]))
    return Quantized(torch.where(heads, rotated.values, values), torch.where(heads, rotated.scale, plain.scale))
