"""The plugin of vLLM-Omni against stand-ins for the classes of it that the plugin uses."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.integrations import vllm_omni
from comfy_sage2.integrations.sageattention import offer

BACKENDS = "vllm_omni.diffusion.attention.backends"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A process with vLLM-Omni; by the names of its backends what was registered for them."""
    found: dict[str, str] = {}
    abstract: Any = ModuleType(f"{BACKENDS}.abstract")
    abstract.AttentionBackend = type("AttentionBackend", (), {})
    abstract.AttentionImpl = type("AttentionImpl", (), {})
    abstract.AttentionMetadata = type("AttentionMetadata", (), {})
    registry: Any = ModuleType(f"{BACKENDS}.registry")
    registry.DiffusionAttentionBackendEnum = SimpleNamespace(SAGE_ATTN="SAGE_ATTN")
    registry.register_diffusion_backend = found.__setitem__
    parts = BACKENDS.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for module in (abstract, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
    yield found
    sys.modules.pop("comfy_sage2.integrations.vllm_omni.backend", None)


def backend(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("masked", ["no", "padding", "whole"])
@pytest.mark.parametrize("causal", [False, True])
def test_layers_serve_calls(registered: dict[str, str], masked: str, causal: bool) -> None:
    vllm_omni.register()
    made = backend(registered["SAGE_ATTN"])
    assert made.get_name() == "SAGE_ATTN" and made.supports_attention_mask(None) and not made.get_supported_head_sizes()
    layer = made.get_impl_cls()(4, 72, 0.2, causal=causal, num_kv_heads=2, prefix="blocks.0", backend_kwargs=None)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 40, 4, 72), torch.randn(2, 24, 2, 72), torch.randn(2, 24, 2, 72)
    mask = {"no": None, "padding": torch.arange(24).expand(2, 24) < 17, "whole": torch.rand(2, 1, 40, 24) < 0.7}[masked]
    if masked == "whole":
        assert mask is not None
        mask[..., 0] = True
    metadata = None if masked == "no" else SimpleNamespace(attn_mask=mask)
    out = layer.forward_cuda(q, k, v, metadata)
    allowed = torch.ones(2, 1, 40, 24, dtype=torch.bool)
    if mask is not None:
        allowed &= mask[:, None, None] if masked == "padding" else mask
    if causal:
        allowed &= torch.ones(40, 24, dtype=torch.bool).tril()
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    wanted = attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), attn_mask=allowed, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    assert out.shape == q.shape
    assert float((out - wanted).abs().sum()) < 0.06 * float(wanted.abs().sum())


def test_another_sageattention_keeps_serving(
    registered: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = SimpleNamespace(origin="/site/sageattention/__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: other)
    with caplog.at_level(logging.INFO, "comfy_sage2"):
        vllm_omni.register()
    assert not registered and "/site/sageattention" in caplog.text


def test_without_a_registry_the_host_starts(caplog: pytest.LogCaptureFixture) -> None:
    vllm_omni.register()
    assert "no registry of diffusion backends" in caplog.text


@pytest.mark.parametrize("options", [{"qkv_layout": "BNSD"}, {"backend_kwargs": {"block_size": 64}}], ids=str)
def test_options_that_it_has_not_are_refused(registered: dict[str, str], options: dict[str, Any]) -> None:
    vllm_omni.register()
    layer = backend(registered["SAGE_ATTN"]).get_impl_cls()
    assert layer(4, 72, 0.2, qkv_layout="BSND", backend_kwargs={}).softmax_scale == 0.2
    with pytest.raises(ValueError, match="SAGE_ATTN of SageAttention2"):
        layer(4, 72, 0.2, **options)
