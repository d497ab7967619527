"""What the node serves in each model family, and on a GPU the time of a sampling step: one command for all families.

    python -m lab families --device cpu --results docs/results        # families.md
    python -m lab families --only "Wan 2.1" --peers --page steps      # beside other packages' attentions
    python -m lab families --short --page short-steps                 # where the host sets the pace

Tiny random models of each family's structure are sampled in ComfyUI with the backend *reference* and without the node.
On a GPU each family's real shape follows, with random weights, in bf16: seconds a step with ComfyUI's attention, with
the node, with `--peers` also with other packages' attentions, and without attention, in shuffled rounds. `--short`
instead times models whose steps are many short calls, which show what the node costs the host. Run it with a Python
that has ComfyUI's requirements.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from comfy_sage2.comfyui.hooks import sampling
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.settings import ALWAYS, WHERE_FASTER, Settings
from tools.comfyui.folders import comfyui_version
from tools.comfyui.launch import TorchvisionOperators

from ..arguments import add_comfyui, at_least_1, chosen_comfyui, parser_of
from ..result_page import page_head, show, write
from .attentions import ALL_PEERS, attention_for_nothing, peers, with_override
from .calls import counted
from .declared import FAMILIES, SHORT_STEPS, DeclaredModel, Family
from .models import TINY_STEPS, load, sample, seconds_by_turns, seconds_in_rounds, unlike_detected
from .page import DEFAULT, NOTHING, FamilyRow, Served, TimedSteps, body

_MODES = ("auto", "8b", "precise", "8b sparse medium")
_SHORT_MODES = ("auto", "8b always", "exact")
_SHORT_PEERS = ("torch-cudnn",)


def enter_comfyui(folder: Path, *, cpu: bool = False) -> None:
    """Make ComfyUI's packages importable, with the defaults of its command line. cpu: use no GPU.

    SystemExit with one line in a Python that lacks what ComfyUI needs.
    """
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.path.insert(0, str(folder))
    try:
        import comfy.cli_args

        comfy.cli_args.args.cpu = cpu or not torch.cuda.is_available()
        import comfy.model_management
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the ComfyUI at {folder} needs {error.name}, which {sys.executable} does not have; "
            "run this with a Python that has ComfyUI's requirements"
        ) from None


def settings_of(text: str, backend: str) -> Settings:
    """The node's settings for a mode: "8b"; "8b sparse light", for steps that are all sparse; or "8b always"."""
    mode, _, level = text.removesuffix(f" {ALWAYS}").partition(" sparse ")
    when = ALWAYS if text.endswith(ALWAYS) else WHERE_FASTER
    return Settings(mode=mode, backend=backend, sparse=level or "off", dense_percent=0.0, when=when)


def mode_of_node(text: str) -> str:
    """A type of argument: a text for `settings_of`."""
    try:
        settings_of(text, "auto")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def serve_tiny(family: Family, device: torch.device) -> Served:
    """Sample the tiny model without the node, with it, and without attention."""
    patcher = load(family, family.tiny, torch.float32, device)
    plain, _ = sample(patcher, family, family.tiny, TINY_STEPS)
    patched = patch_model(patcher, Settings(mode="8b", backend="reference", when=ALWAYS))
    # As in a workflow without a report: else the node also makes calls of ComfyUI's attention, to time it.
    with patch.object(sampling, "reads_times", return_value=False), counted() as calls:
        out, _ = sample(patched, family, family.tiny, TINY_STEPS)
    nothing, _ = sample(with_override(patcher, attention_for_nothing), family, family.tiny, TINY_STEPS)
    shares = sampling.sessions_of(patched)[-1].record.summary().shares
    return Served(
        calls,
        sum(share.calls for share in shares if share.decision.backend is not None),
        {share.decision.label: share.calls for share in shares if share.decision.backend is None},
        float(torch.nn.functional.cosine_similarity(plain.double(), out.double(), dim=0)),
        float((out - plain).norm() / (nothing - plain).norm()),
    )


