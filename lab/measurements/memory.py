"""`python -m lab memory`: the GPU memory that attention takes, in calls, in MiniMax H3's blocks and in whole clips.

    python -m lab memory --results docs/results  # memory.md

Measured beside ours: ComfyUI's default and, if this ComfyUI offers it, comfy-kitchen's INT8, with plain tensors and
with ComfyUI's containers. Peaks are torch's `max_memory_allocated` above what was allocated before, which in calls
includes q, k and v. Times are medians of at least five rounds, each in a new random order. The attention of an H3 block
has its real size and random weights. The longest clip is the longest one of which two of the model's 50 equal blocks
can be computed while torch may allocate only as much as a smaller card has (`set_per_process_memory_fraction`); the
whole model's random weights are in FP8 and offloaded by ComfyUI.
Run it with a Python that has ComfyUI's requirements.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from comfy_sage2 import attention
from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.hooks.slices import slicing
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.options import AttentionOptions
from tools.comfyui.folders import comfyui_version

from ..arguments import above_0, add_comfyui, add_seed, chosen_comfyui, cuda_device, parser_of
from ..bench.candidates import Call, PreparedCandidate
from ..bench.speed import peak_bytes
from ..bench.timing import heat, time_in_rounds
from ..families.attentions import KITCHEN, comfy_kitchen, with_override
from ..families.declared import FAMILIES, DeclaredModel
from ..families.models import load, sample
from ..families.newer import model_config
from ..families.page import DEFAULT
from ..families.run import clear, enter_comfyui
from ..result_page import page_head, show, table, write

CONTAINED, OURS, PRECISE = f"{KITCHEN}, containers", "SageAttention2 8b", "SageAttention2 precise"
CALLS = ((38_010, 56), (75_600, 40), (104_050, 56), (178_000, 56))
BLOCKS = (38_010, 104_050, 178_000)
MOST_TIMED = 110_000  # tokens: a round of longer ones takes many seconds
CARDS = (12, 16)  # GiB
H3 = next(family for family in FAMILIES if family.name == "MiniMax H3")
_FRAMES, _MOST_FRAMES = 37, 160  # of latents: 5 s, and more than the cards hold
_PRECISION = 12  # the search finds a clip's length to within a twelfth of it
_SECONDS, _HEAT_SECONDS, _MIB = 20.0, 20.0, 2**20

Run = Callable[[], torch.Tensor]


def calls(tokens: int, heads: int, device: torch.device) -> dict[str, Run]:
    """Name -> a call of q, k and v (1, N, H, 128), which are views of one projection."""
    from comfy.ldm.modules.attention import optimized_attention

    q, k, v = torch.randn(1, tokens, 3, heads, 128, device=device, dtype=torch.bfloat16).unbind(2)
    by_heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    runs: dict[str, Run] = {DEFAULT: partial(optimized_attention, *by_heads, heads, skip_reshape=True)}
    override = comfy_kitchen()
    if override is not None:
        runs[KITCHEN] = partial(override, None, *by_heads, heads, skip_reshape=True)
    for name, mode in ((OURS, "8b"), (PRECISE, "precise")):
        options = AttentionOptions(mode, layout="BNHD", rotate="off")
        runs[name] = partial(attention, q, k, v, options=options, return_lse=False)
    return runs


@contextmanager
def in_a_pass(patched: Any, model: Any) -> Iterator[dict[str, Any]]:
    """ComfyUI's `transformer_options` in a pass of a sampling with a node."""
    session, options = sessions_of(patched)[-1], patched.model_options["transformer_options"]
    session.begin_sampling([1.0, 0.0], times_calls=False)
    model_pass = session.begin_pass(1.0, patched.load_device, options)
    model_pass.check_at_end = True
    with model_passes.running(session.slot, model_pass), slicing(session, model):
        yield options
    session.end_sampling()


