"""Wrappers of a sampling, its evaluations and its passes: they reset the record and track the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...timing.measure import ensure_timed
from ..adapter import packs
from ..adapter.attention_call import OVERRIDE
from ..adapter.declared_attention import declared_by
from ..adapter.layers import attention_layers
from ..adapter.model_modules import ModelModules
from ..adapter.pass_options import changes_of
from ..adapter.token_kinds import TokenKinds
from ..report.text import session_headline
from ..session.session import Session, log
from .feed_forward import slicing_without_memory
from .prompt import measures_quality, reads_times, running_prompt
from .slices import slicing
from .watcher import watching

# ComfyUI's names, written out so that this module loads without it.
OUTER_SAMPLE = "outer_sample"
PREDICT_NOISE = "predict_noise"
APPLY_MODEL = "apply_model"
DIFFUSION_MODEL = "diffusion_model"
FUNCTION_WRAPPER = "model_function_wrapper"
COMPILE_KEY = "torch.compile"
COMPILE_OPTIONS = "torch_compile_kwargs"
WRAPPER_KEY = "comfy_sage2"
_IN_A_PASS = (DIFFUSION_MODEL, "_apply_model", "process_timestep")  # what ComfyUI's model calls in a pass

# What each diffusion model was last compiled with.
_compiled_with: weakref.WeakKeyDictionary[torch.nn.Module, tuple[object, ...]] = weakref.WeakKeyDictionary()


def sampling_wrapper(session: Session) -> Callable[..., Any]:
    """A wrapper of ComfyUI's outermost sampling function; `sessions_of` reads its `session`.

    A nested sampling of the same model ends the record of the outer one, whose rest is recorded as another sampling.
    """
    running: list[Callable[[], None]] = []  # for each running sampling, outermost first: starts its record

    def wrapper(
        executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        guider = executor.class_obj

        def begin() -> None:
            session.model, session.prompt = type(guider.model_patcher.model).__name__, running_prompt()
            session.begin_sampling(
                sigmas.tolist(),
                can_repeat=FUNCTION_WRAPPER not in guider.model_options and not _is_patched(guider.model_patcher),
                times_calls=reads_times(),
                measures_quality=measures_quality(),
            )
            session.pack_in_model = packs.pack_of(guider.model_options.get(FUNCTION_WRAPPER))
            session.compiled = COMPILE_OPTIONS in guider.model_options

        _drop_stale_compilation(guider.model_patcher, guider.model_options)
        if running:
            session.end_sampling(completed=False)
        running.append(begin)
        try:
            begin()
            completed = False
            try:
                out = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
                completed = True
                return out
            finally:
                session.end_sampling(completed=completed)
                log.info("SageAttention2: %s", session_headline(session))
                session.publish_status()
        finally:
            running.remove(begin)
            if running:
                running[-1]()

    wrapper.session = session  # type: ignore[attr-defined]
    return wrapper


def evaluation_wrapper(session: Session) -> Callable[..., Any]:
    """A wrapper of the function that a sampler calls for a prediction, which takes one or more passes of the model."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        session.evaluations += 1
        return executor(*args, **kwargs)

    return wrapper


def pass_wrapper(session: Session) -> Callable[..., Any]:
    """A wrapper of ComfyUI's call of the model; runs outside of compiled code, once for each forward pass."""

    def wrapper(
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        ensure_timed(x.device)  # the node timed only one of several GPUs; this may be another one
        diffusion_model = getattr(executor.class_obj, DIFFUSION_MODEL, None)
        if id(diffusion_model) not in session.models:  # ComfyUI patches a model when it loads it, after `begin`
            _inspect(session, executor.class_obj)
        model_pass = session.begin_pass(t.flatten()[:1], x.device, options)
        inputs = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control, **kwargs}
        model_pass.changes = changes_of(executor.class_obj, options, inputs)
        model_pass.model = id(diffusion_model)
        model_pass.token_kinds = TokenKinds.of(inputs, cross_attends=session.cross_attends)
        guard = session.dispatcher.guard
        model_pass.check_at_end = (
            guard is not None
            and guard.trusts_repeats
            and session.can_repeat
            and _is_stateless_pass(control, options)
            # measure_quality compares every output with full precision, so broken ones must be repaired per call.
            and not session.measures_quality
        )
        with (
            watching(session, options),
            slicing(session, diffusion_model),
            slicing_without_memory(session, diffusion_model),
        ):
            out = session.run_pass(
                model_pass, lambda: executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
            )
        return out

    return wrapper


def _is_patched(patcher: Any) -> bool:
    """Whether another pack's function replaces one that a pass calls: it may cache results between passes."""
    patches = getattr(patcher, "object_patches", {})
    return any(str(name).startswith(_IN_A_PASS) and callable(patch) for name, patch in patches.items())


def _inspect(session: Session, model: Any) -> None:
    """Tell the session what the modules of ComfyUI's `model` declare, and whether the guard may repeat its passes.

    Replaced functions may cache results between passes. A guider may have two models in one sampling, of one family.
    """
    diffusion_model = getattr(model, DIFFUSION_MODEL, None)
    modules = ModelModules.of(diffusion_model)
    if not session.models:
        session.declared = declared_by(modules.declaring)
        session.cross_attends = modules.cross_attend
    session.models.add(id(diffusion_model))
    is_patched = modules.replaced or modules.have_hooks or _is_patched(getattr(model, "current_patcher", None))
    session.can_repeat = session.can_repeat and not is_patched
    if session.pack_in_model is None and modules.pack is not None:
        session.pack_in_model = modules.pack
        session.model_layers = attention_layers(model.diffusion_model)


def _is_stateless_pass(control: Any, options: Mapping[str, Any]) -> bool:
    """Whether a second pass with these arguments gives the same result: no ControlNet, cache or patch is in them.

    options: before the watcher takes the place of another pack's override.
    """
    wrappers = options.get("wrappers", {})
    keys = {key for kind in (APPLY_MODEL, DIFFUSION_MODEL) for key, value in wrappers.get(kind, {}).items() if value}
    parts = any(options.get(name) for name in ("patches", "patches_replace", "ar_state", "animate2_cache"))
    foreign = packs.has_foreign_override(options.get(OVERRIDE))
    return control is None and not (parts or foreign) and keys <= {WRAPPER_KEY, COMPILE_KEY}


def sessions_of(model: Any) -> list[Session]:
    """The sessions of all nodes of this pack that `model` (ComfyUI's ModelPatcher) went through, in order."""
    return [wrapper.session for wrapper in model.get_wrappers(OUTER_SAMPLE, WRAPPER_KEY)]


def _drop_stale_compilation(model: Any, model_options: Mapping[str, Any]) -> None:
    """ComfyUI compiles without guards on its options: a compiled model would keep the attention it was traced with."""
    if COMPILE_OPTIONS not in model_options:
        return
    diffusion_model = model.model.diffusion_model
    token = tuple(
        (session.dispatcher.settings, session.dispatcher.idle_reason is None) for session in sessions_of(model)
    )
    if _compiled_with.get(diffusion_model) != token:
        torch.compiler.reset()
    _compiled_with[diffusion_model] = token
