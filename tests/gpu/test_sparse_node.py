"""The node's `sparse` on a GPU: which steps skip blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.options import MODES
from comfy_sage2.sparsity import levels

from .builds import relative_l1

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM, BLOCKS, STEPS = 4, 128, 64, 5


@pytest.fixture(autouse=True)
def few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LEAST_HEADS", 1)


def focused() -> list[torch.Tensor]:
    """q, k and v (1, N, H * D), whose queries attend to their own block by 25 octaves more than to others."""
    directions = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, device="cuda"))[0]
    keys = 14.0 * directions[:BLOCKS].repeat_interleave(128, dim=0)
    noise = torch.randn(3, 128 * BLOCKS, HEAD_DIM, device="cuda")
    tensors = (keys + 0.1 * noise[0], keys + 0.1 * noise[1], noise[2])
    return [tensor.repeat(1, HEADS).bfloat16()[None] for tensor in tensors]


def sparse_session(mode: str) -> tuple[Session, str]:
    """A session at *light*, and the name of the kernels that serve it; skips the test when there are none."""
    settings = Settings(mode=mode, sparse="light", when=ALWAYS, rotate="off")
    expected = probe(torch.device("cuda", torch.cuda.current_device()), settings)
    if expected.backend is None:
        pytest.skip(str(expected.reason))
    return Session(Dispatcher(settings, expected)), expected.backend


def unused(*_arguments: Any, **_options: Any) -> torch.Tensor:
    """A stand-in for ComfyUI's own attention, for a session that serves every call."""
    raise AssertionError("a call went to ComfyUI's own attention")


def sampled(session: Session, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output of each step of a sampling."""
    options: dict[str, Any] = {"_inside_attn_wrapper": True, "transformer_options": {}}
    override, outs = make_override(session), []
    session.begin_sampling([1.0 - step / STEPS for step in range(STEPS + 1)], times_calls=False)
    for step in range(STEPS):
        model_pass = session.begin_pass(1.0 - step / STEPS, tensors[0].device, {})
        with torch.no_grad(), model_passes.running(0, model_pass):
            outs.append(override(unused, *tensors, HEADS, **options))
    session.end_sampling()
    return outs


def listed(session: Session) -> list[bool]:
    cells = session.record.summary().cells
    return [cells[0, step].skips for step in range(STEPS)]


@pytest.mark.parametrize("mode", MODES)
def test_all_but_the_first_step_skip_blocks(mode: str, fresh_seed: int) -> None:
    session, _ = sparse_session(mode)
    outs = sampled(session, focused())
    assert listed(session) == [False, True, True, True, True]
    assert all(relative_l1(out, outs[0]) < 0.03 for out in outs[1:])
    assert session.dispatcher.sparsity is not None
    (layer,) = session.dispatcher.sparsity.layers().values()
    assert layer.computed < 0.5 and layer.error < 0.02
