"""Records Q, K and V of a running model, within bounds, and keeps them in a safetensors file.

The file holds the tensors "<number>.q", "<number>.k", "<number>.v" and, where there was one, "<number>.mask", in the
model's own dtype; its metadata has "format" = FORMAT and "samples", a JSON list with layer, step, scale and is_causal
of each number.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .samples import AttentionSample

FORMAT = "comfy_sage2.capture.1"
_GIBIBYTE = 1 << 30


class CaptureError(ValueError):
    """A file that is no capture, or a capture without samples."""


@dataclass(frozen=True)
class CaptureBounds:
    """What of a sampling is kept.

    every_layer, every_step: of layers and steps, numbers 0, n, 2n, ... heads: at most so many of each call, spread
    evenly. most_bytes: once the kept tensors reach it, nothing more is kept.
    """

    every_layer: int = 4
    every_step: int = 5
    heads: int = 4
    most_bytes: int = _GIBIBYTE

    def __post_init__(self) -> None:
        for name in ("every_layer", "every_step", "heads", "most_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


class Recorder:
    """Keeps samples on the CPU; safe to call from several threads."""

    def __init__(self, bounds: CaptureBounds) -> None:
        self.bounds = bounds
        self.samples: list[AttentionSample] = []
        self.left_out = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def wants(self, layer: int, step: int) -> bool:
        """Whether a call is one of those to keep; asked first, so that other calls cost nothing."""
        return layer % self.bounds.every_layer == 0 and step % self.bounds.every_step == 0

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: int,
        step: int,
        scale: float | None = None,
        is_causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> bool:
        """Keep the first batch row of a call, and say whether there was still room for it.

        Args:
            q: (B, Hq, Nq, D); k, v: (B, Hkv, Nkv, D), any device and strides. Copied, never changed.
            layer, step: numbers from 0.
            scale, is_causal, mask (4-D or None): those of the attention call.
        """
        q_heads, kv_heads = _heads(q.shape[1], k.shape[1], self.bounds.heads)
        mask_heads = q_heads if mask is not None and mask.shape[1] > 1 else [0]
        size = _bytes(q, q_heads) + _bytes(k, kv_heads) + _bytes(v, kv_heads)
        size += 0 if mask is None else _bytes(mask, mask_heads)
        with self._lock:
            if self._bytes + size > self.bounds.most_bytes:  # asked before anything is copied
                self.left_out += 1
                return False
            kept = (_first(q, q_heads), _first(k, kv_heads), _first(v, kv_heads))
            kept_mask = None if mask is None else _first(mask, mask_heads)
            self.samples.append(AttentionSample(layer, step, *kept, scale, is_causal, kept_mask))
            self._bytes += size
            return True

    def save(self, path: str | Path) -> None:
        """Write what was kept. CaptureError when that is nothing."""
        with self._lock:
            save_samples(path, self.samples)


def _heads(q_heads: int, kv_heads: int, most: int) -> tuple[list[int], list[int]]:
    """Query heads to keep, spread evenly over all, and the key head of each."""
    chosen = torch.linspace(0, q_heads - 1, min(q_heads, most)).round().long().tolist()
    return chosen, [head // (q_heads // kv_heads) for head in chosen]


def _bytes(tensor: torch.Tensor, heads: list[int]) -> int:
    return len(heads) * tensor.shape[2] * tensor.shape[3] * tensor.element_size()


def _first(tensor: torch.Tensor, heads: list[int]) -> torch.Tensor:
    return tensor[:1, heads].detach().cpu().contiguous()


def save_samples(path: str | Path, samples: list[AttentionSample]) -> None:
    """Write samples as a capture file. CaptureError when there are none."""
    if not samples:
        raise CaptureError(
            "nothing was captured: no attention call reached the capture. "
            "Put the node between the model and the sampler, and sample before saving."
        )
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for number, sample in enumerate(samples):
        parts = {"q": sample.q, "k": sample.k, "v": sample.v, "mask": sample.mask}
        tensors |= {f"{number}.{name}": tensor for name, tensor in parts.items() if tensor is not None}
        fields = ("layer", "step", "scale", "is_causal")
        described.append({name: getattr(sample, name) for name in fields})
    save_file(tensors, str(path), metadata={"format": FORMAT, "samples": json.dumps(described)})


def load_samples(path: str | Path) -> list[AttentionSample]:
    """Read a capture file. CaptureError, with what to do, when it is something else; OSError when it cannot be read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CaptureError(
                    f"{path} is no capture: its metadata has format {metadata.get('format')!r}, expected {FORMAT!r}. "
                    "Choose a file that the SageAttention2 Capture node or `eval --save-capture` wrote."
                )
            names = set(file.keys())
            return [
                AttentionSample(
                    q=file.get_tensor(f"{number}.q"),
                    k=file.get_tensor(f"{number}.k"),
                    v=file.get_tensor(f"{number}.v"),
                    mask=file.get_tensor(f"{number}.mask") if f"{number}.mask" in names else None,
                    **described,
                )
                for number, described in enumerate(json.loads(metadata["samples"]))
            ]
    except SafetensorError as error:
        raise CaptureError(f"{path} cannot be read as safetensors ({error}). Choose a capture file.") from error
