"""The nodes of the pack; their inputs are in `comfy_sage2.comfyui.nodes.schemas`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image

from comfy_sage2.comfyui.hooks.prompt import running_extra, running_prompt
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.inputs import read_inputs
from comfy_sage2.comfyui.node_status import EARLIER, REPORT, Badge, node_status
from comfy_sage2.comfyui.nodes import schemas
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.badge import badge
from comfy_sage2.comfyui.report.picture import draw
from comfy_sage2.comfyui.report.text import advice, is_earlier, report, status
from comfy_sage2.comfyui.settings import Settings


class SageAttention2(io.ComfyNode):
    """Gives a copy of a model quantized attention."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.sage_attention_2()

    @classmethod
    def validate_inputs(cls, mode: Any = None, sparse: Any = None) -> bool:
        """ComfyUI does not check the inputs named here, so that an unknown choice becomes the default."""
        return True

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        values, notes = read_inputs(cls, inputs)
        model, options = values.pop("model"), values.pop("options", None)
        node_id = cls.hidden.unique_id

        def say(text: str, badge: Badge) -> None:
            node_status.publish("SageAttention2", node_id, running_extra(), running_prompt(), text, badge)

        def measuring(finished: int, rounds: int) -> None:
            say("", Badge(f"measuring {finished}/{rounds}"))

        patched = patch_model(model, (options or Settings()).with_inputs(values, notes), measuring)
        session = sessions_of(patched)[-1]
        session.publish_status = lambda: say(advice(session), badge(session))
        session.publish_status()
        return io.NodeOutput(patched, ui={"text": [status(session)]})


class SageAttention2Options(io.ComfyNode):
    """The options of *SageAttention2* that few need."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.sage_attention_2_options()

    @classmethod
    def validate_inputs(
        cls,
        apply_to: Any = None,
        when: Any = None,
        rotate: Any = None,
        backend: Any = None,
        start_percent: Any = None,
        end_percent: Any = None,
    ) -> bool:
        """As in `SageAttention2`. A share that another node gives is None.

        Raises ValueError for invalid shares: if it returned a text, ComfyUI would report an error for each input.
        """
        inputs = {"start_percent": start_percent, "end_percent": end_percent}
        shares = {name: share for name, share in inputs.items() if share is not None}
        if all(isinstance(share, (int, float)) and -1e9 < share < 1e9 for share in shares.values()):
            Settings(**shares)  # else `execute` reports the share that is no number
        return True

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        settings = Settings().with_inputs(*read_inputs(cls, inputs))
        return io.NodeOutput(settings, ui={"text": ["\n".join(settings.notes)]} if settings.notes else None)


class SageAttention2Report(io.ComfyNode):
    """Reports what the last sampling with a model did."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schemas.sage_attention_2_report()

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        values, notes = read_inputs(cls, inputs)
        sessions = sessions_of(values["model"])
        run, wants_quality = running_prompt(), values.get("measure_quality", False)
        text = "\n".join((report(sessions, run, wants_quality=wants_quality), *notes))
        words = EARLIER if is_earlier(sessions, run) else Badge("")
        node_status.publish(REPORT, cls.hidden.unique_id, cls.hidden.extra_pnginfo, run, text, words)
        passed = [values.get(name) for name in ("samples", "images")]
        card, chart = map(_as_image, draw(sessions, run))
        return io.NodeOutput(
            *(ExecutionBlocker(None) if value is None else value for value in passed),
            text,
            chart,
            ui={**ui.PreviewImage(card, cls=cls).as_dict(), "text": [text]},
        )


NODES: list[type[io.ComfyNode]] = [SageAttention2, SageAttention2Options, SageAttention2Report]


def _as_image(picture: Image.Image) -> torch.Tensor:
    """A picture in ComfyUI's format: (1, height, width, 3), float32 from 0 to 1."""
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]
