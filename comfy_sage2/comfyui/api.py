"""All that the nodes call, in one place: they import this module or, when that fails, say why."""

# ruff: noqa: F401

from ..options import rotation_of
from ..policy.document import to_text
from ..policy.files import fingerprint, load_policy, save_policy
from .hooks.prompt import running_prompt, running_workflow
from .hooks.sampling import sessions_of
from .inputs import checked_input
from .node_status import add_route, node_status, workflow_of
from .patch import auto_model, calibrated_model, patch_model, policy_of, policy_text
from .ready import ready_line
from .report.picture import draw
from .report.text import report, status
from .session.auto_policy import calibrations
from .settings import WHERE_FASTER, Settings