def block_attentions(patcher: Any, tokens: int) -> dict[str, Run]:
    """Name -> the attention of the model's first block, projections and all, of one input (N, C)."""
    model, device = patcher.model.diffusion_model, patcher.load_device
    attn = model.blocks[0].attn
    x = torch.randn(tokens, model.hidden_size, device=device, dtype=torch.bfloat16)
    from comfy.ldm.minimax.model import rope_rotation_table

    places = torch.rand(tokens, 3, device=device, dtype=torch.float64) * 32
    rope = rope_rotation_table(model.rope_freqs(places, device), x.dtype)

    def plain(override: Any) -> torch.Tensor:
        options = {} if override is None else {OVERRIDE: override}
        out: torch.Tensor = attn(x, rope_freqs=rope, transformer_options=options)
        return out

    def ours(patched: Any) -> torch.Tensor:
        with in_a_pass(patched, model) as options:
            out: torch.Tensor = attn(x, rope_freqs=rope, transformer_options=options)
        return out

    runs: dict[str, Run] = {DEFAULT: partial(plain, None)}
    for name, contained in ((KITCHEN, False), (CONTAINED, True)):
        override = comfy_kitchen(takes_containers=contained)
        if override is not None:
            runs[name] = partial(plain, override)
    for name, mode in ((OURS, "8b"), (PRECISE, "precise")):
        runs[name] = partial(ours, patch_model(patcher, Settings(mode=mode, when=ALWAYS, rotate="off")))
    return runs


Figure = tuple[int, float | None]  # peak bytes and milliseconds


def figures(runs: Mapping[str, Run], rng: random.Random, seconds: float, *, timed: bool) -> dict[str, Figure]:
    """Name -> figures, without milliseconds unless `timed`."""
    for run in runs.values():  # the first call loads what it needs
        run()
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    if not timed:
        return {name: (peak, None) for name, peak in peaks.items()}
    prepared = {name: PreparedCandidate(Call(run), Call(run)) for name, run in runs.items()}
    times = time_in_rounds(prepared, seconds, None, rng)
    return {name: (peak, median(times[name].calls)) for name, peak in peaks.items()}


def _cell(peak: int, milliseconds: float | None) -> str:
    return f"{peak / _MIB:,.0f} MiB" + ("" if milliseconds is None else f", {milliseconds:.1f} ms")


