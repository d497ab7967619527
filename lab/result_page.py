"""What the pages of docs/results have in common: their first lines, tables, and how commands print and write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import torch

from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.kernels import loader
from comfy_sage2.system import machine


def page_head(title: str, device: torch.device, *, settings: str, command: str, host: str = "") -> list[str]:
    """The lines up to the first paragraph.

    settings: of the node or of `attention`, including `rotate`. command: it writes the page. host: follows the machine.
    """
    versions = [f"{kernel.name} {loader.load(kernel.name).version}" for kernel in usable_kernels(device)]
    return [
        f"# {title}",
        "",
        f"- Machine: {machine_line(device)}{host}.",
        f"- Kernels: {', '.join(versions) or 'none, the reference'}.",
        f"- Settings: {settings}.",
        f"- Command: `{command.replace(str(Path.home()), '~')}`, which wrote this page.",
        f"- Date: {date.today().isoformat()}.",
        "",
    ]


def machine_line(device: torch.device) -> str:
    """The machine that measured the figures: device, driver of a GPU, torch."""
    driver = f", driver {machine.loaded_driver() or 'unknown'}" if device.type == "cuda" else ""
    return f"{machine.device_name(device)}{driver}, torch {torch.__version__.partition('+')[0]}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def show(lines: Sequence[str]) -> None:
    """Print a page."""
    print("\n".join(lines).rstrip(), flush=True)


def write(lines: Sequence[str], page: str, results: Path | None) -> None:
    """Write a page to <page>.md in the folder `results`, if there is one."""
    if results is not None:
        (results / f"{page}.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def usable_kernels(device: torch.device) -> list[KernelBackend]:
    """The kernels that are built for this GPU and can be loaded."""
    if device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    return [kernel for kernel in KERNELS if capability in kernel.capabilities and kernel.availability() is None]


def gpu_in_a_file_name(device: torch.device) -> str:
    """The GPU's name in letters, digits and hyphens, such as h200."""
    return re.sub(r"[^a-z0-9]+", "-", machine.device_name(device).lower()).strip("-").removeprefix("nvidia-")
