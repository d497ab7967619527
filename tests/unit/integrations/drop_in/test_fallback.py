"""Torch's attention computes calls that no kernel serves. The report counts them; the log names each reason once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from comfy_sage2.backends.reference import ReferenceBackend, ReferenceCall
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.comfyui.report import text
from comfy_sage2.dispatch import plan as planning
from comfy_sage2.dispatch.plan import CallPlan, Refusal
from comfy_sage2.integrations.sageattention import functions as typed
from comfy_sage2.integrations.sageattention import serving

pytestmark = pytest.mark.usefixtures("fresh_seed")

functions: Any = typed  # the result is one tensor or two


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    return q, k, v


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_torch_serves_what_no_kernel_can(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(1, 6, 6, 16)
    allowed = torch.rand(1, 1, 6, 6) < 0.7
    allowed[..., 0] = True  # every query keeps a key, with is_causal too
    wanted = [
        scaled_dot_product_attention(q, k, v),
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        scaled_dot_product_attention(q, k, v, attn_mask=allowed),
        scaled_dot_product_attention(q, k, v, attn_mask=allowed & torch.ones(6, 6, dtype=torch.bool).tril()),
    ]
    tensors = [tensor if layout == "HND" else tensor.transpose(1, 2) for tensor in (q, k, v)]
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        outputs = [
            functions.sageattn(*tensors, layout),
            functions.sageattn(*tensors, layout, is_causal=True, sm_scale=0.3),
            functions.sageattn(*tensors, layout, attn_mask=allowed),
            functions.sageattn(
                *tensors, layout, is_causal=True, attn_mask=torch.where(allowed, 0.0, -torch.inf).double()
            ),
        ]
    for out, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(out if layout == "HND" else out.transpose(1, 2), expected)
        assert out.is_contiguous()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == len(set(warnings)) and "SA-103" in warnings[0], warnings
    assert any("3 left to torch's attention: [SA-103]" in line for line in serving.calls.lines())


@pytest.mark.parametrize("scale", ["x", [1.0], torch.ones(2), 10**400, 10**5000], ids=range(5))
def test_a_scale_that_is_no_number_is_named(scale: object) -> None:
    with pytest.raises(TypeError, match=r"^\[SA-205\] sm_scale must be a number or None, got "):
        functions.sageattn(*qkv(1, 2, 4, 8), scale=scale)


@pytest.mark.usefixtures("no_kernels")
def test_torch_computes_the_lse() -> None:
    q, k, v = qkv(1, 2, 24, 32)
    out, lse = functions.sageattn(q, k, v, return_lse=True)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, (q @ k.mT / 32**0.5).logsumexp(-1), rtol=1e-4, atol=1e-4)
    for mask in (torch.zeros(24, dtype=torch.float64), torch.tensor(True)):
        masked = functions.sageattn(q, k, v, return_lse=True, attn_mask=mask)
        torch.testing.assert_close(masked, (out, lse), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(functions.sageattn(q, k, v, attn_mask=mask), out, rtol=1e-4, atol=1e-5)
    q, k, v = q.double(), k.double(), v.double()
    out, lse = functions.sageattn(q, k, v, return_lse=True)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v), rtol=1e-12, atol=1e-13)
    assert lse.dtype == torch.float32


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("scale", [None, -0.2])
def test_the_lse_is_computed_in_float32_under_autocast(scale: float | None) -> None:
    q, k, v = (3 * tensor.bfloat16().float() for tensor in qkv(1, 2, 24, 64))
    scores = (q.double() @ k.double().mT) * (64**-0.5 if scale is None else scale)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = functions.sageattn(q, k, v, sm_scale=scale, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    # As in torch, q and k are first rounded to 16 bits.
    rounded = (q.bfloat16().double() @ k.bfloat16().double().mT) * (64**-0.5 if scale is None else scale)
    assert (lse - rounded.logsumexp(-1)).abs().max() < 1e-4
    expected = scores.softmax(-1) @ v.double()
    assert (out - expected).norm() < 0.03 * expected.norm()


@pytest.mark.usefixtures("reference")
def test_the_requested_backend_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if kernels exist, which would serve the call if no backend were named."""
    planned: list[CallSignature] = []

    def plan(signature: CallSignature) -> CallPlan | Refusal:
        planned.append(signature)
        return planning.plan(signature)

    monkeypatch.setattr(serving, "plan", plan)
    functions.sageattn(*qkv(1, 2, 8, 32))
    (signature,) = planned
    assert signature.routing.backend == "reference"


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (ReferenceCall, "compute", RuntimeError("launch\nfailure")),
        (ReferenceCall, "compute", ValueError("refused after all")),
        (ReferenceBackend, "bind", RuntimeError("no image for this device")),
    ],
    ids=["in the call", "by the module", "in planning"],
)
def test_torch_serves_a_call_whose_kernel_fails(
    owner: type, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object, **options: object) -> Any:
        raise error

    monkeypatch.setattr(owner, method, failing)
    q, k, v = qkv(1, 2, 8, 32)
    torch.testing.assert_close(functions.sageattn(q, k, v), scaled_dot_product_attention(q, k, v))
    escaped = str(error).replace("\n", "\\n")
    assert f"[SA-310] the kernel failed: {escaped}" in serving.calls.lines()[1]


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("result", [0, 1])
def test_torch_computes_gradients_of_the_output_and_the_lse(result: int) -> None:
    q, k, v = qkv(1, 2, 8, 32)
    q.requires_grad_()
    scores = q.double() @ k.double().mT / 32**0.5
    wanted = (scores.softmax(-1) @ v.double(), scores.logsumexp(-1))[result].sum()
    out = functions.sageattn(q, k, v, return_lse=True)[result].sum()
    for gradient, expected in zip(torch.autograd.grad(out, q), torch.autograd.grad(wanted, q), strict=True):
        torch.testing.assert_close(gradient, expected, atol=2e-3, rtol=2e-2)
    assert "SA-307" in serving.calls.lines()[1]


def test_the_log_does_not_flood(caplog: pytest.LogCaptureFixture) -> None:
    calls = serving.CallCounts()
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        for size in range(100):
            calls.count(serving.TORCH, f"head_dim {size}")
            calls.count(serving.TORCH, f"head_dim {size}")
    assert len(caplog.records) == 20
    assert "200 by torch's attention" in calls.lines()[0]


def test_the_report_counts_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serving.CallCounts()
    monkeypatch.setattr(text, "sage_calls", calls)
    assert text.report([]) == text.NOT_PATCHED
    for _ in range(3):
        calls.count("sm90, 8b", None)
    calls.count(serving.TORCH, "[SA-202] head_dim must be from 1 to 256, got 288")
    lines = text.report([]).splitlines()
    assert lines[-2] == "Calls of sageattention since the start: 3 by sm90, 8b, 1 by torch's attention"
    assert lines[-1] == "  1 left to torch's attention: [SA-202] head_dim must be from 1 to 256, got 288"


def test_the_log_names_each_backend_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = serving.CallCounts()
    with caplog.at_level(logging.INFO, "comfy_sage2"):
        for backend in ("sm90, 8b", "sm90, 8b", "sm90, precise"):
            calls.count(backend, None)
    assert [record.getMessage() for record in caplog.records] == [
        f"SageAttention2: sm90, {mode} computed the first call of sageattention" for mode in ("8b", "precise")
    ]
