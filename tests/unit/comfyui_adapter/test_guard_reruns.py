"""The guard's rerun of a broken pass: when the guard reads the flag, and what rules out a rerun."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper, sampling_wrapper
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import guard, model_passes
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.system.readback import Readback

from .breaking import LAYERS, SIGMAS, Breaking, guard_of, ones, sampled
from .calls import Executor, guider_of, node_session, serve_by, settings

pytestmark = pytest.mark.usefixtures("without_precise")


def test_a_broken_pass_is_rerun(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Layers 0 and 1 break in the first run of step 0 (calls 0 and 1) and in the second (calls 3 and 4)."""
    session, means = sampled(monkeypatch, Breaking(0, 1, 3, 4), ones, at_end=True)
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    assert guard_of(session).repeated == [0]
    assert [downgrade.site.layer for downgrade in guard_of(session).downgrades] == [0, 1]
    reasons = {share.decision.reason: share.calls for share in session.record.summary().shares}
    assert reasons == {None: 3 + 1 + 1, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    assert session.layers == LAYERS and session.record.summary().layers == LAYERS
    assert "the model was run again in step 1;" in report([session])
    assert len(caplog.records) == 1 and "call 0 gave" in caplog.text


class Copies:
    """Records after how many calls of its pass each flag is copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moments: list[int] = []
        start = Readback.start

        def starting(readback: Readback, values: torch.Tensor) -> None:
            model_pass = model_passes.current(0)
            assert model_pass is not None
            self.moments.append(len(model_pass.calls))
            start(readback, values)

        monkeypatch.setattr(Readback, "start", starting)


@pytest.mark.parametrize("second", [LAYERS - 1, LAYERS, LAYERS + 1], ids=["fewer calls", "as many calls", "more calls"])
@pytest.mark.parametrize("broken", [False, True])
def test_the_flag_is_copied_after_as_many_calls_as_the_previous_pass_made(
    monkeypatch: pytest.MonkeyPatch, second: int, broken: bool
) -> None:
    """The work after that call hides the wait. A pass of another length is checked at its end."""
    copies = Copies(monkeypatch)
    last = LAYERS + second - 1
    serve_by(monkeypatch, Breaking(*([last] if broken else [])))
    session = node_session(settings(guard=True))
    override = make_override(session)
    session.begin_sampling(SIGMAS)
    for sigma, count in zip(SIGMAS, (LAYERS, second), strict=False):

        def model(count: int = count) -> list[float]:
            return [float(override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(count)]

        model_pass = session.begin_pass(sigma, torch.device("cpu"), {})
        model_pass.check_at_end = True
        means = session.run_pass(model_pass, model)
    assert means == [2.0] * second and guard_of(session).repeated == ([1] if broken else [])
    early = [] if second < LAYERS else [LAYERS]
    assert copies.moments == [LAYERS, *early, *([] if second == LAYERS else [second])]


def test_a_pass_on_several_streams_is_checked_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, streams = Copies(monkeypatch), iter(range(100))
    monkeypatch.setattr(model_passes, "_current_stream", lambda device: next(streams))
    session, _ = sampled(monkeypatch, Breaking(LAYERS), ones, at_end=True)
    assert guard_of(session).repeated == [1] and copies.moments == [LAYERS] * 2


def test_a_rerun_restarts_the_count_of_calls_in_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper of the first of two nodes is the outer one. It must not add up the calls of both runs."""
    serve_by(monkeypatch, Breaking(0, LAYERS))
    first = node_session(settings(start_percent=1.0))
    second = node_session(settings(guard=True), 1, make_override(first))
    override = make_override(second)

    def model() -> list[float]:
        return [float(override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(LAYERS)]

    for session in (first, second):
        session.begin_sampling(SIGMAS)
    inner = second.begin_pass(1.0, torch.device("cpu"), {})
    inner.check_at_end = True
    means = first.run_pass(first.begin_pass(1.0, torch.device("cpu"), {}), lambda: second.run_pass(inner, model))
    assert means == [1.0, 2.0, 2.0]
    assert first.layers == second.layers == LAYERS


def comfyuis_sparse(previous: Callable[..., Any]) -> Callable[..., Any]:
    """An override like that of ComfyUI's *Model Sparse Attention* after a node."""

    def override(*args: Any, **kwargs: Any) -> Any:
        return previous(*args, **kwargs)

    override.__module__ = "comfy_extras.nodes_sparse_attention"
    return override


CACHE = {"diffusion_model": {"easycache": ["wrapper"]}}
OURS = {"apply_model": {"comfy_sage2": ["wrapper"], "torch.compile": ["wrapper"]}, "diffusion_model": {"gone": []}}


@pytest.mark.parametrize(
    ("control", "options", "at_end"),
    [
        (None, {}, True),
        (None, {"wrappers": OURS, "patches": {}, "patches_replace": {}}, True),
        ({"output": []}, {}, False),
        (None, {"wrappers": CACHE}, False),
        (None, {"patches_replace": {"dit": {}}}, False),
        (None, {"patches": {"attn1_patch": []}}, False),
        (None, {"ar_state": {"frame": 1}}, False),
        (None, {"animate2_cache": object()}, False),
        (None, {OVERRIDE: ones}, False),
        (None, {OVERRIDE: make_override(node_session(settings()))}, True),
        (None, {OVERRIDE: make_override(node_session(settings(), 1, make_override(node_session(settings()))))}, True),
        (None, {OVERRIDE: make_override(node_session(settings(), previous=ones))}, False),
        (None, {OVERRIDE: comfyuis_sparse(make_override(node_session(settings())))}, True),
        (None, {OVERRIDE: comfyuis_sparse(make_override(node_session(settings(), previous=ones)))}, False),
    ],
)
def test_passes_in_which_other_code_takes_part_are_not_rerun(
    control: Any, options: dict[str, Any], at_end: bool
) -> None:
    """A pass consumes the outputs of a ControlNet, and a cache would return the broken result."""
    session = node_session(settings(guard=True))
    seen = []

    def model(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        model_pass = model_passes.current(0)
        assert model_pass is not None
        seen.append(model_pass.check_at_end)
        return x

    x = torch.ones(1)
    assert pass_wrapper(session)(Executor(model), x, torch.ones(1), None, None, control, options) is x
    assert seen == [at_end]


class Diffusion(torch.nn.Module):
    """A model of LAYERS attention calls; their sum is the result."""

    def __init__(self, override: Any) -> None:
        super().__init__()
        self.block = torch.nn.Linear(1, 1)
        self.override = override

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_orig(x)

    def forward_orig(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [self.override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2) for _ in range(LAYERS)]
        result: torch.Tensor = x + sum(output.mean() for output in outputs)
        return result


def sampled_by_comfyui(
    session: Session, model: Callable[[torch.Tensor], torch.Tensor], diffusion: torch.nn.Module, **around: Any
) -> list[float]:
    """Run one sampling through both wrappers; return the result of each pass. around: arguments of `guider_of`."""
    guider = guider_of(diffusion, **around)
    results: list[float] = []

    def sample(*args: Any) -> None:
        wrapped = pass_wrapper(session)
        for sigma in SIGMAS[:-1]:
            apply_model = Executor(lambda x, *rest: model(x), guider.model_patcher.model)
            results.append(float(wrapped(apply_model, torch.zeros(1), torch.tensor([sigma]))))

    sampling_wrapper(session)(Executor(sample, guider), None, None, None, torch.tensor(SIGMAS))
    return results


class Cache:
    """A pack that caches results: a pass with the input of the previous one gets its result."""

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.model = model
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept[0] is not x:
            self.kept = x, self.model(x)
        return self.kept[1]


AROUND = {
    "function wrapper": {"model_options": {"model_function_wrapper": lambda *args: None}},
    "object patch": {"object_patches": {"diffusion_model.forward": lambda x: x}},
    "object patch of ComfyUI's model": {"object_patches": {"_apply_model": lambda x: x}},
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_no_pass_is_rerun_beside_a_caching_pack(monkeypatch: pytest.MonkeyPatch, around: dict[str, Any]) -> None:
    serve_by(monkeypatch, Breaking(1))
    session = node_session(settings(guard=True))
    diffusion = Diffusion(make_override(session))
    # ComfyUI computes the second layer in the first pass and from then on.
    assert sampled_by_comfyui(session, Cache(diffusion), diffusion, **around) == [5.0, 5.0]
    assert guard_of(session).repeated == [] and len(guard_of(session).downgrades) == 1


@pytest.mark.parametrize("by", ["hook", "object patch"])
def test_no_pass_is_rerun_if_the_second_model_of_a_guider_is_patched(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Both models are sampled with the options of the first one, so one node serves both."""
    session = node_session(settings(guard=True))
    first, second = (SimpleNamespace(diffusion_model=Diffusion(make_override(session))) for _ in range(2))
    if by == "hook":
        second.diffusion_model.block.register_forward_hook(lambda *args: None)
    else:
        second.current_patcher = SimpleNamespace(object_patches={"diffusion_model.forward": lambda x: x})
    serve_by(monkeypatch, Breaking())
    session.begin_sampling(SIGMAS)
    seen = []

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        model_pass = model_passes.current(0)
        assert model_pass is not None
        seen.append(model_pass.check_at_end)
        result: torch.Tensor = first.diffusion_model(x)
        return result

    for model in (first, second, first):
        pass_wrapper(session)(Executor(run, model), torch.zeros(1), torch.ones(1))
    assert seen == [True, False, False]


def replace(module: torch.nn.Module, name: str) -> None:
    method = getattr(module, name)
    setattr(module, name, lambda *args: method(*args))


@pytest.mark.parametrize("hooked", ["forward", "forward_orig", "hook", "pre-hook", "block"])
def test_functions_and_hooks_on_the_model_rule_out_reruns(monkeypatch: pytest.MonkeyPatch, hooked: str) -> None:
    serve_by(monkeypatch, Breaking(1))
    session = node_session(settings(guard=True))
    diffusion = Diffusion(make_override(session))
    cache = Cache(diffusion)
    if hooked == "block":
        replace(diffusion.block, "forward")
    elif hooked == "hook":
        diffusion.register_forward_hook(lambda *args: None)
    elif hooked == "pre-hook":
        diffusion.register_forward_pre_hook(lambda *args: None)
    else:  # some of ComfyUI's models run part of their forward pass in forward_orig
        replace(diffusion, hooked)
    assert sampled_by_comfyui(session, cache, diffusion) == [5.0, 5.0]
    assert guard_of(session).repeated == []


@pytest.mark.parametrize("compiled", [False, True])
def test_patched_values_and_compiled_models_permit_reruns(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Around each pass, ComfyUI replaces the model with the compiled one."""
    serve_by(monkeypatch, Breaking(1))
    session = node_session(settings(guard=True))
    diffusion = Diffusion(make_override(session))
    model: Any = torch.compile(diffusion) if compiled else diffusion
    patches = {"diffusion_model.default_ref_method": "index", "model_sampling": lambda: None}
    assert sampled_by_comfyui(session, diffusion, model, object_patches=patches) == [6.0, 6.0]
    assert guard_of(session).repeated == [0]


@pytest.mark.parametrize("puts_back", [False, True])
def test_reruns_resume_once_a_pack_has_removed_its_function(monkeypatch: pytest.MonkeyPatch, puts_back: bool) -> None:
    """Between samplings, packs delete their functions from the model or set its own methods again."""
    serve_by(monkeypatch, Breaking(1, 2 * LAYERS + 1))
    session = node_session(settings(guard=True))
    diffusion = Diffusion(make_override(session))
    method = diffusion.forward
    replace(diffusion, "forward")
    assert sampled_by_comfyui(session, diffusion, diffusion) == [5.0, 5.0]
    assert guard_of(session).repeated == []
    del diffusion.forward
    if puts_back:
        diffusion.forward = method  # type: ignore[method-assign]
    assert sampled_by_comfyui(session, diffusion, diffusion) == [6.0, 6.0]
    assert guard_of(session).repeated == [0]


def test_a_rerun_that_is_still_broken_is_named_and_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cause is a cache that the node cannot detect."""
    serve_by(monkeypatch, Breaking(1, LAYERS))
    session = node_session(settings(guard=True))
    diffusion = Diffusion(make_override(session))
    first, second = sampled_by_comfyui(session, Cache(diffusion), diffusion)
    assert first != first and second == 5.0
    assert guard_of(session).repeated == guard_of(session).still_broken == [0]
    assert "its result still has NaN or infinity" in caplog.text
    text = report([session])
    assert "The second run in step 1 gave NaN or infinity too" in text
    session.begin_sampling(SIGMAS)
    assert guard_of(session).trusts_repeats and guard_of(session).still_broken == []
