"""All that the nodes call, in one place: they import this module or, when that fails, say why."""

from ..capture.recorder import CaptureBounds
from ..options import rotation_of
from ..policy.document import to_text
from ..policy.files import fingerprint, load_policy, save_policy
from .hooks.prompt import running_prompt
from .hooks.sampling import sessions_of
from .inputs import checked_input
from .node_status import add_route, node_status
from .patch import auto_model, calibrated_model, captured_model, patch_model, policy_of, policy_text, save_capture
from .report.chart import draw_card, draw_chart
from .report.text import report, status
from .session.auto_policy import calibrations
from .settings import WHERE_FASTER, Settings, reason_against_steps

__all__ = [
    "CaptureBounds",
    "Settings",
    "WHERE_FASTER",
    "add_route",
    "auto_model",
    "node_status",
    "calibrated_model",
    "calibrations",
    "captured_model",
    "checked_input",
    "draw_card",
    "draw_chart",
    "fingerprint",
    "load_policy",
    "patch_model",
    "policy_of",
    "policy_text",
    "reason_against_steps",
    "report",
    "rotation_of",
    "running_prompt",
    "save_capture",
    "save_policy",
    "sessions_of",
    "status",
    "to_text",
]
