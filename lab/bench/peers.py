"""Other attentions as candidates, each if its package can be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .candidates import BenchmarkCandidate, Call, Candidates, Inputs, PeerMissing
from .cudnn_fp8 import prepare_cudnn_fp8
from .fp8 import compiled_quantizer, quantize_heads


def _import(module: str, distribution: str) -> tuple[ModuleType, str]:
    """A module and its version. PeerMissing if it is not installed or does not load."""
    try:
        package = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise PeerMissing(f"not installed (pip install {distribution})") from None
        raise PeerMissing(f"{module} does not import: {error}") from error
    except Exception as error:  # whatever a peer's package raises, cuDNN's an AssertionError
        raise PeerMissing(f"{module} does not import: {error}") from error
    try:
        return package, importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # on the path, but not installed
        return package, str(getattr(package, "__version__", "unknown"))


# The authors' build, and the package index's build of only the forward pass, without fp16.
_FLASH_ATTENTION_3 = (("flash_attn_interface", "flash_attn_3"), ("fa3_fwd_interface", "fa3-fwd"))


def flash_attention_3() -> tuple[ModuleType, str]:
    """FlashAttention-3's module and version. PeerMissing when no build of it is installed and loads."""
    reasons = []
    for module, distribution in _FLASH_ATTENTION_3:
        try:
            return _import(module, distribution)
        except PeerMissing as reason:
            reasons.append(str(reason))
    raise PeerMissing("; ".join(reasons))


def _sdpa(
    name: str, backend: SDPBackend, version: str = torch.__version__, *, takes_mask: bool = True
) -> BenchmarkCandidate:
    def prepare(inputs: Inputs) -> Call:
        if not takes_mask:
            inputs.without_mask()

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    inputs.q, inputs.k, inputs.v, attn_mask=inputs.attn_mask, is_causal=inputs.is_causal
                )

        return Call(run)

    return BenchmarkCandidate(name, version, prepare)


def _torch_efficient() -> list[BenchmarkCandidate]:
    """torch's memory-efficient attention, which ComfyUI gets for calls with a mask, as flash takes none."""
    candidate = _sdpa("torch efficient", SDPBackend.EFFICIENT_ATTENTION)
    return [replace(candidate, applies=lambda shape: shape.mask is not None)]


def _torch_cudnn() -> list[BenchmarkCandidate]:
    if not torch.backends.cudnn.is_available():
        raise PeerMissing("this torch has no cuDNN")
    return [_sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION, f"{torch.backends.cudnn.version()}")]


def _cudnn_fp8() -> list[BenchmarkCandidate]:
    cudnn, version = _import("cudnn", "nvidia-cudnn-frontend")
    prepare, note = partial(prepare_cudnn_fp8, cudnn), "quantization not timed, FP8 output"
    return [BenchmarkCandidate("cuDNN FP8", version, prepare, has_whole_call=False, note=note)]


def _comfy_kitchen() -> list[BenchmarkCandidate]:
    kitchen, version = _import("comfy_kitchen", "comfy-kitchen")
    if not (hasattr(kitchen, "int8_attention_is_available") and kitchen.int8_attention_is_available()):
        raise PeerMissing(f"version {version} has no INT8 attention for this GPU")

    def check(inputs: Inputs) -> None:
        inputs.without_mask()
        if inputs.is_causal:
            raise PeerMissing("no causal attention")

    def prepare(inputs: Inputs) -> Call:
        check(inputs)
        return Call(lambda: kitchen.int8_attention(inputs.q, inputs.k, inputs.v))

    def prepare_kernel(inputs: Inputs) -> Call:
        check(inputs)
        quantized = kitchen.prequantize_int8_attention(inputs.q, inputs.k, inputs.v)
        return Call(lambda: kitchen.int8_attention_from_prequantized(quantized))

    has_kernel = hasattr(kitchen, "prequantize_int8_attention")
    return [BenchmarkCandidate("comfy-kitchen INT8", version, prepare, prepare_kernel if has_kernel else None)]


def _sage_attention_2() -> tuple[ModuleType, str]:
    """Its module and version. PeerMissing if it is version 1, whose kernels are Triton's."""
    sage, version = _import("sageattention", "sageattention")
    if not hasattr(sage, "sageattn_qk_int8_pv_fp16_cuda"):
        raise PeerMissing(f"version {version} has no CUDA kernels: version 2 is built from its sources")
    return sage, version


