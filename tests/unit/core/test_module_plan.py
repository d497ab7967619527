"""What kernel modules are told of a call: fields once for a plan from ABI 5 on, keywords at each call before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorder import STREAM, Recorder, kernel_call

from comfy_sage2.backends import kernel_call as kernel_call_module
from comfy_sage2.backends import parts
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.tensors import NO_TENSORS, OptionalTensors

WORKSPACE = 1000
# kKeywords of csrc/plan_binding.cpp in ABI 3 and, with those of the second line, in ABI 4.
TENSORS = {f"{view}_{field}" for view in "qkv" for field in ("pointer", "batch_stride", "head_stride", "token_stride")}
OUT = {"out_pointer", "out_batch_stride", "out_head_stride", "out_token_stride"}
MASK = {"mask_element", "mask_batch_stride", "mask_head_stride", "mask_query_stride", "mask_key_stride"}
SIZES = {"batch", "q_heads", "kv_heads", "q_length", "kv_length", "head_dim", "element", "scale", "device"}
OPTIONS = {"mode", "rotate", "smooth_v", "causal", "pv_accumulator"}
PLANNED = SIZES | OPTIONS | {name for name in TENSORS | OUT if name.endswith("stride")}  # required
GIVEN = {"lse", "nonfinite", "workspace", "workspace_bytes", "stream", "mask_pointer"}
IN_ABI_3 = TENSORS | OUT | MASK | SIZES | OPTIONS | GIVEN
LISTS = {"tiles_pointer", "tiles_batch_stride", "tiles_head_stride", "tiles_key_tiles", "tiles_invalid"}
IN_ABI_4 = IN_ABI_3 | LISTS | {"gaps", "phase"}


class Keywords:
    """A module before ABI 5, which keeps the keywords of its calls."""

    def __init__(self, abi_version: int = 4) -> None:
        self.abi_version = abi_version
        self.sized: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []

    def workspace_bytes(self, **keywords: Any) -> int:
        self.sized.append(keywords)
        return WORKSPACE

    def read_by_attention_phase(self, **keywords: Any) -> tuple[str, ...]:
        assert self.abi_version >= 4 and keywords.keys() <= IN_ABI_4
        return ("k",)

    def attention(self, **keywords: Any) -> None:
        self.called.append(keywords)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_call_module, "current_stream", lambda device: STREAM)


def tensors(head_dim: int = 64, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of 300 tokens and 4 heads, k and v of 513 and 2, for each entry of a batch of 2."""
    q, k, v = (torch.randn(2, heads, tokens, head_dim) for heads, tokens in ((4, 300), (2, 513), (2, 513)))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def fields(module: Keywords) -> dict[str, Any]:
    """The keywords of the only call, without what is left out when it is 0: a module takes it for 0 all the same."""
    (found,) = module.called
    optional = (IN_ABI_4 - PLANNED) - {"stream"}
    return {name: value for name, value in found.items() if value or name not in optional}


def test_the_keywords_of_a_plain_call() -> None:
    module = Keywords()
    q, k, v = tensors()
    out, _ = kernel_call(module, q, k, v, rotate="off").run(q, k, v)
    assert fields(module) == {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "q_length": 300,
        "kv_length": 513,
        "head_dim": 64,
        "element": 2,
        "device": -1,
        "scale": 0.125,
        "mode": 8,
        "smooth_v": False,
        "causal": False,
        "pv_accumulator": 32,
        "rotate": False,
        "q_batch_stride": 4 * 300 * 64,
        "q_head_stride": 300 * 64,
        "q_token_stride": 64,
        "k_batch_stride": 2 * 513 * 64,
        "k_head_stride": 513 * 64,
        "k_token_stride": 64,
        "v_batch_stride": 2 * 513 * 64,
        "v_head_stride": 513 * 64,
        "v_token_stride": 64,
        "out_batch_stride": 4 * 300 * 64,
        "out_head_stride": 300 * 64,
        "out_token_stride": 64,
        "q_pointer": q.data_ptr(),
        "k_pointer": k.data_ptr(),
        "v_pointer": v.data_ptr(),
        "out_pointer": out.data_ptr(),
        "workspace": module.called[0]["workspace"],
        "workspace_bytes": WORKSPACE,
        "stream": STREAM,
    }
    assert module.called[0]["workspace"]


