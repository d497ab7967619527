"""Workflows of one shape, told by what they differ in: files, latent, prompts, and how is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .graph import Graph, Node, Output
from .parts import Files, finish, sage_node, sampler_node, texts_of


@dataclass(frozen=True)
class Plain:
    """Text to an image or a video by core's sampler.

    Attributes:
        files: what is loaded.
        latent: the node of the empty latent, and its values.
        prompt: the text.
        negative: the negative prompt; None: its conditioning is zeroed, for distilled models.
        guidance: of a model that takes it as an input.
        shift: the node that shifts the noise levels, and by how much.
        sampling: values of the sampler besides the seed.
        name: of the saved file.
        fps: frames a second of a video; None: an image.
        notes: what else there is to know.
    """

    files: Files
    latent: tuple[str, Mapping[str, Any]]
    prompt: str
    negative: str | None
    sampling: Mapping[str, Any]
    name: str
    guidance: float | None = None
    shift: tuple[str, float] | None = None
    fps: float | None = None
    notes: tuple[str, ...] = ()

    def build(self, g: Graph) -> None:
        """Add the nodes."""
        unet, clip, vae = self.files.load(g)
        latent = g.node(self.latent[0], 0, **self.latent[1])
        texts = self._texts(g, clip)
        model = sage_node(g, 2, unet)
        if self.shift is not None:
            model = g.node(self.shift[0], 3, model=model[0], shift=self.shift[1])
        sampler = sampler_node(g, 3, model[0], texts, latent[0], seed=1, **self.sampling)
        finish(g, model[0], sampler[0], vae, self.name, self.fps, *self.notes)

    def _texts(self, g: Graph, clip: Output) -> tuple[Node, Node]:
        if self.negative is not None:
            return texts_of(g, 1, clip, self.prompt, self.negative)
        prompt = g.node("CLIPTextEncode", 1, "Prompt", text=self.prompt, clip=clip)
        positive = prompt
        if self.guidance is not None:
            positive = g.node("FluxGuidance", 1, conditioning=prompt[0], guidance=self.guidance)
        return positive, g.node("ConditioningZeroOut", 1, conditioning=prompt[0])
