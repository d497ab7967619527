"""The node's `skip`: tiles are found in some steps, left out in the others, and never carried where they do not fit."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.attention import attention
from comfy_sage2.backends.base import Constraint
from comfy_sage2.backends.constraints import DENSE, WITHOUT_GAPS
from comfy_sage2.comfyui.call import forward as forwards
from comfy_sage2.comfyui.call.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.report.verdict import compared_speed
from comfy_sage2.comfyui.serve import skipping
from comfy_sage2.comfyui.serve.session import Session
from comfy_sage2.comfyui.settings import FIDELITY, Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import Cell, Policy
from comfy_sage2.policy.signature import Signature
from comfy_sage2.reference.dead_tiles import LOSSLESS, tile_gaps
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.skipping.levels import LEVELS
from comfy_sage2.skipping.skipper import Skipper
from comfy_sage2.tiles import TileLists

from .calls import Container, ones, serving
from .watched import CPU

HEADS, HEAD_DIM, TOKENS = 2, 32, 8 * 128
Window = namedtuple("Window", "index_list")  # as ComfyUI's context windows have it
STEPS = 5
Calls = Callable[[int], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _least_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is slow: here calls of half the length count."""
    assert skipping.LEAST_TILES == 2 * TOKENS // 128
    monkeypatch.setattr(skipping, "LEAST_TILES", TOKENS // 128)


def focused(seed: int, tokens: int = TOKENS, batch: int = 1, beside: int = 0) -> list[torch.Tensor]:
    """q, k and v of a head that attends to its own tile and, less, to one `beside` it: (B, N, H * D) each."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator))[0]
    tile = torch.arange(tokens) // 128
    keys = 14.0 * directions[tile % HEAD_DIM]
    queries = keys + 0.9 * keys.roll(128 * beside, dims=0) if beside else keys
    found = [
        (tensor + 0.1 * torch.randn(batch, tokens, HEAD_DIM, generator=generator)).repeat(1, 1, HEADS)
        for tensor in (queries, keys)
    ]
    return [*found, torch.randn(batch, tokens, HEADS * HEAD_DIM, generator=generator)]


def skipped(level: str = "balanced", **options: Any) -> Session:
    return serving(Settings(**{"backend": "reference", "skip": level, **options}))


def sigma(step: int, steps: int = STEPS) -> float:
    return 1.0 - step / steps


def begin(session: Session, steps: int = STEPS) -> None:
    session.begin_sampling([sigma(step, steps) for step in range(steps + 1)])


def run(
    session: Session,
    step: int,
    *calls: list[torch.Tensor],
    at_end: bool = True,
    of_pass: dict[str, Any] | None = None,
    steps: int = STEPS,
    **keywords: Any,
) -> list[Any]:
    """One pass in `step` that makes these calls; ComfyUI gives it the options `of_pass`."""
    override = make_override(session)
    outs: list[Any] = []

    def model() -> torch.Tensor:
        outs.clear()
        for tensors in calls:
            kwargs = {"_inside_attn_wrapper": True, "transformer_options": {}, **keywords}
            outs.append(override(ones, *tensors, HEADS, **kwargs))
        return torch.cat([out.flatten() for out in outs])

    forward = session.begin_forward(sigma(step, steps), CPU, of_pass or {})
    forward.check_at_end = at_end
    session.run_forward(forward, model)
    return outs


def sampled(session: Session, tensors: list[torch.Tensor], steps: int = STEPS, **keywords: Any) -> list[torch.Tensor]:
    begin(session)
    outs = [run(session, step, tensors, **keywords)[0] for step in range(steps)]
    session.end_sampling()
    return outs


def dense(tensors: list[torch.Tensor], mode: str = "8b") -> torch.Tensor:
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in tensors)
    return attention(q, k, v, mode=mode, layout="BNHD", backend="reference").flatten(2)


def lossless_mask(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tiles that are live at the strictest threshold, by the reference alone."""
    q, k, _ = (tensor.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2) for tensor in tensors)
    return tile_gaps(q, k, ReferenceOptions(), running=True) > LOSSLESS


def by_mask(tensors: list[torch.Tensor], live: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in tensors)
    lists = TileLists.of_mask(live)
    return attention(q, k, v, layout="BNHD", backend="reference", tiles=lists).flatten(2)


def listed(session: Session) -> list[bool]:
    """For each step whether tiles were left out in layer 0."""
    cells = session.record.summary().cells
    return [cells[0, step].skips for step in range(1 + max(step for _, step in cells))]


