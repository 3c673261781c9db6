"""How long a run takes to start, what is left of a step, and what evaluations cost.

    python -m benchmarks.speed.starts [NAME ...]

Runs of a few steps in processes of their own, timed by their logs, after their files were read once. Models lie in
COVEY_REAL_MODELS. The rest of a step is what is neither sampling, rewards, log-probs, backward nor optimizer, nor an
evaluation. An evaluated answer costs its share of the evaluations' seconds, over that which a trained answer has of the
steps'.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speed.report import RESULTS, circumstances, load

NAME = "starts"
STEP_PHASES = ("sampling", "reward", "logprobs", "backward", "optimizer")
LINE = re.compile(r"^(\S+ \S+) INFO \S+: (preflight: |step (?P<step>\d+): |evaluated after step (?P<evaluated>\d+))")
"""Lines of covey.log that tell when the run got so far."""
SMOLLM2 = "model.name={models}/smollm2-135m"
BRIEF = ("recipe=brief", SMOLLM2, "num_steps=2")
IFEVAL = ("recipe=ifeval", SMOLLM2, "num_steps=2", "groups_per_step=2", "evaluation.num_prompts=12")
LORA = "model.lora_rank=16"


@dataclass(frozen=True)
class Case:
    """A run to time, and the sizes of the run that it stands for."""

    words: tuple[str, ...]
    answers: tuple[int, int]
    """Answers that a whole run trains on, and that it evaluates."""


CASES: Mapping[str, Case] = {
    "nano, arithmetic": Case(("recipe=arithmetic", "num_steps=60", "cold_start.num_steps=60"), (179200, 23040)),
    "SmolLM2-135M, brief, float32": Case((*BRIEF, "model.precision=float32"), (1280, 192)),
    "SmolLM2-135M, brief, bfloat16": Case((*BRIEF, "model.precision=bfloat16"), (1280, 192)),
    "SmolLM2-135M, brief, bfloat16, LoRA": Case((*BRIEF, "model.precision=bfloat16", LORA), (1280, 192)),
    "nano, tldr_nano": Case(("recipe=tldr_nano", "num_steps=20", "cold_start.num_steps=50"), (6400, 672)),
    "SmolLM2-135M, ifeval, bfloat16": Case(
        (*IFEVAL, "model.precision=bfloat16", "sampling.max_tokens=192"), (102400, 11264)
    ),
}


def measure(case: Case) -> dict[str, Any]:
    """Train in a new folder, and return what the logs say."""
    models = os.environ.get("COVEY_REAL_MODELS", "")
    words = [word.format(models=models) for word in case.words]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        quiet = ("output.progress=false", "output.report=false", f"hydra.run.dir={folder}")
        warm_up(Path(models))
        began = time.time()
        command = [sys.executable, "-m", "covey", "train", *words, *quiet]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        moments = moments_of((folder / "covey.log").read_text(encoding="utf-8"))
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return figures(began, moments, json.loads((folder / "summary.json").read_text()), config)


def warm_up(models: Path) -> None:
    """Read what a start reads, so that no disk is timed."""
    subprocess.run([sys.executable, "-c", "import covey.loop, covey_preflight.preflight"], check=True)
    for file in models.glob("smollm2-135m/*"):
        file.read_bytes()


def moments_of(log: str) -> dict[str, float]:
    """Return when the preflight had passed, and steps and evaluations were done."""
    found = {}
    for at, what, step, evaluated in (match.groups() for match in map(LINE.match, log.splitlines()) if match):
        name = f"step {step}" if step else f"evaluated {evaluated}" if evaluated else what.strip(" :")
        found[name] = datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return found


def figures(
    began: float, moments: Mapping[str, float], summary: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return seconds to the first step, the rest of a step and an evaluated answer's cost.

    A cold start is left out of the first. The first evaluation lies inside of the first step, the last one after the
    last step.
    """
    seconds = {name: phase["seconds"] for name, phase in summary["phases"].items()}
    last, evaluation = config["num_steps"], config["evaluation"]
    first_evaluation = seconds["evaluation"] - (moments[f"evaluated {last}"] - moments[f"step {last}"])
    of_steps = moments[f"step {last}"] - moments["preflight"] - first_evaluation
    of_phases = sum(seconds.get(name, 0.0) for name in STEP_PHASES)
    trained = last * config["groups_per_step"] * config["group_size"]
    evaluated = 2 * evaluation["num_prompts"] * (1 + evaluation["num_samples"])
    return {
        "start": moments["preflight"] - began - seconds.get("cold_start", 0.0),
        "rest": 1 - of_phases / of_steps,
        "cost": seconds["evaluation"] / evaluated / (of_steps / trained),
        "step": of_steps / last,
        "phases": seconds,
    }


def share(cost: float, trained: int, evaluated: int) -> float:
    """Return the evaluations' share of a whole run."""
    return cost * evaluated / (cost * evaluated + trained)


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table in docs/use/real_models.md."""
    lines = [
        "| run | first step after, s | a step, s | rest of a step | an evaluated answer | evaluation of a whole run |"
    ]
    lines.append("|---" * 6 + "|")
    for name, case in CASES.items():
        if name in rows:
            row, whole = rows[name], share(rows[name]["cost"], *case.answers)
            numbers = f"{row['start']:.1f} | {row['step']:.2f} | {row['rest']:.1%} | {row['cost']:.2f} | {whole:.1%}"
            lines.append(f"| {name} | {numbers} |")
    return lines


def main(names: Sequence[str]) -> None:
    """Measure the named cases, or all, and keep them."""
    for name in names or CASES:
        rows = load(NAME)
        rows[name] = {**measure(CASES[name]), "circumstances": circumstances()}
        (RESULTS / f"{NAME}.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(table({name: rows[name]})[-1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
