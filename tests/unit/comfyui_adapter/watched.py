"""A guard that looks at samples, and a kernel that is wrong: what the tests of its second level share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comfy_sage2.backends.base import flag_nonfinite
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.fidelity import Fidelity
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import FIDELITY, Settings

from .calls import node_session, ones
from .calls import reference_attention as attention

CPU = torch.device("cpu")
LAYERS = 3


class Faulty:
    """The attention, but for the layers and modes in which `wrong` changes its finite output. Counts calls by layer."""

    def __init__(self, wrong: Callable[[torch.Tensor], torch.Tensor], layer: int, *modes: str) -> None:
        self.wrong = wrong
        self.layer = layer
        self.modes = modes
        self.calls = 0
        self.asked: list[tuple[int, str]] = []
        self.slot = 0

    def __call__(self, *args: Any, options: Any, nonfinite: torch.Tensor | None = None, **kwargs: Any) -> Any:
        out = attention(*args, options=options, **kwargs)
        model_pass = model_passes.current(self.slot)
        assert model_pass is not None
        layer, self.calls = len(model_pass.calls) - 1, self.calls + 1
        self.asked.append((layer, options.mode))
        if layer == self.layer and options.mode in self.modes:
            out = self.wrong(out)
        if nonfinite is not None:
            flag_nonfinite(out, nonfinite)
        return out


def rolled(out: torch.Tensor) -> torch.Tensor:
    """Finite, of the right size, and another token's."""
    return out.roll(1, dims=1 if out.shape[1] > out.shape[2] else 2)


def inputs(passes: int, length: int = 96, keys: int | None = None) -> list[list[torch.Tensor]]:
    """q, k and v of LAYERS calls in each pass."""
    generator = torch.Generator().manual_seed(5)
    return [
        [
            torch.randn(1, tokens, 64, generator=generator)
            for _ in range(LAYERS)
            for tokens in (length, keys or length, keys or length)
        ]
        for _ in range(passes)
    ]


def sampled(session: Session, passes: int, func: Any = ones, at_end: bool = True) -> list[torch.Tensor]:
    """One sampling with a step for each pass; the outputs of its calls."""
    override = make_override(session)
    session.begin_sampling([1.0 - step / passes for step in range(passes + 1)])
    outs: list[torch.Tensor] = []
    for step, tensors in enumerate(inputs(passes)):

        def model(tensors: list[torch.Tensor] = tensors, number: int = step) -> torch.Tensor:
            found = [
                override(func, *tensors[i : i + 3], 2, _inside_attn_wrapper=True, transformer_options={})
                for i in range(0, 3 * LAYERS, 3)
            ]
            outs[LAYERS * number :] = found
            return found[-1]

        model_pass = session.begin_pass(1.0 - step / passes, CPU, {})
        model_pass.check_at_end = at_end
        session.run_pass(model_pass, model)
    session.end_sampling()
    return outs


def watched(**options: Any) -> Session:
    return node_session(Settings(**{"backend": "reference", "guard": FIDELITY, **options}))


def found_by(session: Session) -> Fidelity:
    assert session.handler.guard is not None and session.handler.guard.fidelity is not None
    return session.handler.guard.fidelity
