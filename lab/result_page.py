"""What the pages of docs/results have in common: their first lines, and how a command gives them out."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import torch

from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.kernels import loader

NAMED = ("Machine", "Kernels", "Settings", "Command")  # by every page; tests/unit/test_docs.py holds them to it


def page_head(
    title: str, *, machine: str, kernels: str, settings: str, command: str, seed: int | None = None, day: str = ""
) -> list[str]:
    """The lines up to the first paragraph.

    settings: of the node or of `attention`, `rotate` among them. command: what writes the page. day: empty for today.
    """
    drawn = "" if seed is None else f"; seed {seed}"
    values = (machine, kernels, settings, f"`{command}`, which wrote this page{drawn}")
    named = (f"- {name}: {value}." for name, value in zip(NAMED, values, strict=True))
    return [f"# {title}", "", *named, f"- Date: {day or date.today().isoformat()}.", ""]


def show(text: str, page: str, results: Path | None) -> None:
    """Print the text of a page, and write it to <page>.md in the folder `results` where one is given."""
    print(text)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{page}.md").write_text(text, encoding="utf-8")


def usable_kernels(device: torch.device) -> list[KernelBackend]:
    """The kernels that are built for this GPU and can be loaded."""
    if device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    return [kernel for kernel in KERNELS if capability in kernel.capabilities and kernel.availability() is None]


def kernel_versions(device: torch.device) -> str:
    """The usable kernels with their versions, for the head of a page."""
    versions = [f"{kernel.name} {loader.load(kernel.name).version}" for kernel in usable_kernels(device)]
    return ", ".join(versions) or "none, the reference"
