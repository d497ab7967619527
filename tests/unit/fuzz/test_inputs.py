"""Any value from a workflow, a caller or a file is used, or refused with the documented one-line error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.autotune.made_up_gpus import EIGHT, FOUR_HALF, GPU, OWN, WORKS, seconds

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Times
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.text import one_line

pytestmark = pytest.mark.slow
many_examples = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

EXTREME: st.SearchStrategy[Any] = st.sampled_from(
    [10**400, -(10**400), 2**63, -1, 0, 5e-324, 1e-9, 1e4, 1e308, math.inf, math.nan, None, True, "", [], {}]
)
TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates and control characters too
VALUES = EXTREME | st.recursive(
    TEXTS | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def entries_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each entry in a JSON value, as its container and its key."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from entries_of(tree[key])


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A copy of a JSON value with some of its entries replaced or removed."""
    copy = deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        entries = list(entries_of(copy))
        if entries:
            container, key = draw(st.sampled_from(entries))
            if draw(st.booleans()):
                container[key] = draw(VALUES)
            else:
                del container[key]
    return copy


def assert_harmless(error: Exception) -> None:
    """The message fits one line of a strict UTF-8 log."""
    message = str(error)
    message.encode("utf-8")
    assert message == one_line(message), ascii(message[:300])
    assert len(message) < 3000, (len(message), ascii(message[:300]))


CANDIDATES = (OWN, EIGHT, FOUR_HALF)
TIMES = Times(
    {(candidate, work): seconds(GPU, candidate, work) for candidate in CANDIDATES for work in WORKS[-4:]},
    0.01,
    {(EIGHT, 128): (0.04, None)},
)
DOCUMENT = json.loads(json.dumps(TIMES.document()))


@many_examples
@given(changed(DOCUMENT))
def test_a_changed_file_of_times_is_used_or_ignored(document: Any) -> None:
    times = Times.read(document, CANDIDATES, WORKS)
    if times is None:
        return
    assert times.seconds.keys() <= TIMES.seconds.keys()
    choices = TunedChoices(times)
    assert choices.lines()
    for candidate, work in times.seconds:
        predicted = choices.seconds(candidate, work)
        assert predicted is not None and math.isfinite(predicted) and predicted >= 0.0
        assert not choices.is_faster(candidate, candidate, work)


# ComfyUI converts float and boolean inputs; a combo gets the workflow's value as it is.
OF_TYPE = {float: st.floats(), bool: st.booleans(), str: VALUES}
INPUTS = {field.name: OF_TYPE[type(field.default)] for field in fields(Settings) if field.name != "notes"}


@many_examples
@given(st.fixed_dictionaries({}, optional=INPUTS))
def test_inputs_of_the_node(values: dict[str, Any]) -> None:
    try:
        chosen = Settings().with_inputs(values)
    except (TypeError, ValueError) as error:
        assert_harmless(error)
    else:
        for note in chosen.notes:
            assert_harmless(ValueError(note))
        assert chosen.describe() == one_line(chosen.describe())


@many_examples
@given(st.sampled_from([field.name for field in fields(AttentionOptions)]), VALUES)
def test_options_of_a_call(name: str, value: Any) -> None:
    try:
        AttentionOptions(**{name: value})
    except (TypeError, ValueError) as error:
        assert_harmless(error)
