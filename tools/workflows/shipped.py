"""All shipped workflows, in the order of the template browser."""

from __future__ import annotations

from .families import (
    cogvideox_object_removal,
    flux_text_to_image,
    hunyuanvideo15_text_to_video,
    ltx_text_to_video,
    mochi_text_to_video,
    sd35_text_to_image,
    wan21_text_to_video,
    wan22_image_to_video,
    wan22_text_to_video,
)
from .showcases import calibrate_then_render, compare_with_full_precision, demo_model

WORKFLOWS = (
    wan22_text_to_video,
    wan22_image_to_video,
    wan21_text_to_video,
    hunyuanvideo15_text_to_video,
    ltx_text_to_video,
    mochi_text_to_video,
    cogvideox_object_removal,
    flux_text_to_image,
    sd35_text_to_image,
    demo_model,
    calibrate_then_render,
    compare_with_full_precision,
)
