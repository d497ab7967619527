"""One process of a test: python -m torch.distributed.run --nproc-per-node P -m sequence_parallel.worker …

Each process writes its part of every case to rank<i>.safetensors, and what was raised to rank<i>.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from safetensors.torch import save_file
from torch import distributed

from comfy_sage2.integrations.yunchang import SequenceParallelAttention

from .cases import SCALE, Case, cases
from .process import arguments_of, joined


def main() -> None:
    arguments = arguments_of(__doc__, backend=str, dtype=str, tokens=int, head_dim=int)
    with joined(arguments.device) as (rank, processes):
        outputs = {case.name: output_of(case, rank, processes, arguments) for case in cases(processes)}
        save_file(outputs, arguments.out / f"rank{rank}.safetensors")
        errors = {name: message_of(attempt) for name, attempt in attempts(arguments.device, arguments.backend).items()}
        (arguments.out / f"rank{rank}.json").write_text(json.dumps(errors), encoding="utf-8")


def output_of(case: Case, rank: int, processes: int, arguments: argparse.Namespace) -> torch.Tensor:
    """This process's part of a case's output: BHND, on the CPU."""
    parallel = SequenceParallelAttention(
        ulysses_degree=case.ulysses,
        ring_degree=case.ring,
        backend=arguments.backend,
        sparse=case.sparse,
        **case.options,
    )
    whole = case.inputs(arguments.device, getattr(torch, arguments.dtype), arguments.tokens, arguments.head_dim)
    parts = [tensor.chunk(processes, 2)[rank] for tensor in whole]
    if case.layout == "BNHD":
        parts = [part.transpose(1, 2) for part in parts]
    out = parallel(*parts, is_causal=case.is_causal, scale=SCALE, layout=case.layout)
    if case.layout == "BNHD":
        out = out.transpose(1, 2)
    return out.cpu().contiguous()


def attempts(device: str, backend: str) -> dict[str, Callable[[], object]]:
    """Calls that have to be refused, in all processes alike."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()

    def part(heads: int = processes, tokens: int = 64, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.zeros(1, heads, tokens, 64, device=device, dtype=dtype)

    def ulysses() -> SequenceParallelAttention:
        return SequenceParallelAttention(ulysses_degree=processes, backend=backend)

    def ring() -> SequenceParallelAttention:
        return SequenceParallelAttention(ring_degree=processes, backend=backend)

    odd_heads, kv_head = part(processes + 1), part(1)
    uneven = part(tokens=64 + rank)
    mixed = part(dtype=torch.float16 if rank == 0 else torch.bfloat16)
    return {
        "degrees": lambda: SequenceParallelAttention(ulysses_degree=3, backend=backend),
        "no degree": lambda: SequenceParallelAttention(ring_degree=0, backend=backend),
        "heads": lambda: ulysses()(odd_heads, odd_heads, odd_heads),
        "heads of k and v": lambda: ulysses()(part(), kv_head, kv_head),
        "tokens in a ring": lambda: ring()(uneven, uneven, uneven),
        "tokens in Ulysses": lambda: ulysses()(uneven, uneven, uneven),
        "keys": lambda: ring()(part(), uneven, uneven),
        "dtypes": lambda: ring()(mixed, mixed, mixed),
        "causal": lambda: ring()(part(), part(tokens=32), part(tokens=32), is_causal=True),
        "gradients": lambda: ring()(part().requires_grad_(), part(), part()),
    }


def message_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


if __name__ == "__main__":
    main()
