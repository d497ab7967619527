"""SageAttention2 over several GPUs, with yunchang's sequence parallelism: Ulysses, ring attention, or both at once.

Each process holds the same part of every head's tokens. yunchang moves them (USP, Fang and Zhao, arXiv 2405.07719):
Ulysses gives each process all tokens of some heads, by all-to-all; ring attention passes keys and values round and
merges what each part gives by its log-sum-exp. The attention of one GPU in between is `comfy_sage2.attention`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import distributed

from .. import registry
from ..attention import attention
from ..options import CHOICES, AttentionOptions, ModelChoices, check_choice
from ..signature import TensorForm
from ..sparsity.declared import Sparse
from ..validation import DTYPES, check_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

OLDEST_YUNCHANG = "0.6.4"

Processor = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attention_processor(
    *,
    backend: str | None = None,
    options: AttentionOptions | None = None,
    sparse: Sparse | None = None,
    **choices: Unpack[ModelChoices],
) -> Processor:
    """The `attn_processor` for a yunchang.LongContextAttention of your own, made with `attn_type=None`.

    It takes the part of q, k, v that a step works on, (B, N, H, D), and returns the output and its LSE (B, H, N) in
    float32. `backend`, `options`, `sparse` and `choices` as in `comfy_sage2.attention`, but for what each call decides.
    `sparse` needs a ring_degree of 1: a step of a ring sees a part of the keys, and would measure that part alone.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown choice; and from the processor, a feature of yunchang that this attention does not have.
    """
    chosen = AttentionOptions.of_model(options, choices)
    if backend is not None:
        registry.get(backend)

    # The parameters are those that yunchang passes to every attention function.
    def processor(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        dropout_p: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for name, given, served in (
            ("dropout_p", dropout_p, 0.0),
            ("window_size", tuple(window_size), (-1, -1)),
            ("softcap", softcap, 0.0),
            ("alibi_slopes", alibi_slopes, None),
            ("return_softmax", return_softmax, False),
        ):
            if given is not served and given != served:
                raise ValueError(f"{name} must be {served} for quantized attention, got {given}")
        return attention(
            q,
            k,
            v,
            backend=backend,
            options=chosen,
            sparse=sparse,
            is_causal=causal,
            scale=softmax_scale,
            layout="BNHD",
            return_lse=True,
        )

    return processor


class SequenceParallelAttention:
    """Attention over tokens that are divided among processes, in order of rank and in equal parts.

    Making one is a collective operation: every process makes the same ones in the same order, after
    torch.distributed.init_process_group. It replaces yunchang's process-wide groups.

    Args:
        ulysses_degree: processes that divide the heads among them.
        ring_degree: processes that pass keys and values round. Groups of ulysses_degree x ring_degree processes work
            together; the number of processes is a multiple of that.
        backend, options, choices: as in `comfy_sage2.attention`, but for what each call decides.
        sparse: likewise, with `always` in tokens of all processes together; needs a ring_degree of 1.
        check_ranks: compare shapes and dtypes of the processes at every call, so that a difference is an error and not
            a deadlock or a wrong result. It costs two all-reduces of a few bytes, and a wait for the GPU.

    Raises:
        ModuleNotFoundError: yunchang is not installed.
        RuntimeError: torch.distributed is not initialized.
        TypeError: an unknown option.
        ValueError: the degrees do not fit the number of processes, an unknown choice, or `sparse` beside a ring.
    """

    def __init__(
        self,
        *,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        check_ranks: bool = True,
        backend: str | None = None,
        options: AttentionOptions | None = None,
        sparse: Sparse | None = None,
        **choices: Unpack[ModelChoices],
    ) -> None:
        processor = attention_processor(backend=backend, options=options, sparse=sparse, **choices)
        if sparse is not None and ring_degree > 1:
            raise ValueError(
                f"sparse needs a ring_degree of 1, got {ring_degree}: a step of a ring sees a part of the keys; raise "
                "ulysses_degree in its place, or leave out sparse"
            )
        yunchang = _import_yunchang()
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "torch.distributed must be initialized before sequence parallelism: start the program with torchrun "
                "and call torch.distributed.init_process_group first"
            )
        _check_degrees(ulysses_degree, ring_degree, distributed.get_world_size())
        yunchang.set_seq_parallel_pg(ulysses_degree, ring_degree, distributed.get_rank(), distributed.get_world_size())
        # No `attn_type`: yunchang then calls the processor.
        self._divided = yunchang.LongContextAttention(attn_type=None, attn_processor=processor)
        self._ulysses_degree = ulysses_degree
        self._ring_degree = ring_degree
        self._check_ranks = check_ranks

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        layout: str = "BHND",
    ) -> torch.Tensor:
        """This process's part of softmax(q k^T * scale) v over the tokens of all processes of its group.

        Args:
            q: this process's tokens, (B, Hq, Nq / P, D), or (B, Nq / P, Hq, D) with layout "BNHD"; dtypes and head_dim
                as in `comfy_sage2.attention`. P is the number of processes of the group.
            k, v: (B, Hkv, Nkv / P, D), likewise. Hq and Hkv are multiples of `ulysses_degree`.
            is_causal, scale, layout: as in `comfy_sage2.attention`; the tokens count from those of the first process.

        Returns:
            The output for this process's q, in q's shape, layout and dtype; its memory is in the order of BNHD.

        Raises:
            TypeError, ValueError: as in `comfy_sage2.attention`; also when the processes' shapes or dtypes differ, a
                number of heads cannot be divided, or gradients are needed.
        """
        check_choice("layout", layout, CHOICES["layout"])
        check_tensors(TensorForm.of(q), TensorForm.of(k), TensorForm.of(v), layout)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
            raise ValueError("q, k and v must not need gradients, quantized attention has none: use torch.no_grad()")
        if layout == "BHND":
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if self._check_ranks:
            self._require_equal_parts(q, k)
        for name, tensor in (("q", q), ("k and v", k)):
            if tensor.shape[2] % self._ulysses_degree:
                raise ValueError(
                    f"the number of heads of {name} must be a multiple of ulysses_degree {self._ulysses_degree}, "
                    f"got {tensor.shape[2]}: lower ulysses_degree and raise ring_degree"
                )
        if is_causal and self._ring_degree > 1 and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"is_causal with ring_degree {self._ring_degree} needs as many queries as keys, "
                f"got {q.shape[1]} and {k.shape[1]} a process"
            )
        out: torch.Tensor = self._divided(q, k, v, softmax_scale=scale, causal=is_causal)
        return out.transpose(1, 2) if layout == "BHND" else out

    def _require_equal_parts(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raise the same ValueError in every process when they do not all have the shapes and the dtype of this one."""
        batch, queries, query_heads, head_dim = q.shape
        sizes = {
            "batch size": batch, "number of queries": queries, "number of keys": k.shape[1], "heads of q": query_heads,
            "heads of k and v": k.shape[2], "head_dim": head_dim, "dtype": DTYPES.index(q.dtype),
        }  # fmt: skip
        values = list(sizes.values())
        extremes = torch.tensor(values + [-value for value in values], dtype=torch.int64, device=q.device)
        # One group after the other: the maximum over both is that of all processes, so all of them raise, or none.
        for group in (self._divided.ulysses_pg, self._divided.ring_pg):
            distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=group)
        largest, smallest = extremes[: len(values)].tolist(), (-extremes[len(values) :]).tolist()
        for name, own, least, most in zip(sizes, values, smallest, largest, strict=True):
            if least == most:
                continue
            if name == "dtype":
                raise ValueError(f"q, k and v must have one dtype in all processes, this one has {q.dtype}")
            raise ValueError(
                f"the {name} must be equal in all processes, got from {least} to {most}, here {own}: "
                "pad or divide the tokens evenly"
            )


def _import_yunchang() -> ModuleType:
    try:
        return importlib.import_module("yunchang")
    except ModuleNotFoundError as error:
        if error.name != "yunchang":
            raise
        raise ModuleNotFoundError(
            f"sequence parallelism needs yunchang: pip install 'yunchang>={OLDEST_YUNCHANG}'", name="yunchang"
        ) from error


def _check_degrees(ulysses_degree: int, ring_degree: int, processes: int) -> None:
    for name, degree in (("ulysses_degree", ulysses_degree), ("ring_degree", ring_degree)):
        if degree < 1:
            raise ValueError(f"{name} must be at least 1, got {degree}")
    if processes % (ulysses_degree * ring_degree):
        raise ValueError(
            f"the number of processes must be a multiple of ulysses_degree x ring_degree = {ulysses_degree} x "
            f"{ring_degree}, got {processes}"
        )
