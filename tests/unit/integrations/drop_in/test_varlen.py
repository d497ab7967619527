"""Packed sequences: each attends only to itself, in as few calls as the lengths allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_oracle import oracle

from comfy_sage2.autotune.timings import PLAIN, Candidate, Work
from comfy_sage2.integrations.sageattention import functions as typed
from comfy_sage2.integrations.sageattention import serving, varlen

pytestmark = pytest.mark.usefixtures("reference", "fresh_seed")

functions: Any = typed


def packed(*lengths: int, heads: int = 4, head_dim: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.randn(int(starts[-1]), heads, head_dim, dtype=torch.float16), starts


def wanted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: list[int],
    starts_k: list[int],
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The output in float64, one sequence at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if a < b and c < d:
            heads_first = (part.transpose(0, 1)[None] for part in (q[a:b], k[c:d], v[c:d]))
            out[a:b] = oracle(*heads_first, scale=scale, is_causal=is_causal)[0][0].transpose(0, 1)
    return out


def is_close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((out.double() - expected).abs().sum()) < 0.04 * float(expected.abs().sum())


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 30), (6, 6, 6), (0, 4, 0, 4, 9), (3, 3, 8, 8, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_sequence_attends_only_to_itself(lengths: tuple[int, ...], is_causal: bool, kv_heads: int) -> None:
    (q, starts_q), (k, starts_k) = packed(*lengths), packed(*(2 * n for n in lengths), heads=kv_heads)
    v = torch.randn_like(k)
    out = functions.sageattn_varlen(q, k, v, starts_q, starts_k, max(lengths), 2 * max(lengths), is_causal, 0.3)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert is_close(out, wanted(q, k, v, starts_q.tolist(), starts_k.tolist(), is_causal, 0.3))


def test_neighbors_of_equal_lengths_are_one_call() -> None:
    """The windows of a vision encoder are hundreds of short sequences."""
    q, starts = packed(8, 8, 8, 5, 8, 8)
    functions.sageattn_varlen(q, q, q, starts, starts, 8, 8)
    assert serving.calls.lines() == ["Calls of sageattention since the start: 3 by reference, precise"]


@pytest.mark.parametrize("lengths", [((6, 0, 6), (5, 5, 5)), ((6, 6, 6), (5, 0, 5))], ids=["no queries", "no keys"])
def test_a_sequence_without_queries_or_keys_separates_its_neighbors(
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Its tokens lie between two sequences of equal lengths, which therefore need two calls."""
    (q, starts_q), (k, starts_k) = (packed(*each) for each in lengths)
    out = functions.sageattn_varlen(q, k, k, starts_q, starts_k, 6, 5)
    assert is_close(out, wanted(q, k, k, starts_q.tolist(), starts_k.tolist()))


def test_tokens_of_no_sequence_and_queries_without_keys_give_zeros() -> None:
    q, k = (torch.randn(20, 4, 32, dtype=torch.float16) for _ in range(2))
    starts_q, starts_k = [2, 9, 14, 17], [0, 5, 5, 20]
    out = functions.sageattn_varlen(q, k, k, torch.tensor(starts_q), torch.tensor(starts_k), 7, 15)
    expected = wanted(q, k, k, starts_q, starts_k)
    assert is_close(out, expected)
    assert not out[:2].any() and not out[9:14].any() and not out[17:].any()
    differentiable = functions.sageattn_varlen(
        q.float().requires_grad_(), k.float(), k.float(), torch.tensor(starts_q), torch.tensor(starts_k), 7, 15
    )
    assert is_close(differentiable, expected) and differentiable.requires_grad


@pytest.mark.usefixtures("no_kernels")
def test_torch_serves_what_no_kernel_can() -> None:
    q, starts = packed(5, 9, head_dim=300)
    q = q.double()
    assert is_close(functions.sageattn_varlen(q, q, q, starts, starts, 9, 9), wanted(q, q, q, [0, 5, 14], [0, 5, 14]))
    assert "2 left to torch's attention" in serving.calls.lines()[1]


@pytest.mark.parametrize("scale", [None, -0.2])
def test_gradients_and_odd_scales(scale: float | None) -> None:
    q, starts = packed(5, 9)
    x = q.float().requires_grad_()
    out = functions.sageattn_varlen(x, q.float(), q.float(), starts, starts, softmax_scale=scale)
    out.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert is_close(out.detach(), wanted(q, q, q, [0, 5, 14], [0, 5, 14], scale=scale))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.3, -0.2, 0.0])