def test_the_keywords_of_all_options() -> None:
    module = Keywords()
    q, k, v = tensors(20, torch.bfloat16)
    options: dict[str, Any] = {"mode": "4b", "smooth_v": True, "is_causal": True, "scale": 0.5, "rotate": True}
    _, lse = kernel_call(module, q, k, v, **options, pv_accumulator="fp16", return_lse=True).run(q, k, v)
    assert lse is not None
    found = fields(module)
    told = {name: found[name] for name in ("mode", "smooth_v", "causal", "scale", "rotate", "pv_accumulator")}
    assert told == {"mode": 4, "smooth_v": True, "causal": True, "scale": 0.5, "rotate": True, "pv_accumulator": 16}
    assert (found["element"], found["head_dim"], found["k_token_stride"]) == (3, 24, 24)
    assert found["lse"] == lse.data_ptr()


@pytest.mark.parametrize("shape", [(2, 4, 300, 513), (1, 1, 1, 513), (300, 513)], ids=str)
def test_the_keywords_of_a_mask(shape: tuple[int, ...]) -> None:
    module, plain = Keywords(), Keywords()
    q, k, v = tensors()
    mask = torch.zeros(shape)
    optional = OptionalTensors(mask, nonfinite=torch.zeros(1, dtype=torch.int32))
    kernel_call(module, q, k, v, optional).run(q, k, v, optional)
    kernel_call(plain, q, k, v).run(q, k, v)
    found = fields(module)
    batch, head, query, key = mask.expand(2, 4, 300, 513).stride()
    expected = {
        "mask_batch_stride": batch,
        "mask_head_stride": head,
        "mask_query_stride": query,
        "mask_key_stride": key,
    }
    assert {name: found.get(name, 0) for name in expected} == expected
    assert (found["mask_pointer"], found["mask_element"]) == (mask.data_ptr(), 4)
    assert optional.nonfinite is not None and found["nonfinite"] == optional.nonfinite.data_ptr()
    assert found.keys() <= fields(plain).keys() | MASK | {"mask_pointer", "nonfinite"}


@pytest.mark.parametrize("flagged", [False, True])
def test_the_keywords_of_lists(flagged: bool) -> None:
    module = Keywords()
    q, k, v = tensors()
    lists = BlockMask.full(300, 513, batch=2, heads=4).lists
    flag = torch.zeros(1, dtype=torch.int32) if flagged else None
    optional = OptionalTensors(block_mask=lists, invalid_blocks=flag)
    kernel_call(module, q, k, v, optional).run(q, k, v, optional)
    found = {name: value for name, value in fields(module).items() if name in LISTS}
    assert found == {
        "tiles_pointer": lists.data_ptr(),
        "tiles_key_tiles": 5,
        "tiles_batch_stride": 4 * 3 * 6,
        "tiles_head_stride": 3 * 6,
        **({} if flag is None else {"tiles_invalid": flag.data_ptr()}),
    }


def test_the_keywords_of_margins() -> None:
    module = Keywords()
    q, k, v = tensors()
    optional = OptionalTensors(block_margins=torch.zeros(2, 4, 3, 5))
    kernel_call(module, q, k, v, optional).run(q, k, v, optional)
    assert optional.block_margins is not None and fields(module)["gaps"] == optional.block_margins.data_ptr()


def test_the_keywords_of_phases() -> None:
    module = Keywords()
    q, k, v = tensors()
    attend = kernel_call(module, q, k, v).prequantize(q, k, v)
    assert attend is not None
    out, _ = attend()
    first, second = module.called
    assert (first["phase"], second["phase"]) == (1, 2)
    assert (first["out_pointer"], second["out_pointer"]) == (0, out.data_ptr())
    pointers = [[call[f"{name}_pointer"] for name in "qkv"] for call in module.called]
    assert pointers == [[q.data_ptr(), k.data_ptr(), v.data_ptr()], [0, k.data_ptr(), 0]]