def figures(session: Session) -> dict[int, skipping.LayerTiles]:
    assert session.task.skipping is not None
    return session.task.skipping.layers()


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
@pytest.mark.parametrize("level", LEVELS)
def test_steps_1_and_4_are_dense_and_the_others_leave_tiles_out(level: str, mode: str) -> None:
    session, tensors = skipped(level, mode=mode), focused(0)
    outs = sampled(session, tensors)
    whole = dense(tensors, mode)
    assert torch.equal(outs[0], whole) and torch.equal(outs[3], whole)
    assert listed(session) == [False, True, True, False, True]
    for out in (outs[1], outs[2], outs[4]):
        assert (out - whole).abs().sum() / whole.abs().sum() < LEVELS[level] + 1e-3
    (found,) = figures(session).values()
    assert (found.finding, found.listed) == (2, 3) and found.computed < 0.7
    assert found.error <= max(LEVELS[level], 1e-4) and found.later == pytest.approx(found.error, abs=0.01)


def test_lossless_lists_are_those_of_the_strictest_threshold() -> None:
    tensors = focused(1)
    outs = sampled(skipped("lossless"), tensors)
    live = lossless_mask(tensors)
    assert live.float().mean() < 0.7
    assert torch.equal(outs[1], by_mask(tensors, live))


def test_the_prompts_and_all_calls_of_a_step_share_their_tiles() -> None:
    caption, empty = focused(2), focused(3, beside=3)
    session = skipped("lossless")
    begin(session)
    for call in (caption, empty):  # two passes, of a sampler that makes one for each prompt
        run(session, 0, call)
    union = lossless_mask(caption) | lossless_mask(empty)
    assert not torch.equal(lossless_mask(caption), union)
    for call in (caption, empty):
        assert torch.equal(run(session, 1, call)[0], by_mask(call, union))
    together = [torch.cat(pair) for pair in zip(caption, empty, strict=True)]
    session = skipped("lossless")
    begin(session)
    run(session, 0, together)
    assert torch.equal(run(session, 1, together)[0], by_mask(together, union))


def test_prompts_of_different_length_have_their_own_tiles() -> None:
    first, second = focused(4), focused(4, tokens=TOKENS + 100)
    session = skipped()
    begin(session)
    for step in range(2):
        for call in (first, second):
            run(session, step, call)
    assert figures(session)[0].listed == 2


def test_each_layer_has_its_own_tiles() -> None:
    calls = focused(5), focused(5, beside=2)
    session = skipped("lossless")
    begin(session)
    run(session, 0, *calls)
    for out, call in zip(run(session, 1, *calls), calls, strict=True):
        assert torch.equal(out, by_mask(call, lossless_mask(call)))
    assert set(figures(session)) == {0, 1}


def test_a_step_that_was_to_find_tiles_and_made_no_call_is_made_up_for() -> None:
    """As where a cache answers for the model, or a policy leaves the layer in full precision."""
    session, tensors = skipped("lossless"), focused(18)
    begin(session, 12)
    for step in (0, 1, 2, 5, 6, 7, 9, 10):
        run(session, step, tensors, steps=12)  # step 4 of a count from 1 is missed, and step 9
    cells = session.record.summary().cells
    assert [step for step in range(12) if (0, step) in cells and not cells[0, step].skips] == [0, 5, 9]


@pytest.mark.parametrize("of_pass", [{"uuids": ["a"]}, {"uuids": ["b"], "context_window": Window([4, 5])}])
def test_a_prompt_or_window_without_tiles_finds_its_own(of_pass: dict[str, Any]) -> None:
    caption, other = focused(19), focused(20, beside=3)
    session = skipped("lossless")
    begin(session)
    run(session, 0, caption, of_pass={"uuids": ["b"]})
    assert torch.equal(run(session, 1, other, of_pass=of_pass)[0], dense(other))
    union = lossless_mask(caption) | lossless_mask(other)
    for tensors, options in ((other, of_pass), (caption, {"uuids": ["b"]})):
        assert torch.equal(run(session, 2, tensors, of_pass=options)[0], by_mask(tensors, union))


