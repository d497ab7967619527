"""What the node modules share: inputs and schemas that every served ComfyUI version takes, and the import's failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from comfy_api.latest import io

log = logging.getLogger("comfy_sage2")

Execute = TypeVar("Execute", bound=Callable[..., io.NodeOutput])

CATEGORY = "model_patches/attention"
POLICY = io.Custom("SAGEATTENTION2_POLICY")

# Choices are written out: they have to be the same on every machine, or a shared workflow would be refused, and they
# have to be there when the library cannot be imported.
BACKENDS = ["auto", "reference", "auto or reference"]
QUALITIES = ["lossless", "balanced", "fast"]
SPARSE = ["off", "lossless", "light", "medium", "strong"]
SKIP = ["off", *QUALITIES]
ROTATIONS = ["auto", "on", "off"]


def advanced(node_input: io.Input) -> io.Input:
    """Mark an input as advanced, also on versions whose constructor has no argument for it."""
    node_input.extra_dict = {**node_input.extra_dict, "advanced": True}
    return node_input


def hidden_widget(node_input: io.Input) -> io.Input:
    """Keep an input for prompts and files of earlier versions, without showing it."""
    node_input.extra_dict = {**node_input.extra_dict, "hidden": True}
    return node_input


# Inputs that several nodes have.


def quality_input(repeats: str) -> io.Input:
    """The quality target of a policy. repeats: what a change of it does not do again."""
    return io.Combo.Input(
        "quality",
        options=QUALITIES,
        default="balanced",
        tooltip="How close each layer must be to full precision.\n"
        "lossless: allows about the error that 8b has in most layers.\n"
        "balanced: as close as an average layer in 4 bits.\n"
        "fast: 4 bits wherever their error is not clearly too large.\n"
        f"After a change the node does not {repeats} again.",
    )


def cost_limit_input(percent: float, of: str) -> io.Input:
    """The time that measuring may take, by default `percent` of `of`, which is some sampling's time."""
    return advanced(
        io.Float.Input(
            "cost_limit",
            display_name="cost limit (percent)",
            default=percent,
            min=1.0,
            max=500.0,
            step=1.0,
            tooltip=f"Time that the node may take to measure, in percent of {of}. Parts that it did not measure take "
            "the most exact mode of their layer.",
        )
    )


def backend_input(*, optional: bool = False) -> io.Input:
    """Who computes the attention."""
    return advanced(
        io.Combo.Input(
            "backend",
            options=BACKENDS,
            default="auto",
            optional=optional,
            tooltip="auto: the fastest kernel for this GPU. Without one the model passes through unchanged.\n"
            "reference: the same computation in plain PyTorch on any device, for comparisons. It is slower than "
            "ComfyUI's attention.\n"
            "auto or reference: the reference only where no kernel can run.",
        )
    )


def measure_quality_input(when: str = "", *, optional: bool = False) -> io.Input:
    """Whether to compare with full precision, and at what time, where that is not always."""
    return advanced(
        io.Boolean.Input(
            "measure_quality",
            display_name="measure quality",
            default=False,
            optional=optional,
            tooltip=f"Compares a sample of every attention call with full precision{when}, for the report. Sampling "
            "is slower while it is on.",
        )
    )


def sparse_input(
    tooltip: str = "Skips the key blocks that matter least in long self-attention, from 8192 tokens on. The level "
    "limits the relative L2 error of each head on sampled rows.\n"
    "lossless: only weights that 8b rounds to zero.\n"
    "light: 0.02.\n"
    "medium: 0.05.\n"
    "strong: 0.1, which gives another video of the same prompt.\n"
    "The node chooses the blocks in every second step. With lossless it finds them in steps 4, 9, 16 and so on. "
    "Steps in between can exceed the limit. The report gives shares and errors.",
) -> io.Input:
    """How much key blocks that are left out may cost."""
    return io.Combo.Input("sparse", options=SPARSE, default="off", optional=True, tooltip=tooltip)


