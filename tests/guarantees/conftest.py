"""The reference run that the others are compared with."""

from pathlib import Path

import pytest

from .runs import finish_well, new_run, prepare


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the run "whole" went through without a stop; others beside it have its rows and reward."""
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    finish_well(new_run(folder, "whole"))
    return folder
