"""Copies to the host that nobody waits for until they are read, and the guard's look at its flag through one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.readback import Readback
from comfy_sage2.tensors import OptionalTensors

from .test_fidelity import LAYERS, OPTIONS, plain, qkv, watched, without_waiting

pytestmark = pytest.mark.gpu

CLOCKS = 200_000_000  # about 0.1 s
STEPS = 3


def test_values_are_those_where_the_copy_began_and_what_follows_is_not_waited_for() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    values, through = torch.zeros(3, device=device), torch.cuda.Event()
    readback = Readback(3, torch.float32, device)
    for clocks in (1, CLOCKS):  # the first time loads kernels
        torch.cuda.synchronize()
        with without_waiting():
            torch.cuda._sleep(clocks)
            values.fill_(7.0)
            readback.start(values)
            values.fill_(8.0)
            torch.cuda._sleep(4 * clocks)
            through.record()
        assert readback.values() == [7.0] * 3
    assert not through.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_one_broken_call_of_a_later_pass_is_found(monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    calls = iter(range(100))
    run = KernelCall.run

    def breaking(call: KernelCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Any:
        if next(calls) == LAYERS + layer:
            v = v.clone()
            v[0, 5] = float("nan")
        return run(call, q, k, v, optional)

    monkeypatch.setattr(KernelCall, "run", breaking)
    session, tensors = watched(), qkv()
    override = make_override(session)
    session.begin_sampling([1.0 - step / STEPS for step in range(STEPS + 1)])
    for step in range(STEPS):
        model_pass = session.begin_pass(1.0 - step / STEPS, tensors[0].device, {})
        model_pass.check_at_end = True
        outputs = session.run_pass(model_pass, lambda: [override(plain, *tensors, 4, **OPTIONS) for _ in range(LAYERS)])
        assert all(out.isfinite().all() for out in outputs)
    session.end_sampling()
    guard = session.handler.guard
    assert guard is not None and guard.repeated == (1,) and not guard.downgrades
    assert next(calls) == LAYERS * (STEPS + 1)
