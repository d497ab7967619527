"""One process of a test: a random Wan in diffusers, unpatched, patched, and patched with divided tokens.

    python -m torch.distributed.run --nproc-per-node P -m sequence_parallel.diffusers_worker --device cpu …

Every process writes the model's outputs to rank<i>.safetensors and the patch's counts to rank<i>.json.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from diffusers import ContextParallelConfig, WanTransformer3DModel
from safetensors.torch import save_file

from comfy_sage2.integrations.diffusers import patch

from .process import arguments_of, joined


def main() -> None:
    arguments = arguments_of(__doc__, backend=str)
    with joined(arguments.device) as (rank, processes):
        outputs, counts = compute(arguments.device, arguments.backend, processes)
        save_file(outputs, arguments.out / f"rank{rank}.safetensors")
        (arguments.out / f"rank{rank}.json").write_text(json.dumps(counts), encoding="utf-8")


def compute(device: str, backend: str, processes: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's outputs by name, and the patch's counts of the run with divided tokens."""
    if device == "cpu":
        # diffusers counts a process's accelerators; let the CPU count as one.
        torch.accelerator.device_count = lambda: 1
    torch.manual_seed(1)
    make: Any = WanTransformer3DModel  # neither has annotations
    make_config: Any = ContextParallelConfig
    model = make(num_attention_heads=4, attention_head_dim=128, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2)
    model = model.to(device).eval().requires_grad_(False)
    # 512 tokens: 128 for each of four processes, so that the groups of cross-attention's queries are the same.
    latent, text = torch.randn(1, 16, 2, 32, 32), torch.randn(1, 16, 32)

    def run() -> torch.Tensor:
        inputs = (latent, torch.tensor([500.0]), text)
        result: torch.Tensor = model(*(tensor.to(device) for tensor in inputs), return_dict=False)[0].cpu().contiguous()
        return result

    outputs = {"full": run()}
    with patch(model, backend=backend):
        outputs["undivided"] = run()
    # The model's own plan without the timesteps per token, which only Wan 2.2 5B has. Without such timesteps, diffusers
    # 0.42.1 warns through a method that its logger has only if transformers is installed.
    plan = {module: division for module, division in model._cp_plan.items() if module}
    model.enable_parallelism(config=make_config(ulysses_degree=processes), cp_plan=plan)
    with patch(model, backend=backend) as patched:
        outputs["divided"] = run()
    return outputs, {"calls": patched.calls, "fallbacks": patched.fallbacks}


if __name__ == "__main__":
    main()
