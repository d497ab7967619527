"""All that the nodes call, in one place: they import this module or, when that fails, say why."""

from ..capture.recorder import CaptureBounds
from ..policy.document import to_text
from .observe.capture import save_capture
from .patch import calibrated_model, captured_model, patch_model
from .policies import fingerprint, policy_of
from .policy_files import load_policy, policies_folder, save_policy
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
    "policies_folder",
    "policy_of",
    "report",
    "save_capture",
    "save_policy",
    "sessions_of",
    "status",
    "to_text",
]