def rows(measured: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """A table: a row for each size, a column for each attention."""
    names = list(dict.fromkeys(name for by_name in measured.values() for name in by_name))
    return table(
        ["", *names], ([size, *(_cell(*by_name[name]) for name in names)] for size, by_name in measured.items())
    )


def clip(frames: int) -> DeclaredModel:
    """MiniMax H3's real shape with this many frames of latents."""
    _, sound = H3.real.latents
    longer = ((1, 24, frames, 48, 84), (*sound[:3], sound[3] * frames // _FRAMES))
    return replace(H3.real, latents=longer, fewer={})


def in_fp8(device: torch.device) -> Any:
    """ComfyUI's ModelPatcher of the whole model in FP8 on the CPU; it loads weights to the device as memory allows."""
    import comfy.model_patcher

    config = model_config(H3.model)(dict(H3.real.config))
    config.set_inference_dtype(torch.float8_e4m3fn, torch.bfloat16, device=device)
    model = config.get_model({}, "", device=torch.device("cpu"))
    values: dict[torch.Size, torch.Tensor] = {}
    for parameter in model.diffusion_model.parameters():
        shape = parameter.shape
        if parameter.ndim > 1:
            if shape not in values:
                values[shape] = (torch.randn(shape, dtype=torch.bfloat16) * shape[1] ** -0.5).to(parameter.dtype)
            parameter.data = values[shape].clone()
        else:
            parameter.data = torch.ones(shape, dtype=torch.bfloat16)
    for buffer in model.diffusion_model.buffers():
        buffer.copy_(10000.0 ** -(torch.arange(buffer.numel()) / buffer.numel()))  # the frequencies of its positions
    model.diffusion_model.eval().requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


@contextmanager
def card(gigabytes: int, device: torch.device) -> Iterator[None]:
    """Limit torch and ComfyUI to the memory of a smaller card."""
    import comfy.model_management

    size = gigabytes << 30

    def free(dev: Any = None, torch_free_too: bool = False) -> Any:
        left = size - torch.cuda.memory_allocated(device)
        return (left, left) if torch_free_too else left

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total, device)
    try:
        with patch.object(comfy.model_management, "get_free_memory", free):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class _Enough(Exception):
    """Two blocks have been computed."""


@contextmanager
def two_blocks(patcher: Any) -> Iterator[None]:
    """Within a `with` block the model raises `_Enough` before its third block, when ComfyUI prefetches its weights.

    A forward hook on the block would keep this pack from making slices, because it might belong to another pack.
    """
    import comfy.model_prefetch

    third, prefetch = patcher.model.diffusion_model.blocks[2], comfy.model_prefetch.prefetch_queue_pop

    def pop(queue: Any, device: Any, module: Any) -> None:
        if module is third:
            raise _Enough
        prefetch(queue, device, module)

    with patch.object(comfy.model_prefetch, "prefetch_queue_pop", pop):
        yield


def longest(candidate: Any) -> int:
    """Frames of latents of the longest clip of which two blocks can be computed; 0 if not even 5 s can."""
    fits, fails = 0, _MOST_FRAMES
    frames = _FRAMES
    while fails - fits > max(fits // _PRECISION, 1):
        try:
            sample(candidate, H3, clip(frames), 1)
        except torch.cuda.OutOfMemoryError:
            fails = frames
        except _Enough:
            fits = frames
        clear()
        if not fits:
            return 0
        frames = (fits + fails) // 2
    return fits


def clips(device: torch.device) -> list[str]:
    """The table of longest clips."""
    patcher = in_fp8(device)
    candidates: dict[str, Any] = {DEFAULT: patcher.clone()}
    override = comfy_kitchen(takes_containers=True)
    if override is not None:
        candidates[CONTAINED] = with_override(patcher, override)
    candidates[OURS] = patch_model(patcher, Settings(mode="8b", when=ALWAYS))
    cells = []
    for gigabytes in CARDS:
        with card(gigabytes, device), two_blocks(patcher):
            frames = {name: longest(candidate) for name, candidate in candidates.items()}
        tokens = (f"{count} ({count * 24 * 42:,} tokens)" for count in frames.values())
        cells.append([f"{gigabytes} GB", *tokens])
    return table(["", *candidates], cells)


def parts(options: argparse.Namespace, device: torch.device) -> Iterator[list[str]]:
    """Measure; yield the page below its head, part by part."""
    rng = random.Random(options.seed)
    heat(_HEAT_SECONDS)
    measured = {}
    for tokens, heads in CALLS:
        runs = calls(tokens, heads, device)
        measured[f"{tokens:,} tokens, {heads} heads"] = figures(runs, rng, options.seconds, timed=tokens <= MOST_TIMED)
        del runs
        clear()
    yield [
        "Peaks are over what was there before: in calls q, k and v, in a block its input. Times are medians of five "
        "rounds or more, each in an order drawn anew.",
        "",
        "Calls: head_dim 128, bf16, q, k and v as views of one projection. The peak with the output.",
        "",
        *rows(measured),
    ]
    patcher = load(H3, replace(H3.real, fewer={"num_layers": 1}), torch.bfloat16, device)
    measured = {}
    for tokens in BLOCKS:
        runs = block_attentions(patcher, tokens)
        measured[f"{tokens:,} tokens"] = figures(runs, rng, options.seconds, timed=tokens <= MOST_TIMED)
        del runs
        clear()
    yield [
        "",
        "The attention of a block of MiniMax H3 with its projections: its real size, random weights in bf16.",
        "",
        *rows(measured),
    ]
    if options.clips:
        yield [
            "",
            "The longest clip of MiniMax H3 that fits, in frames of latents, to a twelfth, where torch may allocate as "
            "much as on a smaller card: all 50 blocks with random weights in FP8, offloaded as ComfyUI does it, of "
            "which the first two are computed. SageAttention2 computes the MLP in slices where there is no memory for "
            "the whole.",
            "",
            *clips(device),
        ]


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = parser_of("memory", __doc__, "memory.md")
    add_comfyui(parser)
    parser.add_argument(
        "--seconds", type=above_0, default=_SECONDS, help=f"for the times of a size (default: {_SECONDS:.0f})"
    )
    parser.add_argument("--no-clips", dest="clips", action="store_false", help="leave out the longest clips")
    add_seed(parser)
    options = parser.parse_args(arguments)
    device = cuda_device("memory")
    comfyui = chosen_comfyui(parser, options.comfyui)
    enter_comfyui(comfyui)
    lines = page_head(
        "Memory of attention",
        device,
        settings="`rotate` off in calls and blocks, a new node in clips but for the mode",
        command=f"python -m lab memory --seed {options.seed} --results docs/results",
        host=f", ComfyUI {'.'.join(map(str, comfyui_version(comfyui)))}",
    )
    with torch.inference_mode():
        for part in parts(options, device):
            lines += part
            write(lines, "memory", options.results)  # an interrupted run leaves what it has measured
    show(lines)
    return 0
