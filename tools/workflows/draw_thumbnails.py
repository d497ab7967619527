"""Draw the thumbnails workflows/*.jpg: a scene for each model, framed by what the workflow makes of it.

python -m tools.workflows.draw_thumbnails

The template browser writes the title below a square picture, so the picture has no text. A film has perforated edges, a
workflow that starts from pictures shows them in its corner, and one that changes a picture shows both halves.
"""

from __future__ import annotations

import argparse
import colorsys
import math
import random
from collections.abc import Callable, Sequence

from PIL import Image, ImageDraw

from .make_workflows import FOLDER
from .shipped import WORKFLOWS, Workflow

SIDE = 400  # pixels; the template browser shows about 260
FAMILIES = list(dict.fromkeys(workflow.family for workflow in WORKFLOWS))
_WHITE, _BLACK = (248, 248, 244), (18, 18, 20)

Color = tuple[int, int, int]


def _color(hue: float, lightness: float, saturation: float) -> Color:
    red, green, blue = colorsys.hls_to_rgb(hue % 1.0, lightness, saturation)
    return round(red * 255), round(green * 255), round(blue * 255)


def _mixed(first: Color, second: Color, share: float) -> Color:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


class _Scene:
    """A landscape in the colors of a family: sky, light, and ground of one of several kinds."""

    def __init__(self, family: str, *, night: bool = False, has_light: bool = True) -> None:
        number = FAMILIES.index(family)
        self._hue = number * 0.618034 % 1.0  # families that follow each other get hues far apart
        self._random = random.Random(number)
        self._night = night
        self.image = Image.new("RGB", (SIDE, SIDE))
        self._draw = ImageDraw.Draw(self.image)
        self._sky()
        self.light = (SIDE * self._random.uniform(0.25, 0.75), SIDE * self._random.uniform(0.2, 0.38))
        if has_light:
            self.disk(self.light, SIDE * 0.09)
        grounds: Sequence[Callable[[], None]] = (self._ridges, self._sea, self._city, self._forest, self._dunes)
        grounds[number % len(grounds)]()

    def _shade(self, lightness: float, shift: float = 0.0, saturation: float = 0.55) -> Color:
        return _color(self._hue + shift, lightness * (0.4 if self._night else 1.0), saturation)

    def _sky(self) -> None:
        high, low = self._shade(0.42), self._shade(0.82, 0.09, 0.8)
        for row in range(SIDE):
            self._draw.line((0, row, SIDE, row), _mixed(high, low, min(row / (SIDE * 0.7), 1.0)))

    def disk(self, center: tuple[float, float], radius: float, share: float = 1.0) -> None:
        """A sun; share: how much of it is seen through the sky."""
        x, y = center
        sky = self.image.getpixel((round(x), round(y)))
        assert isinstance(sky, tuple)
        ground = (int(sky[0]), int(sky[1]), int(sky[2]))
        for ring in range(8, 0, -1):  # the glow around it
            glow = radius * (1 + ring * 0.12)
            self._draw.ellipse(
                (x - glow, y - glow, x + glow, y + glow), _mixed(ground, _WHITE, share * 0.05 * (9 - ring))
            )
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), _mixed(ground, _WHITE, share))

    def _area_below(self, height: Callable[[float], float], fill: Color) -> None:
        edge = [(x, height(x / SIDE) * SIDE) for x in range(0, SIDE + 4, 4)]
        self._draw.polygon([(0, SIDE), *edge, (SIDE, SIDE)], fill)

    def _waves(self, level: float, size: float, roughness: Sequence[int]) -> Callable[[float], float]:
        phases = [
            (count, self._random.uniform(0, math.tau), size / (1 + place)) for place, count in enumerate(roughness)
        ]
        return lambda x: level + sum(part * math.sin(count * x * 3 + phase) for count, phase, part in phases)

    def _ridges(self) -> None:
        for layer in range(4):
            height = self._waves(0.5 + layer * 0.13, 0.07, (1, 3, 7, 13))
            self._area_below(height, self._shade(0.58 - layer * 0.13, 0.03 * layer))

    def _dunes(self) -> None:
        for layer in range(4):
            self._area_below(
                self._waves(0.58 + layer * 0.11, 0.06, (1, 2)), self._shade(0.62 - layer * 0.11, 0.5, 0.45)
            )

    def _sea(self) -> None:
        top = round(SIDE * 0.56)
        for row in range(top, SIDE):
            depth = (row - top) / (SIDE - top)
            self._draw.line((0, row, SIDE, row), _mixed(self._shade(0.6), self._shade(0.2), depth))
        for row in range(top + 6, SIDE, 9):  # the light on the waves
            half = SIDE * (0.03 + 0.12 * (row - top) / SIDE) * self._random.uniform(0.4, 1.0)
            x = self.light[0] + self._random.uniform(-8, 8)
            self._draw.rectangle((x - half, row, x + half, row + 2), self._shade(0.85, 0.09, 0.7))

    def _city(self) -> None:
        for layer, shade in enumerate((0.5, 0.34, 0.2)):
            x = -10.0
            while x < SIDE:
                width = self._random.uniform(26, 60)
                top = SIDE * (self._random.uniform(0.4, 0.62) + layer * 0.14)
                self._draw.rectangle((x, top, x + width, SIDE), self._shade(shade))
                if layer:
                    self._windows(x, top, width)
                x += width + 3

    def _windows(self, left: float, top: float, width: float) -> None:
        for row in range(round(top) + 8, SIDE - 6, 14):
            for column in range(round(left) + 6, round(left + width) - 8, 11):
                if self._random.random() < 0.4:
                    self._draw.rectangle((column, row, column + 4, row + 6), _color(0.13, 0.72, 0.9))

    def _forest(self) -> None:
        self._area_below(self._waves(0.6, 0.05, (1, 2)), self._shade(0.72, 0.09, 0.4))
        for layer in range(3):
            for _ in range(9):
                x, foot = self._random.uniform(0, SIDE), SIDE * (0.68 + layer * 0.15)
                height = SIDE * self._random.uniform(0.16, 0.26)
                for part in range(3):  # the branches of a fir
                    top, half = foot - height * (1 - part * 0.25), height * (0.14 + part * 0.07)
                    self._draw.polygon(
                        [(x, top), (x - half, top + height * 0.45), (x + half, top + height * 0.45)],
                        self._shade(0.4 - layer * 0.11, 0.04 * layer),
                    )


