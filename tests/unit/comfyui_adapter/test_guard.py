"""The guard: the check itself, the second computation in the same call, and who stays downgraded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.call import forward as forwards
from comfy_sage2.comfyui.call.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.sampling import forward_wrapper, sampling_wrapper
from comfy_sage2.comfyui.serve import guard
from comfy_sage2.comfyui.serve.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.readback import Readback

from .calls import serving

SIGMAS = [1.0, 0.5, 0.0]
LAYERS = 3


@pytest.fixture(autouse=True)
def without_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attention is ComfyUI's, as with a kernel that lacks mode precise."""
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_broken_value_is_found(dtype: torch.dtype, value: float) -> None:
    out = torch.randn(2, 33, 5, 16, dtype=dtype)
    for view in (out, out.transpose(1, 2), out[:, ::2]):
        assert guard.is_finite(view)
    out[1, 32, 4, 15] = value
    for view in (out, out.transpose(1, 2), out[:, ::2]):
        assert not guard.is_finite(view)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_values_are_no_alarm(dtype: torch.dtype) -> None:
    """A sum of these would overflow."""
    assert guard.is_finite(torch.full((4, 4096), torch.finfo(dtype).max, dtype=dtype))


class Breaking:
    """An attention whose output has one NaN in chosen calls, counted from 0, which the flag is told."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.calls = 0

    def __call__(
        self, q: torch.Tensor, *args: Any, nonfinite: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        out = torch.full_like(q, 2.0)
        if self.calls in self.broken:
            out[0, 0, 0, 0] = float("nan")
            if nonfinite is not None:
                nonfinite.fill_(1)
        self.calls += 1
        return out


def sampled(
    monkeypatch: pytest.MonkeyPatch, kernel: Breaking, func: Any, guarded: bool = True, at_end: bool = False
) -> tuple[Session, list[float]]:
    """One sampling of two steps and three layers; the mean of each call's output."""
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    session = serving(Settings(backend="reference", guard=guarded))
    override = make_override(session)
    session.begin_sampling(SIGMAS)

    def model() -> list[float]:
        return [float(override(func, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(LAYERS)]

    means = []
    for sigma in SIGMAS[:-1]:
        forward = session.begin_forward(sigma, torch.device("cpu"), {})
        forward.check_at_end = at_end
        means += session.run_forward(forward, model)
    return session, means


def guard_of(session: Session) -> guard.Guard:
    assert session.task.guard is not None
    return session.task.guard


def ones(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ones_like(q)


def nothing_finite(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(q, float("nan"))


def test_broken_call_is_computed_again_and_its_layer_stays_downgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session, means = sampled(monkeypatch, Breaking(0, 1), ones)
    # Layers 0 and 1 break in step 0 and are ComfyUI's from there on; layer 2 is never touched.
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    reasons = {share.outcome.reason: share.calls for share in session.record.summary().shares}
    assert reasons == {None: 2, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    text = report([session])
    assert "call 0 gave a result that was not finite in step 0 (reference · 8b)" in text
    assert text.count("serves this layer from there on") == 2
    assert len(caplog.records) == 1 and "call 0 gave" in caplog.text


def test_a_new_sampling_trusts_every_layer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = sampled(monkeypatch, Breaking(0), ones)
    assert guard_of(session).reason(0) is not None
    session.begin_sampling(SIGMAS)
    assert guard_of(session).reason(0) is None and guard_of(session).downgrades == ()


def test_values_that_were_broken_before_are_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(2), nothing_finite)
    assert means[:2] == [2.0, 2.0] and means[2] != means[2]
    assert "the model's own values are broken" in report([session])


def test_without_the_guard_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(0), ones, guarded=False)
    assert means[0] != means[0] and session.task.guard is None


def test_broken_pass_is_made_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Layers 0 and 1 break in the first run of step 0 (calls 0 and 1) and in the second (calls 3 and 4)."""
    session, means = sampled(monkeypatch, Breaking(0, 1, 3, 4), ones, at_end=True)
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    assert guard_of(session).repeated == (0,) and [found.layer for found in guard_of(session).downgrades] == [0, 1]
    reasons = {share.outcome.reason: share.calls for share in session.record.summary().shares}
    assert reasons == {None: 3 + 1 + 1, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    assert session.layers == LAYERS and session.record.summary().layers == LAYERS
    assert "the model was run again in step 0;" in report([session])
    assert len(caplog.records) == 1 and "call 0 gave" in caplog.text


def test_a_whole_pass_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr("comfy_sage2.comfyui.serve.guard.is_finite", lambda out: looked.append(1))
    session, means = sampled(monkeypatch, Breaking(), ones, at_end=True)
    assert means == [2.0] * (2 * LAYERS)
    assert guard_of(session).repeated == () and session.record.summary().calls == 2 * LAYERS
    assert not looked, "no call was waited for"
    assert "run again" not in report([session])


class Copies:
    """When flags are copied: the calls that their pass had made, and whether the model was still at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, bool]] = []
        self.in_model = False
        start = Readback.start

        def starting(readback: Readback, values: torch.Tensor) -> None:
            forward = forwards.current(0)
            assert forward is not None
            self.found.append((len(forward.calls), self.in_model))
            start(readback, values)

        monkeypatch.setattr(Readback, "start", starting)


@pytest.mark.parametrize("second", [LAYERS - 1, LAYERS, LAYERS + 1], ids=["fewer calls", "as many calls", "more calls"])
@pytest.mark.parametrize("broken", [False, True])
def test_the_flag_is_copied_behind_the_call_that_was_the_last_one_before(
    monkeypatch: pytest.MonkeyPatch, second: int, broken: bool
) -> None:
    """So what follows that call hides the wait; a pass of another length is looked at when it is through."""
    copies = Copies(monkeypatch)
    last = LAYERS + second - 1
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(*([last] if broken else [])))
    session = serving(Settings(backend="reference", guard=True))
    override = make_override(session)
    session.begin_sampling(SIGMAS)
    for sigma, count in zip(SIGMAS, (LAYERS, second), strict=False):

        def model(count: int = count) -> list[float]:
            copies.in_model = True
            means = [float(override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(count)]
            copies.in_model = False
            return means

        forward = session.begin_forward(sigma, torch.device("cpu"), {})
        forward.check_at_end = True
        means = session.run_forward(forward, model)
    assert means == [2.0] * second and guard_of(session).repeated == ((1,) if broken else ())
    early = [] if second < LAYERS else [(LAYERS, True)]
    assert copies.found == [(LAYERS, False), *early, *([] if second == LAYERS else [(second, False)])]


def test_a_pass_on_several_streams_is_looked_at_when_it_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, streams = Copies(monkeypatch), iter(range(100))
    monkeypatch.setattr(forwards, "_current_stream", lambda device: next(streams))
    session, _ = sampled(monkeypatch, Breaking(LAYERS), ones, at_end=True)
    assert guard_of(session).repeated == (1,) and copies.found == [(LAYERS, False)] * 2


def test_pass_without_the_guard_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(0), ones, guarded=False, at_end=True)
    assert means[0] != means[0] and session.task.guard is None


