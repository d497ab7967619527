"""The node that calibrates a model by itself and renders by the policy."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .support import (
    BACKENDS,
    CATEGORY,
    IMPORT_ERROR,
    PASSED_THROUGH,
    QUALITIES,
    advanced,
    library,
    schema,
    shown_progress,
)


class SageAttention2AutoPolicy(io.ComfyNode):
    """Calibrates a model in its first sampling and renders by the policy from then on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2AutoPolicy",
            display_name="SageAttention2 Auto Policy",
            category=CATEGORY,
            description="The first run with a model is in full precision and measured. From the next run on each layer "
            "takes the fastest mode that the quality allows. Another model, LoRA or size is measured anew.",
            search_aliases=["sage auto", "sage calibrate", "sage policy", "mixed precision", "speed up"],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model. It stays as it is; the output is a copy that calibrates itself.",
                ),
                io.Combo.Input(
                    "quality",
                    options=QUALITIES,
                    default="balanced",
                    tooltip="How close each layer must be to full precision. lossless: as close as 8b on "
                    "ordinary layers. balanced: as close as an average layer in 4 bits. fast: 4 bits unless they are "
                    "clearly too coarse. Changing this does not measure again.",
                ),
                io.String.Input(
                    "policy",
                    default="",
                    multiline=True,
                    tooltip="Empty: the node measures by itself. 'Keep in this workflow' writes the policy here: it is "
                    "stored in the workflow and taken while the kind of model fits. Empty it to measure anew.",
                ),
                advanced(
                    io.Float.Input(
                        "cost_limit",
                        default=30.0,
                        min=1.0,
                        max=500.0,
                        step=1.0,
                        tooltip="Time that measuring may take, in percent of the first run's sampling time. Layers "
                        "that were not measured take the most cautious mode.",
                    )
                ),
                advanced(
                    io.Boolean.Input(
                        "rotate",
                        default=True,
                        tooltip="Rotate queries and keys after smoothing, while measuring and rendering: closer to "
                        "full precision in every mode, for up to 3 % more attention time.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "backend",
                        options=BACKENDS,
                        default="auto",
                        tooltip="auto: the fastest kernel for this GPU; without one the model passes through "
                        "unchanged. reference: the same numerics in plain PyTorch on any device, slower than "
                        "ComfyUI's attention.",
                    )
                ),
                advanced(
                    io.Boolean.Input(
                        "measure_quality",
                        default=False,
                        tooltip="Compare a sample of every attention call with full precision while rendering, for "
                        "the report. Slows sampling down.",
                    )
                ),
                advanced(
                    io.Boolean.Input(
                        "guard",
                        default=True,
                        tooltip="Detect NaN/Inf in the attention output while rendering, and compute such calls again.",
                    )
                ),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model to sample.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Changes when the node has calibrated: the next run then renders, although its inputs are the same."""
        # ComfyUI 0.3 does not tell the id here.
        return "" if IMPORT_ERROR is not None else str(library.calibrations.made(cls.hidden.unique_id))

    @classmethod
    def execute(
        cls,
        model: Any,
        quality: str,
        policy: str,
        cost_limit: float,
        rotate: bool,
        backend: str,
        measure_quality: bool,
        guard: bool,
    ) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        node = str(cls.hidden.unique_id)
        settings = library.Settings.of_workflow(
            rotate=rotate,
            backend=backend,
            measure_quality=measure_quality,
            guard=guard,
            when=library.WHERE_FASTER,
        )
        patched = library.auto_model(
            model,
            settings,
            node=node,
            quality=quality,
            kept=policy,
            cost_limit=cost_limit / 100.0,
            progress=shown_progress(node),
        )
        session = library.sessions_of(patched)[-1]
        session.tell = library.board.teller("SageAttention2AutoPolicy", node, cls.hidden.extra_pnginfo)
        status = library.status(session)
        session.tell(status)
        return io.NodeOutput(patched, ui={"text": [status], "policy": [library.policy_text(patched)]})
