"""The node that calibrates a model by itself and renders by the policy."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .support import (
    IMPORT_ERROR,
    PASSED_THROUGH,
    advanced,
    backend_input,
    checked,
    cost_limit_input,
    dense_percent_input,
    library,
    measure_quality_input,
    quality_input,
    rotate_input,
    schema,
    shown_progress,
    skip_input,
    sparse_input,
    status_of,
)


class SageAttention2AutoPolicy(io.ComfyNode):
    """Calibrates a model in its first sampling and renders by the policy from then on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2AutoPolicy",
            display_name="SageAttention2 Auto Policy",
            description="The first run with a model is in full precision and measured. From the next run on each layer "
            "takes the fastest mode that the quality allows. If you change the model, a LoRA or the size, the node "
            "measures again.",
            search_aliases=["sage auto", "sage calibrate", "sage policy", "mixed precision", "speed up"],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model. It is not changed. The output is a copy that calibrates itself.",
                ),
                quality_input("measure"),
                io.String.Input(
                    "policy",
                    default="",
                    multiline=True,
                    tooltip="Empty: the node measures by itself. 'Keep in this workflow' writes the policy here. The "
                    "workflow then stores it, and the node uses it while the kind of model fits. Empty it to measure "
                    "again.",
                ),
                cost_limit_input(30.0, "the first run's sampling time"),
                rotate_input(
                    "Mixes the channels of queries and keys before quantization, while measuring and rendering.\n"
                    "auto: in the attention heads that get closer to full precision by it.\n"
                    "on: in all heads.\n"
                    "off: in none.",
                    optional=False,
                ),
                backend_input(),
                measure_quality_input(" while rendering"),
                advanced(
                    io.Boolean.Input(
                        "guard",
                        default=True,
                        tooltip="Looks for NaN and infinity in the attention's output while rendering, and computes "
                        "such calls again.",
                    )
                ),
                skip_input(),
                sparse_input(),
                dense_percent_input(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model to sample.")],
        )

    @classmethod
    def validate_inputs(cls, rotate: Any = None) -> bool:
        """ComfyUI does not check rotate, which was true or false before: older workflows have that."""
        return True

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Changes when the node has calibrated: the next run then renders, although its inputs are the same."""
        if IMPORT_ERROR is not None:
            return ""
        # ComfyUI 0.3 does not tell the id here, and none tells the workflow. With it a node of the same number in
        # another tab is another node, whose output is not taken from the cache.
        workflow = library.running_workflow()
        return f"{workflow} {library.calibrations.made(cls.hidden.unique_id, workflow)}"

    @classmethod
    @checked
    def execute(
        cls,
        model: Any,
        quality: str,
        policy: str,
        cost_limit: float,
        **options: Any,  # of `Settings`, whose defaults hold where a prompt was saved without one
    ) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        node = str(cls.hidden.unique_id)
        settings = library.Settings.of_workflow(when=library.WHERE_FASTER, **options)
        patched = library.auto_model(
            model,
            settings,
            node=(library.workflow_of(cls.hidden.extra_pnginfo) or "", node),
            quality=quality,
            kept=policy,
            cost_limit=cost_limit / 100.0,
            progress=shown_progress(node),
        )
        status = status_of(patched, "SageAttention2AutoPolicy", cls.hidden)
        return io.NodeOutput(patched, ui={"text": [status], "policy": [library.policy_text(patched)]})