def test_layers_without_names_keep_their_tiles_to_themselves() -> None:
    """A pass that leaves a block out moves the numbers of the calls behind it."""
    first, second = focused(21), focused(22, beside=3)
    patched = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    for of_pass in (patched, {}):
        session = skipped("lossless")
        begin(session)
        run(session, 0, first, second)
        (out,) = run(session, 1, second, of_pass=of_pass)
        assert torch.equal(out, dense(second)) == bool(of_pass), "without a patch it is noticed at the pass's end"
        assert torch.equal(run(session, 2, second)[0], dense(second))
        assert report([session]).count("passes leave blocks out, and the model does not say of which block") == 1


def test_layers_with_names_are_known_in_a_shorter_pass() -> None:
    first, second = focused(21), focused(22, beside=3)
    session = skipped("lossless")
    begin(session)
    for index, tensors in ((0, first), (1, second)):
        run(session, 0, tensors, transformer_options={"block_index": index})
    (out,) = run(session, 1, second, transformer_options={"block_index": 1})
    assert torch.equal(out, by_mask(second, lossless_mask(second)))


def test_each_head_has_its_own_tiles_and_threshold() -> None:
    sharp, flat = focused(23), [tensor * scale for tensor, scale in zip(focused(24), (0.3, 0.3, 1.0), strict=True)]
    tensors = [
        torch.cat([one[..., :HEAD_DIM], other[..., :HEAD_DIM]], 2) for one, other in zip(sharp, flat, strict=True)
    ]
    out = sampled(skipped("lossless"), tensors)[1]
    live = lossless_mask(tensors)
    assert live[0, 0].float().mean() < 0.7 and live[0, 1].all()
    assert torch.equal(out, by_mask(tensors, live))
    loose = skipped("fast")
    exact = dense(tensors)
    (listed_out, *_) = sampled(loose, tensors)[1:]
    of_head = (listed_out - exact).unflatten(2, (HEADS, HEAD_DIM)).abs().sum((0, 1, 3))
    assert (of_head / exact.unflatten(2, (HEADS, HEAD_DIM)).abs().sum((0, 1, 3)) < LEVELS["fast"] + 0.01).all()


def test_the_calls_own_scale_is_what_errors_are_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []
    find = Skipper.find

    def watched(self: Any, layer: int, step: int, q: Any, k: Any, v: Any, gaps: Any, scale: float, *more: Any) -> None:
        scales.append(scale)
        find(self, layer, step, q, k, v, gaps, scale, *more)

    monkeypatch.setattr(Skipper, "find", watched)
    session = skipped()
    begin(session)
    run(session, 0, focused(25), scale=0.125)
    run(session, 3, focused(25))
    assert scales == [0.125, pytest.approx(HEAD_DIM**-0.5)]


def test_nothing_is_kept_after_a_sampling() -> None:
    session = skipped()
    sampled(session, focused(26))
    assert session.task.skipping is not None and session.task.skipping._skipper._kept.bytes == 0


