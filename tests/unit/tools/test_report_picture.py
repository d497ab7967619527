"""The documentation's picture of a report, of a model small enough for the reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from comfy_sage2.comfyui.report.picture import HEIGHT, WIDTH, draw
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.settings import ALWAYS
from tools import report_picture


def test_the_report_is_of_all_layers_and_steps() -> None:
    sizes = report_picture.Sizes(tokens=40, text_tokens=16, layers=2, heads=2, head_dim=64, ffn=64)
    settings = replace(report_picture.SETTINGS, backend="reference", when=ALWAYS)
    session = report_picture.sampled(sizes, torch.device("cpu"), settings, steps=3)
    summary = session.record.summary()
    assert (summary.layers, summary.steps, summary.calls) == (4, 3, 12)
    assert len(summary.agreement) == 12 and summary.timed
    assert "12 of 12 attention calls computed by SageAttention2" in report([session])
    assert draw([session]).size == (WIDTH, HEIGHT)
