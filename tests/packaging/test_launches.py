"""What a call launches, according to the fake driver's log."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from binding import CSRC, MODE_CODES, Binding
from fake_pack import ROOT

from tools import kernel_table

# Code for the interpreter under test: the entries of a call in the driver's log.
LOGGED = """
import os
from pathlib import Path
def logged(phase=0, addresses={}, **changes):
    log = Path(os.environ["FAKE_CUDA_LOG"])
    log.unlink(missing_ok=True)
    enqueue(phase, addresses, **changes)
    entries = [line.partition(" ")[::2] for line in log.read_text().splitlines()]
    return {name: [details for called, details in entries if called == name] for name, _ in entries}
"""


@pytest.fixture
def hopper(kernels_of: Callable[[kernel_table.Architecture], Binding]) -> Binding:
    """The kernels of Hopper, which have launches of their own."""
    return kernels_of(kernel_table.read("sm90"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_call_with_a_block_mask_prepares_its_lists_first(
    kernels: Binding, architecture: kernel_table.Architecture, causal: bool, mask: bool, shared: bool
) -> None:
    strides = (0, 0) if shared else (3 * 2 * 6, 2 * 6)
    fields = (
        f"q_heads=3, kv_heads=3, q_length=129, kv_length=513, causal={causal}, has_lse=True, "
        f"mask_element={int(mask)}, block_mask_batch_stride={strides[0]}, block_mask_head_stride={strides[1]}"
    )
    for mode in architecture.modes:
        kernels.run(f"""
for head_dim in (64, 128, 256):
    dense = dict(call, head_dim=head_dim, mode={MODE_CODES[mode]}, {fields})
    wanted = dict(dense, block_mask_key_blocks=5)
    room = kernels.plan(**wanted).workspace_bytes - kernels.plan(**dense).workspace_bytes
    assert 2 * 3 * 2 * (5 * 2 + 4) <= room <= 2 * 3 * 2 * (5 * 2 + 4) + 4 + 4 + 4 * 256, room
    enqueue(**wanted)
""")
        launched = kernels.calls("cuLaunchKernelEx")
        kernels.log.unlink()
        first = [at for at, line in enumerate(launched) if line.startswith("prepare_tile_lists ")]
        cleared = [at + 1 for at, line in enumerate(launched) if line.startswith("clear_dead_tiles ")]
        assert len(first) == 3 and first[0] == (first[0] in cleared) and set(cleared) <= set(first)
        lists = 2 if shared else 2 * 3 * 2
        assert all(f" grid {-(-lists // 8)},1,1 block 256,1,1 shared 32 " in launched[at] for at in first)
        if architecture.name == "sm90":  # which has separate kernels for lists
            attention = [line.split()[0] for line in launched if line.startswith(("attention", "precise"))]
            listed = [name for name in attention if re.search("(?<!_beside)_listed", name)]
            assert len(listed) == 3
            assert all(name.endswith("_biased") == (mask or mode == "4b") for name in attention)
            # The dense kernel runs if no block is skipped. It is launched beside the listed one if their tiles differ,
            # or if there is a dense kernel for that case alone.
            dense = [name for name in attention if not re.search("(?<!_beside)_listed", name)]
            beside = [name for name in dense if "_beside_listed" in name]
            kernel = "precise_d256_fp16" + "_causal" * causal
            assert beside == [f"{kernel}_beside_listed"] * (mode == "precise" and not mask)
            assert len(dense) == len(cleared) == {"8b": int(not causal), "4b": 0, "precise": 2 + len(beside)}[mode]
            assert all("_causal" in name for name in dense) == (causal or not dense)


SLICED = "q_heads=4, kv_heads=2, q_length=9000, kv_length=9000, head_dim=128, causal=False, mode=8"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ("first_token=100, slice_tokens=100", "must begin and end at a multiple of 128 tokens"),
        ("first_token=128, slice_tokens=100", "must begin and end at a multiple of 128 tokens"),
        ("first_token=8960, slice_tokens=41", "slice_tokens must be from 1 to 40, got 41"),
        ("first_token=128", "first_token must be from 0 to 0, got 128"),
        ("slice_tokens=128, mask_element=1, mask_key_stride=1", "without masks of at least 8192 tokens"),
        ("slice_tokens=128, q_length=8000, kv_length=8000", "without masks of at least 8192 tokens"),
        ("slice_tokens=128, mode=16, pv=0", "must be of self-attention in mode 8"),
    ],
)
def test_invalid_slices_are_refused(kernels: Binding, fields: str, error: str) -> None:
    output = kernels.run(f"""
