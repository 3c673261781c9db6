"""Every test finds logging as it was, and a copy of its file's run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ....support.small import logging_as_it_was


@pytest.fixture(autouse=True)
def _plain_logging() -> Iterator[None]:
    with logging_as_it_was():
        yield


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")
