"""Copies to the host that wait only when they are read, and the guard, which reads its flag through such a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.system.readback import Readback

pytestmark = pytest.mark.gpu

CLOCKS = 200_000_000  # about 0.1 s
STEPS = 3
LAYERS = 3
OPTIONS: dict[str, Any] = {"_inside_attn_wrapper": True, "transformer_options": {}}


@contextmanager
def without_waiting() -> Iterator[None]:
    """Make every wait for the device an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def guarded_session() -> Session:
    settings = Settings(mode="8b", when=ALWAYS)
    expected = probe(torch.device("cuda", torch.cuda.current_device()), settings)
    if expected.reason is not None:
        pytest.skip(expected.reason)
    return Session(Dispatcher(settings, expected))


def qkv(length: int = 1000, keys: int = 1000) -> list[torch.Tensor]:
    return [torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16) for tokens in (length, keys, keys)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_readback_has_the_values_of_its_start_and_does_not_wait_for_later_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    values, through = torch.zeros(3, device=device), torch.cuda.Event()
    readback = Readback(3, torch.float32, device)
    for clocks in (1, CLOCKS):  # the first round loads kernels
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

    def breaking(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_broken(
            call: KernelCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors, *more: Any
        ) -> Any:
            if next(calls) == LAYERS + layer:
                v = v.clone()
                v[0, 5] = float("nan")
            return run(call, q, k, v, optional, *more)

        return run_broken

    for name in ("run", "run_reshaped"):
        monkeypatch.setattr(KernelCall, name, breaking(getattr(KernelCall, name)))
    session, tensors = guarded_session(), qkv()
    override = make_override(session)
    session.begin_sampling([1.0 - step / STEPS for step in range(STEPS + 1)])
    for step in range(STEPS):
        model_pass = session.begin_pass(1.0 - step / STEPS, tensors[0].device, {})
        model_pass.check_at_end = True
        outputs = session.run_pass(model_pass, lambda: [override(plain, *tensors, 4, **OPTIONS) for _ in range(LAYERS)])
        assert all(out.isfinite().all() for out in outputs)
    session.end_sampling()
    guard = session.dispatcher.guard
    assert guard is not None and guard.repeated == [1] and not guard.downgrades
    assert next(calls) == LAYERS * (STEPS + 1)
