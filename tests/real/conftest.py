"""Folders of real models, made once, and settings that keep a step of theirs small."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.real.models import model_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Return the folder of a model by name, made first where it is not there."""

    def folder_of(name: str) -> Path:
        folder = model_folder(name)
        if not (folder / "config.json").is_file():  # in a process of its own, whose memory ends with it
            subprocess.run([sys.executable, "-m", "benchmarks.real.models", name], cwd=ROOT, check=True)
        return folder

    return folder_of
