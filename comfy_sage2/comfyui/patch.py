"""Installing a node's attention on a copy of a ComfyUI model."""

from __future__ import annotations

from typing import Any

from ..capture.recorder import CaptureBounds
from .call.override import make_override
from .observe.calibration import Calibration, Progress
from .observe.capture import Capture
from .sampling import APPLY_MODEL, OUTER_SAMPLE, WRAPPER_KEY, forward_wrapper, sampling_wrapper, sessions_of
from .serve.planning import plan_for, signature_of, usual_mode
from .serve.selection import Selection, probe
from .serve.session import Override, Session
from .settings import Settings

OVERRIDE = "optimized_attention_override"


def calibrated_model(model: Any, cost_limit: float, progress: Progress) -> Any:
    """A clone of `model` whose next sampling is measured.

    cost_limit: the share of the sampling's time, 0 to 1, that measuring may take. progress: is told how far it is.
    """
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    calibration = Calibration(
        signature_of(patched), cost_limit, len(sessions_of(patched)), _in_full_precision(options), progress
    )
    patched.add_wrapper_with_key(OUTER_SAMPLE, WRAPPER_KEY, sampling_wrapper(calibration))
    _install(patched, calibration)
    return patched


def captured_model(model: Any, bounds: CaptureBounds) -> Any:
    """A clone of `model` of whose next sampling some attention calls are kept, within `bounds`."""
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    capture = Capture(bounds, len(sessions_of(patched)), _in_full_precision(options))
    patched.add_wrapper_with_key(OUTER_SAMPLE, WRAPPER_KEY, sampling_wrapper(capture))
    _install(patched, capture)
    return patched


def patch_model(model: Any, settings: Settings) -> Any:
    """A clone of `model` (ComfyUI's ModelPatcher) whose attention follows `settings`.

    The clone's session says whether it is idle and why. An idle clone has no override: sampling runs exactly as without
    the node. It keeps the wrapper of the sampling, so that a model compiled with the override is compiled anew and the
    report can say why nothing ran. Raises ValueError when the settings' policy does not fit the model.
    """
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    expected = Selection(None, "mode is off")
    if settings.mode != "off":
        expected = probe(patched.load_device, settings.backend, usual_mode(settings))
    plan = plan_for(settings, expected, patched)
    session = Session(settings, expected, len(sessions_of(patched)), options.get(OVERRIDE), plan)
    patched.add_wrapper_with_key(OUTER_SAMPLE, WRAPPER_KEY, sampling_wrapper(session))
    if session.idle_reason is None:
        _install(patched, session)
    return patched


def _in_full_precision(options: dict[str, Any]) -> Override | None:
    """The override in `options`, under those of this pack: what is measured and kept is not to be quantised already."""
    previous = options.get(OVERRIDE)
    while (session := getattr(previous, "session", None)) is not None:
        previous = session.previous
    return previous


def _install(patched: Any, session: Session) -> None:
    """Have `session` asked for every attention call of `patched`, and told about every pass."""
    patched.add_wrapper_with_key(APPLY_MODEL, WRAPPER_KEY, forward_wrapper(session))
    patched.model_options["transformer_options"][OVERRIDE] = make_override(session)
