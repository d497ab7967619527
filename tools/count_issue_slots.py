"""Count the instructions per score element in an attention kernel's inner loop, and the ceilings on a card.

    python -m tools.count_issue_slots build/kernels/comfy_sage2_sm89/attention_d128.cubin --head-dim 128

Reads the machine code with nvdisasm (CUDA toolkit, or the package nvidia-cuda-nvdisasm). Counts the steady state: the
shortest path around the loop of the quickest steps, on which no row maximum grows and no key is masked. The rates come
from data sheets: nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

WARP = 32
SCORES_OF_A_PRODUCT = 16 * 8  # of one mma.sync

SUB_PARTITIONS = 4  # per SM, each with a tensor core


@dataclass(frozen=True)
class Card:
    """Data sheet: SMs, boost clock, and the clocks that a sub-partition needs for one dense mma.sync.

    tensor_clocks: opcode prefix -> clocks; the first match counts.
    """

    sms: int
    clock_ghz: float
    tensor_clocks: tuple[tuple[str, int], ...]


_SIXTEEN_BITS = (("HMMA.16816.F32", 32), ("HMMA.16816.F16", 16))  # GeForce: FP32 sums at half rate
_FP8 = (("QMMA.SF.16832.F32", 16), ("QMMA.16832.F32", 32), ("QMMA.16832.F16", 16))
_INT8 = (("IMMA.16832", 16),)
_INT4 = (("IMMA.16864", 16),)
# From the white papers of GA102, AD102 and GB202. Only others' measurements (flashinfer issue 3628, mmapeak) give the
# rate of QMMA.SF. Blackwell emulates INT4, and the pack has no INT4 kernels for it.
CARDS = {
    "RTX 3090": Card(82, 1.695, _SIXTEEN_BITS + _INT8 + _INT4),
    "RTX 4090": Card(128, 2.52, _SIXTEEN_BITS + _FP8 + _INT8 + _INT4),
    "RTX 5090": Card(170, 2.407, _SIXTEEN_BITS + _FP8 + _INT8),
}
ISSUE_PER_CLOCK = 4  # warp instructions per SM
LANES_PER_CLOCK = {"MUFU": 16, "ALU": 64, "FMA": 128}
SHARED_BYTES_PER_CLOCK = 128

# Class -> opcodes. The remaining opcodes are "other": addresses, barriers, branches, padding.
CLASSES = (
    ("tensor", ("IMMA", "QMMA", "HMMA")),
    ("MUFU", ("MUFU",)),
    (
        "ALU",
        ("FMNMX", "FSETP", "FSEL", "F2FP", "I2FP", "I2F", "ISETP", "LOP3", "SEL", "SHF", "PRMT", "IMNMX", "VIMNMX"),
    ),
    ("FMA", ("FFMA", "FADD", "FMUL", "IMAD", "HADD2", "HFMA2")),
    ("memory", ("LDS", "LDSM", "STS", "LDG", "STG", "LDL", "STL", "LDGSTS", "LDGDEPBAR", "DEPBAR")),
)

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Instruction:
    opcode: str
    predicate: str
    operands: str

    @property
    def target(self) -> str | None:
        """The label this instruction may jump to."""
        match = _TARGET.search(self.operands) if self.opcode.startswith("BRA") else None
        return match[1] if match else None

    @property
    def falls_through(self) -> bool:
        unconditional = not self.predicate and not re.match(r"!?U?P\d", self.operands)
        return not (self.opcode.startswith(("BRA", "EXIT")) and unconditional)

    @property
    def kind(self) -> str:
        for name, prefixes in CLASSES:
            if self.opcode.split(".")[0] in prefixes:
                return name
        return "other"


def disassemble(cubin: Path, nvdisasm: str) -> str:
    """The listing of a device image, with labels in place of addresses."""
    return subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout


def parse(listing: str) -> dict[str, tuple[list[Instruction], dict[str, int]]]:
    """Kernel name -> its instructions, and label -> index of the next instruction."""
    kernels: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    for section in re.split(r"^\.text\.", listing, flags=re.M)[1:]:
        name, body = section.split(":", 1)
        code: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in body.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(code)
            elif match := _INSTRUCTION.search(line):
                code.append(Instruction(match[3], (match[2] or "").strip(), match[4]))
        kernels[name] = code, labels
    return kernels


def shortest(code: list[Instruction], labels: dict[str, int], start: int, end: int) -> list[int]:
    """Indices of the instructions on the shortest path from `start` to `end`; empty if there is none."""
    previous, queue = {start: start}, deque([start])
    while queue and end not in previous:
        at = queue.popleft()
        instruction = code[at]
        followers = [at + 1] if instruction.falls_through and at + 1 < len(code) else []
        if instruction.target:
            followers.append(labels[instruction.target])
        for follower in followers:
            if follower not in previous:
                previous[follower] = at
                queue.append(follower)
    if end not in previous:
        return []
    path = [end]
    while path[-1] != start:
        path.append(previous[path[-1]])
    return path[::-1]


def steady_state(code: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """The path around the loop with the most tensor instructions a score; of equal ones, with the fewest instructions.

    Steps in which nothing is hidden have a loop of their own within the loop of all steps. A path around both may skip
    products of one of them.
    """
    last_of_loops: dict[int, int] = {}
    for index, instruction in enumerate(code):
        if instruction.target and labels[instruction.target] <= index:
            # The loop's own branch jumps back furthest: cold paths at the end of the kernel jump into its middle.
            last_of_loops.setdefault(labels[instruction.target], index)
    paths = [around(code, labels, head, last) for head, last in last_of_loops.items()]

    def worth(path: list[Instruction]) -> tuple[float, float]:
        products = score_products(path)
        tensor = sum(instruction.kind == "tensor" for instruction in path)
        return -tensor / products, len(path) / products

    return min((path for path in paths if score_products(path)), key=worth)


def around(code: list[Instruction], labels: dict[str, int], head: int, last: int) -> list[Instruction]:
    """The shortest path around a loop among the paths with the most tensor instructions.

    The shortest path of all may skip a product through a branch on a flag, which the steady state never takes.
    """
    paths, seen = [shortest(code, labels, head, last)], set[int]()
    for index, instruction in enumerate(code):
        if not instruction.opcode.startswith("IMMA") or index in seen:
            continue
        before, after = shortest(code, labels, head, index), shortest(code, labels, index, last)
        path = before + after[1:]
        if before and after and len(set(path)) == len(path):
            paths.append(path)
            seen.update(path)
    best = min(paths, key=lambda path: (-sum(code[index].kind == "tensor" for index in path), len(path)))
    return [code[index] for index in best]


def score_products(path: list[Instruction]) -> int:
    """The products of Q and K on a path, each for the same number of scores."""
    return sum(instruction.opcode.startswith(("IMMA.16864", "IMMA.16832.S8.S8")) for instruction in path)


@dataclass(frozen=True)
class Report:
    instructions: int  # per loop iteration of one warp
    scores: int  # per loop iteration of one warp
    per_score: dict[str, float]
    ceilings: dict[str, float]  # resource -> TOPS if it alone were the limit


def shared_bytes(opcode: str) -> int:
    """The bytes that a load from shared memory gives a lane, on average."""
    if opcode.startswith("LDSM"):
        return 4 * int(opcode[-1]) if opcode[-1].isdigit() else 4
    if not opcode.startswith("LDS"):
        return 0
    return 16 if opcode.endswith(".128") else 8 if opcode.endswith(".64") else 4


def tensor_clocks(opcode: str, card: Card) -> int:
    """Clocks of a sub-partition. ValueError when the card lacks the instruction."""
    for prefix, clocks in card.tensor_clocks:
        if opcode.startswith(prefix):
            return clocks
    raise ValueError(f"no rate of {opcode} is known for this card; it has {[name for name, _ in card.tensor_clocks]}")


def report(path: list[Instruction], head_dim: int, card: Card) -> Report:
    """Instructions per score element in a loop iteration of one warp, and the rates that each unit of an SM allows."""
    opcodes = Counter(instruction.opcode for instruction in path)
    kinds = Counter(instruction.kind for instruction in path)
    int4 = sum(count for opcode, count in opcodes.items() if opcode.startswith("IMMA.16864"))
    int8 = sum(count for opcode, count in opcodes.items() if opcode.startswith("IMMA.16832.S8.S8"))
    scores = SCORES_OF_A_PRODUCT * (int4 // (head_dim // 64) if int4 else int8 // (head_dim // 32))
    operations = 4 * scores * head_dim
    loaded = sum(WARP * shared_bytes(instruction.opcode) for instruction in path if instruction.predicate != "@!PT")
    clocks = {
        "tensor": sum(tensor_clocks(instruction.opcode, card) for instruction in path if instruction.kind == "tensor")
        / SUB_PARTITIONS,
        "issue": len(path) / ISSUE_PER_CLOCK,
        "shared memory": loaded / SHARED_BYTES_PER_CLOCK,
        **{kind: kinds[kind] * WARP / lanes for kind, lanes in LANES_PER_CLOCK.items()},
    }
    ceilings = {resource: operations / needed * card.sms * card.clock_ghz * 1e-3 for resource, needed in clocks.items()}
    lanes = scores / WARP
    per_score = {kind: kinds[kind] / lanes for kind in (*(name for name, _ in CLASSES), "other")}
    return Report(len(path), scores, per_score, ceilings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin", type=Path)
    parser.add_argument("--head-dim", type=int, required=True, choices=(64, 128, 256))
    parser.add_argument("--card", choices=list(CARDS), default="RTX 4090", help="use its rates (default: %(default)s)")
    parser.add_argument("--kernels", default="", metavar="REGEX", help="only kernels whose name matches")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    arguments = parser.parse_args()
    kinds = (*(name for name, _ in CLASSES), "other")
    print(
        "instructions of a warp for 2,048 scores, and per score element; "
        f"TOPS on an {arguments.card} if the named unit were the only limit"
    )
    print(f"{'kernel':26}{'2,048':>8}" + "".join(f"{kind:>8}" for kind in kinds) + "  no tensor   limits")
    for name, (code, labels) in sorted(parse(disassemble(arguments.cubin, arguments.nvdisasm)).items()):
        if not re.search(arguments.kernels, name):
            continue
        loop = report(steady_state(code, labels), arguments.head_dim, CARDS[arguments.card])
        counts = "".join(f"{loop.per_score[kind]:8.2f}" for kind in kinds)
        without_tensor = sum(count for kind, count in loop.per_score.items() if kind != "tensor")
        limits = ", ".join(
            f"{unit} {tops:.0f}" for unit, tops in sorted(loop.ceilings.items(), key=lambda item: item[1])
        )
        print(f"{name[:25]:26}{loop.instructions * 2048 / loop.scores:8.0f}{counts}{without_tensor:11.2f}   {limits}")


if __name__ == "__main__":
    main()
