"""What a calibration holds for: a model with its LoRAs, sampled at one size over one range of noise."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import numpy as np
import torch

from ...policy.calibrated import BOUNDS, part_of
from ...policy.signature import Signature
from ..adapter.packs import held_by

# A tensor is told from another by its shape and these many values; a model by so many of its parameters.
VALUES = 4
PARAMETERS = 64

Identity = tuple[Signature, str, str]  # kind, weights and patches

_known: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
_unread = count()


@dataclass(frozen=True)
class Subject:
    """Two samplings with equal subjects can take one policy.

    Attributes:
        model: class and sizes.
        weights: of the checkpoint; those that LoRAs patched in place count as they were before.
        patches: LoRAs and other patches of weights, with their strengths, and LoRAs that run beside the weights.
        hooks: LoRAs that come with the prompts.
        shape: of the latent, without the batch.
        noise: the first and the last noise level, roughly. Two stages of one model differ in them.
        parts: the parts of the steps that the sampling has.
        settings: of the measuring.
    """

    model: Signature
    weights: str
    patches: str
    hooks: str
    shape: tuple[int, ...]
    noise: tuple[str, str]
    parts: tuple[int, ...]
    settings: tuple[object, ...]

    @classmethod
    def of(cls, model: Any, shape: Sequence[int], sigmas: Sequence[float], settings: tuple[object, ...]) -> Subject:
        """Of a sampling of `model` (ComfyUI's ModelPatcher) that begins now, of latents of this shape."""
        steps = max(len(sigmas) - 1, 1)
        return cls(
            *identity_of(model),
            _digest(_described(list(getattr(model, "hook_patches", {}).values()))),
            tuple(shape[1:]),
            (f"{sigmas[0]:.2g}", f"{sigmas[-1]:.2g}"),
            tuple(sorted({part_of(step, steps, BOUNDS) for step in range(steps)})),
            settings,
        )

    @property
    def identity(self) -> Identity:
        """See `identity_of`."""
        return self.model, self.weights, self.patches

    def changes(self, earlier: Subject) -> str:
        """In words what differs from `earlier`."""
        return ", ".join(
            _WORDS[field.name] for field in fields(self) if getattr(self, field.name) != getattr(earlier, field.name)
        )


_WORDS = {
    "model": "the kind of model",
    "weights": "the model's weights",
    "patches": "its LoRAs",
    "hooks": "the prompts' LoRAs",
    "shape": "the size",
    "noise": "the noise levels",
    "parts": "the number of steps",
    "settings": "the settings of the node",
}


def signature_of(model: Any) -> Signature:
    """The class and the sizes of `model` (ComfyUI's ModelPatcher)."""
    return Signature.of(type(model.model).__name__, model.model.model_config.unet_config)


def identity_of(model: Any) -> Identity:
    """What is known of `model` (ComfyUI's ModelPatcher) before it is sampled: as `Subject` has them."""
    patches = [dict(model.patches), *_beside_the_weights(model)]
    return signature_of(model), _weights(model), _digest(_described(patches))


def _beside_the_weights(model: Any) -> Iterator[object]:
    """The LoRAs that ComfyUI injects into the forward pass: their manager is what the injecting functions refer to."""
    for name, injections in sorted(getattr(model, "injections", {}).items()):
        yield name
        for injection in injections:
            held = (getattr(entry, "adapters", None) for entry in held_by(getattr(injection, "inject", None)))
            yield from (adapters for adapters in held if isinstance(adapters, Mapping))


def _weights(model: Any) -> str:
    """A digest of some weights of the checkpoint, read once for each loaded model."""
    diffusion_model = model.model.diffusion_model
    if diffusion_model not in _known:
        parameters = list(diffusion_model.named_parameters())
        chosen = parameters[:: max(1, len(parameters) // PARAMETERS)]
        backup = model.backup  # the weights that LoRAs have changed in place, as they were
        tensors = [getattr(backup.get(f"diffusion_model.{name}"), "weight", tensor) for name, tensor in chosen]
        described = [part for tensor in tensors for part in _tensor(tensor)]
        if not any(isinstance(part, float) for part in described):
            described.append(f"unread {next(_unread)}")  # nothing tells it from another model of these sizes
        _known[diffusion_model] = _digest(described)
    return _known[diffusion_model]


def _digest(described: Iterator[object] | list[object]) -> str:
    """A short name of what is described."""
    found = hashlib.blake2b(digest_size=16)
    for part in described:
        found.update(repr(part).encode("utf-8", "backslashreplace") + b"\0")
    return found.hexdigest()


def _described(value: Any) -> Iterator[object]:
    """What makes up the patches of a model, as plain values."""
    if isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _described(value[key])
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for entry in value:
            yield from _described(entry)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield value
    else:  # ComfyUI's adapters of LoRA, LoHa and so on hold their tensors so; of functions the name counts
        yield getattr(value, "__qualname__", type(value).__qualname__)
        yield from _described(getattr(value, "weights", None))


def _tensor(tensor: torch.Tensor) -> Iterator[object]:
    """The shape and some values; a tensor that is nowhere in memory has its shape alone."""
    yield tuple(tensor.shape), str(tensor.dtype)
    shape = tensor.size()  # of the packed data, where `shape` is that of the weight, as in a GGUF file's tensors
    size = math.prod(shape)
    try:
        for number in range(min(VALUES, size)):
            place = (2 * number + 1) * size // (2 * VALUES)
            yield float(tensor.detach()[tuple(map(int, np.unravel_index(place % size, shape)))])
    except (RuntimeError, IndexError, TypeError, ValueError):
        # No data, as on the meta device, or a type of another pack that cannot be read so.
        return
