"""Versions of the packages that a run depends on."""

import platform
import subprocess
from functools import cache
from pathlib import Path

from covey.policy.kernels.compiler import compiler_version

PACKAGES = ("covey", "torch", "transformers", "tokenizers", "peft", "accelerate", "datasets", "bitsandbytes", "numpy")
"""Packages whose versions are recorded; those not installed are left out."""


def versions() -> dict[str, str]:
    """Return the versions of Python, platform, packages and compiler.

    In a checkout also the commit ("+" where files differ).
    """
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if compiler := compiler_version():
        found["compiler"] = compiler
    commit = _git_commit(Path(__file__).resolve().parents[1])
    return found | ({"git_commit": commit} if commit else {})


def _git_commit(folder: Path) -> str:
    if not (folder.parents[1] / ".git").exists():
        return ""
    commit = _git(folder, "rev-parse", "HEAD")
    return commit + "+" if commit and _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
