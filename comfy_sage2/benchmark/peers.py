"""Other attentions as candidates, each where its package can be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .candidates import Call, Candidate, Found, Inputs, PeerMissing
from .cudnn_fp8 import prepare_cudnn_fp8
from .fp8 import quantize_tensor


def _import(module: str, distribution: str) -> tuple[ModuleType, str]:
    """A module and its distribution's version. PeerMissing when it is not installed or does not load."""
    try:
        version = importlib.metadata.version(distribution)
        return importlib.import_module(module), version
    except importlib.metadata.PackageNotFoundError:
        raise PeerMissing(f"not installed (pip install {distribution})") from None
    except Exception as error:  # whatever a peer's package raises, cuDNN's an AssertionError
        raise PeerMissing(f"{module} does not import: {error}") from error


def _sdpa(name: str, backend: SDPBackend, version: str) -> Candidate:
    def prepare(inputs: Inputs) -> Call:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.is_causal)

        return Call(run)

    return Candidate(name, version, prepare)


def _torch_flash() -> list[Candidate]:
    return [_sdpa("torch flash", SDPBackend.FLASH_ATTENTION, torch.__version__)]


def _torch_cudnn() -> list[Candidate]:
    if not torch.backends.cudnn.is_available():
        raise PeerMissing("this torch has no cuDNN")
    return [_sdpa("torch cuDNN", SDPBackend.CUDNN_ATTENTION, f"{torch.backends.cudnn.version()}")]


def _cudnn_fp8() -> list[Candidate]:
    cudnn, version = _import("cudnn", "nvidia-cudnn-frontend")

    def prepare(inputs: Inputs) -> Call:
        return prepare_cudnn_fp8(cudnn, inputs)

    return [Candidate("cuDNN fp8", version, prepare, has_whole_call=False, note="quantisation not timed, FP8 output")]


def _comfy_kitchen() -> list[Candidate]:
    kitchen, version = _import("comfy_kitchen", "comfy-kitchen")
    if not (hasattr(kitchen, "int8_attention_is_available") and kitchen.int8_attention_is_available()):
        raise PeerMissing(f"version {version} has no INT8 attention for this GPU")

    def without_causal(inputs: Inputs) -> None:
        if inputs.is_causal:
            raise PeerMissing("no causal attention")

    def prepare(inputs: Inputs) -> Call:
        without_causal(inputs)
        return Call(lambda: kitchen.int8_attention(inputs.q, inputs.k, inputs.v))

    def prepare_kernel(inputs: Inputs) -> Call:
        without_causal(inputs)
        quantized = kitchen.prequantize_int8_attention(inputs.q, inputs.k, inputs.v)
        return Call(lambda: kitchen.int8_attention_from_prequantized(quantized))

    has_kernel = hasattr(kitchen, "prequantize_int8_attention")
    return [Candidate("comfy-kitchen int8", version, prepare, prepare_kernel if has_kernel else None)]


def _sage_attention() -> list[Candidate]:
    sage, version = _import("sageattention", "sageattention")
    first = version.startswith("1.")

    def prepare(inputs: Inputs) -> Call:
        k = inputs.k.clone()  # version 1 subtracts the mean of k in place
        return Call(lambda: sage.sageattn(inputs.q, k, inputs.v, tensor_layout="HND", is_causal=inputs.is_causal))

    kernel_name = "attn_fwd" if first else "attn_kernel"
    return [Candidate(f"sageattention {version[0]}", version, prepare, kernel_name=kernel_name)]


def _flash_attention_3() -> list[Candidate]:
    flash, version = _import("flash_attn_interface", "flash_attn_3")

    def call(inputs: Inputs, fp8: bool) -> Call:
        # Tokens before heads; one FP8 scale for each batch and head.
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v)]
        scales: dict[str, torch.Tensor] = {}
        if fp8:
            quantized = [quantize_tensor(tensor) for tensor in tensors]
            tensors = [values for values, _ in quantized]
            batch, _, heads, _ = tensors[0].shape
            for name, (_, scale) in zip("qkv", quantized, strict=True):
                scales[f"{name}_descale"] = scale.expand(batch, heads)

        def run() -> torch.Tensor:
            out = flash.flash_attn_func(*tensors, causal=inputs.is_causal, **scales)
            return out[0] if isinstance(out, tuple) else out

        return Call(run, lambda out: out.transpose(1, 2))

    return [
        Candidate("FlashAttention-3", version, lambda inputs: call(inputs, fp8=False)),
        Candidate(
            "FlashAttention-3 fp8", version, lambda inputs: call(inputs, fp8=True), has_whole_call=False,
            note="quantisation not timed",
        ),
    ]  # fmt: skip


PEERS: dict[str, Callable[[], list[Candidate]]] = {
    "torch-flash": _torch_flash,
    "torch-cudnn": _torch_cudnn,
    "cudnn-fp8": _cudnn_fp8,
    "comfy-kitchen": _comfy_kitchen,
    "sageattention": _sage_attention,
    "flash-attention-3": _flash_attention_3,
}


def find(names: Iterable[str], peers: dict[str, Callable[[], list[Candidate]]] = PEERS) -> Found:
    """The peers called `names`; those that cannot be imported go to `missing`. ValueError for an unknown name."""
    found = Found()
    for name in names:
        if name not in peers:
            raise ValueError(f"peer must be one of {', '.join(peers)}, got {name!r}")
        try:
            found.candidates += peers[name]()
        except PeerMissing as reason:
            found.missing[name] = str(reason)
    return found
