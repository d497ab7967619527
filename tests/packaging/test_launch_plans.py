"""What the launches of a plan read and write, without a release to compare with: places in the workspace, sizes, grids.

The fake driver logs the structures that kernels take. How much kernels read or write at an address follows from the
sizes of the call, as the comments of csrc's headers say.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from binding import Binding
from kernel_parameters import flattened, header_of, structures
from platforms import calls
from test_released_launches import random_calls

from tools import kernel_table

CALLS = 150
ROTATED_HEADS = 0x7EF000000000
MULTIPROCESSORS = 132  # of the fake driver's GPU
RUN = f"""
for number, (signature, operands) in enumerate(json.load(open({{path!r}}))):
    try:
        plans = kernels.plan(**signature), kernels.plan(**signature)
    except ValueError:
        print("null")
        continue
    print(json.dumps([plans[0].workspace_bytes, plans[0].attention_reads]))
    for turn, (of, phase) in enumerate(((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0))):
        plans[of].run({calls.Q}, {calls.K}, {calls.V}, {calls.OUT}, {calls.WORKSPACE}, 8 * number + turn, phase=phase,
                      **operands)
"""
# The parameter structure of a kernel, by the start of its name.
LISTS = {"prepare_tile_lists|clear_dead_tiles": "PrepareListsParams"}
KINDS = {
    "sm90": LISTS | {
        "statistics_(k_)?(choosing|hiding)": "ChoosingStatisticsParams", "statistics": "StatisticsParams",
        "one_pass_(choosing|hiding)": "ChoosingOnePassParams", "one_pass": "OnePassParams",
        "quantize_?[48q]_(choosing|hiding)": "ChoosingQuantizeParams", "quantize": "QuantizeParams",
        "delta_hiding": "HidingDeltaParams", "delta": "DeltaParams", "attention|precise": "AttentionParams",
    },
    "sm80": LISTS | {
        "partial_statistics|finish_statistics": "StatisticsParams", "choose_rotation": "RotationParams",
        "quantize": "QuantizeParams", "delta": "DeltaParams", "mask_bias": "KeyBiasParams",
        "attention": "AttentionParams",
    },
}  # fmt: skip
ATTENTION = re.compile("attention|precise")


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    shared_bytes: int
    fields: list[tuple[str, Any]]  # of its parameters

    @property
    def first(self) -> dict[str, Any]:
        """The first field of each name."""
        return dict(reversed(self.fields))


def parts_of(length: int, size: int) -> int:
    return -(-length // size)


def reader(family: str) -> Callable[[str], Launch]:
    """Reads a line of the driver's log."""
    known = structures(*header_of(family))
    for prefix in ("Choosing", "") if family == "sm90" else ():
        parts = [(part.lower(), known[f"{prefix}{part}Params"]) for part in ("Statistics", "Quantize")]
        fields = [*parts, ("tensors", ctypes.c_int32), ("units", ctypes.c_int32)]
        known[f"{prefix}OnePassParams"] = type("OnePassParams", (ctypes.Structure,), {"_fields_": fields})

    def read(line: str) -> Launch:
        name = line.split()[0]
        kind = known[next(kind for start, kind in KINDS[family].items() if re.match(start, name))]
        grid = tuple(map(int, line.partition(" grid ")[2].split()[0].split(",")))
        shared_bytes = int(line.partition(" shared ")[2].split()[0])
        return Launch(
            name, grid, shared_bytes, flattened(kind.from_buffer_copy(bytes.fromhex(line.partition(" parameters ")[2])))
        )

    return read


