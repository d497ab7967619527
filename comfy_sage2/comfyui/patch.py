"""Installing a node's attention on a copy of a ComfyUI model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..timing.measure import ensure_timed
from ..timing.rounds import Progress, unseen
from .adapter.attention_call import OVERRIDE
from .adapter.declared_attention import declared_layers
from .adapter.packs import own_is_torchs
from .hooks import sampling
from .hooks.override import make_override
from .hooks.prompt import notes_on_others
from .session.dispatcher import Dispatcher, probe, with_backend
from .session.session import Session, log
from .settings import Settings


def patch_model(model: Any, settings: Settings, measuring: Progress = unseen) -> Any:
    """A clone of `model` (ComfyUI's ModelPatcher) whose attention follows `settings`. If idle, its session says why.

    An idle clone has no override: sampling runs exactly as without the node. It keeps the wrapper of the sampling, so
    that a model compiled with the override is compiled again. measuring: called while the GPU is timed.
    """
    device = model.load_device
    if settings.mode != "off":
        ensure_timed(device, measuring)
    settings = with_backend(device, settings)
    expected = probe(device, settings)
    settings = replace(settings, notes=(*settings.notes, *notes_on_others()))
    for note in settings.notes:
        log.warning("SageAttention2: %s", note)
    previous = model.model_options.get("transformer_options", {}).get(OVERRIDE)
    dispatcher = Dispatcher(
        settings,
        expected,
        device=device,
        is_first=previous is None,
        own_is_torchs=previous is None and own_is_torchs(),
    )
    patched = model.clone()
    session = Session(dispatcher, len(sampling.sessions_of(patched)), previous)
    session.declared = declared_layers(model.model, getattr(model, "object_patches", {}))
    patched.add_wrapper_with_key(sampling.OUTER_SAMPLE, sampling.WRAPPER_KEY, sampling.sampling_wrapper(session))
    if dispatcher.idle_reason is None:
        patched.add_wrapper_with_key(sampling.PREDICT_NOISE, sampling.WRAPPER_KEY, sampling.evaluation_wrapper(session))
        patched.add_wrapper_with_key(sampling.APPLY_MODEL, sampling.WRAPPER_KEY, sampling.pass_wrapper(session))
        patched.model_options.setdefault("transformer_options", {})[OVERRIDE] = make_override(session)
    return patched
