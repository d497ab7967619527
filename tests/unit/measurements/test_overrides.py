"""Other attentions in the place of ComfyUI's: layouts, masks, peers that cannot be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import comfy_sage2
from comfy_sage2.block_mask import BlockMask
from lab.measurements import overrides
from lab.measurements.overrides import override_of

HEADS = 4


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    assert q.shape[1] == HEADS
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("ComfyUI's attention was asked")


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_every_layout_gives_the_same(skip_reshape: bool, skip_output_reshape: bool, fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    q, k, v = torch.randn(3, 2, HEADS, 10, 16).unbind()
    expected = scaled_dot_product_attention(q, k, v)
    given = (q, k, v) if skip_reshape else tuple(one.transpose(1, 2).flatten(2) for one in (q, k, v))
    override = override_of(attend, takes_mask=True)
    out = override(
        never, *given, HEADS, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, attn_precision=None
    )
    torch.testing.assert_close(out, expected if skip_output_reshape else expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("more", [{"mask": torch.ones(10, 10)}, {"scale": 0.5}])
def test_what_an_attention_does_not_take_stays_with_comfyui(more: dict[str, Any], fresh_seed: int) -> None:
    q, k, v = torch.randn(3, 2, 10, HEADS * 16).unbind()
    asked: list[Any] = []

    def comfyui(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append((args, kwargs))
        return q

    out = override_of(never, takes_mask=False)(comfyui, q, k, v, HEADS, **more)
    [((*tensors, heads, mask), kwargs)] = asked
    assert out is q and all(one is other for one, other in zip(tensors, (q, k, v), strict=True)) and heads == HEADS
    assert mask is more.get("mask") and kwargs.get("scale") == more.get("scale")
    assert kwargs["skip_reshape"] is kwargs["skip_output_reshape"] is False


def test_an_attention_that_takes_masks_gets_them(fresh_seed: int) -> None:
    q, k, v = torch.randn(3, 1, HEADS, 10, 16).unbind()
    mask = torch.rand(10, 10) < 0.7
    mask[:, 0] = True
    out = override_of(attend, takes_mask=True)(never, q, k, v, HEADS, mask, skip_reshape=True, skip_output_reshape=True)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_peers_that_cannot_be_had_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("lib.so: undefined symbol")

    monkeypatch.setattr(overrides, "_MAKERS", {"one": lambda: never, "two": broken})
    found, missing = overrides.peers()
    assert found == {"one": never} and missing == {"two": "OSError: lib.so: undefined symbol"}


@pytest.mark.parametrize(("share", "blocks"), [(0.5, 5), (0.1, 1)])
def test_share_of_the_blocks_of_self_attention(
    share: float, blocks: int, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    asked: list[BlockMask | None] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **choices: Any) -> Any:
        asked.append(choices.pop("block_mask"))
        assert choices == {"mode": "8b", "rotate": "off"}
        return q

    monkeypatch.setattr(comfy_sage2, "attention", attention)
    override = overrides.share_of_the_blocks("8b", share)
    q, k = torch.randn(1, 1280, HEADS * 16), torch.randn(1, 300, HEADS * 16)
    for keys in (q, q, k):
        override(never, q, keys, keys, HEADS)
    first, second, cross = asked
    assert cross is None and first is second and first is not None
    active = first.to_dense()
    assert active.shape == (1, 1, 10, 10) and (active.sum(dim=3) == blocks).all()
    assert not torch.equal(active, active[:, :, :1].expand_as(active))
