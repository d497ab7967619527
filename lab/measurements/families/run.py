"""What the node serves in each model family, and on a GPU what it saves: one command for all families.

    python -m lab families --device cpu --results docs/results/families.md

Tiny random models of each family's structure are sampled in ComfyUI with the backend *reference* and without the node.
On a GPU each family's real shape follows, with random weights, in bf16: seconds a step with ComfyUI's attention, with
the node, and without attention, in shuffled rounds. Run it with a Python that has ComfyUI's requirements.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from dataclasses import asdict

import torch

from comfy_sage2 import machine
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.command_line import Parser, at_least_1, output_file
from tools.comfyui.folders import comfyui_folder, comfyui_folders, comfyui_version
from tools.workflows.template_use import HEADING as USE

from ...result_page import kernel_versions
from ..overrides import attention_for_nothing, with_override
from ..sampling_steps import DEFAULT, NOTHING, enter_comfyui
from . import paper
from .calls import counted
from .declared import FAMILIES, DeclaredModel, Family
from .findings import FamilyRow, Findings, Served, TimedSteps
from .models import TINY_STEPS, load, sample, seconds_in_rounds, unlike_detected
from .page import document, served_line, timed_line
from .sparse_pair import PairTimes, time_pairs


def serve_tiny(family: Family, device: torch.device) -> Served:
    """Sample the tiny model without the node, with it, and without attention."""
    patcher = load(family, family.tiny, torch.float32, device)
    plain, _ = sample(patcher, family, family.tiny, TINY_STEPS)
    patched = patch_model(patcher, Settings("8b", backend="reference", when=ALWAYS))
    with counted() as calls:
        out, _ = sample(patched, family, family.tiny, TINY_STEPS)
    nothing, _ = sample(with_override(patcher, attention_for_nothing), family, family.tiny, TINY_STEPS)
    shares = sessions_of(patched)[-1].record.summary().shares
    return Served(
        calls,
        sum(share.calls for share in shares if share.decision.backend is not None),
        {share.decision.label: share.calls for share in shares if share.decision.backend is None},
        float(torch.nn.functional.cosine_similarity(plain.double(), out.double(), dim=0)),
        float((out - plain).norm() / (nothing - plain).norm()),
    )


def time_steps(family: Family, shape: DeclaredModel, modes: list[str], rounds: int, device: torch.device) -> TimedSteps:
    """Seconds a step with each attention; on a CPU with the backend *reference*, to see that it runs."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    patcher = load(family, shape, torch.bfloat16, device)
    backend = "auto" if is_gpu else "reference"
    nodes = {mode: patch_model(patcher, Settings(mode, backend=backend)) for mode in modes}
    candidates = {DEFAULT: patcher.clone(), **nodes, NOTHING: with_override(patcher, attention_for_nothing)}
    for mode, node in nodes.items():
        reason = sessions_of(node)[-1].dispatcher.idle_reason
        if reason is not None:
            raise RuntimeError(f"the node has nothing to measure in {mode}: {reason}")
    with counted() as calls:
        for candidate in candidates.values():
            sample(candidate, family, shape, 1)
    seconds = seconds_in_rounds(candidates, family, shape, rounds)
    shares = sessions_of(nodes[modes[0]])[-1].record.summary().shares
    found = "; ".join(f"{share.calls // (family.steps + 1)} {share.decision.label}" for share in shares)
    return TimedSteps(calls.longest, seconds, found, torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else 0.0)


def clear() -> None:
    """Forget the models, so that the next family finds the memory free."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.soft_empty_cache()


def before_sampling(row: FamilyRow, options: argparse.Namespace, device: torch.device) -> None:
    """Fill in a row; RuntimeError when ComfyUI does not know the family by its real shape."""
    family = row.family
    unlike = unlike_detected(family)
    if unlike:
        raise RuntimeError(f"ComfyUI's detection does not find this shape: {unlike}")
    row.served = serve_tiny(family, device)
    clear()
    timed = {"real": family.real, "tiny": family.tiny}.get(options.time)
    if timed is not None:
        row.timed = time_steps(family, timed, options.modes, options.rounds, device)


def main(arguments: list[str]) -> int:
    """Run the command; 0 when every family was sampled."""
    parser = Parser(
        prog="python -m lab families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=comfyui_folder, help="folder of ComfyUI (default: the first one found)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto takes a GPU if there is one")
    parser.add_argument("--only", default="", help="part of a family's name, such as wan")
    parser.add_argument("--paper", action="store_true", help="the paper's models in place of those that people run")
    parser.add_argument("--modes", nargs="+", choices=("8b", "precise", "4b"), default=["8b", "precise"])
    parser.add_argument(
        "--sparse-pair", action="store_true", help="ComfyUI's sparse node beside this one, on MiniMax H3"
    )
    parser.add_argument("--rounds", type=at_least_1, default=3, help="of timing (default: 3)")
    parser.add_argument(
        "--time", choices=("real", "tiny", "none"), help="shapes (default: real on a GPU, none without)"
    )
    parser.add_argument("--results", type=output_file, help="write the page here")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    options = parser.parse_args(arguments)
    folders = [options.comfyui] if options.comfyui else comfyui_folders()
    if not folders:
        parser.error("there is no ComfyUI in the usual folders: name its folder with --comfyui")
    known = paper.MODELS if options.paper else FAMILIES
    families = parser.with_part(options.only, "family", known)
    if options.time == "tiny" and options.results is not None:
        parser.error("--results is a page on the real shapes: leave it out with --time tiny, or take --json")
    if options.sparse_pair and options.results is not None:
        parser.error("--results is a page of single steps: leave it out with --sparse-pair, or take --json")
    if options.paper and options.results is not None:
        parser.error("--results is a page on the models that people run: leave it out with --paper, or take --json")
    folder = folders[0].resolve()
    enter_comfyui(folder, cpu=options.device == "cpu")
    logging.getLogger().setLevel(logging.WARNING)
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    is_gpu = device.type == "cuda"
    if options.sparse_pair:
        with torch.inference_mode():
            pairs = time_pairs(device, options.rounds, tiny=not is_gpu)
        print(PairTimes.head(), *(pair.line() for pair in pairs), sep="\n", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1) + "\n", encoding="utf-8")
        return 0
    options.time = options.time or ("real" if is_gpu else "none")
    command = "python -m lab families" + (" --device cpu" if options.device == "cpu" else "")
    version = ".".join(map(str, comfyui_version(folder)))
    found = Findings(version, machine.summary(device), kernel_versions(device), command, options.modes, is_gpu)
    for family in families:
        if family.needs and not (folder / family.needs).is_file():
            print(f"{family.name} NOT TESTED: this ComfyUI has no {family.needs}", flush=True)
            continue
        row = FamilyRow(family)
        found.rows.append(row)
        try:
            with torch.inference_mode():
                before_sampling(row, options, device)
        except Exception as error:  # whatever a model raises: it is told, and does not cost the other families
            row.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            logging.exception(family.name)
        clear()
        print(served_line(row), flush=True)
        if row.timed is not None:
            print(timed_line(row, options.modes), flush=True)
        if options.results is not None:  # after each, so that what is found stays found
            page = options.results.read_text(encoding="utf-8") if options.results.is_file() else ""
            kept = page[page.index(USE) :] if USE in page else ""  # what tools.workflows.template_use has written
            options.results.write_text(document(found) + (f"\n{kept}" if kept else ""), encoding="utf-8")
        if options.json is not None:
            found.write(options.json)
    return int(any(row.failed for row in found.rows))
