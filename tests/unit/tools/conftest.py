"""What the tests of the developers' commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import test_summary
from tools.fetching import UNTIL


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that .ci/run gives to what it fetches itself says nothing to the tests."""
    monkeypatch.delenv(UNTIL, raising=False)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the suites are recorded in a test."""
    monkeypatch.setattr(test_summary, "FOLDER", tmp_path / "records")
    return tmp_path / "records"
