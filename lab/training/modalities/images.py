"""An image classifier: timm's vision transformer, small, that answers the question about :mod:`.pictures`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from tools.comfyui.launch import TorchvisionOperators

from ...demo.sampler import half_precision
from ...demo.scenes import SHAPES
from ..demo_model.state import TrainingSchedule
from .fitting import Batch, fit
from .pictures import SIDE, Pictures
from .replaced_attention import ReplacedAttention
from .transformer import AttentionFunction

if "torchvision" not in sys.modules:  # which timm imports
    sys.meta_path.insert(0, TorchvisionOperators())
from timm.models.vision_transformer import VisionTransformer

_PATCH = 4
_DIM, _LAYERS, _HEADS = 256, 4, 4
_BATCH = {"cuda": 256, "cpu": 16}
_BATCHES_AT_ONCE = 8  # drawn together in training: drawing is many small operations, whose launching takes a GPU's time
_MATRIX_RATE, _OTHER_RATE = 5e-3, 1e-3


def classifier() -> VisionTransformer:
    """Pictures (batch, 3, SIDE, SIDE) to the logits of SHAPES."""
    return VisionTransformer(
        img_size=SIDE, patch_size=_PATCH, num_classes=len(SHAPES), embed_dim=_DIM, depth=_LAYERS, num_heads=_HEADS,
        class_token=False, global_pool="avg",
    )  # fmt: skip


def train(seconds: float, seed: int, device: torch.device) -> VisionTransformer:
    """Train for ``seconds`` on fresh pictures; returns the averaged model."""
    torch.manual_seed(seed)
    model = classifier().to(device)
    hidden = [value for value in model.blocks.parameters() if value.ndim == 2]
    batches = _batches(seed, device)
    return fit("images", model, hidden, TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE), lambda: next(batches))


def _batches(seed: int, device: torch.device) -> Iterator[Batch]:
    """An endless series of batches of pictures and their shapes."""
    pictures, size = Pictures(seed, device), _BATCH[device.type]
    while True:
        seen, shapes = pictures.next(_BATCHES_AT_ONCE * size)
        yield from zip(seen.split(size), shapes.split(size), strict=True)


@torch.no_grad()
def measure(model: VisionTransformer, count: int, seed: int, attend: AttentionFunction) -> dict[str, float]:
    """Cross-entropy (nats) and accuracy on ``count`` fresh pictures.

    Raises:
        RuntimeError: when a layer computed its attention in another way.
    """
    device = next(model.parameters()).device
    pictures, loss, right, batches = Pictures(seed, device), 0.0, 0.0, range(0, count, _BATCH[device.type])
    with half_precision(device), ReplacedAttention(attend) as replaced:
        for first in batches:
            seen, shapes = pictures.next(min(batches.step, count - first))
            logits = model(seen).float()
            loss += F.cross_entropy(logits, shapes, reduction="sum").item()
            right += (logits.argmax(dim=1) == shapes).sum().item()
    if replaced.calls != len(model.blocks) * len(batches):
        raise RuntimeError(
            f"{replaced.calls} attention calls in {len(batches)} batches of {len(model.blocks)} layers: timm computes "
            "attention itself when TIMM_FUSED_ATTN=0 is set; unset it"
        )
    return {"loss": loss / count, "accuracy": right / count}