def test_what_a_broken_pass_found_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]

    def first_breaks(*args: Any, nonfinite: Any = None, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attention(*args, nonfinite=nonfinite, **kwargs)
        if broken and kwargs.get("gaps") is not None:
            broken.clear()
            kwargs["gaps"].fill_(torch.nan)
            out = out * torch.nan
            if nonfinite is not None:
                nonfinite.fill_(1)
        return out

    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", first_breaks)
    session, tensors = skipped("lossless", guard=True), focused(27)
    begin(session)
    run(session, 0, tensors)
    out = run(session, 1, tensors)[0]
    session.end_sampling()
    (found,) = figures(session).values()
    assert found.error < 1e-3 and found.finding == 1
    assert torch.equal(out, by_mask(tensors, lossless_mask(tensors)))


def test_in_the_last_step_nothing_is_found() -> None:
    session, tensors = skipped(), focused(28)
    session.begin_sampling([1.0, 0.75, 0.5, 0.25, 0.0])
    for step in range(4):
        forward = session.begin_forward(1.0 - 0.25 * step, CPU, {})
        override = make_override(session)
        with forwards.running(0, forward):
            out = override(ones, *tensors, HEADS, _inside_attn_wrapper=True, transformer_options={})
    assert torch.equal(out, dense(tensors)) and listed(session) == [False, True, True, False]
    assert figures(session)[0].finding == 1 and "the last step is dense" in report([session])


def another_size(session: Session) -> tuple[int, list[torch.Tensor]]:
    return 1, focused(6, tokens=TOKENS + 1)


def another_sampling(session: Session) -> tuple[int, list[torch.Tensor]]:
    """As another model, LoRA, prompt, seed or sampler begins one."""
    session.end_sampling()
    begin(session)
    return 1, focused(6)


def a_step_back(session: Session) -> tuple[int, list[torch.Tensor]]:
    run(session, 2, focused(6))
    return 1, focused(6)


def outside_of_a_sampling(session: Session) -> tuple[int, list[torch.Tensor]]:
    session.end_sampling()
    return 1, focused(6)


@pytest.mark.parametrize("change", [another_size, another_sampling, a_step_back, outside_of_a_sampling])
def test_tiles_are_thrown_away(change: Callable[[Session], tuple[int, list[torch.Tensor]]]) -> None:
    session = skipped("fast")
    begin(session)
    run(session, 0, focused(6))
    assert not torch.equal(run(session, 1, focused(6, beside=1))[0], dense(focused(6, beside=1))), "lists serve"
    step, tensors = change(session)
    assert torch.equal(run(session, step, tensors)[0], dense(tensors))


def test_a_layer_whose_first_step_comes_late_finds_its_tiles_then() -> None:
    session = skipped(start_percent=0.2)
    sampled(session, focused(7))
    assert listed(session) == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("tensors", "keywords", "reason"),
    [
        (focused(8), {"mask": torch.ones(1, 1, TOKENS, dtype=torch.bool)}, "the call has a mask"),
        (focused(8, tokens=TOKENS - 128), {}, "fewer than 8 tiles"),
        ([focused(8)[0], *focused(8, tokens=1500)[1:]], {}, None),
    ],
    ids=["mask", "short", "cross"],
)
def test_other_calls_are_dense(tensors: list[torch.Tensor], keywords: dict[str, Any], reason: str | None) -> None:
    session, plain = skipped(), serving(Settings(backend="reference"))
    for out, whole in zip(
        sampled(session, tensors, 2, **keywords), sampled(plain, tensors, 2, **keywords), strict=True
    ):
        assert torch.equal(out, whole)
    text = report([session])
    assert "Tiles left out (balanced): none" in text
    if reason is not None:
        assert text.count(reason) == 1 and "  2 calls computed all tiles: [SA-318] " in text


@pytest.mark.parametrize(("constraint", "code"), [(DENSE, "SA-212"), (WITHOUT_GAPS, "SA-214")])
def test_a_backend_without_lists_or_gaps_is_said_once(
    monkeypatch: pytest.MonkeyPatch, constraint: Constraint, code: str
) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (constraint,))
    session, tensors = skipped(), focused(9)
    assert all(torch.equal(out, dense(tensors)) for out in sampled(session, tensors, 3))
    assert report([session]).count(f"  3 calls computed all tiles: [{code}] ") == 1


