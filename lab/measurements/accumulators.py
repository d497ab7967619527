"""How many mantissa bits the tensor core's accumulator keeps here, and what two-level accumulation saves.

    python -m lab accumulators --results docs/results

Every query is zero, so that P is 1 for every key and only the sums of V's codes can be inexact; V holds values that
E4M3 has. The kernels of this GPU are measured where there are any, and the reference's emulation anywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial

import torch

from comfy_sage2 import machine, registry
from comfy_sage2.attention import attention
from comfy_sage2.command_line import Parser, output_folder
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.request import AttentionRequest

from ..arguments import usable_device, usual_device

# q, k, v (1, heads, tokens, head_dim) float32 -> the output, float32.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

LENGTHS = (1024, 4096, 16384, 65536)
MOST_BITS = 15  # E4M3 holds 448 and 448 / 2 ** 15, and nothing smaller that is 448 times a power of two
_KEYS, _HEAD_DIM, _QUERIES, _HEADS = 64, 64, 128, 2
_EARLY, _LATE = 0, 33  # keys of two instructions, which take 32 keys each

EMULATED, EMULATED_ONE_LEVEL = "emulated, two levels", "emulated, one accumulator for all keys"


def emulated(two_level: bool) -> Attend:
    """The paper's 8b on Ada, with its 13-bit accumulator."""
    options = replace(
        ReferenceOptions.of(AttentionOptions("8b", rotate="off"), dtype=torch.float32), two_level=two_level
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return reference_attention(q, k, v, options)[0]

    return attend


def kernels(device: torch.device) -> dict[str, Attend]:
    """Name -> attention in 8b with FP32 accumulators, for the kernels that run on `device`."""
    options = AttentionOptions("8b", pv_accumulator="fp32", rotate="off")
    request = AttentionRequest.minimal(device, options)
    able = [backend.name for backend in registry.kernels() if backend.reason_against(request) is None]
    return {f"{name} kernel": partial(attention, backend=name, options=options, return_lse=False) for name in able}


def mantissa_bits(attend: Attend, device: torch.device) -> int:
    """The largest n up to MOST_BITS for which the sum 1 + 2^-n over two keys keeps more than half of its second term.

    Channel n of V holds both terms; a sum without the second one is exactly 1.
    """
    bits = torch.arange(_HEAD_DIM, device=device).clamp(1, MOST_BITS)
    small = torch.exp2(-bits.float())
    q = torch.zeros(1, 1, _KEYS, _HEAD_DIM, device=device)
    v = torch.zeros_like(q)
    v[0, 0, _EARLY], v[0, 0, _LATE] = 1.0, small
    kept = attend(q, torch.zeros_like(q), v)[0, 0].double() * _KEYS - 1
    lost = (kept.amin(dim=0) < small.double() / 2) & (torch.arange(_HEAD_DIM, device=device) >= 1)
    return int(bits[lost].min()) - 1 if lost.any() else MOST_BITS


def errors(attend: Attend, length: int, device: torch.device) -> float:
    """Relative L1 of the mean of `length` values that E4M3 has: the accumulator's error and nothing else."""
    generator = torch.Generator().manual_seed(length)
    size = (1, _HEADS, length, _HEAD_DIM)
    mantissas = torch.randint(8, 15, size, generator=generator) / 8
    v = mantissas * torch.exp2(-torch.randint(0, 4, size, generator=generator).float())
    v[:, :, 0] = 1.75  # the largest value of each channel, which becomes 448
    v = v.to(device)
    q = torch.zeros(1, _HEADS, _QUERIES, _HEAD_DIM, device=device)
    exact = v.double().mean(dim=2, keepdim=True).expand(*q.shape)
    out = attend(q, torch.zeros_like(v), v).double()
    return float((out - exact).abs().sum() / exact.abs().sum())


def tables(attends: dict[str, Attend], lengths: Sequence[int], device: torch.device) -> Iterator[str]:
    """Markdown: mantissa bits of each attention, then its errors by length."""
    yield from ("## Mantissa bits", "", "| attention | mantissa bits kept |", "| --- | --- |")
    for name, attend in attends.items():
        bits = mantissa_bits(attend, device)
        yield f"| {name} | {bits}{' or more' if bits == MOST_BITS else ''} |"
    yield from ("", "## Error of a sum over many keys", "", "Relative L1 against float64.", "")
    yield f"| keys | {' | '.join(attends)} |"
    yield "| --- " * (1 + len(attends)) + "|"
    for length in lengths:
        yield f"| {length:,} | {' | '.join(f'{errors(attend, length, device):.1e}' for attend in attends.values())} |"


def page(command: str, attends: dict[str, Attend], lengths: Sequence[int], device: torch.device) -> str:
    """The whole page of docs/results."""
    ran = ", ".join(name for name in attends if name.endswith("kernel")) or "no kernel runs there"
    lines = [
        "# The accumulator of P·V",
        "",
        f"- Machine: {machine.summary(device)}; {ran}.",
        f"- Command: `{command}`, which wrote this page.",
        f"- Date: {date.today().isoformat()}.",
        "",
        "P is 1 for every key and V holds values that E4M3 has, so that only the sums are inexact. The paper measures "
        "13 mantissa bits on Ada and Hopper and adds each key block to FP32 (section 3.4). The emulation cuts the sum "
        "to 13 bits after every 32 keys.",
        "",
        *tables(attends, lengths, device),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab accumulators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", type=usable_device, default=usual_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write accumulators.md there")
    options = parser.parse_args(arguments)
    device: torch.device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    attends = {EMULATED: emulated(True), EMULATED_ONE_LEVEL: emulated(False)}
    if device.type == "cuda":
        attends |= kernels(device)
    with torch.no_grad():
        text = page(" ".join(["python -m lab accumulators", *arguments]), attends, LENGTHS, device)
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "accumulators.md").write_text(text, encoding="utf-8")
    return 0
