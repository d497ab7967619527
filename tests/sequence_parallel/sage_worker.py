"""One process of a test: yunchang's AttnType.SAGE_*, as Raylight calls it, with this library as `sageattention`.

    python -m torch.distributed.run --nproc-per-node P -m sequence_parallel.sage_worker --device cpu …

PYTHONPATH holds comfy_sage2/integrations/sageattention/path. Each process writes its part of every output to
rank<i>.safetensors.
"""

from __future__ import annotations

import argparse
import importlib

import torch
from safetensors.torch import save_file

from .cases import SCALE, Case
from .process import arguments_of, joined

# yunchang's name of an attention -> the mode in which it is served.
MODES = {
    "SAGE_AUTO": "8b",
    "SAGE_FP8": "8b",
    "SAGE_FP8_SM90": "8b",
    "SAGE_FP16": "precise",
    "SAGE_FP16_TRITON": "precise",
}


def sage_cases(processes: int) -> list[tuple[str, Case]]:
    """Every attention divided by Ulysses and by a ring: yunchang's name, and the case that it computes."""
    listed = []
    for name, mode in MODES.items():
        options = {"mode": mode}
        listed.append((name, Case(f"{name} Ulysses", processes, processes, 1, options)))
        listed.append((name, Case(f"{name} ring", processes, 1, processes, options)))
    listed.append(("SAGE_AUTO", Case("causal", processes, 1, processes, {"mode": "8b"}, is_causal=True)))
    return listed


def main() -> None:
    arguments = arguments_of(__doc__, dtype=str, tokens=int, head_dim=int)
    with joined(arguments.device) as (rank, processes):
        outputs = {case.name: output_of(name, case, rank, processes, arguments) for name, case in sage_cases(processes)}
        save_file(outputs, arguments.out / f"rank{rank}.safetensors")


def output_of(name: str, case: Case, rank: int, processes: int, arguments: argparse.Namespace) -> torch.Tensor:
    """This process's part of what yunchang's attention of that name gives: BHND, on the CPU."""
    yunchang = importlib.import_module("yunchang")
    kinds = importlib.import_module("yunchang.kernels").AttnType
    yunchang.set_seq_parallel_pg(case.ulysses, case.ring, rank, processes)
    attend = yunchang.LongContextAttention(attn_type=kinds[name])
    whole = case.inputs(arguments.device, getattr(torch, arguments.dtype), arguments.tokens, arguments.head_dim)
    parts = [tensor.chunk(processes, 2)[rank].transpose(1, 2).contiguous() for tensor in whole]
    with torch.no_grad():
        out: torch.Tensor = attend(*parts, softmax_scale=SCALE, causal=case.is_causal)
    return out.transpose(1, 2).cpu().contiguous()


if __name__ == "__main__":
    main()