@pytest.mark.parametrize("level", ["lossless", "fast"])
def test_few_dead_tiles_are_computed_where_lists_would_not_pay(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(registry.get("reference"), "least_dead", lambda mode: 0.9)
    session, tensors = skipped(level), focused(17)
    assert all(torch.equal(out, dense(tensors)) for out in sampled(session, tensors))
    assert listed(session) == [False] * STEPS
    (found,) = figures(session).values()
    assert (found.finding, found.listed, found.share) == (2, 0, 1.0)
    reason = "[SA-318] less than 90% of its tiles are dead: lists would save no time"
    text = report([session])
    assert "  call 0: all computed; 2 calls looked for dead ones\n" in text
    assert f"  3 calls computed all tiles: {reason}\n" in text


def test_exact_attention_stays_exact() -> None:
    session = skipped(mode="exact")
    sampled(session, focused(10), 2)
    assert not figures(session)


@pytest.mark.parametrize("broken", ["gaps", "Skipper.find", "Skipper.finds", "Skipper.lists", "tiles"])
@pytest.mark.parametrize("error", [RuntimeError("kernel"), torch.cuda.OutOfMemoryError("memory"), TypeError("gaps")])
def test_what_fails_gives_the_dense_output(monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    def without(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = fails() if broken in kwargs else attention(*args, **kwargs)
        return out

    if broken in ("gaps", "tiles"):
        monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", without)
    else:
        monkeypatch.setattr(f"comfy_sage2.comfyui.serve.skipping.{broken}", fails)
    session, tensors = skipped(), focused(11)
    assert all(torch.equal(out, dense(tensors)) for out in sampled(session, tensors, 3))
    assert listed(session) == [False] * 3
    given_up = f"[SA-318] leaving tiles out failed, and was given up for this sampling: {error}"
    assert report([session]).count(given_up) == 1
    assert all(share.outcome.backend == "reference" for share in session.record.summary().shares)


def test_the_next_sampling_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, tensors = skipped(), focused(11)
    with monkeypatch.context() as patched:
        patched.setattr("comfy_sage2.comfyui.serve.skipping.Skipper.find", None)
        sampled(session, tensors, 2)
    sampled(session, tensors, 2)
    assert listed(session) == [False, True] and "given up" not in report([session])


@pytest.mark.parametrize("at_end", [True, False], ids=["once a pass", "at each call"])
def test_a_broken_output_takes_the_layer_to_precise_with_all_tiles(
    monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    def broken_lists(*args: Any, tiles: Any = None, nonfinite: Any = None, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attention(*args, nonfinite=nonfinite, **kwargs)
        if tiles is not None:
            out = out / 0.0
            if nonfinite is not None:
                nonfinite.fill_(1)
        return out

    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", broken_lists)
    session, tensors = skipped(guard=True), focused(12)
    begin(session)
    outs = [run(session, step, tensors, at_end=at_end)[0] for step in range(4)]
    session.end_sampling()
    assert all(out.isfinite().all() for out in outs)
    assert session.record.summary().cells[0, 3].label == "reference · precise"
    assert torch.equal(outs[2], dense(tensors, "precise"))


def test_a_layer_that_is_too_far_off_has_all_tiles_before_a_more_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_lists(*args: Any, tiles: Any = None, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attention(*args, **kwargs)
        return out if tiles is None else out.roll(128, dims=1)

    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", wrong_lists)
    session, tensors = skipped(guard=True, guard_level=FIDELITY), focused(13)
    outs = sampled(session, tensors)
    assert session.task.guard is not None and session.task.guard.fidelity is not None
    (finding,) = session.task.guard.fidelity.findings
    assert finding.steps == (1, 2) and finding.next_by == "reference · 8b with all tiles"
    assert finding.served_by == "reference · 8b · tiles left out"
    assert torch.equal(outs[4], dense(tensors)) and listed(session) == [False, True, True, False, False]


@pytest.mark.parametrize("least_dead", [0.0, 0.9])
def test_inputs_in_containers_are_not_let_go_before_their_tiles_are_found(
    monkeypatch: pytest.MonkeyPatch, least_dead: float
) -> None:
    monkeypatch.setattr(registry.get("reference"), "least_dead", lambda mode: least_dead)
    session, tensors = skipped(), focused(14)
    override = make_override(session)
    begin(session)
    for step in range(2):
        containers = [Container(tensor) for tensor in tensors]
        with forwards.running(0, session.begin_forward(sigma(step), CPU, {})):
            override.container_function(*containers, HEADS, transformer_options={})  # type: ignore[attr-defined]
        assert all(container.tensor is None for container in containers)
    assert listed(session) == [False, least_dead == 0.0]


def test_the_report_says_what_was_computed() -> None:
    session = skipped("fast")
    sampled(session, focused(15))
    (found,) = figures(session).values()
    text = report([session])
    assert f"Tiles left out (fast): {found.share:.1%} of those of 5 calls computed\n" in text
    speed = compared_speed(session.record.summary().skip_speeds[0].ratio)
    listed_calls = f"{found.computed:.1%} computed in 3 calls with lists ({speed}, beside those that found the tiles)"
    assert f"  call 0: {listed_calls}; relative L1 of the worst head " in text
    assert "when they gave way to newer ones" in text and "skip fast" in text
    assert "  reference · 8b · tiles left out: 3 calls" in text
    assert found.share == pytest.approx((2 + 3 * found.computed) / 5)
    assert "Tiles left out" not in report([serving(Settings(backend="reference"))])


@pytest.mark.parametrize(
    ("node", "policy", "level"), [("off", "fast", "fast"), ("balanced", "fast", "balanced"), ("off", "off", None)]
)
def test_the_level_of_the_node_goes_before_that_of_the_policy(node: str, policy: str, level: str | None) -> None:
    eight = Cell(AttentionOptions("8b"))
    carried = Policy(Signature.of("", {}), "fast", (0.0, 1.0), (HEAD_DIM,), ((eight,),), skip=policy)
    settings = Settings(backend="reference", skip=node, policy=carried)
    assert settings.skip_level == level and ("skip" in settings.describe()) == (level is not None)
    session = serving(settings, plan=carried)
    sampled(session, focused(16), 2)
    assert listed(session) == [False, level is not None]