def test_a_compiled_call_does_not_break_the_graph(scale: float | None) -> None:
    q, starts = packed(5, 9)
    torch._dynamo.reset()
    compiled: Any = torch.compile(functions.sageattn_varlen, fullgraph=True, backend="aot_eager")
    out = compiled(q, q, q, starts, starts, 9, 9, sm_scale=scale)
    assert torch.equal(out, functions.sageattn_varlen(q, q, q, starts, starts, 9, 9, sm_scale=scale))
    assert is_close(out, wanted(q, q, q, [0, 5, 14], [0, 5, 14], scale=scale))


@pytest.mark.parametrize(
    ("starts_q", "starts_k"),
    [
        ([0, 9, 5], [0, 5, 10]),
        ([0, 5, 11], [0, 5, 10]),
        ([-1, 5, 10], [0, 5, 10]),
        ([0, 10], [0, 5, 10]),
        ([0.0, 10.0], [0, 10]),
        ([], [0, 10]),
        ([[0, 10]], [0, 10]),
        ([False, True], [0, 10]),
    ],
    ids=str,
)
def test_invalid_cu_seqlens_are_refused(starts_q: list[Any], starts_k: list[Any]) -> None:
    q = torch.randn(10, 4, 64)
    with pytest.raises(ValueError, match="SA-603"):
        functions.sageattn_varlen(q, q, q, torch.tensor(starts_q), torch.tensor(starts_k), 6, 6)


def test_invalid_tensors_and_unknown_arguments_are_refused() -> None:
    q, starts = packed(5, 9)
    for wrong in ((q[None], q[None], q[None]), (q, q, q[..., :8])):
        with pytest.raises(ValueError, match="SA-603"):
            functions.sageattn_varlen(*wrong, starts, starts)
    with pytest.raises(TypeError, match=r"SA-602.*block_table"):
        functions.sageattn_varlen(q, q, q, starts, starts, block_table=starts)


def test_the_gpu_is_timed_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our node nothing else times the GPU, and only the times tell which calls gain from a kernel."""
    timed: list[torch.device] = []
    monkeypatch.setattr(varlen, "ensure_timed", timed.append)
    q, starts = packed(6, 9)
    functions.sageattn_varlen(q, q, q, starts, starts, 9, 9)
    assert timed == [q.device]


def test_torch_serves_sequences_too_short_for_the_enqueue_time_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is by the time of torch's attention, with the heads of all neighbors together."""
    requests: list[tuple[Candidate, Work]] = []

    def seconds(candidate: Candidate, work: Work) -> float | None:
        requests.append((candidate, work))
        return {6: 9e-5, 9: 2e-4, 11: None}[work.q_length]

    monkeypatch.setattr(varlen, "choices_of", lambda device: SimpleNamespace(seconds=seconds))
    q, starts = packed(6, 6, 9, 11)
    out = functions.sageattn_varlen(q, q, q, starts, starts, is_causal=True)
    assert is_close(out, wanted(q, q, q, starts.tolist(), starts.tolist(), is_causal=True))
    sizes = ((2, 6), (1, 9), (1, 11))
    assert requests == [(Candidate(PLAIN), Work(4 * count, n, n, 32, is_causal=True)) for count, n in sizes]
    assert serving.calls.lines()[0].endswith("2 by reference, precise, 1 by torch's attention")
    assert serving.calls.lines()[1:] == [f"  1 left to torch's attention: {varlen.IS_SHORT}"]
    functions.sageattn_varlen(q.float(), q.float(), q.float(), starts, starts)
    assert len(requests) == 3


@pytest.mark.parametrize("starts", [[0, 5], (0, 5), None], ids=str)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_that_are_no_tensor_are_named(name: str, starts: Any) -> None:
    q, both = packed(5)
    with pytest.raises(TypeError, match=f"SA-603.*{name} must be a torch.Tensor of integers, got"):
        functions.sageattn_varlen(q, q, q, **{"cu_seqlens_q": both, "cu_seqlens_k": both, name: starts})


@pytest.mark.parametrize("options", [{}, {"sm_scale": -0.2}, {"dropout_p": 0.5}], ids=str)
def test_sequences_without_query_key_pairs_give_zeros_with_gradients(options: dict[str, Any]) -> None:
    """A batch of only padding must not stop a training run."""
    q, k, v = (torch.randn(6, heads, 32, requires_grad=True) for heads in (4, 2, 2))
    out = functions.sageattn_varlen(q, k, v, torch.tensor([0, 0, 6]), torch.tensor([0, 6, 6]), **options)
    assert out.shape == q.shape and not out.any()
    out.sum().backward()
    assert q.grad is not None and not q.grad.any()
