"""Attentions of other packages, all of them stand-ins: their arguments, their results, and their errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pretended_gpu
import pytest
import torch

from comfy_sage2.autotune import store
from comfy_sage2.backends import peers
from comfy_sage2.backends.peers import PEERS, Peer, PeerFunctions
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.exact import exact_attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(q: Any, k: Any, v: Any, mask: Any, signature: CallSignature) -> torch.Tensor:
    """Exact attention of (B, H, N, D)."""
    return exact_attention(q, k, v, attn_mask=mask, dtype=torch.float32)[0].to(q.dtype)


def attend_in_layout(q: Any, k: Any, v: Any, mask: Any, signature: CallSignature) -> torch.Tensor:
    if signature.options.layout == "BHND":
        return attend(q, k, v, mask, signature)
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, signature).transpose(1, 2)


@pytest.fixture(autouse=True)
def other_is_installed(installed: dict[str, str]) -> None:
    installed["other"] = "1.5"


def peer_of(function: Any = attend, layouts: tuple[str, ...] = ("BHND",), prequantize: Any = None) -> Peer:
    return Peer("peer", "other", lambda: PeerFunctions(function, layouts, prequantize))


def call(peer: Peer, tensors: Tensors, optional: OptionalTensors = NO_TENSORS, **options: Any) -> Any:
    """The bound call. It is on the CPU, which the constraints of a peer would refuse."""
    signature = CallSignature.of(*tensors, AttentionOptions(**options), optional)
    assert peer.availability() is None
    return peer.bind(signature)


def inputs(layout: str) -> Tensors:
    shape = (2, 3, 20, 16) if layout == "BHND" else (2, 20, 3, 16)
    q, k, v = (torch.randn(shape).bfloat16() for _ in "qkv")
    return q, k, v


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize(
    ("function", "layouts"), [(attend, ("BHND",)), (attend_in_layout, ("BHND", "BNHD"))], ids=["one", "both"]
)
@pytest.mark.parametrize("in_two_steps", [False, True])
def test_calls_in_both_layouts(
    layout: str, function: Callable[..., torch.Tensor], layouts: tuple[str, ...], in_two_steps: bool
) -> None:
    """A batch entry whose mask hides every key gives zeros, whatever the package returns."""
    tensors, mask = inputs(layout), torch.ones(2, 1, 1, 20, dtype=torch.bool)
    mask[0, ..., 15:] = False
    mask[1] = False

    def nan_where_nothing_is_shown(*arguments: Any) -> torch.Tensor:
        out = function(*arguments)
        out[1] = torch.nan
        return out

    def prequantize(*arguments: Any) -> Callable[[], torch.Tensor]:
        copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
        return lambda: nan_where_nothing_is_shown(*copies)

    flag = torch.zeros(1, dtype=torch.int32)
    optional = OptionalTensors(mask, nonfinite=flag)
    peer = peer_of(nan_where_nothing_is_shown, layouts, prequantize if in_two_steps else None)
    bound = call(peer, tensors, optional, layout=layout)
    q, k, v = (t if layout == "BHND" else t.transpose(1, 2) for t in tensors)
    exact = exact_attention(q, k, v, attn_mask=mask)[0]
    second_phase = bound.prequantize(*tensors, optional)
    assert (second_phase is not None) == in_two_steps
    if in_two_steps:
        for tensor in tensors:
            tensor.fill_(torch.nan)
    out, lse = second_phase() if in_two_steps else bound.run(*tensors, optional)
    assert lse is None and out.is_contiguous() and out.shape == tensors[0].shape and flag.item() == 0
    torch.testing.assert_close((out if layout == "BHND" else out.transpose(1, 2)).double(), exact, atol=0.02, rtol=0.02)
    assert not out[1].any()


def test_nonfinite_values_set_the_flag() -> None:
    tensors, flag = inputs("BHND"), torch.zeros(1, dtype=torch.int32)
    tensors[2][0, 0, 0, 0] = torch.inf
    optional = OptionalTensors(nonfinite=flag)
    call(peer_of(), tensors, optional).run(*tensors, optional)
    assert flag.item() == 1


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    "error", [ImportError("no\nDLL"), AssertionError("no"), TypeError("no"), OSError("no")], ids=repr
)
def test_a_package_that_cannot_be_imported(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The import is tried once, and one line of the log gives the reason."""
    tries = []

    def load() -> PeerFunctions:
        tries.append(1)
        raise error

    peer = Peer("peer", "other", load)
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        reasons = {peer.availability() for _ in range(3)}
    (reason,) = reasons
    assert reason is not None and reason.startswith("[SA-115] other 1.5 cannot be used: no") and "\n" not in reason
    assert [record.getMessage() for record in caplog.records] == [f"SageAttention2: {reason}"]
    assert tries == [1]


