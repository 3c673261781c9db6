"""Runs of the command for the demos, in processes of their own: trained, read, and kept by name and seed."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Read a finished run: its summary, the rows of its evaluations, and those of its training steps."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    of_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("evaluate", "train")}
    return summary, of_kind["evaluate"], of_kind["train"]


def kept_with(
    path: Path, name: str, seed: int, result: Mapping[str, Any], indent: int | None = 1
) -> dict[str, dict[str, Any]]:
    """Add one result to a file of results by name and seed, and return all of them."""
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    results.setdefault(name, {})[str(seed)] = dict(result)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=indent, sort_keys=True) + "\n")
    return results


def train(words: Sequence[str], folder: Path, environment: Mapping[str, str], longest: float) -> None:
    """`covey train` into a folder, silently, in a process of its own.

    RuntimeError with the end of what it said where it failed; subprocess.TimeoutExpired after `longest` seconds.
    """
    done = subprocess.run(
        [sys.executable, "-m", "covey", "train", *words, f"hydra.run.dir={folder}", "output.progress=false"],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=longest,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")


def estimate(values: Mapping[str, float], sign: str = "") -> str:
    """A value with its interval, as pages show it."""
    return f"{values['value']:{sign}.3f} [{values['low']:{sign}.3f}, {values['high']:{sign}.3f}]"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()}, no GPU"
