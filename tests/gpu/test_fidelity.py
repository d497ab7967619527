"""The guard's samples on a GPU: the figures are those of float64, and no call waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from comfy_sage2 import attention, explain
from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import fidelity
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import FIDELITY, Settings
from comfy_sage2.metrics import Agreement
from comfy_sage2.reference.exact import exact_attention

pytestmark = pytest.mark.gpu

LAYERS, PASSES = 3, 9
OPTIONS: dict[str, Any] = {"_inside_attn_wrapper": True, "transformer_options": {}}


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within it whatever waits for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def watched(**options: Any) -> Session:
    settings = Settings(guard=FIDELITY, **options)
    expected = probe(torch.device("cuda", torch.cuda.current_device()), settings)
    if expected.reason is not None:
        pytest.skip(expected.reason)
    return Session(Dispatcher(settings, expected))


def qkv(length: int = 1000, keys: int = 1000) -> list[torch.Tensor]:
    return [torch.randn(2, tokens, 512, device="cuda", dtype=torch.bfloat16) for tokens in (length, keys, keys)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def sampled(session: Session, tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """The last output of a sampling of PASSES steps with LAYERS calls each."""
    override = make_override(session)
    device = tensors[0].device
    # Kernels are loaded, and forms of calls decided, before anything is held to not waiting.
    for waits in (True, False):
        session.begin_sampling([1.0 - step / PASSES for step in range(PASSES + 1)])
        for step in range(1 if waits else PASSES):

            def model(waits: bool = waits) -> torch.Tensor:
                def calls() -> torch.Tensor:
                    return [override(plain, *tensors, 4, **OPTIONS, **options) for _ in range(LAYERS)][-1]

                if waits:
                    return calls()
                with without_waiting():
                    return calls()

            model_pass = session.begin_pass(1.0 - step / PASSES, device, {})
            model_pass.check_at_end = True
            out = session.run_pass(model_pass, model)
        session.end_sampling()
    return out


@pytest.mark.parametrize("mask", [None, "padding"])
@pytest.mark.parametrize("keys", [1000, 77])
@pytest.mark.parametrize("mode", ["8b", "precise"])
def test_healthy_layers_are_near_and_nothing_waits(mode: str, keys: int, mask: str | None, fresh_seed: int) -> None:
    tensors = qkv(keys=keys)
    options = {} if mask is None else {"mask": (torch.arange(keys, device="cuda") < keys // 2)[None, None]}
    session = watched(mode=mode)
    out = sampled(session, tensors, **options)
    guard = session.handler.guard
    assert guard is not None and guard.fidelity is not None
    assert not guard.fidelity.findings and f"{PASSES} samples of {LAYERS} layers" in guard.fidelity.summary[0]
    without = Session(Dispatcher(Settings(mode=mode), probe(out.device, Settings(mode=mode))))
    assert torch.equal(out, sampled(without, tensors, **options))


def test_a_wrong_layer_is_found(monkeypatch: pytest.MonkeyPatch, fresh_seed: int) -> None:
    session = watched()

    run = KernelCall.run

    def wrong(call: KernelCall, *tensors: Any) -> Any:
        out, lse = run(call, *tensors)
        return -out if call._request.options.mode == "8b" else out, lse

    monkeypatch.setattr(KernelCall, "run", wrong)
    sampled(session, qkv())
    guard = session.handler.guard
    assert guard is not None and guard.fidelity is not None and len(guard.fidelity.findings) == LAYERS
    assert all(finding.found.cosine < -0.9 for finding in guard.fidelity.findings)


def test_figures_are_those_of_float64(fresh_seed: int) -> None:
    q, k, v = (torch.randn(2, 4, 3000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if all(reason for name, reason in explain(q, k, v).items() if name != "reference"):
        pytest.skip("no accelerated backend runs here")
    out = attention(q, k, v)
    exact, _ = exact_attention(q, k, v)
    stride = q.shape[2] // fidelity.ROWS
    for number in range(4):
        found = fidelity.measure(out, q, k, v, scale=None, mask=None, number=number).tolist()
        entry, head = divmod(fidelity.spread(number, 8), 4)
        rows = slice(number, number + stride * fidelity.ROWS, stride)
        wanted = Agreement.of(out[entry, head, rows], exact[entry, head, rows])
        assert found == pytest.approx([wanted.cosine, wanted.relative_l1, wanted.rmse], rel=1e-3, abs=1e-6)