def test_a_second_run_counts_anew_for_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes in a row, the outer wrapper's first: its calls are those of one pass, not of two."""
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(0, LAYERS))
    first = serving(Settings(backend="reference", start_percent=1.0))
    second = serving(Settings(backend="reference", guard=True), 1, make_override(first))
    override = make_override(second)

    def model() -> list[float]:
        return [float(override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(LAYERS)]

    for session in (first, second):
        session.begin_sampling(SIGMAS)
    inner = second.begin_forward(1.0, torch.device("cpu"), {})
    inner.check_at_end = True
    means = first.run_forward(
        first.begin_forward(1.0, torch.device("cpu"), {}), lambda: second.run_forward(inner, model)
    )
    assert means == [1.0, 2.0, 2.0]
    assert first.layers == second.layers == LAYERS


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
    ],
)
def test_passes_that_others_take_part_in_are_not_made_again(
    control: Any, options: dict[str, Any], at_end: bool
) -> None:
    """A ControlNet's outputs are consumed, and a cache would answer with the broken result."""
    session = serving(Settings(backend="reference", guard=True))
    seen = []

    def executor(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward = forwards.current(0)
        assert forward is not None
        seen.append(forward.check_at_end)
        return x

    x = torch.ones(1)
    assert forward_wrapper(session)(executor, x, torch.ones(1), None, None, control, options) is x
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
    session: Session, model: Callable[[torch.Tensor], torch.Tensor], diffusion: torch.nn.Module, **found: Any
) -> list[float]:
    """One sampling through both wrappers; the result of each pass. found: what stands around the model."""
    patcher = SimpleNamespace(
        model=SimpleNamespace(diffusion_model=diffusion), object_patches=found.get("object_patches", {})
    )
    results: list[float] = []

    class Executor:
        class_obj = SimpleNamespace(model_patcher=patcher, model_options=found.get("model_options", {}))

        def __call__(self, *args: Any) -> None:
            wrapped = forward_wrapper(session)
            for sigma in SIGMAS[:-1]:
                results.append(float(wrapped(lambda x, *rest: model(x), torch.zeros(1), torch.tensor([sigma]))))

    sampling_wrapper(session)(Executor(), None, None, None, torch.tensor(SIGMAS))
    return results


