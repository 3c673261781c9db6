"""`covey best FOLDER`: the step of a run with the highest reward."""

import json
from pathlib import Path


def show_best(words: list[str]) -> None:
    """Show the step of a run with the highest reward.

    usage: covey best FOLDER
    """
    if len(words) != 1:
        raise ValueError(f"covey best must be given the folder of one run, got {len(words)} words")
    file = Path(words[0]) / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{words[0]} must be the folder of a run, got no {file.name} in it")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get("reward_mean") is not None]
    if not rows:
        raise ValueError(f"{file} must have a finished step, got none")
    best = max(rows, key=lambda row: float(row["reward_mean"]))
    print(f"step {best['step']}: reward {best['reward_mean']:.3f}")
