"""Installing a node's attention on a copy of a ComfyUI model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..autotune.store import choices_of
from ..options import ROTATIONS, check_choice
from ..policy.calibrated import COMPUTE_ALL, SKIP, SPARSE, Policy
from ..policy.document import from_text
from ..policy.rules import RuleSelector
from ..policy.selector import FixedSelector, ModeSelector
from ..policy.targets import check_target
from ..timing.measure import ensure_timed
from .adapter.attention_call import OVERRIDE, Override
from .adapter.declared_attention import declared_layers
from .adapter.packs import inexact, own_is_torchs
from .hooks.override import make_override
from .hooks.prompt import notes_on_others
from .hooks.sampling import (
    APPLY_MODEL,
    OUTER_SAMPLE,
    PREDICT_NOISE,
    WRAPPER_KEY,
    evaluation_wrapper,
    pass_wrapper,
    sampling_wrapper,
    sessions_of,
)
from .report.text import session_report
from .session.auto_policy import AutoPolicy, NodeKey
from .session.calibration import Calibration, Progress
from .session.dispatcher import Dispatcher, probe, with_backend
from .session.faster_peers import notes_on_peers
from .session.handler import Handler
from .session.record import Decision
from .session.session import Session, log
from .session.subject import identity_of, signature_of
from .settings import Settings

# That an automatic calibration may take of a sampling that is over in no time: it is made once.
LEAST_SECONDS = 2.0


def patch_model(model: Any, settings: Settings) -> Any:
    """A clone of `model` (ComfyUI's ModelPatcher) whose attention follows `settings`.

    The clone's session says whether it is idle and why. An idle clone has no override: sampling runs exactly as without
    the node. It keeps the wrapper of the sampling, so that a model compiled with the override is compiled anew and the
    report can say why nothing ran. Raises ValueError when the settings' policy does not fit the model.
    """
    if settings.mode != "off":
        ensure_timed(model.load_device)
    settings = _settled(model, settings)
    expected = probe(model.load_device, settings)
    selector = _selector(settings, expected.backend or "", model)
    previous = _options(model).get(OVERRIDE)
    return with_handler(model, _dispatcher(model, previous, settings, expected, selector), previous)


def calibrated_model(model: Any, cost_limit: float, progress: Progress, *, rotate: str = "off") -> Any:
    """A clone of `model` whose next sampling is measured.

    cost_limit: the share of the sampling's time, 0 to 1, that measuring may take. progress: is told how far it is.
    rotate: of `AttentionOptions`, to measure with.
    """
    check_choice("rotate", rotate, ROTATIONS)
    ensure_timed(model.load_device)
    previous = override_before_ours(model)
    return with_handler(model, _calibration(model, previous, cost_limit, progress, rotate), previous)


def auto_model(
    model: Any,
    settings: Settings,
    *,
    node: NodeKey,
    quality: str,
    kept: str,
    cost_limit: float,
    progress: Progress,
) -> Any:
    """A clone of `model` that is measured in its first sampling, and served by the policy for `quality` afterwards.

    settings: its `policy` is not read. node: which one. kept: a policy as JSON, taken in place of what is measured
    while it fits, or "". cost_limit, progress: as in `calibrated_model`. Raises ValueError when `kept` is no policy, or
    `quality` no target.
    """
    check_target(quality)
    ensure_timed(model.load_device)
    settings = _settled(model, settings)
    expected = probe(model.load_device, settings)
    previous = override_before_ours(model)
    policy = from_text(kept) if kept.strip() else None

    def dispatch(policy: Policy | None) -> Dispatcher:
        return _dispatcher(model, previous, replace(settings, policy=policy), expected, policy)

    def calibrate() -> Calibration:
        return _calibration(model, previous, cost_limit, progress, settings.rotate, LEAST_SECONDS)

    settled = (settings.rotate, cost_limit)
    handler = AutoPolicy(node, identity_of(model), quality, policy, dispatch, calibrate, settled)
    return with_handler(model, handler, previous)


def policy_text(model: Any) -> str:
    """The policy that the *Auto Policy* node which `model` went through last would keep, as JSON, or ""."""
    for session in reversed(sessions_of(model)):
        if isinstance(session.handler, AutoPolicy):
            return session.handler.policy_text()
    return ""


def policy_of(model: Any, quality: str, skip: str = COMPUTE_ALL, sparse: str = COMPUTE_ALL) -> tuple[Policy, str]:
    """The policy for `quality` from the last sampling with `model`, and a report of it.

    skip, sparse: of SKIP and SPARSE, written into the policy; nothing is measured for them.
    Raises ValueError when the model was not calibrated, nothing was measured, or one of them is no level.
    """
    check_choice("skip", skip, SKIP)
    check_choice("sparse", sparse, SPARSE)
    for session in reversed(sessions_of(model)):
        if isinstance(session.handler, Calibration):
            policy = replace(session.handler.policy(quality), skip=skip, sparse=sparse)
            return policy, f"{session_report(session)}\n{policy.description}"
    raise ValueError("[SA-403] this model was not calibrated: connect the model output of SageAttention2 Calibrate")


def _calibration(
    model: Any, previous: Override | None, cost_limit: float, progress: Progress, rotate: str, least: float = 0.0
) -> Calibration:
    return Calibration(
        signature_of(model),
        cost_limit,
        progress,
        rotate=rotate,
        choices=choices_of(model.load_device),
        sampled_by=inexact(previous),
        least_seconds=least,
    )


def _dispatcher(
    model: Any, previous: Override | None, settings: Settings, expected: Decision, selector: ModeSelector | None
) -> Dispatcher:
    """previous: serves what the dispatcher does not, or None: ComfyUI's own attention."""
    return Dispatcher(
        settings,
        expected,
        selector,
        device=model.load_device,
        is_first=previous is None,
        own_is_torchs=previous is None and own_is_torchs(),
    )


def _settled(model: Any, settings: Settings) -> Settings:
    """`settings` with the backend that `model`'s device has, and notes on other nodes and packages; all are logged."""
    device = model.load_device
    settings = with_backend(device, settings)
    peers = notes_on_peers(device, settings, probe(device, settings).backend)
    settings = replace(settings, notes=(*settings.notes, *notes_on_others(), *peers))
    for note in settings.notes:
        log.warning("SageAttention2: %s", note)
    return settings


def with_handler(model: Any, handler: Handler, previous: Override | None) -> Any:
    """A clone of `model` in whose samplings `handler` decides, and `previous` serves what it does not."""
    patched = model.clone()
    session = Session(handler, len(sessions_of(patched)), previous)
    session.declared = declared_layers(model.model, getattr(model, "object_patches", {}))
    patched.add_wrapper_with_key(OUTER_SAMPLE, WRAPPER_KEY, sampling_wrapper(session))
    if handler.idle_reason is None:
        patched.add_wrapper_with_key(PREDICT_NOISE, WRAPPER_KEY, evaluation_wrapper(session))
        patched.add_wrapper_with_key(APPLY_MODEL, WRAPPER_KEY, pass_wrapper(session))
        patched.model_options.setdefault("transformer_options", {})[OVERRIDE] = make_override(session)
    return patched


def _options(model: Any) -> dict[str, Any]:
    options: dict[str, Any] = model.model_options.get("transformer_options", {})
    return options


def override_before_ours(model: Any) -> Override | None:
    """The override on `model` under those of this pack: what is measured and kept must not be quantized already."""
    previous: Override | None = _options(model).get(OVERRIDE)
    while (session := getattr(previous, "session", None)) is not None:
        previous = session.previous
    return previous


def _selector(settings: Settings, backend: str, model: Any) -> ModeSelector:
    """The selector of a node at work with `backend` on `model`.

    Raises ValueError, naming the differences, when the settings' policy was made for another kind of model.
    """
    if settings.policy is not None and settings.mode != "off":
        settings.policy.signature.require(signature_of(model))
        return settings.policy
    if settings.mode == "auto":
        choices = choices_of(model.load_device)
        return RuleSelector(type(model.model).__name__, backend, None if choices is None else choices.four_bits_pay())
    return FixedSelector(settings.options)