def drawn_calls() -> list[calls.Call]:
    """Calls of all kinds, some with given rotated heads, and a few very long ones."""
    drawn: list[calls.Call] = random_calls(CALLS)
    for signature, operands in drawn:
        if signature["rotate"] and not signature["rotate_by_head"] and random.random() < 0.5:
            signature["rotate_as_given"] = True
        if signature["rotate_by_head"] or "rotate_as_given" in signature:
            operands["rotated_heads"] = ROTATED_HEADS
    for mode, block_mask in ((4, None), (4, "own"), (8, "shared"), (16, None)):
        # The correction of 4b is computed for some of the tiles of a head at a time.
        q_length, kv_length = random.randint(100_000, 150_000), random.randint(100_000, 150_000)
        sizes: dict[str, Any] = {"q_heads": 20, "kv_heads": 10, "q_length": q_length, "kv_length": kv_length}
        mask = random.choice((None, "keys"))
        drawn.append(calls.description(**sizes, mode=mode, block_mask=block_mask, mask=mask, lse=True))
    for mask in (None, "keys"):  # few keys: a call in one phase has launches of its own
        lengths: dict[str, Any] = {"q_length": random.randint(1, 3000), "kv_length": random.randint(1, 300)}
        drawn.append(calls.description(**lengths, mask=mask))
    return drawn


