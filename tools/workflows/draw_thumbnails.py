"""Draw the thumbnails workflows/*.jpg: the model's name and what is done with it, large, in a color of its own.

python -m tools.workflows.draw_thumbnails
"""

from __future__ import annotations

import argparse
import colorsys

from PIL import Image, ImageDraw, ImageFont

from .make_workflows import FOLDER
from .shipped import WORKFLOWS, Workflow

SIZE = (640, 360)
MARGIN = 40
FAMILIES = list(dict.fromkeys(workflow.family for workflow in WORKFLOWS))
_PAPER = (244, 244, 240)


def color(family: str) -> tuple[int, int, int]:
    """Families that follow each other get hues far apart."""
    hue = FAMILIES.index(family) * 0.618034 % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.28, 0.6)
    return round(red * 255), round(green * 255), round(blue * 255)


def font_for(text: str, largest: int, width: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, as large as `text` fits into `width` pixels."""
    for size in range(largest, 10, -2):
        font = ImageFont.load_default(size)
        if font.getlength(text) <= width:
            return font
    raise ValueError(f"{text!r} does not fit into {width} pixels in any size")


def thumbnail(workflow: Workflow) -> Image.Image:
    """A film or a picture beside the words; the paper's models are dark on light."""
    paper = workflow.name.startswith("sage2_paper_")
    hue = color(workflow.family)
    ground, ink = (_PAPER, hue) if paper else (hue, _PAPER)
    image = Image.new("RGB", SIZE, ground)
    draw = ImageDraw.Draw(image)
    width = SIZE[0] - 2 * MARGIN
    draw.text((MARGIN, 26), "SageAttention2", ink, ImageFont.load_default(26))
    draw.text((MARGIN, 84), workflow.family, ink, font_for(workflow.family, 92, width))
    draw.text((MARGIN, 200), workflow.task, ink, font_for(workflow.task, 56, width))
    top, bottom = SIZE[1] - 78, SIZE[1] - 22
    if workflow.task.endswith(("video", "object")):
        _film(draw, 160 if "image" in workflow.task else 0, top, bottom, ink, ground)
    elif "image" not in workflow.task:
        _bars(draw, top, bottom, ink)
    if "image" in workflow.task:
        _picture(draw, top, bottom, ink, ground)
    return image


def _film(
    draw: ImageDraw.ImageDraw, start: int, top: int, bottom: int, ink: tuple[int, ...], ground: tuple[int, ...]
) -> None:
    draw.rectangle((start, top, SIZE[0], bottom), ink)
    for left in range(start + 6, SIZE[0], 20):
        for row in (top + 5, bottom - 11):
            draw.rectangle((left, row, left + 9, row + 6), ground)
    for left in range(start + 6, SIZE[0], 80):
        draw.rectangle((left, top + 16, left + 69, bottom - 16), ground)


def _picture(draw: ImageDraw.ImageDraw, top: int, bottom: int, ink: tuple[int, ...], ground: tuple[int, ...]) -> None:
    left, right = MARGIN, MARGIN + 100
    draw.rectangle((left, top, right, bottom), ink)
    draw.rectangle((left + 5, top + 5, right - 5, bottom - 5), ground)
    draw.ellipse((right - 32, top + 11, right - 18, top + 25), ink)
    draw.polygon([(left + 5, bottom - 5), (left + 38, top + 16), (left + 72, bottom - 5)], ink)


def _bars(draw: ImageDraw.ImageDraw, top: int, bottom: int, ink: tuple[int, ...]) -> None:
    for number, height in enumerate((1.0, 0.55, 0.8, 0.4, 0.65)):
        left = MARGIN + number * 30
        draw.rectangle((left, bottom - height * (bottom - top), left + 20, bottom), ink)


def main() -> None:
    """The command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for workflow in WORKFLOWS:
        path = FOLDER / f"{workflow.name}.jpg"
        thumbnail(workflow).save(path, quality=88, optimize=True)
        print(path)


if __name__ == "__main__":
    main()