pv = 1 if "fp8" in kernels.pv_formats and kernels.architecture == "sm90" else 3
attempt(kernels.plan, **{{**dict(call, {SLICED}, pv=pv), **dict({fields})}})
""")
    assert output.startswith("ValueError: ") and error in output


def test_the_plan_of_a_slice_runs_the_preparation_only(kernels: Binding) -> None:
    output = kernels.run(f"""
pv = 1 if kernels.architecture == "sm90" else 3
fields = dict({SLICED}, pv=pv, slice_tokens=4096)
for phase in (0, 2):
    attempt(enqueue, phase, dict(nonfinite=32), **fields)
attempt(enqueue, 1, dict(out=0), **fields)
""")
    assert output.count("phase must be 1 (preparation) for the plan of a slice") == 2
    assert "nonfinite must be an address, got 0" in output


@pytest.mark.parametrize("name", ["sm90", "sm80"])
def test_the_library_enqueues_the_phases(kernels_of: Callable[[kernel_table.Architecture], Binding], name: str) -> None:
    """With the fields that these modules require: the two phases launch the kernels of the whole call."""
    architecture = kernel_table.read(name)
    kernels_of(architecture).run(f"""{LOGGED}
sys.path.insert(0, {str(ROOT)!r})
import torch
from comfy_sage2.backends import kernel_call, launches
from comfy_sage2.options import AttentionOptions
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import OptionalTensors
launches.current_stream = lambda device: 77
log = Path(os.environ["FAKE_CUDA_LOG"])
def launched():
    return [line.split()[1] for line in log.read_text().splitlines() if line.startswith("cuLaunchKernelEx ")]
q, k, v = (torch.zeros(2, heads, 300, 64).half() for heads in (4, 2, 2))
for mode in {list(architecture.modes)}:
    for mask in (None, torch.zeros(1, 1, 300, 300)):
        optional = OptionalTensors(mask, nonfinite=torch.zeros(1).int())
        signature = CallSignature.of(q, k, v, AttentionOptions(mode, return_lse=True), optional)
        signature = signature._replace(q=signature.q._replace(device=torch.device("cuda", 0)))
        call = kernel_call.KernelCall(kernels, signature)
        log.unlink(missing_ok=True)
        call.run(q, k, v, optional)
        whole = launched()
        log.unlink()
        attend = call.prequantize(q, k, v, optional)
        assert 2 <= len(launched()) < len(whole)
        attend()
        assert launched() == whole
""")


def test_a_kernel_of_the_attention_phase_that_cannot_be_loaded_fails_in_the_preparation(
    kernels: Binding, architecture: kernel_table.Architecture
) -> None:
    kernels.cubins = tuple(cubin for cubin in kernels.cubins if not cubin.startswith("attention"))
    output = kernels.run("attempt(enqueue, phase=1, addresses=dict(out=0))")
    assert output.startswith("RuntimeError: ") and "attention_d64" in output
    assert not kernels.calls("cuLaunchKernelEx")


def test_parts_of_a_call_share_their_tensor_maps(hopper: Binding) -> None:
    """4b with many keys runs in parts, each of which has its own work counter."""
    hopper.run("""
wanted = dict(mode=4, causal=False, q_heads=16, kv_heads=16, q_length=20000, kv_length=20000, head_dim=128,
              block_mask_key_blocks=157, block_mask_head_stride=158 * 157)