@pytest.mark.parametrize("version", [None, "2.2.0+comfy.sage2"])
def test_a_package_that_is_not_installed(
    version: str | None, installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """This pack's own module in place of `sageattention` does not count, and nothing is imported."""
    installed.clear()
    if version is not None:
        installed["other"] = version
    peer = Peer("peer", "other", raising(AssertionError("imported")))
    assert peer.version is None and peer.availability() == "[SA-115] other is not installed"
    assert not caplog.records


def test_a_package_whose_metadata_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    monkeypatch.setattr("importlib.metadata.version", raising(damaged))
    assert peer_of().availability() == "[SA-115] other is not installed"


@pytest.mark.parametrize("in_two_steps", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA"), AssertionError(), TypeError("argument"), KeyError("x")], ids=repr
)
def test_a_call_that_raises(error: Exception, in_two_steps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The runner handles the RuntimeError. Plans are discarded once, and the log reports the failure once."""
    peer = peer_of(raising(error), prequantize=raising(error) if in_two_steps else None)
    tensors, before = inputs("BHND"), store.generation
    bound = call(peer, tensors)
    for _ in range(2):  # both were planned before the first failure
        with (
            caplog.at_level(logging.WARNING, "comfy_sage2"),
            pytest.raises(RuntimeError, match=r"^\[SA-115\] other 1.5"),
        ):
            (bound.prequantize if in_two_steps else bound.run)(*tensors)
    assert len(caplog.records) == 1 and type(error).__name__ in caplog.text
    assert peer.availability() is not None and store.generation == before + 1


def test_the_first_call_in_two_steps_shows_whether_the_second_step_works() -> None:
    """The second step runs while the inputs exist, so that another attention can serve if it fails."""
    tensors, ended = inputs("BHND"), []

    def second_step() -> torch.Tensor:
        ended.append(1)
        return tensors[0]

    bound = call(peer_of(prequantize=lambda *arguments: second_step), tensors)
    for number in (1, 2, 3):
        attend = bound.prequantize(*tensors)
        assert len(ended) == max(number - 1, 1)
        assert torch.equal(attend()[0], tensors[0]) and len(ended) == number
    broken = call(peer_of(prequantize=lambda *arguments: raising(TypeError("argument"))), tensors)
    with pytest.raises(RuntimeError, match=r"^\[SA-115\] other 1.5 failed.*argument"):
        broken.prequantize(*tensors)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize(
    "out",
    [None, (torch.zeros(2, 3, 20, 16), None), torch.zeros(2, 3, 4, 16).bfloat16(), torch.zeros(2, 3, 20, 16)],
    ids=range(4),
)
def test_an_output_of_the_wrong_form_is_a_failure_of_the_package(out: Any, layout: str) -> None:
    peer, tensors = peer_of(lambda *arguments: out), inputs(layout)
    with pytest.raises(RuntimeError, match=r"^\[SA-115\] other 1.5 failed"):
        call(peer, tensors, layout=layout).run(*tensors)


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError], ids=["torch's", "CUDA's"])
def test_lack_of_memory_is_not_a_failure_of_the_package(error: type[RuntimeError]) -> None:
    peer, tensors = peer_of(raising(error("CUDA error: out of memory"))), inputs("BHND")
    bound = call(peer, tensors)
    with pytest.raises(error, match="out of memory"):
        bound.run(*tensors)
    assert peer.availability() is None


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = f"/elsewhere/{name}/__init__.py"
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_comfy_kitchen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def int8_attention(q: Any, k: Any, v: Any, *, scale: Any = None, attn_mask: Any = None) -> torch.Tensor:
        seen.append((tuple(q.shape), scale, attn_mask))
        return torch.add(q, 1)

    kitchen = module(
        monkeypatch, "comfy_kitchen", int8_attention=int8_attention, int8_attention_is_available=lambda: True
    )
    assert peers._kitchen().prequantize is None  # as in versions before 0.2.31
    kitchen.prequantize_int8_attention = lambda *arguments, **options: (arguments, options)  # type: ignore[attr-defined]
    kitchen.int8_attention_from_prequantized = lambda held: int8_attention(*held[0], **held[1])  # type: ignore[attr-defined]
    peer = Peer("peer", "other", peers._kitchen)
    tensors, mask = inputs("BNHD"), torch.ones(1, 1, 1, 20, dtype=torch.bool)
    bound = call(peer, tensors, OptionalTensors(mask), layout="BNHD", scale=0.5)
    out, _ = bound.run(*tensors, OptionalTensors(mask))
    second_phase = bound.prequantize(*tensors, OptionalTensors(mask))
    assert torch.equal(out, tensors[0] + 1) and torch.equal(second_phase()[0], out)
    assert seen == [((2, 3, 20, 16), 0.5, mask)] * 2
    kitchen.int8_attention_is_available = lambda: False  # type: ignore[attr-defined]
    reason = Peer("peer", "other", peers._kitchen).availability()
    assert reason is not None and reason.endswith("comfy-kitchen has no INT8 attention on this machine")
    assert not caplog.records  # ComfyUI installs it on every machine


@pytest.mark.parametrize("version", ["1.0.6", "2.2.0"])
def test_sage_attention(version: str, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 subtracts the mean of k in place; the caller's k stays unchanged."""
    seen: list[Any] = []

    def sageattn(q: Any, k: Any, v: Any, *, tensor_layout: str, is_causal: bool, sm_scale: float) -> torch.Tensor:
        seen.append((tensor_layout, is_causal, sm_scale, k.data_ptr()))
        if version.startswith("1"):
            k -= k.mean()
        return torch.clone(q)

    installed["sageattention"] = version
    module(monkeypatch, "sageattention", sageattn=sageattn)
    peer = Peer("peer", "other", peers._sage_attention)
    for layout, name in (("BHND", "HND"), ("BNHD", "NHD")):
        tensors = inputs(layout)
        before = tensors[1].clone()
        call(peer, tensors, layout=layout, is_causal=True).run(*tensors)
        assert torch.equal(tensors[1], before)
        assert seen[-1][:3] == (name, True, 0.25)
        assert (seen[-1][3] == tensors[1].data_ptr()) == version.startswith("2")


def test_this_packs_own_module_is_not_a_peer(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = module(monkeypatch, "sageattention")
    own.__file__ = str(Path(peers.__file__).parents[1] / "integrations" / "sageattention" / "path" / "x.py")
    reason = Peer("peer", "other", peers._sage_attention).availability()
    assert reason is not None and reason.endswith("Python finds this pack's module of that name, not the package")


def on_gpu(**changes: Any) -> CallSignature:
    options = {name: changes.pop(name) for name in ("mode", "is_causal", "return_lse") if name in changes}
    return pretended_gpu.on_gpu(changes.pop("capability", (8, 9)), AttentionOptions(**options), **changes)


MASKED = {"mask_shape": (2, 1, 1, 1024), "mask_dtype": torch.bool}


@pytest.mark.parametrize(
    ("changes", "able"),
    [
        ({}, {"comfy-kitchen", "sageattention"}),
        ({"mode": "precise"}, {"comfy-kitchen", "sageattention"}),
        ({"mode": "exact"}, set()),
        ({"device": torch.device("cpu")}, set()),
        ({"capability": (7, 5)}, {"comfy-kitchen"}),
        ({"capability": (7, 0)}, set()),
        ({"dtype": torch.float32}, set()),
        ({"return_lse": True}, set()),
        ({"has_block_mask": True}, set()),
        ({"is_causal": True}, {"sageattention"}),
        ({"is_causal": True, "kv_length": 512}, set()),
        (MASKED, {"comfy-kitchen"}),
        ({**MASKED, "mask_shape": (1, 1, 1024, 1024)}, set()),
        ({**MASKED, "mask_shape": (1, 8, 1, 1024)}, set()),
        ({"kv_heads": 4}, {"comfy-kitchen"}),
        ({"head_dim": 96}, {"comfy-kitchen"}),
        ({"kv_length": 1000}, {"comfy-kitchen"}),
        ({"kv_length": 1000, "version": "2.2.0"}, {"comfy-kitchen", "sageattention"}),
    ],
    ids=lambda value: str(value if isinstance(value, dict) else sorted(value)),
)
def test_calls_that_a_package_does_not_take_never_reach_it(
    changes: dict[str, Any], able: set[str], installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported for them. SageAttention 1, which is the default here, needs whole blocks."""
    changes = dict(changes)
    installed.update({"comfy-kitchen": "0.2.40", "sageattention": changes.pop("version", "1.0.6")})
    loaded = []
    for peer in PEERS:

        def load(name: str = peer.name) -> PeerFunctions:
            loaded.append(name)
            return PeerFunctions(attend, ("BHND",))

        monkeypatch.setattr(peer, "_load", load)
        monkeypatch.setattr(peer, "_functions", None)
        monkeypatch.setattr(peer, "_failure", None)
    reasons = {peer.name: peer.reason_against(on_gpu(**changes)) for peer in PEERS}
    assert {name for name, reason in reasons.items() if reason is None} == able == set(loaded)
    assert all(reason is None or reason.startswith("[SA-") for reason in reasons.values())
