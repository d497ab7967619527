"""What rotation by the head, hidden keys, a mean of Q, the order of the row sum and loud values of V do to the error.

    python -m lab exactness --results docs/results

By the reference, or by the kernels of `--backend`. Relative L1 against float64, the mean of several seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from comfy_sage2 import machine, registry
from comfy_sage2.attention import attention
from comfy_sage2.command_line import Parser, output_folder
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import MODES, ROTATIONS, AttentionOptions
from comfy_sage2.quantize.formats import FP32
from comfy_sage2.quantize.fp8 import E4M3
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions

from ..arguments import check_kernel, usable_device, usual_device
from ..evaluation.kinds import KINDS, Shape, Tensors, inputs
from ..result_page import kernel_versions, page_head, show

SEEDS = (0, 1)
SHAPE = (4, 1024, 128)
_SHOWN, _KEYS = 1054, 1280  # of a joint attention whose text is padded
_TILE, _SIZES = 128, (1, 10, 100, 1000)

# q, k, v (1, heads, tokens, head_dim), options and a mask or None -> the output.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions, torch.Tensor | None], torch.Tensor]


def attend_by(backend: str) -> Attend:
    """Attention by the backend of this name, of bf16 tensors."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
        return attention(q, k, v, attn_mask=mask, options=options, backend=backend, return_lse=False)

    return attend


def error(out: torch.Tensor, tensors: Tensors, mask: torch.Tensor | None = None) -> float:
    """Relative L1 against exact attention of `tensors`."""
    return Agreement.of(out.double(), exact_attention(*tensors, attn_mask=mask)[0]).relative_l1


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def rotation_table(attend: Attend, shape: Shape, device: torch.device) -> Iterator[str]:
    """The error of each mode with rotation off, on and chosen by the head."""
    yield f"| inputs | {' | '.join(f'{mode} {rotate}' for mode in MODES for rotate in reversed(ROTATIONS))} |"
    yield "| --- " * (1 + len(MODES) * len(ROTATIONS)) + "|"
    for kind in KINDS:
        found: dict[tuple[str, str], list[float]] = {}
        for seed in SEEDS:
            q, k, v = (tensor.to(device) for tensor in inputs(kind, shape, seed))
            for mode in MODES:
                for rotate in ROTATIONS:
                    out = attend(q, k, v, AttentionOptions(mode, rotate=rotate), None)
                    found.setdefault((mode, rotate), []).append(error(out, (q, k, v)))
        cells = (f"{_mean(found[mode, rotate]):.4f}" for mode in MODES for rotate in reversed(ROTATIONS))
        yield f"| {kind} | {' | '.join(cells)} |"


def hidden_keys_table(attend: Attend, shape: Shape, device: torch.device) -> Iterator[str]:
    """A padding mask, as a row for each query, whose hidden keys count as they did before, and as one for all."""
    yield f"| hidden keys | {' | '.join(f'{mode} counted | hidden | cut off' for mode in MODES)} |"
    yield "| --- " * (1 + 3 * len(MODES)) + "|"
    for name, size in (("as the others", 1.0), ("3 times larger", 3.0), ("10 times larger", 10.0)):
        cells = []
        for mode in MODES:
            found = []
            for seed in SEEDS:
                q, k, v = (t.to(device) for t in inputs("Gaussian", (shape[0], _KEYS, shape[2]), seed))
                k[:, :, _SHOWN:] *= size
                v[:, :, _SHOWN:] *= size
                mask = (torch.arange(_KEYS, device=device) < _SHOWN).view(1, 1, 1, _KEYS)
                rows = mask.expand(1, 1, _KEYS, _KEYS).contiguous()
                cut = (q, k[:, :, :_SHOWN].contiguous(), v[:, :, :_SHOWN].contiguous())
                options = AttentionOptions(mode, rotate="auto")
                outs = attend(q, k, v, options, rows), attend(q, k, v, options, mask), attend(*cut, options, None)
                found.append([error(out, cut) for out in outs])
            cells += [f"{_mean(list(column)):.4f}" for column in zip(*found, strict=True)]
        yield f"| {name} | {' | '.join(cells)} |"


def mean_of_q_table(attend: Attend, shape: Shape, device: torch.device) -> Iterator[str]:
    """The error of 8b and precise with one mean of Q a head, whose part of the scores is an additive term of each key.

    q · k = (q - m) · k + m · k, where m is the mean over the head's queries. The term is a mask of float32, from K less
    its mean, as kernels would have it: what all keys have in common changes no softmax.
    """
    modes = ("8b", "precise")
    columns = [f"{mode} {rotate}{also}" for mode in modes for rotate in ("off", "auto") for also in ("", ", mean of Q")]
    yield f"| inputs | {' | '.join(columns)} |"
    yield "| --- " * (1 + len(columns)) + "|"
    for kind in KINDS:
        found = []
        for seed in SEEDS:
            q, k, v = (tensor.to(device) for tensor in inputs(kind, shape, seed))
            mean = q.mean(dim=2, keepdim=True)
            term = mean @ (k - k.mean(dim=2, keepdim=True)).transpose(2, 3) / q.shape[-1] ** 0.5
            calls = ((q, None), (q - mean, term))
            found.append(
                [
                    error(attend(queries, k, v, AttentionOptions(mode, rotate=rotate), added), (q, k, v))
                    for mode in modes
                    for rotate in ("off", "auto")
                    for queries, added in calls
                ]
            )
        yield f"| {kind} | {' | '.join(f'{_mean(list(column)):.4f}' for column in zip(*found, strict=True))} |"