def time_steps(
    family: Family, shape: DeclaredModel, modes: list[str], rounds: int, device: torch.device, peer_names: Sequence[str]
) -> TimedSteps:
    """Seconds per step with each attention; on a CPU with the backend *reference*, to see that it runs.

    peer_names: names of other attentions, as for `peers`.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    patcher = load(family, shape, torch.bfloat16, device)
    backend = "auto" if is_gpu else "reference"
    nodes = {mode: patch_model(patcher, settings_of(mode, backend)) for mode in modes}
    for mode, node in nodes.items():
        reason = sampling.sessions_of(node)[-1].dispatcher.idle_reason
        if reason is not None:
            raise RuntimeError(f"the node has nothing to measure in {mode}: {reason}")
    candidates: dict[str, Any] = {DEFAULT: patcher.clone(), **nodes}
    if peer_names:
        overrides, missing = peers(peer_names)
        print(*(f"{name}: left out, {reason}" for name, reason in missing.items()), sep="\n", file=sys.stderr)
        candidates |= {name: with_override(patcher, override) for name, override in overrides.items()}
    candidates[NOTHING] = with_override(patcher, attention_for_nothing)
    with patch.object(sampling, "reads_times", return_value=False):  # as in a workflow without a report
        with counted() as calls:
            for candidate in candidates.values():
                sample(candidate, family, shape, 1)
        in_pairs = family in SHORT_STEPS
        timed = seconds_by_turns if in_pairs else seconds_in_rounds
        seconds = timed(candidates, family, shape, rounds)
    shares = sampling.sessions_of(nodes[modes[0]])[-1].record.summary().shares
    served = "; ".join(f"{share.calls // (family.steps + 1)} {share.decision.label}" for share in shares)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else 0.0
    return TimedSteps(calls.longest, seconds, served, peak, in_pairs)


def clear() -> None:
    """Unload the models, so that the memory is free for the next family."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.soft_empty_cache()


def fill_in(row: FamilyRow, options: argparse.Namespace, device: torch.device) -> None:
    """Sample a row's models; RuntimeError if ComfyUI does not detect the family by its real shape."""
    family = row.family
    unlike = unlike_detected(family)
    if unlike:
        raise RuntimeError(f"ComfyUI's detection does not find this shape: {unlike}")
    if not options.short:
        row.served = serve_tiny(family, device)
        clear()
    shape = {"real": family.real, "tiny": family.tiny}.get(options.time)
    if shape is not None:
        peer_names = _SHORT_PEERS if options.short else ALL_PEERS if options.peers else ()
        row.timed = time_steps(family, shape, options.modes, options.rounds, device, peer_names)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("families", __doc__, "families.md")
    add_comfyui(parser)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto takes a GPU if there is one")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of families' names, such as wan")
    parser.add_argument(
        "--modes",
        nargs="+",
        type=mode_of_node,
        help=f'such as 8b, "8b sparse light" or "8b always" (default: {", ".join(_MODES)})',
    )
    parser.add_argument("--short", action="store_true", help="time models whose steps are many short calls instead")
    parser.add_argument("--peers", action="store_true", help="also time the attentions of other packages")
    parser.add_argument("--rounds", type=at_least_1, help="of timing (default: 3, of short steps 20)")
    parser.add_argument(
        "--time", choices=("real", "tiny", "none"), help="shapes (default: real on a GPU, none without)"
    )
    parser.add_argument("--page", default="families", help="its name (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    options.modes = options.modes or list(_SHORT_MODES if options.short else _MODES)
    options.rounds = options.rounds or (20 if options.short else 3)
    known = SHORT_STEPS if options.short else FAMILIES
    texts = [text.lower() for text in options.only]
    options.families = [family for family in known if any(text in family.name.lower() for text in texts)]
    if not options.families:
        names = ", ".join(family.name for family in known)
        parser.error(f"no family has {' or '.join(map(repr, options.only))} in its name: {names}")
    options.comfyui = chosen_comfyui(parser, options.comfyui)
    return options


def main(arguments: list[str]) -> int:
    """Run the command; 0 when every family was sampled."""
    options = _parse(arguments)
    enter_comfyui(options.comfyui, cpu=options.device == "cpu")
    logging.getLogger().setLevel(logging.WARNING)
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    is_gpu = device.type == "cuda"
    options.time = options.time or ("real" if is_gpu else "none")
    head = page_head(
        "Short steps" if options.short else "Steps with each attention" if options.peers else "Model families",
        device,
        settings="a new node but for the mode",
        command=shlex.join(["python", "-m", "lab", "families", *arguments]),
        host=f", ComfyUI {'.'.join(map(str, comfyui_version(options.comfyui)))}",
    )
    rows: list[FamilyRow] = []
    lines: list[str] = []
    for family in options.families:
        if family.needs and not (options.comfyui / family.needs).is_file():
            print(f"{family.name} NOT TESTED: this ComfyUI has no {family.needs}", flush=True)
            continue
        row = FamilyRow(family)
        rows.append(row)
        try:
            with torch.inference_mode():
                fill_in(row, options, device)
        except Exception as error:  # whatever a model raises: report it, and go on with the other families
            row.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            logging.exception(family.name)
        clear()
        print(f"{family.name}: {row.failed or 'done'}", file=sys.stderr, flush=True)
        # Write after each family, so that an interrupted run keeps what it measured.
        lines = [*head, *body(rows, options.modes, is_gpu=is_gpu)]
        if options.results is not None:
            write(lines, options.page, options.results)
        if options.json is not None:
            options.json.write_text(json.dumps([each.figures() for each in rows], indent=1) + "\n", encoding="utf-8")
    show(lines)
    return int(any(row.failed for row in rows))