def test_a_module_is_asked_for_the_workspace_of_what_it_is_given() -> None:
    """Once for a signature, and whether there is an LSE may decide."""
    for return_lse in (False, True):
        module = Keywords()
        q, k, v = tensors()
        call = kernel_call(module, q, k, v, return_lse=return_lse)
        for _ in range(2):
            call.run(q, k, v)
        (sized,) = module.sized
        assert sized.keys() == PLANNED | {"lse"} and sized["lse"] == int(return_lse)
        assert all(module.called[0][name] == value for name, value in sized.items() if name != "lse")


@pytest.mark.parametrize("known", [(3, IN_ABI_3), (4, IN_ABI_4)], ids=["ABI 3", "ABI 4"])
@pytest.mark.parametrize("masked", [False, True])
def test_modules_are_given_what_they_know(known: tuple[int, set[str]], masked: bool) -> None:
    """A keyword that a module does not know, or one that it wants and does not get, is a TypeError there."""
    abi_version, names = known
    module = Keywords(abi_version)
    q, k, v = tensors()
    flag = torch.zeros(1, dtype=torch.int32)
    optional = OptionalTensors(torch.zeros(300, 513) if masked else None, nonfinite=flag)
    kernel_call(module, q, k, v, optional, mode="4b", return_lse=True).run(q, k, v, optional)
    for keywords in (*module.sized, *module.called):
        assert PLANNED <= keywords.keys() <= names
    assert module.called[0]["nonfinite"] == flag.data_ptr()


def test_modules_of_abi_3_have_no_phases() -> None:
    module = Keywords(3)
    q, k, v = tensors()
    assert kernel_call(module, q, k, v).prequantize(q, k, v) is None
    assert not module.called


def test_the_keywords_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WORKSPACE_BOUND", 1)
    module = Keywords()
    q, k, v = tensors()
    kernel_call(module, q, k, v).run(q, k, v)
    sizes = [[call[name] for name in ("batch", "q_heads", "kv_heads")] for call in module.called]
    assert sizes == [[1, 2, 1]] * 4
    places = [(entry, head) for entry in range(2) for head in range(2)]
    assert [call["k_pointer"] for call in module.called] == [k[place].data_ptr() for place in places]
    assert [call["q_pointer"] for call in module.called] == [q[entry, 2 * head].data_ptr() for entry, head in places]


def test_the_fields_of_a_plan() -> None:
    """Of ABI 5: all that is no address, by the names of csrc/attention_call.h."""
    module = Recorder()
    q, k, v = tensors()
    kernel_call(module, q, k, v, NO_TENSORS).run(q, k, v)
    assert module.plans[0].fields.keys() == PLANNED | {"pv", "rotate_by_head", "has_lse", "has_block_margins"}
    lists = BlockMask.full(300, 513, batch=2, heads=4).lists
    optional = OptionalTensors(torch.zeros(300, 513), lists, block_margins=torch.zeros(2, 4, 3, 5))
    kernel_call(module, q, k, v, optional, return_lse=True, rotate="on").run(q, k, v, optional)
    of_lists = {"block_mask_key_blocks", "block_mask_batch_stride", "block_mask_head_stride"}
    told = module.plans[1].fields
    assert told.keys() == PLANNED | MASK | of_lists | {"pv", "has_lse", "has_block_margins"}
    assert told["has_lse"] is True and told["has_block_margins"] is True
    assert told["rotate"] is True and module.plans[0].fields["rotate_by_head"] is True


@pytest.mark.parametrize("abi_version", [3, 4])
def test_older_modules_rotate_all_heads(abi_version: int) -> None:
    module = Keywords(abi_version)
    q, k, v = tensors()
    for rotate in ("off", "on", "auto"):
        kernel_call(module, q, k, v, rotate=rotate).run(q, k, v)
    assert [call["rotate"] for call in module.called] == [False, True, True]