enqueue(**wanted)
enqueue(**{**wanted, "block_mask_key_blocks": 0})
""")
    names = [line.split()[0] for line in hopper.calls("cuLaunchKernelEx")]
    assert names.count("attention_d128_listed_biased") == names.count("attention_d128_biased") > 1
    assert names.count("delta_fp16") == 2 * names.count("attention_d128_biased")
    assert len(hopper.calls("cuTensorMapEncodeTiled")) == 2 * 3


def test_kernels_whose_tiles_differ_have_tensor_maps_of_their_own(hopper: Binding) -> None:
    """At head_dim 64 one kernel takes 192 keys per step; the one for lists takes 128."""
    hopper.run("""
enqueue(head_dim=64, causal=False, q_length=300, kv_length=300, block_mask_key_blocks=3, block_mask_head_stride=12)
""")
    names = [line.split()[0] for line in hopper.calls("cuLaunchKernelEx")]
    assert names[-2:] == ["attention_d64", "attention_d64_listed"]
    boxes = [line.partition(" box ")[2].split()[0] for line in hopper.calls("cuTensorMapEncodeTiled")]
    assert sorted(boxes) == ["128,64", "64,128", "64,128", "64,192", "64,64"]


# The longest kv_length whose K and V one pass takes, by the head_dim of the kernels, and the tokens of a block's unit.
ONE_PASS = {64: (4096, 256), 128: (2048, 128), 256: (1024, 64)}


@pytest.mark.parametrize("mode", ["8b", "precise"])
@pytest.mark.parametrize("rotated", ["", "_rotated", "_auto"])
@pytest.mark.parametrize("batch", [1, 70])
def test_short_keys_take_one_pass(hopper: Binding, mode: str, rotated: str, batch: int) -> None:
    """Only the shape of a head decides this, and how many blocks share the head."""
    output = hopper.run(f"""{LOGGED}
