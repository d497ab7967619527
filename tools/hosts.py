"""Programs outside of ComfyUI that import `sageattention`: one attention call by each one's own file.

    python -m tools.hosts FOLDER

FOLDER holds their checkouts: musubi-tuner, LightX2V, vllm-omni, sdnext. The wheel of packages/sageattention has to be
installed, and diffusers. Of a host only its attention file is loaded; what that imports beside torch and
`sageattention` is replaced by empty modules. Prints a row for each: what was called, and how far the result is from
exact attention (relative L1).
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from comfy_sage2.console import say

exact: Any = F.scaled_dot_product_attention
Row = tuple[str, float]


class _Anything(ModuleType):
    """A module that has every name: a logger, a class where it is written as one is, else a decorator of nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("logger", "log"):
            return logging.getLogger("host")
        if name == "init_logger":
            return logging.getLogger
        if name[:1].isupper() and not name.isupper():
            return type(name, (), {})
        return lambda *given, **options: lambda decorated: decorated


class _Absent:
    """Finds an empty module for each name below those that a host's file imports and this machine does not have."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Of importlib's finders."""
        if not any(name == one or name.startswith(f"{one}.") for one in self._names):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Of importlib's loaders."""
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Of importlib's loaders: there is nothing to execute."""


def loaded(file: Path, name: str, *absent: str) -> Any:
    """The module of a host's file under its full `name`, beside empty modules for the names `absent`."""
    finder = _Absent(*absent)
    sys.meta_path.insert(0, finder)
    try:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # it is a Python file
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.meta_path.remove(finder)


def qkv(*shape: int) -> list[torch.Tensor]:
    """Random q, k and v of (B, N, H, D)."""
    return [torch.randn(shape) for _ in range(3)]


def wanted(given: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """Exact attention of (B, N, H, D) tensors."""
    out: torch.Tensor = exact(*(tensor.transpose(1, 2) for tensor in given), **options)
    return out.transpose(1, 2)


def relative_l1(out: torch.Tensor, best: torch.Tensor) -> float:
    """How far `out` is from `best`."""
    assert out.shape == best.shape
    return float((out - best).abs().sum() / best.abs().sum())


def musubi_tuner(folder: Path) -> Iterator[Row]:
    """Its unified attention function: without a mask, by sequences, and packed."""
    module = loaded(folder / "src/musubi_tuner/modules/attention.py", "musubi_attention")
    given = qkv(2, 40, 4, 64)
    make = module.AttentionParams.create_attention_params_from_mask
    for name, splits, mask in (
        ("no mask", False, None),
        ("split_attn", True, torch.arange(16).expand(2, 16) < torch.tensor([[16], [9]])),
        ("sageattn_varlen", False, torch.arange(16).expand(2, 16) < torch.tensor([[16], [9]])),
    ):
        out = module.attention([*given], attn_params=make("sageattn", splits, 24, mask))
        attended = None if mask is None else F.pad(mask, (24, 0), value=True)[:, None, None, :]
        best = wanted(given, attn_mask=attended).flatten(2)
        valid = slice(None) if attended is None else attended[:, 0, 0]
        yield name, relative_l1(out[valid], best[valid])


def lightx2v(folder: Path) -> Iterator[Row]:
    """Its weights of sage_attn2, without and with the LSE."""
    file = folder / "lightx2v/common/ops/attn/sage_attn.py"
    module = loaded(file, "lightx2v.common.ops.attn.sage_attn", "loguru", "lightx2v", "magi_compiler")
    weight = module.SageAttn2Weight.__new__(module.SageAttn2Weight)
    given = qkv(1, 40, 4, 64)
    best = wanted(given).reshape(40, -1)
    module.magi_register_custom_op = None
    yield "sage_attn2", relative_l1(weight.apply(*(tensor[0] for tensor in given)), best)
    out, lse = weight.apply_with_lse(*given)
    scores = given[0].transpose(1, 2) @ given[1].transpose(1, 2).mT / 8
    assert torch.allclose(lse, scores.logsumexp(-1)[0].T, atol=0.1)
    yield "apply_with_lse", relative_l1(out, best)


def vllm_omni(folder: Path) -> Iterator[Row]:
    """Its own backend SAGE_ATTN."""
    path = "vllm_omni.diffusion.attention.backends"
    backends = folder / "vllm_omni/diffusion/attention/backends"
    absent = ("vllm", "vllm_omni")
    loaded(backends / "abstract.py", f"{path}.abstract", *absent)
    module = loaded(backends / "sage_attn.py", f"{path}.sage_attn", *absent)
    layer = module.SageAttentionBackend.get_impl_cls()(4, 64, 0.125)
    given = qkv(1, 40, 4, 64)
    call = getattr(layer, "forward_cuda", None) or layer.forward
    yield "SAGE_ATTN", relative_l1(call(*given), wanted(given))


def sdnext(folder: Path) -> Iterator[Row]:
    """What it puts in the place of torch's function; that leaves tensors on a CPU out, so what it calls is called."""
    module = loaded(folder / "modules/attention.py", "sdnext_attention", "installer", "modules")
    module.set_sage_attention("auto", torch.device("cpu"))
    replaced: Any = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = exact
    cells = dict(zip(replaced.__code__.co_freevars, replaced.__closure__, strict=True))
    given = qkv(1, 40, 4, 64)
    out = cells["sage_attn_impl"].cell_contents(*(tensor.transpose(1, 2) for tensor in given), False, None)
    yield "set_sage_attention", relative_l1(out.transpose(1, 2), wanted(given))


def diffusers(folder: Path) -> Iterator[Row]:
    """A tiny Flux by set_attention_backend, as a user writes it."""
    from diffusers import FluxTransformer2DModel

    make: Any = FluxTransformer2DModel  # has no annotations
    model = make(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[8, 12, 12],
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 64, 16), "encoder_hidden_states": torch.randn(1, 16, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(64, 3),
        "txt_ids": torch.zeros(16, 3), "return_dict": False,
    }  # fmt: skip
    best = model(**inputs)[0]
    for backend in ("sage", "sage_varlen"):
        model.set_attention_backend(backend)
        yield f'set_attention_backend("{backend}")', relative_l1(model(**inputs)[0], best)


HOSTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "diffusers": diffusers,
    "musubi-tuner": musubi_tuner,
    "LightX2V": lightx2v,
    "vllm-omni": vllm_omni,
    "sdnext": sdnext,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.hosts", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    torch.manual_seed(0)
    say("| host | call | relative L1 |\n| --- | --- | --- |")
    with torch.no_grad():
        for name, host in HOSTS.items():
            for call, error in host(folder / name):
                say(f"| {name} | {call} | {error:.4f} |")


if __name__ == "__main__":
    main()
