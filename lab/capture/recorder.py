"""Records Q, K and V of a running model, within bounds, and keeps them in a safetensors file.

The file holds the tensors "<number>.q", "<number>.k", "<number>.v" and, where there was one, "<number>.mask", in the
model's own dtype; its metadata has "format" = FORMAT and "samples", a JSON list with layer, step, scale and is_causal
of each number.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from comfy_sage2.signature import TensorForm
from comfy_sage2.tensors import mask_4d
from comfy_sage2.text import error_text, one_line, quoted
from comfy_sage2.validation import check_mask, check_tensors

from .samples import AttentionSample

FORMAT = "comfy_sage2.capture.1"
PARTS = ("q", "k", "v", "mask")  # the tensors of a sample; the last one may be missing
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
            "[SA-404] nothing was captured: no attention call reached the capture. "
            "Put the node between the model and the sampler, and sample before saving."
        )
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for number, sample in enumerate(samples):
        parts = {f"{number}.{part}": getattr(sample, part) for part in PARTS}
        tensors |= {name: tensor for name, tensor in parts.items() if tensor is not None}
        described.append({name: getattr(sample, name) for name in _CHECKS})
    save_file(tensors, str(path), metadata={"format": FORMAT, "samples": json.dumps(described)})


def load_samples(path: str | Path) -> list[AttentionSample]:
    """Read a capture file. CaptureError, with what to do, when it is something else; OSError when it cannot be read."""
    shown = one_line(str(path))
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CaptureError(
                    f"{shown} is no capture: its metadata has format {quoted(metadata.get('format'))}, expected "
                    f"{FORMAT!r}. Choose a file that the SageAttention2 Capture node or `eval --save-capture` wrote."
                )
            names = set(file.keys())
            samples = []
            for number, described in enumerate(_described(metadata.get("samples"))):
                tensors = {part: file.get_tensor(f"{number}.{part}") for part in PARTS if f"{number}.{part}" in names}
                samples.append(_sample(tensors, described, f"samples[{number}]"))
            return samples
    except SafetensorError as error:
        raise CaptureError(
            f"{shown} cannot be read as safetensors ({error_text(error)}). Choose a capture file."
        ) from error
    except _Broken as error:
        raise CaptureError(f"{shown} is a broken capture: {error}. Capture again.") from error


class _Broken(Exception):
    """What is wrong with the contents of a capture file."""


def _described(text: str | None) -> list[dict[str, Any]]:
    """The JSON list in the metadata, with its entries checked."""
    if text is None:
        raise _Broken("its metadata lacks 'samples'")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"'samples' is no JSON ({type(error).__name__})") from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise _Broken(f"'samples' must be a list of objects, got {quoted(found)}")
    for number, entry in enumerate(found):
        for name, allowed in _CHECKS.items():
            if name not in entry or not allowed(entry[name]):
                got = quoted(entry[name]) if name in entry else "nothing"
                raise _Broken(f"samples[{number}].{name} has no valid value, got {got}")
        if set(entry) != set(_CHECKS):
            raise _Broken(f"samples[{number}] must have {', '.join(_CHECKS)}, got {quoted(sorted(entry))}")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_scale(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= 3.4e38


_CHECKS: dict[str, Callable[[object], bool]] = {
    "layer": _is_number,
    "step": _is_number,
    "scale": _is_scale,
    "is_causal": lambda value: isinstance(value, bool),
}


def _sample(tensors: dict[str, torch.Tensor], described: dict[str, Any], name: str) -> AttentionSample:
    missing = [part for part in PARTS[:3] if part not in tensors]
    if missing:
        raise _Broken(f"{name} lacks the tensors {', '.join(missing)}")
    q, k, v = (tensors[part] for part in PARTS[:3])
    try:
        check_tensors(TensorForm.of(q), TensorForm.of(k), TensorForm.of(v), "BHND")
        mask = tensors.get("mask")
        if mask is not None:
            check_mask(TensorForm.of(mask), (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), q.device)
            mask = mask_4d(mask)
    except (TypeError, ValueError) as error:
        raise _Broken(f"{name}: {error}") from error
    return AttentionSample(q=q, k=k, v=v, mask=mask, **described)