class Cache:
    """A pack that keeps results: a pass with the input of the one before is answered with that one's result."""

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
}


@pytest.mark.parametrize("found", AROUND.values(), ids=AROUND.keys())
def test_beside_a_caching_pack_no_pass_is_made_again(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> None:
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(1))
    session = serving(Settings(backend="reference", guard=True))
    diffusion = Diffusion(make_override(session))
    # Of the first pass the second layer is ComfyUI's, and stays so.
    assert sampled_by_comfyui(session, Cache(diffusion), diffusion, **found) == [5.0, 5.0]
    assert guard_of(session).repeated == () and len(guard_of(session).downgrades) == 1


@pytest.mark.parametrize("hooked", ["forward", "forward_orig", "hook", "pre-hook", "block"])
def test_a_function_put_on_the_model_is_seen(monkeypatch: pytest.MonkeyPatch, hooked: str) -> None:
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(1))
    session = serving(Settings(backend="reference", guard=True))
    diffusion = Diffusion(make_override(session))
    cache = Cache(diffusion)
    if hooked == "forward":
        diffusion.forward = diffusion.forward  # type: ignore[method-assign]
    elif hooked == "forward_orig":  # the part of its forward pass that some of ComfyUI's models have
        diffusion.forward_orig = diffusion.forward_orig  # type: ignore[method-assign]
    elif hooked == "block":
        diffusion.block.forward = diffusion.block.forward  # type: ignore[method-assign]
    elif hooked == "hook":
        diffusion.register_forward_hook(lambda *args: None)
    else:
        diffusion.register_forward_pre_hook(lambda *args: None)
    assert sampled_by_comfyui(session, cache, diffusion) == [5.0, 5.0]
    assert guard_of(session).repeated == ()


def test_plain_values_put_on_the_model_are_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(1))
    session = serving(Settings(backend="reference", guard=True))
    diffusion = Diffusion(make_override(session))
    patches = {"diffusion_model.default_ref_method": "index", "model_sampling": lambda: None}
    assert sampled_by_comfyui(session, diffusion, diffusion, object_patches=patches) == [6.0, 6.0]
    assert guard_of(session).repeated == (0,)


def test_a_repeated_pass_that_is_still_broken_is_named_and_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that gives no sign of itself."""
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(1, LAYERS))
    session = serving(Settings(backend="reference", guard=True))
    diffusion = Diffusion(make_override(session))
    first, second = sampled_by_comfyui(session, Cache(diffusion), diffusion)
    assert first != first and second == 5.0
    assert guard_of(session).repeated == guard_of(session).still_broken == (0,)
    assert "its result is still not finite" in caplog.text
    text = report([session])
    assert "the second run in step 0 gave no finite result either" in text
    session.begin_sampling(SIGMAS)
    assert guard_of(session).trusts_repeats and guard_of(session).still_broken == ()


@pytest.mark.parametrize("other", [False, True], ids=["our node", "another pack"])
def test_who_computed_again_is_named(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """With a node before this one it is not full precision that computes again."""
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(0, 1))
    first = serving(Settings(backend="reference"))
    previous: Any = make_override(first)
    if other:
        previous = lambda func, *args, **kwargs: nothing_finite(*args)  # noqa: E731
    second = serving(Settings(backend="reference", guard=True), 1, previous)
    override = make_override(second)
    for session in (first, second):
        session.begin_sampling(SIGMAS)
    inner, outer = (session.begin_forward(1.0, torch.device("cpu"), {}) for session in (first, second))
    with forwards.running(0, inner), forwards.running(1, outer):
        override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2)
    text = report([second])
    name = "comfyui_adapter" if other else "the SageAttention2 node before this one"
    assert f"; {name} gave no finite values either" in text and "the model's own values" not in text


def test_a_broken_output_is_not_compared_with_full_precision() -> None:
    settings = Settings(backend="reference", guard=True, measure_quality=True)
    session = serving(settings)
    override = make_override(session)
    session.begin_sampling(SIGMAS)

    def executor(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = torch.randn(3, 1, 8, 32).unbind(0)
        v[0, 0, 0] = float("inf")
        return override(ones, q, k, v, 2)

    forward_wrapper(session)(executor, torch.ones(1), torch.ones(1))
    assert [found.layer for found in guard_of(session).downgrades] == [0]
    assert not session.record.summary().agreement
