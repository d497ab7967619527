"""`skip` under samplers that evaluate the model several times a step, ahead of it too, in one pass or several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.sampling import evaluation_wrapper
from comfy_sage2.comfyui.session.session import Session

from .skip_samplings import begin, by_mask, figures, focused, lossless_mask, run, skipped

pytestmark = pytest.mark.usefixtures("short_calls_skip")

STEPS = 10
# How far ahead of a step, in steps, each sampler evaluates the model in it, other than at the end of the sampling.
AHEAD: dict[str, tuple[float, ...]] = {
    "euler": (0,),
    "dpmpp_2m": (0,),
    "uni_pc": (0,),
    "heun": (0, 1),
    "heunpp2": (0, 1, 2),
    "dpm_2": (0, 0.5),
    "dpmpp_2s_ancestral": (0, 0.9),
}


def evaluate(session: Session, passes: Callable[[], Any]) -> Any:
    """What `passes` gives, as an evaluation that a sampler asked for."""
    return evaluation_wrapper(session)(passes)


@pytest.mark.parametrize("sampler", AHEAD)
def test_one_evaluation_finds_blocks_in_steps_1_4_and_9(sampler: str) -> None:
    session, tensors, found, calls = skipped("fast"), focused(30), [], 0
    begin(session, STEPS)
    levels = [step + ahead for step in range(STEPS) for ahead in AHEAD[sampler] if step + math.ceil(ahead) < STEPS]
    for level in levels:

        def caption_and_empty(level: float = level) -> None:
            for uuid in "ab":
                run(session, level, tensors, of_pass={"uuids": [uuid]}, steps=STEPS)

        evaluate(session, caption_and_empty)
        finding, calls = figures(session)[0].finding - calls, figures(session)[0].finding
        assert finding in (0, 2), "the passes of an evaluation are for one prompt each"
        found += [math.floor(level)] if finding else []
    assert found == [0, 3, 8]
    assert figures(session)[0].listed == 2 * (len(levels) - 3)


def test_passes_of_an_evaluation_for_one_prompt_find_blocks_together() -> None:
    """As where a pack divides the picture; a further evaluation of the step uses what they found."""
    parts = focused(31), focused(32, beside=3)
    session = skipped("lossless")
    begin(session)

    def passes(level: float) -> list[torch.Tensor]:
        return [run(session, level, part, of_pass={"uuids": ["a"]})[0] for part in parts]

    evaluate(session, lambda: passes(0))
    union = lossless_mask(parts[0]) | lossless_mask(parts[1])
    for out, part in zip(evaluate(session, lambda: passes(0.5)), parts, strict=True):
        assert torch.equal(out, by_mask(part, union))