def _sage_attention() -> list[BenchmarkCandidate]:
    """SageAttention 2 with the kernel that it chooses; on Hopper with each of its granularities."""
    sage, version = _sage_attention_2()
    if torch.cuda.get_device_capability() != (9, 0):
        return [_sage("SageAttention 2", version, sage.sageattn, "attn_kernel")]
    function = sage.sageattn_qk_int8_pv_fp8_cuda_sm90
    return [
        _sage(f"SageAttention 2 per {name}", version, partial(function, qk_quant_gran=f"per_{name}"), "attn_kernel")
        for name in ("thread", "warp")
    ]


def _sage_attention_fp16() -> list[BenchmarkCandidate]:
    """The kernels with P V in fp16, which GeForce cards of the 30 series run, with each of their accumulators."""
    sage, version = _sage_attention_2()
    function = partial(sage.sageattn_qk_int8_pv_fp16_cuda, qk_quant_gran="per_thread")
    return [
        _sage(f"SageAttention 2 fp16, {sums} sums", version, partial(function, pv_accum_dtype=sums), "qk_int_sv_f16")
        for sums in ("fp32", "fp16+fp32", "fp16")
    ]


def _sage(name: str, version: str, function: Callable[..., torch.Tensor], kernel_name: str) -> BenchmarkCandidate:
    def prepare(inputs: Inputs) -> Call:
        inputs.without_mask()
        q, k, v = inputs.q, inputs.k, inputs.v
        return Call(lambda: function(q, k, v, tensor_layout="HND", is_causal=inputs.is_causal))

    return BenchmarkCandidate(name, version, prepare, kernel_name=kernel_name)


def _flash_attention_3() -> list[BenchmarkCandidate]:
    flash, version = flash_attention_3()

    def tensors_of(inputs: Inputs) -> list[torch.Tensor]:
        """Tokens before heads, as this package takes them."""
        inputs.without_mask()
        return [tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v)]

    def attend(*tensors: torch.Tensor, is_causal: bool, **scales: torch.Tensor) -> torch.Tensor:
        answer = flash.flash_attn_func(*tensors, causal=is_causal, **scales)
        out: torch.Tensor = answer[0] if isinstance(answer, tuple) else answer
        return out

    def decode(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2)

    def prepare(inputs: Inputs) -> Call:
        tensors = tensors_of(inputs)
        return Call(lambda: attend(*tensors, is_causal=inputs.is_causal), decode)

    def attend_quantized(quantized: list[tuple[torch.Tensor, torch.Tensor]], is_causal: bool) -> torch.Tensor:
        scales = {f"{name}_descale": scale for name, (_, scale) in zip("qkv", quantized, strict=True)}
        return attend(*(values for values, _ in quantized), is_causal=is_causal, **scales)

    def prepare_fp8_kernel(inputs: Inputs) -> Call:
        quantized = [quantize_heads(tensor) for tensor in tensors_of(inputs)]
        return Call(lambda: attend_quantized(quantized, inputs.is_causal), decode)

    quantize, how = compiled_quantizer(torch.ones(1, 128, 2, 128, device="cuda", dtype=torch.bfloat16))

    def prepare_fp8(inputs: Inputs) -> Call:
        tensors = tensors_of(inputs)
        return Call(lambda: attend_quantized([quantize(tensor) for tensor in tensors], inputs.is_causal), decode)

    return [
        BenchmarkCandidate("FlashAttention-3", version, prepare),
        BenchmarkCandidate("FlashAttention-3 FP8", version, prepare_fp8, prepare_fp8_kernel, note=how),
    ]


PEERS: dict[str, Callable[[], list[BenchmarkCandidate]]] = {
    "torch-flash": lambda: [_sdpa("FlashAttention-2", SDPBackend.FLASH_ATTENTION, takes_mask=False)],
    "torch-efficient": _torch_efficient,
    "torch-cudnn": _torch_cudnn,
    "cudnn-fp8": _cudnn_fp8,
    "comfy-kitchen": _comfy_kitchen,
    "sageattention": _sage_attention,
    "sageattention-fp16": _sage_attention_fp16,
    "flash-attention-3": _flash_attention_3,
}


def find(names: Iterable[str]) -> Candidates:
    """The peers called `names`, of PEERS; those that cannot be imported go to `missing`."""
    candidates = Candidates()
    for name in names:
        try:
            candidates.able += PEERS[name]()
        except PeerMissing as reason:
            candidates.missing[name] = str(reason)
    return candidates
