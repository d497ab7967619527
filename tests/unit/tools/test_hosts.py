"""The loader of a host's attention file: what the file imports beside torch need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tools.hosts import loaded, relative_l1

FILE = """
import torch
from no_such_host.registry import REGISTER, Template
from no_such_host.log import init_logger, logger

log = init_logger(__name__)

@REGISTER("attention")
class Attention(Template):
    def call(self, x):
        logger.debug("called")
        return x * 2
"""


def test_a_file_is_loaded_beside_empty_modules(tmp_path: Path) -> None:
    file = tmp_path / "attention.py"
    file.write_text(FILE)
    module = loaded(file, "host_of_a_test", "no_such_host")
    assert torch.equal(module.Attention().call(torch.ones(2)), torch.full((2,), 2.0))
    assert module.log.name == "host_of_a_test"
    assert not any(type(finder).__module__ == "tools.hosts" for finder in sys.meta_path)


def test_other_names_stay_missing(tmp_path: Path) -> None:
    file = tmp_path / "attention.py"
    file.write_text("import no_such_hostess\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_hostess"):
        loaded(file, "host_of_a_test", "no_such_host")


def test_the_error_is_relative_and_shapes_have_to_be_equal() -> None:
    assert relative_l1(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == 1.0
    with pytest.raises(AssertionError):
        relative_l1(torch.ones(2), torch.ones(3))
