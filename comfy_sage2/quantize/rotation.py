"""Rotation multiplies smoothed Q and K by one orthogonal matrix, which spreads large values over the channels.

The matrix is D H: D holds fixed random signs, H is the Hadamard matrix in Sylvester's order (QuaRot, arXiv 2404.00456,
section 3). q . k does not change, nor does the paper's Delta S, which is computed from unrotated Q and K.
"""

from __future__ import annotations

import torch

# The kernels' narrowest tile. Narrower vectors padded to it give the same integers several times over.
SMALLEST_SIZE = 64

# The first 256 bits of the fraction of pi. If bit i, from the left, is set, channel i changes its sign.
_SIGN_BITS = 0x243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89
_SIGN_BIT_COUNT = 256


def rotation_size(head_dim: int) -> int:
    """The channels of rotated Q and K: head_dim padded with zeros to a power of two, at least 64."""
    return max(SMALLEST_SIZE, 1 << (head_dim - 1).bit_length())


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x D H of x (..., D) float32: (..., n) with n = rotation_size(D).

    H has the entries 1 and -1, so that products of rotated vectors are n times those of the vectors: the scale of Q
    takes the factor 1/n, a power of two. The order of the sums is fixed: neighboring channels first, then those 2, 4,
    8, ... apart.
    """
    size = rotation_size(x.shape[-1])
    x = torch.nn.functional.pad(x * _signs(x.shape[-1], x.device), (0, size - x.shape[-1]))
    distance = 1
    while distance < size:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        distance *= 2
    return x


def _signs(channels: int, device: torch.device) -> torch.Tensor:
    bits = [_SIGN_BITS >> (_SIGN_BIT_COUNT - 1 - channel % _SIGN_BIT_COUNT) & 1 for channel in range(channels)]
    return 1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32, device=device)
