"""Programs outside of ComfyUI that import `sageattention`: attention calls by each one's own code.

    python -m tools.hosts FOLDER [--device cuda] [--hosts musubi-tuner LightX2V ...]

FOLDER holds checkouts of musubi-tuner, LightX2V, sdnext and Wan2GP; the packages diffusers, xfuser and fastvideo are
installed, and the wheel of packages/sageattention. Of sdnext and Wan2GP the attention file alone is loaded, with empty
modules for what it imports; the others are imported as they are. Prints a row for each call: how far its result is from
exact attention (relative L1), and of models from the same model's own attention.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

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
    out, best = out.double(), best.double()
    return float((out - best).abs().sum() / best.abs().sum())


def without_gpu(name: str, value: object) -> Any:
    """In the place of torch's function `name`, which a host asks about the GPU at its import: its answer there."""
    return mock.patch(name, return_value=value) if not torch.cuda.is_available() else mock.MagicMock()


def musubi_tuner(folder: Path) -> Iterator[Row]:
    """A tiny Wan, and its attention function: without a mask, by sequences, and packed."""
    torch.set_default_dtype(torch.float32)  # of the norms in its models
    sys.path.insert(0, str(folder / "src"))
    with without_gpu("torch.cuda.current_device", 0):
        from musubi_tuner.modules import attention as module
        from musubi_tuner.wan.modules.model import WanModel
    models = {
        mode: WanModel(
            dim=128, ffn_dim=128, freq_dim=32, text_dim=32, num_heads=2, num_layers=2, text_len=16, attn_mode=mode
        ).eval()
        for mode in ("torch", "sageattn")
    }
    models["sageattn"].load_state_dict(models["torch"].state_dict())
    latent, text = torch.randn(16, 2, 16, 16), torch.randn(9, 32)
    for model in models.values():
        torch.nn.init.normal_(model.head.head.weight, std=0.1, generator=torch.Generator(latent.device).manual_seed(1))
    outs = {mode: model([latent], torch.tensor([500.0]), [text], 128)[0] for mode, model in models.items()}
    yield "a tiny Wan, `attn_mode` sageattn", relative_l1(outs["sageattn"], outs["torch"])
    given = qkv(2, 40, 4, 64)
    make = module.AttentionParams.create_attention_params_from_mask
    for name, splits, mask in (
        ("`attention`, no mask", False, None),
        ("`attention`, `split_attn`", True, torch.arange(16).expand(2, 16) < torch.tensor([[16], [9]])),
        (
            "`attention`, a mask: `sageattn_varlen`",
            False,
            torch.arange(16).expand(2, 16) < torch.tensor([[16], [9]]),
        ),
    ):
        out = module.attention([*given], attn_params=make("sageattn", splits, 24, mask))
        attended = None if mask is None else F.pad(mask, (24, 0), value=True)[:, None, None, :]
        best = wanted(given, attn_mask=attended).flatten(2)
        valid = slice(None) if attended is None else attended[:, 0, 0]
        yield name, relative_l1(out[valid], best[valid])


def lightx2v(folder: Path) -> Iterator[Row]:
    """Its weights of sage_attn2, without and with the LSE."""
    sys.path.insert(0, str(folder))
    os.environ["SKIP_PLATFORM_CHECK"] = "1"
    import lightx2v.common.ops.attn.sage_attn  # noqa: F401  # registers its classes
    from lightx2v.utils.registry_factory import ATTN_WEIGHT_REGISTER

    weight = ATTN_WEIGHT_REGISTER["sage_attn2"]()
    given = qkv(1, 40, 4, 64)
    best = wanted(given).reshape(40, -1)
    yield "`sage_attn2`", relative_l1(weight.apply(*(tensor[0] for tensor in given)), best)
    out, lse = weight.apply_with_lse(*given)
    scores = given[0].transpose(1, 2).float() @ given[1].transpose(1, 2).float().mT / 8
    assert torch.allclose(lse, scores.logsumexp(-1)[0].T, atol=0.1)
    yield "`sage_attn2`, `apply_with_lse`", relative_l1(out, best)


def xdit(folder: Path) -> Iterator[Row]:
    """The function of its attention backend SAGE."""
    with without_gpu("torch.backends.mps.is_available", True):  # it refuses to start without any accelerator
        from xfuser.core.distributed import attention_backend as module
    assert module.env_info["has_sage"]
    given = qkv(1, 40, 4, 64)
    function = module.ATTENTION_FUNCTION_REGISTRY[module.AttentionBackendType.SAGE]
    for is_causal in (False, True):
        out, _ = function(*(tensor.transpose(1, 2) for tensor in given), 0.0, is_causal)
        best = wanted(given, is_causal=is_causal)
        yield f"its backend SAGE{', causal' if is_causal else ''}", relative_l1(out.transpose(1, 2), best)


def fastvideo(folder: Path) -> Iterator[Row]:
    """Its backend SAGE_ATTN."""
    from fastvideo.attention.backends.sage_attn import SageAttentionBackend

    layer = SageAttentionBackend.get_impl_cls()(4, 64, False, 0.125)
    given = qkv(1, 40, 4, 64)
    yield "its SAGE_ATTN", relative_l1(layer.forward(*given, None), wanted(given))


def wan2gp(folder: Path) -> Iterator[Row]:
    """Its attention mode "sage"."""
    sys.path.insert(0, str(folder))
    with without_gpu("torch.cuda.get_device_capability", (9, 0)):
        module = loaded(folder / "shared/attention.py", "shared.attention", "mmgp")
    given = qkv(1, 40, 4, 64)
    out = module.pay_attention([*given], force_attention="sage")
    yield 'its mode "sage"', relative_l1(out, wanted(given))


def sdnext(folder: Path) -> Iterator[Row]:
    """What it puts in the place of torch's function; that leaves tensors on a CPU out, so what it calls is called."""
    module = loaded(folder / "modules/attention.py", "sdnext_attention", "installer", "modules")
    module.set_sage_attention("auto", torch.get_default_device())
    replaced: Any = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = exact
    cells = dict(zip(replaced.__code__.co_freevars, replaced.__closure__, strict=True))
    given = qkv(1, 40, 4, 64)
    out = cells["sage_attn_impl"].cell_contents(*(tensor.transpose(1, 2) for tensor in given), False, None)
    yield "what `set_sage_attention` calls", relative_l1(out.transpose(1, 2), wanted(given))


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
        yield f'`set_attention_backend("{backend}")`, a tiny Flux', relative_l1(model(**inputs)[0], best)


HOSTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "diffusers": diffusers,
    "musubi-tuner": musubi_tuner,
    "LightX2V": lightx2v,
    "xfuser": xdit,
    "fastvideo": fastvideo,
    "Wan2GP": wan2gp,
    "sdnext": sdnext,
}


def version_of(host: str) -> str:
    """The installed version; of a checkout there is none."""
    try:
        return importlib.metadata.version(host)
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="where the calls run: cpu (default) or cuda, then in bfloat16")
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=[*HOSTS], metavar="HOST", help=", ".join(HOSTS))
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for name in arguments.hosts:
            torch.set_default_dtype(torch.float32 if arguments.device == "cpu" else torch.bfloat16)
            rows += [
                f"| {name} | {version_of(name)} | {call} | {error:.4f} |"
                for call, error in HOSTS[name](arguments.folder / name)
            ]
    say("| host | version | call | relative L1 |\n| --- | --- | --- | --- |")
    for row in rows:
        say(row)


if __name__ == "__main__":
    main()
