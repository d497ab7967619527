"""cuDNN's FP8 attention through its graph interface (the package nvidia-cudnn-frontend).

On Hopper it takes and returns E4M3 with one scale per tensor, P included. P lies in 0..1, so its scale is 448; the
output's scale comes from the output itself, as if a caller had calibrated it.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch.nn.functional import scaled_dot_product_attention

from .candidates import Call, Inputs
from .fp8 import E4M3, E4M3_MAXIMUM, quantize_tensor


def prepare_cudnn_fp8(cudnn: ModuleType, inputs: Inputs) -> Call:
    """Quantize, and build cuDNN's execution plan. Errors of the package pass through."""
    inputs.without_mask()
    device = inputs.q.device
    tensors = [quantize_tensor(tensor) for tensor in (inputs.q, inputs.k, inputs.v)]
    exact = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.is_causal)
    _, out_descale = quantize_tensor(exact)
    factors = {
        "descale_q": tensors[0][1],
        "descale_k": tensors[1][1],
        "descale_v": tensors[2][1],
        "descale_s": torch.tensor(1 / E4M3_MAXIMUM),
        "scale_s": torch.tensor(E4M3_MAXIMUM),
        "scale_o": 1 / out_descale,
    }

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    nodes = {
        name: graph.tensor(
            name=name, dim=list(values.shape), stride=list(values.stride()), data_type=cudnn.data_type.FP8_E4M3
        )
        for name, (values, _) in zip("qkv", tensors, strict=True)
    }
    scalar = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    for name in factors:
        nodes[name] = graph.tensor(name=name, data_type=cudnn.data_type.FLOAT, **scalar)
    out_node, _, *amax_nodes = graph.sdpa_fp8(
        **nodes,
        generate_stats=False,
        attn_scale=1 / math.sqrt(inputs.q.shape[3]),
        use_causal_mask=inputs.is_causal,
        name="attention",
    )
    out = torch.empty_like(tensors[0][0])
    out_node.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    out_node.set_data_type(cudnn.data_type.FP8_E4M3)
    for node in amax_nodes:
        node.set_output(True).set_dim(scalar["dim"]).set_stride(scalar["stride"]).set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    memory = {nodes[name]: values for name, (values, _) in zip("qkv", tensors, strict=True)}
    memory |= {nodes[name]: factor.float().to(device).reshape(1, 1, 1, 1) for name, factor in factors.items()}
    memory |= {node: torch.empty(1, 1, 1, 1, device=device) for node in amax_nodes}
    memory[out_node] = out
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)

    def run() -> torch.Tensor:
        graph.execute(memory, workspace, handle=handle)
        return out

    assert out.dtype == E4M3
    return Call(run, lambda result: result.float() * out_descale)
