"""The chart's colors, computed in OKLab, where equal distances look equal.

Colors that have to be told apart differ in lightness or along blue and yellow: most color-blind readers see both.
"""

from __future__ import annotations

import math

import numpy as np

Color = tuple[int, int, int]

# OKLab by Björn Ottosson's definition (2020): linear sRGB to the eye's cones, and the cones' cube roots to lightness
# and the axes green to red, blue to yellow.
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def oklab(lightness: float, chroma: float, hue: float) -> np.ndarray:
    """The OKLab coordinates of a color; `hue` in degrees."""
    angle = math.radians(hue)
    return np.array([lightness, chroma * math.cos(angle), chroma * math.sin(angle)])


def srgb(lab: np.ndarray) -> np.ndarray:
    """OKLab colors, (..., 3), as sRGB bytes; what no screen shows is clipped."""
    cones = (np.asarray(lab) @ np.linalg.inv(_TO_LAB).T) ** 3
    linear = np.clip(cones @ np.linalg.inv(_TO_CONES).T, 0.0, 1.0)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    rounded: np.ndarray = np.round(255.0 * encoded).astype(np.uint8)
    return rounded


def color(lightness: float, chroma: float = 0.0, hue: float = 0.0) -> Color:
    """The color for Pillow."""
    red, green, blue = (int(value) for value in srgb(oklab(lightness, chroma, hue)))
    return red, green, blue


BACKGROUND = color(0.22, 0.010, 265)
PANEL = color(0.27, 0.012, 265)
EMPTY = color(0.33, 0.015, 265)
FAINT = color(0.74, 0.015, 265)
TEXT = color(0.95, 0.005, 265)
# One for each way to serve a call: blues, greens and a violet; and for the reasons to leave one, orange, yellow, brown.
# Found by search: the least distance of two of them, also as protanopes, deuteranopes and tritanopes see them, is 0.1.
SERVED = tuple(
    color(*place)
    for place in (
        (0.74, 0.14, 230),
        (0.92, 0.09, 190),
        (0.80, 0.04, 150),
        (0.68, 0.04, 150),
        (0.50, 0.14, 310),
        (0.56, 0.04, 190),
    )
)
LEFT = (color(0.74, 0.14, 85), color(0.86, 0.14, 100), color(0.50, 0.14, 40))
# Errors: a straight line in OKLab from dark blue to light yellow, and white for NaN and infinity.
_NO_ERROR, _LARGEST_ERROR = oklab(0.38, 0.11, 265), oklab(0.92, 0.15, 100)
BROKEN: Color = (255, 255, 255)


def ramp(shares: np.ndarray) -> np.ndarray:
    """The colors of errors, given as shares 0 to 1 of the scale's end: (..., 3) bytes; BROKEN where not finite."""
    shares = np.asarray(shares, dtype=np.float64)
    finite = np.isfinite(shares)
    place = np.clip(np.where(finite, shares, 0.0), 0.0, 1.0)[..., None]
    colors = srgb(_NO_ERROR + place * (_LARGEST_ERROR - _NO_ERROR))
    return np.where(finite[..., None], colors, np.array(BROKEN, dtype=np.uint8))
