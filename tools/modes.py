"""The page docs/results/modes.md: what a user chooses from, with the figures that the other results have of each.

python -m tools.modes          # write the page anew
python -m tools.modes --check  # say whether it is current, and change nothing
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from .figures import DEMO_TENSORS, RESULTS, Source, renew

PAGE = RESULTS / "modes.md"
_GPU = "NVIDIA H200"
_ON_CPU, _EMULATED = "†", "‡"
COLUMNS = (
    "attention",
    "error: Gaussian",
    "error: outliers",
    "error: demo model",
    "videos: dB",
    "videos: worst",
    "step: times as fast",
)

_ON_H200 = Source("attention-h200.md", "Accuracy")
_PRECISE_ON_H200 = Source("ablations-h200.md", "Accuracy")
_BENCH_INPUTS = Source("reference-numerics.md", "The inputs of `bench`")
_TENSORS = Source("accuracy-tables.md", "Whole attentions as the modes and baselines define them", DEMO_TENSORS)
_ROTATED_VIDEOS = Source("rotation.md", "Whole videos")
_VIDEOS = Source("videos.md", "32 captions")
_STEPS = Source("comfyui-steps-h200.md", "Peers")


@dataclass(frozen=True)
class TableCell:
    """A cell of a results table; of one with a mean and a worst in brackets only the mean."""

    source: Source
    row: str
    column: str

    def text(self) -> str:
        """What the page has, marked where it is not of a kernel on the H200."""
        marks = "" if _GPU in self.source.about("Machine") else _ON_CPU
        marks += _EMULATED if "emulated" in self.row else ""
        return self.source.cell(self.row, self.column).split(" (")[0] + marks


Cells = tuple[TableCell | None, ...]
_NOTHING: Cells = (None,)


def _call(source: Source, row: str) -> Cells:
    return tuple(TableCell(source, row, f"{kind}: relative L1") for kind in ("gaussian", "outliers"))


def _videos(source: Source, row: str) -> Cells:
    return tuple(TableCell(source, row, column) for column in ("PSNR (dB)", "worst PSNR"))


def _step(row: str) -> Cells:
    return (TableCell(_STEPS, row, "times as fast"),)


ROWS: dict[str, Cells] = {
    "16 bits (ComfyUI's default)": (
        *_call(_ON_H200, "FA-2"),
        *3 * _NOTHING,
        *_step("ComfyUI's default"),
    ),
    "`precise`": (
        *_call(_BENCH_INPUTS, "precise + rotation"),
        TableCell(_TENSORS, "precise + rotation (sm90 kernel)", "Relative L1"),
        *_videos(_ROTATED_VIDEOS, "precise + rotation, sm90 kernel"),
        *_NOTHING,
    ),
    "`8b`": (
        *_call(_BENCH_INPUTS, "8b + rotation"),
        TableCell(_TENSORS, "8b + rotation (sm90 kernel)", "Relative L1"),
        *_videos(_ROTATED_VIDEOS, "8b + rotation, sm90 kernel"),
        *_NOTHING,
    ),
    "`4b`": (
        *_call(_BENCH_INPUTS, "4b + rotation"),
        TableCell(_TENSORS, "4b + rotation (sm90 kernel)", "Relative L1"),
        *_videos(_ROTATED_VIDEOS, "4b + rotation, sm90 kernel"),
        *_NOTHING,
    ),
    "`precise`, `rotate` off": (
        *_call(_PRECISE_ON_H200, "precise"),
        TableCell(_TENSORS, "precise (sm90 kernel)", "Relative L1"),
        *2 * _NOTHING,
        *_step("this node, precise"),
    ),
    "`8b`, `rotate` off: the paper's": (
        *_call(_ON_H200, "8b"),
        TableCell(_TENSORS, "8b (sm90 kernel)", "Relative L1"),
        *_videos(_VIDEOS, "SageAttn2-8b, sm90 kernel"),
        *_step("this node, 8b"),
    ),
    "`4b`, `rotate` off: the paper's": (
        *_call(_ON_H200, "4b"),
        TableCell(_TENSORS, "4b (sm90 kernel)", "Relative L1"),
        *_videos(_VIDEOS, "SageAttn2-4b, sm90 kernel"),
        *_NOTHING,
    ),
    "SageAttention 2.2": (*_call(_ON_H200, "Sage 2.2, per thread"), *3 * _NOTHING, *_step("Sage 2.2")),
    "comfy-kitchen INT8": (*_call(_ON_H200, "comfy-kitchen INT8"), *3 * _NOTHING, *_step("comfy-kitchen INT8")),
    "FlashAttention-3 FP8": (
        *_call(_ON_H200, "FA-3 FP8"),
        TableCell(_TENSORS, "FlashAttn3-fp8 (emulated)", "Relative L1"),
        *_videos(_VIDEOS, "FlashAttention-3 FP8, emulated"),
        *_NOTHING,
    ),
}

_HEAD = f"""# What a user chooses from

`precise`, `8b` and `4b` as a new node has them, with `rotate` on; beside them the paper's numerics and its peers.

- Command: `python -m tools.modes`, which wrote this page: the figures are those of the pages beside it.
- Machine: one {_GPU}. {_ON_CPU}: the reference on a CPU. {_EMULATED}: emulated.

## Closeness and speed

"""
_NOTES = """
- Error: relative L1 of one call ([inputs on the H200](attention-h200.md#accuracy),
  [`precise`](ablations-h200.md#accuracy), [on the CPU](reference-numerics.md#the-inputs-of-bench),
  [demo model](accuracy-tables.md)).
- Videos: PSNR against full precision, the mean and the worst, of [32 captions](videos.md#32-captions)
  ([rotated](rotation.md#whole-videos)).
- A step: [Wan 2.1 14B at 720p](comfyui-steps-h200.md#peers). Rotation costs `8b` about
  [one percent of a call](rotation.md#cost-on-hopper) of 8,192 tokens.
- Nothing: not measured.
"""


def page() -> str:
    """The page as the results have it now; ValueError for a figure that is not found."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [[name, *(cell.text() if cell else "" for cell in cells)] for name, cells in ROWS.items()]
    return _HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + _NOTES


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 when the page is not current (with --check) or cannot be made."""
    return renew(PAGE, page, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
