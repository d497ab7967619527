"""One process of a test: yunchang's attention, through this library's processor and its module `sageattention`.

    python -m torch.distributed.run --nproc-per-node P -m sequence_parallel.worker --device cpu …

PYTHONPATH holds comfy_sage2/integrations/sageattention/path. Each process writes its part of every case to
rank<i>.safetensors.
"""

from __future__ import annotations

import argparse
import importlib

import torch
from safetensors.torch import save_file

from comfy_sage2.integrations.yunchang import attention_processor

from .cases import SCALE, Case, cases, sparse_with_few_heads
from .process import arguments_of, joined


def main() -> None:
    arguments = arguments_of(__doc__, backend=str, dtype=str, tokens=int, head_dim=int)
    with joined(arguments.device) as (rank, processes):
        outputs = {case.name: output_of(case, rank, processes, arguments) for case in cases(processes)}
        save_file(outputs, arguments.out / f"rank{rank}.safetensors")


def output_of(case: Case, rank: int, processes: int, arguments: argparse.Namespace) -> torch.Tensor:
    """This process's part of a case's output: BHND, on the CPU."""
    yunchang = importlib.import_module("yunchang")
    yunchang.set_seq_parallel_pg(case.ulysses, case.ring, rank, processes)
    if case.attention is None:
        processor = attention_processor(backend=arguments.backend, sparse=case.sparse, **case.options)
        attend = yunchang.LongContextAttention(attn_type=None, attn_processor=processor)
    else:
        attn_types = importlib.import_module("yunchang.kernels").AttnType
        attend = yunchang.LongContextAttention(attn_type=attn_types[case.attention])
    whole = case.inputs(arguments.device, getattr(torch, arguments.dtype), arguments.tokens, arguments.head_dim)
    parts = [tensor.chunk(processes, 2)[rank].transpose(1, 2).contiguous() for tensor in whole]
    with torch.no_grad(), sparse_with_few_heads():
        out: torch.Tensor = attend(*parts, softmax_scale=SCALE, causal=case.is_causal)
    return out.transpose(1, 2).cpu().contiguous()


if __name__ == "__main__":
    main()