for head_dim, (most, unit) in {ONE_PASS}.items():
    for kv_length in (1, 77, unit, unit + 1, 8 * unit, 8 * unit + 1, most, most + 1):
        for channels in (head_dim, head_dim // 2 + 8):
            wanted = dict(call, batch={batch}, q_heads=6, kv_heads=3, q_length=130, kv_length=kv_length,
                          has_lse=True, head_dim=channels, mode={MODE_CODES[mode]}, causal=False,
                          rotate={rotated != ""}, rotate_by_head={rotated == "_auto"})
            launched = logged(**wanted)["cuLaunchKernelEx"]
            names = [line.split()[0] for line in launched]
            rotated = "{rotated}"
            way = "_choosing" if rotated else ""
            if kv_length > most:
                assert names[0].startswith("statistics_") and names[1] == f"quantize8{{way}}_fp16_d{{head_dim}}"
                assert ("_choosing_" in names[0]) == (rotated == "_auto")
                assert len(names) == 3
                continue
            units = 1 if kv_length <= unit else 2
            blocks = -(-kv_length // (units * unit))
            grid = blocks * {2 - (mode == "precise")} * 3 * {batch}
            cluster = f" attribute 4={{blocks}}" * (blocks > 1)
            assert names[:2] == [f"one_pass{{way}}_fp16_d{{head_dim}}", f"quantize_q{{way}}_fp16_d{{head_dim}}"]
            assert len(names) == 3
            one_pass, queries = launched[:2]
            expected = f" grid {{grid}},1,1 block 256,1,1 shared {{units * 32768}} stream 77 attribute 6=1{{cluster}} "
            assert expected in one_pass, (one_pass, expected)
            assert f" grid {{2 * 6 * {batch}}},1,1 block 256,1,1 shared 0 stream 77 attribute 6=1 " in queries
print("done")
""")
    assert output == "done"


def test_other_calls_take_two_passes(hopper: Binding) -> None:
    """4b, whose correction reads K, and float32."""
    hopper.run(f"""{LOGGED}
for fields in (dict(mode={MODE_CODES["4b"]}), dict(element=4)):
    wanted = dict(call, q_heads=3, kv_heads=3, q_length=200, kv_length=300, **fields)
    names = [line.split()[0] for line in logged(**wanted)["cuLaunchKernelEx"]]
    assert names[0].startswith("statistics_fp") and names[1].startswith("quantize"), names
    assert not names[1].startswith("quantize_q"), names
""")


LAUNCHED = """
def launched(phase=0, **fields):
    wanted = dict(call, q_heads=6, kv_heads=3, q_length=130, kv_length=512, causal=False, mode=8, phase=phase)
    wanted.update(fields)
    return [line.split()[0] for line in logged(**wanted)["cuLaunchKernelEx"]]
"""


def test_the_attention_kernel_quantizes_q_of_calls_with_few_keys(hopper: Binding) -> None:
    """No pass over Q is launched then, and the kernel reads Q in place. A padding mask changes nothing in this."""
    hopper.run(f"""{LOGGED}{LAUNCHED}
for element, name in ((2, "fp16"), (3, "bf16")):
    for channels, head_dim in ((8, 64), (64, 64), (72, 128), (128, 128)):
        for kv_length in (1, 77, 128, 200, 512, 700, 2048):
            for mask, suffix in ((dict(), ""), (dict(mask_element=1, mask_key_stride=1), "_biased")):
                for way, kernel, rotate in (
                    ("", "quantizing", dict()), ("_choosing", "rotating", dict(rotate=True, rotate_by_head=True))
                ):
                    way = "_hiding" if mask else way
                    wanted = [f"one_pass{{way}}_{{name}}_d{{head_dim}}",
                              f"attention_d{{head_dim}}_{{kernel}}{{suffix}}"]
                    found = launched(head_dim=channels, kv_length=kv_length, element=element, **mask, **rotate)
                    wider = head_dim == 64 and kv_length == 700  # in whole steps of 192 keys
                    assert (found == wanted) != wider, found
maps = [logged(causal=False, addresses=dict(q=address))["cuTensorMapEncodeTiled"] for address in (1 << 20, 2 << 20)]
assert maps[0] != maps[1]
""")


def test_given_rotated_heads_take_no_pass_that_chooses(hopper: Binding) -> None:
    """The statistics are those of calls without rotation. This holds for few and many keys, in every mode."""
    hopper.run(f"""{LOGGED}{LAUNCHED}
given = dict(rotate=True, rotate_as_given=True)
mask = dict(mask_element=1, mask_key_stride=1)
for mode in {list(MODE_CODES.values())}:
    for kv_length in (300, 2049, 9000):
        for more in (dict(), dict(has_lse=True), mask):
            plain, found = (launched(mode=mode, kv_length=kv_length, **more, **rotate) for rotate in (dict(), given))
            assert len(found) == len(plain), (found, plain)
            for ours, theirs in zip(found, plain):
                if "statistics" in ours or "delta" in ours:
                    assert ours == theirs, (ours, theirs)
                else:
                    theirs = theirs.replace("_quantizing", "_rotating").replace("_choosing_", "_")
                    assert ours.replace("_choosing_", "_") == theirs, (ours, theirs)
""")


@pytest.mark.parametrize(
    "fields",
    [
        "has_lse=True",
        "rotate=True",
        "element=4",
        "causal=True",
        "mask_element=1, mask_key_stride=1, mask_query_stride=512",
        "block_mask_key_blocks=4, block_mask_head_stride=10",
        "mode=16",
        "mode=4",
        "head_dim=256",
        "kv_length=2049",
        "phase=1",
    ],
)
def test_other_calls_have_a_pass_over_q(hopper: Binding, fields: str) -> None:
    """This includes calls in two phases: Q may be freed before the second."""
    hopper.run(f"""{LOGGED}{LAUNCHED}
for head_dim in (64, 128):
    found = launched(**{{"head_dim": head_dim, **dict({fields})}})
    assert any(name.startswith("quantize") for name in found), found
    assert not any("_quantizing" in name or "_rotating" in name for name in found), found
""")


def test_few_keys_and_a_padding_mask_in_two_phases_have_a_kernel_of_their_own(hopper: Binding) -> None:
    """It gives the same bits as that of the whole call."""
    hopper.run(f"""{LOGGED}{LAUNCHED}
for head_dim in (64, 128):
    mask = dict(mask_element=1, mask_key_stride=1)
    assert launched(phase=2, head_dim=head_dim, **mask) == [f"attention_d{{head_dim}}_prequantized_biased"]
    assert "prequantized" not in launched(phase=2, head_dim=head_dim)[0]
    assert "prequantized" not in launched(phase=2, head_dim=head_dim, has_lse=True, **mask)[0]
""")


@pytest.mark.parametrize("mode", MODE_CODES.values())
def test_only_a_mask_for_all_queries_and_heads_takes_kernels_that_hide_keys(hopper: Binding, mode: int) -> None:
    """Calls with other masks and without a mask have the ordinary kernels and parameters."""
    hopper.run(f"""{LOGGED}
def preparations(**fields):
    wanted = dict(call, q_heads=6, kv_heads=3, q_length=130, kv_length=5000, causal=False, mode={mode})
    wanted.update(fields)
    lines = [line.partition(" parameters ") for line in logged(**wanted)["cuLaunchKernelEx"]]
    attention = ("attention", "precise")
    return [(name.split()[0], len(parameters)) for name, _, parameters in lines if not name.startswith(attention)]
mask = dict(mask_element=1, mask_key_stride=1)
plain = preparations()
assert not any("choosing" in name or "hiding" in name for name, _ in plain), plain
assert preparations(**mask, mask_query_stride=5000) == plain
assert preparations(**mask, mask_head_stride=5000) == plain
hiding = preparations(**mask)
marks = ("choosing", "hiding")
assert len(hiding) == len(plain) and all(any(mark in name for mark in marks) for name, _ in hiding), hiding
assert [name for name, _ in preparations(**mask, rotate=True, rotate_by_head=True)] == [name for name, _ in hiding]
chosen = preparations(rotate=True, rotate_by_head=True)
assert all("choosing" in name for name, _ in chosen if not name.startswith("delta")), chosen
""")


def test_a_step_at_head_dim_64_takes_few_keys_that_do_not_exist(hopper: Binding) -> None:
    """Up to 2,048 keys a step takes 128 if steps of 192 would take more keys that do not exist."""
    hopper.run(f"""{LOGGED}{LAUNCHED}
narrow_ones, wide_ones = (1, 128, 193, 385, 512, 2048), (129, 192, 300, 384, 576, 2049)
for kv_length in narrow_ones + wide_ones:
    for fields, suffix in (
        (dict(has_lse=True), ""), (dict(has_lse=True, mask_element=1, mask_key_stride=1), "_biased")
    ):
        wanted = "attention_d64" + "_narrow" * (kv_length in narrow_ones) + suffix
        assert launched(head_dim=64, kv_length=kv_length, **fields)[-1] == wanted, (kv_length, suffix)
for fields in (dict(mode=4), dict(mask_element=1, mask_query_stride=8)):
    assert launched(head_dim=64, kv_length=5000, **fields)[-1] == "attention_d64_narrow_biased"
""")


@pytest.mark.parametrize("header", sorted(path for path in CSRC.rglob("*.h") if "Params {" in path.read_text()))
def test_parameter_structures_have_no_padding(compiler: None, header: Path) -> None:
    command = ["g++", "-std=c++17", "-Werror=padded", "-fsyntax-only", "-I", str(CSRC), "-include", str(header)]
    subprocess.run([*command, "-x", "c++", "/dev/null"], check=True, timeout=600)
