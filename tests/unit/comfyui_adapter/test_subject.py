"""What counts as another model or another sampling, for a policy that was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.session import subject
from comfy_sage2.comfyui.session.subject import Subject

from .lora_models import SHAPE, patcher, subject_of


def test_the_same_model_loaded_twice_is_the_same() -> None:
    assert subject_of(patcher(scale=0.5)) == subject_of(patcher(scale=0.5))
    assert subject_of(patcher(), (4, *SHAPE[1:])) == subject_of(patcher())  # a batch
    assert subject_of(patcher(), sigmas=[1.0 - step / 30 for step in range(31)]) == subject_of(
        patcher(), sigmas=[1.0 - step / 20 for step in range(21)]
    )


@pytest.mark.parametrize(
    "other, words",
    [
        (subject_of(patcher(seed=1, scale=0.5)), "the model's weights"),
        (subject_of(patcher(scale=0.5, layers=3)), "the kind of model"),
        (subject_of(patcher()), "its LoRAs"),
        (subject_of(patcher(scale=0.25)), "its LoRAs"),
        (subject_of(patcher(scale=0.5, strength=0.8)), "its LoRAs"),
        (subject_of(patcher(scale=0.5), (1, 16, 3, 32, 40)), "the size"),
        (subject_of(patcher(scale=0.5), sigmas=[0.5, 0.4, 0.3, 0.15, 0.0]), "the noise levels"),
        (subject_of(patcher(scale=0.5), sigmas=[1.0, 0.0]), "the number of steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_counts_as_another_sampling(other: Subject, words: str) -> None:
    mine = subject_of(patcher(scale=0.5))
    assert mine != other and other.changes(mine) == words


@pytest.mark.parametrize("way, words", [("beside", "its LoRAs"), ("with the prompt", "the prompts' LoRAs")])
def test_loras_that_are_no_patches(way: str, words: str) -> None:
    mine = subject_of(patcher(scale=0.5, way=way))
    assert mine == subject_of(patcher(scale=0.5, way=way))
    for other in (patcher(), patcher(scale=0.25, way=way), patcher(scale=0.5, strength=0.8, way=way)):
        assert subject_of(other).changes(mine) == words


def test_an_injection_that_refers_to_nothing() -> None:
    def inject() -> Any:
        return later

    model = patcher()
    model.injections = {"other": [SimpleNamespace(inject=inject), SimpleNamespace(inject=print), object()]}
    assert subject_of(model).changes(subject_of(patcher())) == "its LoRAs"
    later = None


def test_a_lora_that_was_patched_in_place_is_no_other_model() -> None:
    """ComfyUI changes the weights of the model that all its clones share, and keeps what they were."""
    plain, patched = patcher(), patcher()
    layer = patched.model.diffusion_model[0]
    patched.backup = {"diffusion_model.0.weight": SimpleNamespace(weight=layer.weight.detach().clone())}
    with torch.no_grad():
        layer.weight += 1.0
    assert subject_of(patched) == subject_of(plain)


def test_models_without_readable_weights_are_never_taken_for_each_other() -> None:
    models = [patcher(), patcher()]
    for model in models:
        model.model.diffusion_model.to("meta")
    assert subject_of(models[0]) != subject_of(models[1])
    assert subject_of(models[0]) == subject_of(models[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int8, torch.bool])
def test_weights_of_every_type_are_read(dtype: torch.dtype) -> None:
    parts = list(subject._tensor(torch.ones(3, 5).to(dtype)))
    assert parts[1:] == [1.0] * 4


class Packed(torch.Tensor):
    """As ComfyUI-GGUF's tensors: `shape` is that of the weight, and the data are packed."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((32, 64))


def test_packed_weights_are_read_as_they_are() -> None:
    """A Q4_K tensor has fewer bytes in a row than the weight has values."""
    packed = [torch.full((32, 36), value, dtype=torch.uint8).as_subclass(Packed) for value in (1, 2)]
    assert [list(subject._tensor(tensor))[1:] for tensor in packed] == [[1.0] * 4, [2.0] * 4]