def row_sum_table(shape: Shape, device: torch.device) -> Iterator[str]:
    """8b of the reference with the row sum of P before and after rounding."""
    yield "| inputs | the paper's order | the kernels' |"
    yield "| --- | --- | --- |"
    cases = {
        "Gaussian": ("Gaussian", 0.0),
        "video-like": ("video-like", 0.0),
        "V with an offset of 4": ("Gaussian", 4.0),
    }
    for name, (kind, offset) in cases.items():
        found = []
        for seed in SEEDS:
            q, k, v = (tensor.to(device) for tensor in inputs(kind, shape, seed))
            numerics = ReferenceOptions.of(AttentionOptions(rotate="off"))
            both = (replace(numerics, sum_quantized_p=False), numerics)
            found.append([error(reference_attention(q, k, v + offset, o)[0], (q, k, v + offset)) for o in both])
        yield f"| {name} | {' | '.join(f'{_mean(list(column)):.4f}' for column in zip(*found, strict=True))} |"


def loud_values_table(shape: Shape, device: torch.device) -> Iterator[str]:
    """The error of queries that do not attend to the tile of keys whose V is loud, with a V scale a channel or a tile.

    A scale a tile is the channel's times a power of two.
    """
    yield "| loud tile | 8b | 8b, smooth V | 8b, V scaled by the tile |"
    yield "| --- | --- | --- | --- |"
    tokens = shape[1]
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device)
    half = tokens // 2
    mask[:, :, half:, :_TILE] = False  # the others see it
    for size in _SIZES:
        found = []
        for seed in SEEDS:
            q, k, v = (tensor.to(device) for tensor in inputs("Gaussian", shape, seed))
            v[:, :, :_TILE] *= size
            exact = exact_attention(q, k, v, attn_mask=mask)[0][:, :, half:]
            plain = ReferenceOptions.of(AttentionOptions(rotate="off"))
            smooth = ReferenceOptions.of(AttentionOptions(rotate="off", smooth_v=True))
            calls = ((v, plain), (v, smooth), (by_tile(v), replace(plain, v_format=FP32)))
            found.append(
                [
                    Agreement.of(
                        reference_attention(q, k, values, options, attn_mask=mask)[0][:, :, half:], exact
                    ).relative_l1
                    for values, options in calls
                ]
            )
        cells = (f"{_mean(list(column)):.4f}" for column in zip(*found, strict=True))
        yield f"| {size} times | {' | '.join(cells)} |"


def by_tile(v: torch.Tensor) -> torch.Tensor:
    """V (1, heads, tokens, head_dim) as E4M3 leaves it with a scale a channel, less a power of two for each tile."""
    maximum = E4M3.maximum or 1.0
    channel = v.abs().amax(dim=2, keepdim=True)
    tiles = v.unflatten(2, (-1, _TILE))
    # One power for all channels of a tile: that of the channel that comes nearest to its largest value.
    share = (tiles.abs().amax(dim=3, keepdim=True) / channel.unsqueeze(2)).amax(dim=4, keepdim=True)
    scale = channel.unsqueeze(2) / maximum * torch.exp2(share.log2().ceil())
    return (E4M3.round(tiles / scale) * scale).flatten(2, 3)


def page(command: str, backend: str, device: torch.device) -> str:
    """The whole page of docs/results."""
    attend = attend_by(backend)
    heads, tokens, head_dim = SHAPE
    lines = [
        *page_head(
            "What the numbers hide",
            machine=machine.summary(device),
            kernels="none, backend reference" if backend == "reference" else kernel_versions(device),
            settings="the attention function; `rotate` off, on and auto, as the columns say",
            command=command,
        ),
        f"Relative L1 against float64, mean of {len(SEEDS)} seeds; B 1, H {heads}, N {tokens:,}, head_dim {head_dim}, "
        "bf16. The inputs are those of `lab/evaluation/kinds.py`.",
        "",
        "## Rotation by the head",
        "",
        *rotation_table(attend, SHAPE, device),
        "",
        "## Hidden keys",
        "",
        f"{_SHOWN:,} of {_KEYS:,} keys are shown. Counted: as a mask with a row a query, of which hidden keys enter "
        "means and scales; so did all masks before.",
        "",
        *hidden_keys_table(attend, SHAPE, device),
        "",
        "## One mean of Q a head",
        "",
        "A trial, which no mode has: the mean is subtracted from Q before the call, and its product with each key is "
        "an additive mask of float32.",
        "",
        *mean_of_q_table(attend, SHAPE, device),
        "",
        "## The order of the row sum",
        "",
        "8b of the reference.",
        "",
        *row_sum_table(SHAPE, device),
        "",
        "## Loud values of V",
        "",
        f"8b of the reference. The V of {_TILE} keys is so many times larger; of the queries that do not see them.",
        "",
        *loud_values_table(SHAPE, device),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab exactness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", type=usable_device, default=usual_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument(
        "--backend", choices=["reference", *(kernels.name for kernels in registry.kernels())], default="reference"
    )
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write exactness.md there")
    options = parser.parse_args(arguments)
    device: torch.device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if options.backend != "reference":
        check_kernel(options.backend, "--backend", device, parser)
    with torch.no_grad():
        text = page(" ".join(["python -m lab exactness", *arguments]), options.backend, device)
    show(text, "exactness", options.results)
    return 0
