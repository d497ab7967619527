"""What the tests of the developers' commands share."""

from __future__ import annotations

import pytest

from tools.fetching import UNTIL


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that .ci/run gives to what it fetches itself says nothing to the tests."""
    monkeypatch.delenv(UNTIL, raising=False)
