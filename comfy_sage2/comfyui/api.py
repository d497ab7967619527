"""All that the nodes call, in one place: they import this module or, when that fails, say why."""

from ..capture.recorder import CaptureBounds
from ..policy.document import to_text
from ..policy.files import fingerprint, load_policy, save_policy
from .patch import calibrated_model, captured_model, patch_model, policy_of, save_capture
from .report.chart import draw_chart
from .report.text import report, status
from .sampling import sessions_of
from .settings import Settings

__all__ = [
    "CaptureBounds",
    "Settings",
    "calibrated_model",
    "captured_model",
    "draw_chart",
    "fingerprint",
    "load_policy",
    "patch_model",
    "policy_of",
    "report",
    "save_capture",
    "save_policy",
    "sessions_of",
    "status",
    "to_text",
]