def _demo_scene(family: str) -> Image.Image:
    """A star and a square over a checkered floor, as in the demo model's videos."""
    image = Image.new("RGB", (SIDE, SIDE), (70, 110, 200))
    draw = ImageDraw.Draw(image)
    for row in range(8):
        for column in range(8):
            shade = (60, 90, 190) if (row + column) % 2 else (150, 180, 240)
            draw.rectangle((column * 50, row * 50, column * 50 + 49, row * 50 + 49), shade)
    points = [
        (SIDE * (0.36 + radius * math.cos(angle)), SIDE * (0.4 + radius * math.sin(angle)))
        for turn in range(10)
        for radius, angle in [((0.24, 0.1)[turn % 2], math.tau * turn / 10 - math.tau / 4)]
    ]
    draw.polygon(points, _WHITE)
    for stripe in range(6):
        top = 230 + stripe * 22
        draw.rectangle((230, top, 350, top + 22), (200, 40, 40) if stripe % 2 == 0 else (240, 150, 140))
    return image


def _film(image: Image.Image) -> None:
    draw = ImageDraw.Draw(image)
    for left in (0, SIDE - 34):
        draw.rectangle((left, 0, left + 34, SIDE), _BLACK)
        for top in range(10, SIDE, 36):
            draw.rounded_rectangle((left + 9, top, left + 25, top + 20), 4, _WHITE)


def _corner_picture(image: Image.Image, picture: Image.Image, place: int = 0) -> None:
    """A photo in the lower left corner; place: how many lie left of it."""
    side = 104
    photo = Image.new("RGB", (side + 12, side + 12), _WHITE)
    photo.paste(picture.resize((side, side)), (6, 6))
    image.paste(photo, (50 + place * (side + 22), SIDE - side - 28))


def _calibrated(image: Image.Image) -> None:
    """Layers and steps, as the report's map has them."""
    draw, errors = ImageDraw.Draw(image), random.Random(5)
    for row in range(7):
        for column in range(12):
            left, top = 44 + column * 26, 200 + row * 26
            shade = _mixed(_color(0.75, 0.2, 0.6), _color(0.14, 0.6, 0.9), errors.random() ** 3)
            draw.rectangle((left, top, left + 23, top + 23), shade)


def thumbnail(workflow: Workflow) -> Image.Image:
    """The picture of a workflow, SIDE x SIDE."""
    family, task = workflow.family, workflow.task
    if family == "Demo model":
        image = _demo_scene(family)
    else:
        scene = _Scene(family, has_light=task != "object removal")
        if task == "motion transfer":
            for place, share in enumerate((0.25, 0.45, 0.7)):
                x, y = scene.light
                scene.disk((x - (3 - place) * 46, y + (3 - place) * 12), SIDE * 0.09, share)
            scene.disk(scene.light, SIDE * 0.09)
        image = scene.image
        if task == "object removal":
            x, y = scene.light
            draw = ImageDraw.Draw(image)
            for start in range(0, 360, 30):
                draw.arc((x - 44, y - 44, x + 44, y + 44), start, start + 16, _WHITE, 4)
    if "edit" in task or family == "Compare":
        other = _Scene(family, night=family != "Compare").image
        image.paste(other.crop((SIDE // 2, 0, SIDE, SIDE)), (SIDE // 2, 0))
        ImageDraw.Draw(image).rectangle((SIDE // 2 - 2, 0, SIDE // 2 + 2, SIDE), _WHITE)
    if family == "Calibrate":
        _calibrated(image)
    if "video" in task or task in ("motion transfer", "object removal"):
        _film(image)
    if task.startswith("image to") or "reference" in task:
        _corner_picture(image, _Scene(family, has_light=False).image)
    if "reference" in task:
        _corner_picture(image, _Scene(family, night=True).image, 1)
    return image


def main() -> None:
    """The command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for workflow in WORKFLOWS:
        path = FOLDER / f"{workflow.title}.jpg"
        thumbnail(workflow).save(path, quality=88, subsampling=0, optimize=True)
        print(path)


if __name__ == "__main__":
    main()
