"""Feed-forward modules without memory for all of their tokens. A stand-in replaces MiniMax H3's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from comfy_sage2.comfyui.adapter.model_modules import ModelModules
from comfy_sage2.comfyui.hooks import slices
from comfy_sage2.comfyui.hooks.feed_forward import slicing_without_memory
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import model_passes

from .calls import SIGMAS, Executor, call, qkv, session_with

SLICE, LARGEST, TOKENS = 64, 100, 333


OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("no memory for the whole"),
    RuntimeError("CUDA error: out of memory"),  # torch.AcceleratorError, where torch has it
]


class FeedForward(torch.nn.Module):
    """Has memory for `largest` tokens at once."""

    error: Exception = OUT_OF_MEMORY[0]

    def __init__(self, largest: int = LARGEST) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(24, 96), torch.nn.Linear(96, 24)
        self.largest = largest
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lengths.append(x.shape[-2])
        if x.shape[-2] > self.largest:
            raise self.error
        return self.exact(x)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.narrow(torch.nn.functional.gelu(self.wide(x))))


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_TOKENS", SLICE)
    monkeypatch.setattr(FeedForward.forward, "__module__", "comfy.ldm.minimax.model")


def model_of(*modules: Any, source: str = "comfy.ldm.minimax.model", name: str = "mlp") -> Any:
    """A model of ComfyUI with these modules in its blocks."""
    model = type("Model", (), {"__module__": source})()
    model.blocks = [SimpleNamespace(**{name: module}) for module in modules]
    return model


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("shape", [(TOKENS, 24), (2, TOKENS, 24)], ids=str)
def test_without_memory_the_tokens_are_sliced(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], error: Exception, fresh_seed: int
) -> None:
    """The next module does not try the whole first, but the next sampling does."""
    monkeypatch.setattr(FeedForward, "error", error)
    first, second = modules = FeedForward(), FeedForward()
    session, x = session_with(), torch.randn(shape)
    before = x.clone()
    with torch.no_grad():
        with slicing_without_memory(session, model_of(*modules)):
            for module in modules:
                assert torch.allclose(module(x), module.exact(x), atol=1e-6)
        sizes = [SLICE] * 5 + [TOKENS - 5 * SLICE]
        assert first.lengths == [TOKENS, *sizes] and second.lengths == sizes
        assert torch.equal(x, before)
        session.begin_sampling(SIGMAS)
        with slicing_without_memory(session, model_of(*modules)):
            first(x)
    assert first.lengths.count(TOKENS) == 2
    assert all("forward" not in vars(module) for module in modules)


def test_a_module_whose_own_method_was_set_again_is_sliced(fresh_seed: int) -> None:
    module, x = FeedForward(), torch.randn(TOKENS, 24)
    module.forward = module.forward  # type: ignore[method-assign]
    with torch.no_grad(), slicing_without_memory(session_with(), model_of(module)):
        assert torch.allclose(module(x), module.exact(x), atol=1e-6)
    assert module.lengths[:2] == [TOKENS, SLICE]


@pytest.mark.parametrize(
    ("tokens", "capturing", "error"),
    [
        (SLICE, False, OUT_OF_MEMORY[0]),
        (TOKENS, True, OUT_OF_MEMORY[0]),
        (TOKENS, False, RuntimeError("shapes do not fit")),
    ],
    ids=["a slice", "a CUDA graph", "another error"],
)
def test_a_call_that_cannot_be_sliced_raises_torchs_error(
    monkeypatch: pytest.MonkeyPatch, tokens: int, capturing: bool, error: Exception
) -> None:
    """A CUDA graph that is being captured would contain the failed run."""
    monkeypatch.setattr(FeedForward, "error", error)
    monkeypatch.setattr(model_passes, "can_read_back", lambda device: not capturing)
    module, session = FeedForward(largest=1), session_with()
    with slicing_without_memory(session, model_of(module)), pytest.raises(type(error), match=str(error)):
        module(torch.randn(tokens, 24))
    assert module.lengths == [tokens] and not session.sliced_feed_forwards


class Converting(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


@pytest.mark.parametrize(
    ("dtype", "state", "sliced"),
    [
        (torch.float32, {}, False),
        (torch.float16, {}, True),  # the weight is converted, so patches go to a copy
        (torch.float32, {"resident": True}, True),
        (torch.float32, {"signature": object()}, True),
        (torch.float32, {"needs_cast": True}, True),
        (torch.float32, (False, None), False),
    ],
    ids=["patched in place", "converted", "resident", "with a place on the device", "cast", "of another ComfyUI"],
)
def test_layers_that_patch_prefetched_weights_in_place_stay_whole(dtype: torch.dtype, state: Any, sliced: bool) -> None:
    """Each call of the layer adds the LoRAs to such a weight again."""
    module, session, x = FeedForward(), session_with(), torch.randn(TOKENS, 24)
    layer: Any = Converting(96, 24, bias=False)
    module.narrow = layer.to(dtype)
    layer.weight_lowvram_function = lambda weight: weight
    known = {"resident": False, "signature": None, "needs_cast": False}
    layer._prefetch = {**known, **state} if isinstance(state, dict) else state
    expected = module.exact(x)
    with slicing_without_memory(session, model_of(module)):
        if sliced:
            assert torch.allclose(module(x), expected, atol=1e-6)
        else:
            with pytest.raises(torch.cuda.OutOfMemoryError):
                module(x)
    assert (module.lengths[1:] != []) == sliced and bool(session.sliced_feed_forwards) == sliced


def replaced(module: FeedForward) -> None:
    whole = module.forward
    module.forward = lambda x: whole(x)  # type: ignore[method-assign]


def of_a_pack(module: FeedForward) -> None:
    FeedForward.forward.__module__ = "a_pack.nodes"  # the fixture puts it back


def unchanged(module: FeedForward) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "compiled", "source"),
    [
        (replaced, False, "comfy.ldm.minimax.model"),
        (of_a_pack, False, "comfy.ldm.minimax.model"),
        (unchanged, True, "comfy.ldm.minimax.model"),
        (unchanged, False, "comfy.ldm.flux.model"),
    ],
)
def test_unsuitable_modules_stay_whole(change: Callable[[FeedForward], None], compiled: bool, source: str) -> None:
    module, session = FeedForward(), session_with()
    change(module)
    session.compiled = compiled
    before = dict(vars(module))
    with slicing_without_memory(session, model_of(module, source=source)), pytest.raises(torch.cuda.OutOfMemoryError):
        assert vars(module) == before
        module(torch.randn(TOKENS, 24))
    assert vars(module) == before


def test_a_second_node_leaves_the_slices_to_the_first() -> None:
    """It does not take the first node's functions for another pack's, which would rule out its own slices."""
    module, first = FeedForward(), session_with()
    model = model_of(module)
    with slicing_without_memory(first, model), slicing_without_memory(session_with(), model):
        assert not ModelModules.of(torch.nn.ModuleList([module])).replaced
        module(torch.randn(TOKENS, 24))
    assert first.sliced_feed_forwards == {TOKENS} and "forward" not in vars(module)


def test_a_module_of_two_blocks_is_sliced_once(fresh_seed: int) -> None:
    module, x = FeedForward(), torch.randn(TOKENS, 24)
    with torch.no_grad(), slicing_without_memory(session_with(), model_of(module, module)):
        assert torch.allclose(module(x), module.exact(x), atol=1e-6)
    assert module.lengths.count(TOKENS) == 1 and "forward" not in vars(module)


@pytest.mark.parametrize("stays", [False, True])
def test_another_pack_may_replace_the_function_within_the_block(stays: bool) -> None:
    module = FeedForward()
    with slicing_without_memory(session_with(), model_of(module)):
        replaced(module)
        theirs = module.forward
        if not stays:
            del module.forward
    assert vars(module).get("forward") is (theirs if stays else None)


def test_the_report_tells_of_slices(fresh_seed: int) -> None:
    session, module = session_with(), FeedForward()
    x = torch.randn(TOKENS, 24)
    model = SimpleNamespace(diffusion_model=model_of(module))
    pass_wrapper(session)(Executor(lambda *_, **__: module(x), model), torch.randn(1, 4), torch.ones(1))
    call(session, *qkv(), 1)
    sentence = "Feed-forward modules of 333 tokens were computed in slices, since there was no memory for the whole."
    assert sentence in report([session]).splitlines()
