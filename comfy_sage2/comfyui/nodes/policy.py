"""The nodes that measure a model's layers and keep the outcome as a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from .support import (
    IMPORT_ERROR,
    PASSED_THROUGH,
    POLICY,
    advanced,
    checked,
    cost_limit_input,
    library,
    quality_input,
    rotate_input,
    schema,
    shown_progress,
    skip_input,
    sparse_input,
)

FILE_TOOLTIP = "in ComfyUI's folder user/comfy_sage2/policies, without .json."


def policies_folder() -> Path:
    """Where policies are kept, in ComfyUI's user folder."""
    return Path(folder_paths.get_user_directory()) / "comfy_sage2" / "policies"


class SageAttention2Calibrate(io.ComfyNode):
    """Has the next sampling measured, layer by layer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2Calibrate",
            display_name="SageAttention2 Calibrate",
            description="The next sampling runs in full precision and measures the error of each mode in each layer. "
            "SageAttention2 Make Policy turns the result into a policy.",
            search_aliases=["sage calibrate", "measure attention", "mixed precision"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model with its LoRAs, as it will be sampled. It stays as it is.",
                ),
                cost_limit_input(15.0, "the sampling time"),
                rotate_input(
                    "Measures with queries and keys rotated in the attention heads that get closer to full precision "
                    "by it (auto), in all heads or in none. Choose the same as on the SageAttention2 node that will "
                    "use the policy.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="The model to sample. Connect it to SageAttention2 Make Policy too.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, rotate: Any = None) -> bool:
        """ComfyUI does not check rotate, which was true or false before: older workflows have that."""
        return True

    @classmethod
    @checked
    def execute(cls, model: Any, cost_limit: float, rotate: str | bool = "off") -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        progress = shown_progress(cls.hidden.unique_id)
        patched = library.calibrated_model(model, cost_limit / 100.0, progress, rotate=library.rotation_of(rotate))
        return io.NodeOutput(patched, ui={"text": [library.status(library.sessions_of(patched)[-1])]})


class SageAttention2MakePolicy(io.ComfyNode):
    """Makes a policy from a calibration."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2MakePolicy",
            display_name="SageAttention2 Make Policy",
            description="After sampling with SageAttention2 Calibrate: chooses the fastest mode that the quality "
            "allows, for each layer and each part of the steps.",
            search_aliases=["sage policy", "save policy"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="SageAttention2 Calibrate's output, or a model made from it."),
                io.Latent.Input(
                    "samples",
                    optional=True,
                    tooltip="The sampler's output. Connect it so that this node runs after sampling.",
                ),
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="The decoded images. They may be connected in place of samples.",
                ),
                quality_input("sample"),
                io.String.Input(
                    "file",
                    default="",
                    tooltip="Name under which to save the policy, " + FILE_TOOLTIP + " Empty: not saved.",
                ),
                skip_input(
                    "The older form of sparse. The node writes it into the policy, where it counts if sparse is off."
                ),
                advanced(
                    sparse_input(
                        "The node writes this level into the policy. SageAttention2 uses it where its own sparse and "
                        "skip are off. Calibrate did not measure with it."
                    )
                ),
            ],
            outputs=[
                POLICY.Output(display_name="policy", tooltip="The policy, for SageAttention2."),
                io.String.Output(display_name="text", tooltip="The policy as JSON, for SageAttention2 Load Policy."),
            ],
        )

    @classmethod
    @checked
    def execute(
        cls,
        model: Any,
        quality: str,
        file: str,
        samples: Any = None,
        images: Any = None,
        skip: str = "off",
        sparse: str = "off",
    ) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            blocked = ExecutionBlocker(None)
            return io.NodeOutput(blocked, blocked, ui={"text": [IMPORT_ERROR]})
        policy, found = library.policy_of(model, quality, skip, sparse)
        text = library.to_text(policy)
        if file.strip():
            path = library.save_policy(policy, policies_folder(), file)
            found += f"\nSaved as {path.stem}."
        return io.NodeOutput(policy, text, ui={"text": [found], "policy": [text]})


class SageAttention2LoadPolicy(io.ComfyNode):
    """A policy from the workflow or from a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2LoadPolicy",
            display_name="SageAttention2 Load Policy",
            description="A policy that was made earlier, stored in the workflow or in a file.",
            search_aliases=["sage policy"],
            inputs=[
                io.String.Input(
                    "text",
                    default="",
                    multiline=True,
                    tooltip="The policy as JSON. It is stored in the workflow and travels with it.",
                ),
                io.String.Input(
                    "file",
                    default="",
                    tooltip="Name of a policy, in place of the text, " + FILE_TOOLTIP,
                ),
            ],
            outputs=[POLICY.Output(display_name="policy", tooltip="The policy, for SageAttention2.")],
        )

    @classmethod
    def fingerprint_inputs(cls, text: str | None, file: str | None) -> str:
        """A file that was written anew is read anew; an input that another node gives is not known yet."""
        return "" if IMPORT_ERROR is not None else library.fingerprint(policies_folder(), text or "", file or "")

    @classmethod
    @checked
    def execute(cls, text: str, file: str) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(None, ui={"text": [IMPORT_ERROR]})
        policy = library.load_policy(policies_folder(), text, file)
        return io.NodeOutput(policy, ui={"text": ["\n".join(policy.reasoning(0, 0))]})