def rotate_input(tooltip: str, *, optional: bool = True) -> io.Input:
    """Whether queries and keys are rotated."""
    return advanced(
        io.Combo.Input(
            "rotate",
            display_name="rotate queries and keys",
            options=ROTATIONS,
            default="auto",
            optional=optional,
            tooltip=tooltip,
        )
    )


def share_input(name: str, display_name: str, default: float, tooltip: str) -> io.Input:
    """A share of a sampler's steps."""
    return advanced(
        io.Float.Input(
            name,
            display_name=f"{display_name} (share of steps)",
            default=default,
            min=0.0,
            max=1.0,
            step=0.01,
            optional=True,
            tooltip=tooltip,
        )
    )


def dense_percent_input() -> io.Input:
    """From which step on key blocks are left out."""
    return share_input(
        "dense_percent",
        "dense at first",
        0.2,
        "Share of this sampler's steps in which sparse leaves nothing out yet. With 0.2 and 20 steps these are the "
        "first 4, which decide what the video shows. Where several samplers share one schedule, each counts its own "
        "steps.",
    )


def skip_input(
    when: str = "What earlier versions had in place of sparse. The node uses it where sparse is off.",
) -> io.Input:
    """The input in whose place `sparse` came. when: it counts."""
    return advanced(
        io.Combo.Input(
            "skip",
            display_name="skip (older form of sparse)",
            options=SKIP,
            default="off",
            optional=True,
            tooltip=f"{when} It skips key blocks that it finds in steps 1, 4, 9 and so on. The level limits the "
            "relative L1 error of each head.\n"
            "lossless: only weights that 8b rounds to zero.\n"
            "balanced: 1 %.\n"
            "fast: 3 %.",
        )
    )


def schema(**options: Any) -> io.Schema:
    """A schema of those options that this ComfyUI knows: older ones have no `search_aliases` and no `is_dev_only`."""
    known = io.Schema.__dataclass_fields__
    return io.Schema(**{name: value for name, value in {"category": CATEGORY, **options}.items() if name in known})


def checked(execute: Execute) -> Execute:
    """A node's `execute`, asked only with values that its inputs can take; what another node gives may be anything."""

    @wraps(execute)
    def with_checks(cls: type[io.ComfyNode], **values: Any) -> io.NodeOutput:
        if IMPORT_ERROR is None:
            kinds = {node_input.id: str(node_input.io_type) for node_input in cls.define_schema().inputs}
            values = {name: library.checked_input(kinds[name], name, value) for name, value in values.items()}
        return execute(cls, **values)

    return with_checks  # type: ignore[return-value]


def shown_progress(node: str | None) -> Callable[[int, int], None]:
    """Shows on the node of this id how much of how much is done."""
    from comfy.utils import ProgressBar

    bar = ProgressBar(1, node_id=node)

    def progress(done: int, total: int) -> None:
        bar.update_absolute(done, max(total, 1))

    return progress


def status_of(patched: Any, kind: str, hidden: Any) -> str:
    """What the node of class `kind` that made `patched` has to say; from now on what its session publishes is kept.

    hidden: the node's hidden inputs.
    """
    session = library.sessions_of(patched)[-1]
    session.publish_status = library.node_status.publisher(kind, hidden.unique_id, hidden.extra_pnginfo)
    text: str = library.status(session)
    session.publish_status(text, session.handler.policy_text())
    return text


library: Any
try:
    from .. import api
except Exception as error:  # whatever an unusual torch or a broken copy raises must not take the nodes away
    log.exception("SageAttention2: the library could not be imported; models pass through unchanged")
    IMPORT_ERROR: str | None = f"[SA-111] comfy_sage2 could not be imported ({type(error).__name__}: {error})."
    library = None
else:
    library = api
    IMPORT_ERROR = None
PASSED_THROUGH = f"The model passed through unchanged: {IMPORT_ERROR}"