def test_launches_stay_in_their_memory_and_do_all_of_the_work(
    kernels: Binding, architecture: kernel_table.Architecture, fresh_seed: int, tmp_path: Path
) -> None:
    random.seed(fresh_seed)
    drawn = drawn_calls()
    (tmp_path / "calls.json").write_text(json.dumps(drawn))
    kernels.environment["FAKE_CUDA_PARAMETER_BYTES"] = "1024"
    plans = kernels.run(RUN.format(path=str(tmp_path / "calls.json"))).splitlines()
    read, launched = reader(architecture.family), defaultdict[int, list[Launch]](list)
    maps, encoded = defaultdict[int, list[dict[str, str]]](list), []
    for line in kernels.log.read_text().splitlines():
        called, _, details = line.partition(" ")
        if called == "cuTensorMapEncodeTiled":
            words = details.split()
            encoded.append(dict(zip(words[::2], words[1::2], strict=True)))
        elif called == "cuLaunchKernelEx":
            stream = int(details.partition(" stream ")[2].split()[0])
            launched[stream].append(read(details))
            maps[stream // 8] += encoded
            encoded = []
    made = [json.loads(plan) for plan in plans]
    for number, ((signature, operands), plan) in enumerate(zip(drawn, made, strict=True)):
        if plan is None:
            continue
        whole, *phases = (launched[8 * number + turn] for turn in range(6))
        assert [whole, *phases[:2]] == [phases[4], *phases[2:4]], f"an earlier run changed a plan: {signature}"
        check = {"sm90": Sm90, "sm80": Sm80}[architecture.family](architecture, signature, operands, plan[0])
        for launches in (whole, [*phases[0], *phases[1]]):
            check.check_memory(launches)
            for launch in launches:
                check.check_fields(launch)
                assert launch.grid == check.grid(launch), (launch.kernel, signature)
            check.check_work([launch for launch in launches if ATTENTION.match(launch.kernel)])
            check.check_maps(maps[number])
        later = (field for launch in phases[1] for field in launch.fields)
        assert {name.removesuffix("_map") for name, value in later if is_input(name, value)} == set(plan[1]), signature
    assert len(made) - made.count(None) > CALLS // 4


def is_input(name: str, value: Any) -> bool:
    """Whether a field is a tensor of the caller, or a tensor map of one."""
    address = value[0] if isinstance(value, list) else value
    return bool(address == {"q": calls.Q, "k": calls.K, "v": calls.V}.get(name.removesuffix("_map")))


class Check:
    """Checks the launches of a call against its sizes."""

    maps: dict[str, str] = {}  # the part of the workspace that each tensor map describes

    def __init__(
        self,
        architecture: kernel_table.Architecture,
        signature: dict[str, Any],
        operands: dict[str, int],
        workspace_bytes: int,
    ) -> None:
        self.architecture, self.call, self.end = architecture, signature, calls.WORKSPACE + workspace_bytes
        self.given = {"q": calls.Q, "k": calls.K, "v": calls.V, "out": calls.OUT, **operands}
        self.batch, self.q_heads, self.kv_heads = (signature[x] for x in ("batch", "q_heads", "kv_heads"))
        self.q_bh, self.kv_bh = self.batch * self.q_heads, self.batch * self.kv_heads
        self.q_length, self.kv_length, self.head_dim = (signature[x] for x in ("q_length", "kv_length", "head_dim"))
        self.is_4b, self.is_precise = signature["mode"] == 4, signature["mode"] == 16
        self.channels = next(size for size in (64, 128, 256) if self.head_dim <= size)
        self.has_mask = bool(signature.get("mask_element"))
        self.hides_keys = self.has_mask and not signature["mask_head_stride"] and not signature["mask_query_stride"]
        batches = self.batch if signature.get("block_mask_batch_stride") else 1
        heads = self.q_heads if signature.get("block_mask_head_stride") else 1
        self.lists = batches * heads * parts_of(self.q_length, 128)

    def sizes(self, launches: list[Launch]) -> dict[str, int]:
        """The bytes of each part of the workspace, by the field that holds its address; 0 if it is not used."""
        key_blocks = self.call.get("block_mask_key_blocks", 0)
        attentions = sum(bool(ATTENTION.match(launch.kernel)) for launch in launches)
        return {"entries": self.lists * key_blocks * 2, "counts": self.lists * 4 if key_blocks else 0,
                "next": 4 * attentions if key_blocks else 0}  # fmt: skip

    def check_memory(self, launches: list[Launch]) -> None:
        """Each part of the workspace has one place, and no two parts overlap."""
        sizes, places = self.sizes(launches), defaultdict[str, set[int]](set)
        for launch in launches:
            for name, value in launch.fields:
                part = self.maps.get(name, name)
                if part not in sizes or value in self.given.values():
                    continue
                assert value or not sizes[part] or part in ("choices", "dead", "rotated"), (launch.kernel, name)
                if value:
                    places[part].add(value)
        if sizes["next"]:
            first, counters = min(places["next"]), len(places["next"])
            own = {launch.first["next"] for launch in launches if ATTENTION.match(launch.kernel)}
            assert not own or min(own) == first, "attention counts in the first counter that was set to 0"
            assert places.pop("next") == {first + 4 * number for number in range(counters)}
            places["next"], sizes["next"] = {first}, 4 * counters
        self.places = {part: min(found) for part, found in places.items()}
        assert sum(map(len, places.values())) == len(places), (places, self.call)
        spans = sorted((place, sizes[part], part) for part, place in self.places.items())
        assert spans[0][0] >= calls.WORKSPACE
        for (place, size, part), (behind, _, other) in pairwise([*spans, (self.end, 0, "the end")]):
            assert place + size <= behind, (part, other, self.call)

    def check_fields(self, launch: Launch) -> None:
        """Operands, strides and numbers are the call's."""
        fields = launch.first
        for name in ("q_heads", "kv_heads", "q_length", "kv_length", "head_dim"):
            assert fields.get(name, self.call[name]) == self.call[name], (launch.kernel, name)
        for name in ("q", "k", "v", "out"):
            view = [self.given[name], *(self.call[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token"))]
            assert fields.get(name, view) == view, (launch.kernel, name)
        operands = {"lse": "lse", "nonfinite": "nonfinite", "invalid": "invalid_blocks", "lists": "block_mask"}
        for name, operand in operands.items():
            assert fields.get(name) in (None, self.given.get(operand, 0)), (launch.kernel, name)
        if "scale" in fields:
            factor = math.log2(math.e) if launch.kernel.startswith("delta") else 1.0
            assert math.isclose(fields["scale"], self.call["scale"] * factor, rel_tol=1e-6)
        if ATTENTION.match(launch.kernel) or fields.get("pointer"):
            assert fields["pointer"] == self.given.get("mask", 0), launch.kernel
        if launch.kernel == "prepare_tile_lists":
            assert (fields["causal"], fields["key_tiles"]) == (self.call["causal"], self.call["block_mask_key_blocks"])

    def check_maps(self, maps: list[dict[str, str]]) -> None:
        """The kernels have no tensor maps."""
        assert not maps

    def grid(self, launch: Launch) -> tuple[int, int, int]:
        """The grid that a launch must have."""
        return parts_of(self.lists, 8) if launch.kernel == "prepare_tile_lists" else 1, 1, 1


class Sm90(Check):
    maps = {"q_map": "q_int8", "k_map": "k_int8", "v_map": "v_fp8"}

    def sizes(self, launches: list[Launch]) -> dict[str, int]:
        n = next(launch.first for launch in launches if "row_bytes" in launch.first)
        self.numbers = n
        assert n["row_bytes"] >= (self.channels if self.call["rotate"] else self.head_dim) and n["row_bytes"] % 16 == 0
        assert n["key_row_bytes"] >= self.kv_length and n["key_row_bytes"] % 16 == 0
        assert n["v_rows"] >= self.head_dim and n["v_rows"] % 32 == 0
        rows = 384 if self.is_precise else 128  # whole tiles are read
        assert n["q_scale_rows"] >= parts_of(self.q_length, rows) * rows
        assert all(n["k_scale_blocks"] * 64 >= parts_of(self.kv_length, keys) * keys for keys in (128, 192))
        of_v = 0 if self.is_precise else self.kv_bh * self.head_dim * 4
        delta = [
            launch.first["heads"] * launch.first["tiles"] for launch in launches if launch.kernel.startswith("delta")
        ]
        return super().sizes(launches) | {
            "q_int8": self.q_bh * self.q_length * n["row_bytes"],
            "k_int8": self.kv_bh * self.kv_length * n["row_bytes"],
            "v_fp8": 0 if self.is_precise else self.kv_bh * n["v_rows"] * n["key_row_bytes"],
            "q_scale": self.q_bh * n["q_scale_rows"] * 4, "k_scale": self.kv_bh * n["k_scale_blocks"] * 4 * 4,
            "k_mean": self.kv_bh * self.head_dim * 4, "v_mean": of_v, "v_scale": of_v, "v_inverse": of_v,
            "lse_shift": self.q_bh * self.q_length * 4 if self.call["has_lse"] else 0,
            "q_mean": self.q_bh * parts_of(self.q_length, 128) * self.head_dim * 4 if self.is_4b else 0,
            "delta_s": max(delta, default=0) * self.kv_length * 4, "prepared": self.kv_bh * 16,
            "choices": self.kv_bh * 8, "dead": 4,
        }  # fmt: skip

    def grid(self, launch: Launch) -> tuple[int, int, int]:
        name, fields = launch.kernel, launch.first
        if ATTENTION.match(name):
            return min(fields["heads"] * fields["tiles"], MULTIPROCESSORS), 1, 1
        if name.startswith("delta"):
            return parts_of(self.kv_length, 128), parts_of(fields["tiles"], 16), fields["heads"]
        if name.startswith("statistics"):
            return fields["cluster_blocks"] * self.kv_bh, 1, 1
        if name.startswith("one_pass"):
            tokens = fields["cluster_blocks"] * fields["units"] * (32768 // 2 // self.channels)
            assert tokens >= self.kv_length and fields["tensors"] == (1 if self.is_precise else 2)
            return fields["cluster_blocks"] * fields["tensors"] * self.kv_bh, 1, 1
        if name.startswith("quantize"):
            blocks = [parts_of(self.kv_length, 64), 0 if self.is_precise else parts_of(self.kv_length, 128)]
            assert [fields["k_blocks"], fields["v_blocks"]] == blocks
            assert fields["q_blocks"] in (0, parts_of(self.q_length, 128))
            of_q = fields["q_blocks"] * self.q_bh
            return of_q if name.startswith("quantize_q") else of_q + sum(blocks) * self.kv_bh, 1, 1
        return super().grid(launch)

    def check_maps(self, maps: list[dict[str, str]]) -> None:
        """A row is a token of Q or K with the channels of its part, or a channel of V with the keys of its part."""
        columns = self.channels if self.call["rotate"] else self.head_dim
        rows = {
            "q_int8": (columns, self.q_length), "k_int8": (columns, self.kv_length),
            "v_fp8": (self.numbers["key_row_bytes"], self.numbers["v_rows"]),
        }  # fmt: skip
        for encoded in maps:
            address, found = int(encoded["address"]), tuple(map(int, encoded["sizes"].split(",")))
            if address in (calls.Q, calls.V):
                name = "q" if address == calls.Q else "v"
                length = self.q_length if name == "q" else self.kv_length
                assert found == (self.head_dim, length)
                assert length == 1 or int(encoded["stride"]) == 2 * self.call[f"{name}_token_stride"]
            else:
                (part,) = (part for part in rows if self.places[part] == address)
                stride = self.numbers["key_row_bytes" if part == "v_fp8" else "row_bytes"]
                assert (found, int(encoded["stride"])) == (rows[part], stride), part

    def check_work(self, attentions: list[Launch]) -> None:
        """The launches of each kernel take every query tile of every head once."""
        for kernel in {launch.kernel for launch in attentions}:
            chunks = [launch.first for launch in attentions if launch.kernel == kernel]
            places = {(c["first_head"], c["first_tile"]): (c["heads"], c["tiles"]) for c in chunks}
            last = max(first + tiles for (_, first), (_, tiles) in places.items())
            assert last in {parts_of(self.q_length, rows) for rows in ((128, 192, 384) if self.is_precise else (128,))}
            assert max(first + heads for (first, _), (heads, _) in places.items()) == self.q_bh
            assert len(places) == len(chunks) and sum(a * b for a, b in places.values()) == self.q_bh * last
            # Each launch counts its tiles in a counter of its own.
            assert not chunks[0]["next"] or len({chunk["next"] for chunk in chunks}) == len(chunks)


class Sm80(Check):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.query_blocks, self.blocks = parts_of(self.q_length, 128), parts_of(self.kv_length, 64)
        self.works, self.chunks = self.q_bh * self.query_blocks, parts_of(self.kv_length, 512)
        self.tensors = 1 if self.is_precise and self.call["pv_accumulator"] == 32 else 2  # with statistics
        self.mask_rows = 0
        if self.has_mask and not self.call["mask_query_stride"]:
            self.mask_rows = self.batch * (self.q_heads if self.call["mask_head_stride"] else 1)
        self.bits, self.is_int8 = 4 if self.is_4b else 8, self.call["pv"] == 3 and not self.is_precise
        is_half = "HALF_VALUES=1" in self.architecture.defines and self.call["pv"] not in (3, 4)
        self.v_bytes = 2 if self.is_precise or is_half else 1

    def sizes(self, launches: list[Launch]) -> dict[str, int]:
        bits, v_bytes = self.bits, self.v_bytes
        of_v = (self.tensors - 1) * self.kv_bh * self.channels * 4
        deltas = [launch.first["works"] for launch in launches if launch.kernel.startswith("delta")]
        shown = 4 * self.kv_bh if self.hides_keys else 0
        sizes = super().sizes(launches) | {
            "q_tiles": self.works * 128 * self.channels * bits // 8,
            "k_tiles": self.kv_bh * self.blocks * 64 * self.channels * bits // 8,
            "v_tiles": self.kv_bh * self.blocks * 64 * self.channels * v_bytes,
            "q_scale": self.works * (128 if self.is_4b else 32) * 4, "k_scale": self.kv_bh * self.blocks * 4 * 4,
            "k_mean": self.kv_bh * self.channels * 4, "v_mean": of_v, "v_scale": of_v,
            "v_tile_scale": self.kv_bh * self.blocks * 4 if self.is_int8 else 0,
            "v_token_term": self.kv_bh * self.blocks * 64 * 4 if self.is_int8 else 0,
            "q_mean": self.works * self.channels * 4 if self.is_4b else 0,
            "lse_shift": self.q_bh * self.q_length * 4 if self.call["has_lse"] else 0,
            "partials": self.tensors * self.kv_bh * self.chunks * 3 * self.channels * 4,
            "bias": max(deltas, default=self.mask_rows) * self.blocks * 64 * 4,
            "shown": shown, "shown_of_chunks": shown * self.chunks, "rotated": 4 * self.kv_bh,
        }  # fmt: skip
        # The attention kernel copies one key block too many, which must not reach past the end.
        behind = {"k_tiles": 64 * self.channels * bits // 8, "k_scale": 16, "v_tile_scale": 4, "bias": 256}
        for name, value in (field for launch in launches for field in launch.fields):
            assert name not in behind or value + sizes[name] + behind[name] <= self.end, name
        return sizes

    def grid(self, launch: Launch) -> tuple[int, int, int]:
        name, fields = launch.kernel, launch.first
        if name.startswith("attention"):
            return fields["works"], 1, 1
        if name.startswith("partial_statistics"):
            return self.kv_bh, self.chunks, self.tensors
        if name == "finish_statistics":
            return self.kv_bh, self.tensors, 1
        if name.startswith("choose_rotation"):
            return self.kv_bh, 1, 1
        if name.startswith("quantize"):
            assert (fields["query_tiles"], fields["key_tiles"]) == (self.works, self.kv_bh * self.blocks)
            return self.works + 2 * self.kv_bh * self.blocks, 1, 1
        if name == "mask_bias":
            return self.mask_rows, parts_of(self.blocks * 64, 256), 1
        if name.startswith("delta"):
            slices = (fields["first_work"] + fields["works"] - 1) // self.query_blocks + 1 - fields["first_slice"]
            assert fields["first_slice"] == fields["first_work"] // self.query_blocks
            return slices * self.blocks, parts_of(self.query_blocks, 64), 1
        assert name == "prepare_tile_lists"  # these kernels do not check whether lists skip a block
        return super().grid(launch)

    def check_work(self, attentions: list[Launch]) -> None:
        """The launches take every work item once. Each reads its head's row of a key bias, or a row of its own."""
        for numbers in (launch.first for launch in attentions):
            row = self.blocks * 64
            strides = [numbers[f"bias_{axis}_stride"] for axis in ("batch", "head", "work")]
            of_mask = [row * self.mask_rows // self.batch, row if self.call.get("mask_head_stride") else 0, 0]
            assert strides == ([0, 0, row] if self.is_4b else of_mask if self.mask_rows else [0, 0, 0])
        # Q and its scales, V, and K with its scales and its bias. K takes two blocks unless V has 8-bit floats; V takes
        # two blocks if it is small.
        of_q = 128 * self.channels * self.bits // 8 + (128 if self.is_4b else 32) * 4
        of_k = 64 * self.channels * self.bits // 8 + 4 * 4 + 64 * 4
        blocks_of_k = 2 if self.v_bytes == 2 or self.is_int8 else 1
        blocks_of_v = 2 if self.is_int8 and self.channels == 64 else 1
        shared_bytes = of_q + blocks_of_v * 64 * self.channels * self.v_bytes + blocks_of_k * of_k
        assert {launch.shared_bytes for launch in attentions} == {shared_bytes}, self.call
        has_row_bias = self.has_mask and self.call["mask_query_stride"]
        scores = "mask" if has_row_bias else "bias" if self.is_4b or self.has_mask else "plain"
        assert all(launch.kernel.split("_")[2] == scores for launch in attentions), self.call
        ends = [0, *(launch.first["first_work"] + launch.first["works"] for launch in attentions)]
        assert ends == [*(launch.first["first_work"] for launch in attentions), self.works]


SLICES = ((0, 4096), (4096, 4096), (8192, 808))  # first token, tokens
SLICE_RUN = """
signature, operands, slices = json.load(open({path!r}))
plans = [kernels.plan(**signature), *(kernels.plan(**signature, first_token=first, slice_tokens=tokens)
                                      for first, tokens in slices)]
assert len({{plan.workspace_bytes for plan in plans}}) == 1
for stream, plan in enumerate(plans):
    plan.run({q}, {k}, {v}, 0, {workspace}, stream, phase=1, **operands)
"""


@pytest.mark.parametrize("rotate", [{}, {"rotate_by_head": True}, {"rotate_as_given": True}], ids=str)
def test_slices_fill_the_workspace_of_the_whole_call(
    kernels: Binding, architecture: kernel_table.Architecture, rotate: dict[str, bool], tmp_path: Path
) -> None:
    """Each slice has its own tokens, which begin at q, k and v; the first one computes the statistics."""
    pv, length = 1 if architecture.name == "sm90" else 3, sum(SLICES[-1])
    signature, operands = calls.description(batch=2, q_length=length, kv_length=length, pv=pv, lse=True)
    signature |= {"rotate": bool(rotate), **rotate}
    operands = {"nonfinite": calls.NONFINITE} | ({"rotated_heads": ROTATED_HEADS} if rotate else {})
    (tmp_path / "call.json").write_text(json.dumps([signature, operands, SLICES]))
    kernels.environment["FAKE_CUDA_PARAMETER_BYTES"] = "1024"
    addresses = {"q": calls.Q, "k": calls.K, "v": calls.V, "workspace": calls.WORKSPACE}
    kernels.run(SLICE_RUN.format(path=str(tmp_path / "call.json"), **addresses))
    read, launched = reader(architecture.family), defaultdict[int, list[Launch]](list)
    for details in kernels.calls("cuLaunchKernelEx"):
        launched[int(details.partition(" stream ")[2].split()[0])].append(read(details))
        assert " attribute " not in details or " stream 0 " in details or " stream 1 " in details
    whole = launched[0]
    for stream, (first, tokens) in enumerate(SLICES, 1):
        expected = whole[-1:] if first else whole
        assert [launch.kernel for launch in launched[stream]] == [launch.kernel for launch in expected]
        for launch, of_whole in zip(launched[stream], expected, strict=True):
            for (name, value), (_, there) in zip(launch.fields, of_whole.fields, strict=True):
                if isinstance(there, int) and there >= calls.WORKSPACE and name not in operands:
                    assert value == there, (launch.kernel, name)
        *statistics, quantize = (launch.first for launch in launched[stream])
        assert all(fields["kv_length"] == tokens for fields in statistics)
        assert all(fields.get("head_room", 16.0) == 16.0 for fields in statistics)
        assert (quantize["q_length"], quantize["kv_length"]) == (length, length)
        for name in "qkv":
            behind = addresses[name] - first * signature[f"{name}_token_stride"] * 2
            assert quantize[name][0] == behind, name
        assert quantize["too_large"] == calls.NONFINITE
        queries, keys = parts_of(tokens, 128), parts_of(tokens, 64)
        if architecture.family == "sm90":
            assert quantize["first_token"] == first
            blocks = [quantize[f"{name}_blocks"] for name in "qkv"]
            assert blocks == [queries, keys, queries]
            assert launched[stream][-1].grid[0] == 2 * (4 * queries + 2 * (keys + queries))
        else:
            assert (quantize["first_query_block"], quantize["first_key_block"]) == (first // 128, first // 64)
            assert (quantize["taken_query_blocks"], quantize["taken_key_blocks"]) == (queries, keys)
            assert launched[stream][-1].grid[0] == 2 * (4 * queries + 2 * 2 * keys)
            assert quantize["largest_tile_scale"] == 4.0
    assert all(launch.first.get("head_room", 1.0) == 1.0 and not launch.first.get("too_large") for launch in whole)
