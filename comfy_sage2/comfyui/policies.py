"""The steps between the policy nodes and the policy package."""

from __future__ import annotations

import hashlib
from typing import Any

from ..policy.calibrated import make_policy
from ..policy.policy import Policy
from .observe.calibration import Calibration
from .policy_files import policies_folder, read_policy_text
from .report.calibration import calibration_report
from .sampling import sessions_of


def policy_of(model: Any, quality: str) -> tuple[Policy, str]:
    """The policy for `quality` from the last sampling with `model` (ComfyUI's ModelPatcher), and a report of it.

    Raises ValueError when the model was not calibrated, or nothing was measured.
    """
    calibrations = [session for session in sessions_of(model) if isinstance(session, Calibration)]
    if not calibrations:
        raise ValueError("this model was not calibrated: connect the model output of SageAttention2 Calibrate")
    calibration = calibrations[-1]
    policy = make_policy(calibration.signature, quality, calibration.head_dims, calibration.measurements)
    return policy, "\n".join((calibration_report(calibration), *policy.reasoning(0, 0)))


def fingerprint(text: str, file: str) -> str:
    """Changes when the policy that `text` or `file` names does; a file that cannot be read is the node's to report."""
    if not file.strip():
        return text
    try:
        content = read_policy_text(policies_folder(), file)
    except (OSError, ValueError):
        return file
    return hashlib.sha256(content.encode()).hexdigest()
