"""Fixtures of all unit tests."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh_self_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the self-test results of another test's made-up GPU."""
    from comfy_sage2.backends import self_test

    monkeypatch.setattr(self_test, "_results", {})
    monkeypatch.setattr(self_test, "_postponed", set())


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """No test gets a plan that another test's backends, constraints or GPUs led to."""
    from comfy_sage2.dispatch import plan

    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of installed packages: only those that a test adds."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """The files that git tracks."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
