"""Folders of real models, made once, and settings that keep a step of theirs small."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.real.models import model_folder
from covey.system.machine import release_memory

ROOT = Path(__file__).resolve().parents[2]
HEAVY = pytest.mark.xdist_group("half a billion weights")
"""Tests that take 12 GB each: one after the other, in one worker."""


@pytest.fixture(autouse=True)
def _memory_of_one_test() -> Iterator[None]:
    yield
    gc.collect()
    release_memory()


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Return the folder of a model by name, made first where it is not there."""

    def folder_of(name: str) -> Path:
        folder = model_folder(name)
        if not (folder / "config.json").is_file():  # in a process of its own, whose memory ends with it
            subprocess.run([sys.executable, "-m", "benchmarks.real.models", name], cwd=ROOT, check=True)
        return folder

    return folder_of
