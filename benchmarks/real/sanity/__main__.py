"""The sanity set: problems that a real model solves sometimes must be learnt, and are not by a broken system.

    python -m benchmarks.real.sanity build                  # samples candidates, keeps what is solved in 1 to 15 of 16
    python -m benchmarks.real.sanity run --seeds 0 1 2      # trains on the set, minutes a seed on two CPU cores
    python -m benchmarks.real.sanity planted --only NAME    # the same with faults planted: each must fail and be named
    python -m benchmarks.real.sanity table                  # writes sanity.md from what was measured

The model is SmolLM2-135M-Instruct, made by benchmarks.real.models, or any folder by --model. Every run has a process
and a folder of its own. Exit code 1 where a run without a fault does not learn, or one with a fault does unnoticed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real.models import make_model, model_folder
from benchmarks.real.sanity import problems
from benchmarks.real.sanity.faults import FAULTS
from benchmarks.real.sanity.table import RESULTS, SET, SHORT, is_right, read_results, row_of, write_page

NAME = "smollm2-135m"


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    arguments.set = arguments.set or (SHORT if arguments.what == "planted" else SET)
    if arguments.what == "table":
        write_page()
        return 0
    model = arguments.model or str(model_folder(NAME))
    if arguments.model is None:
        make_model(NAME, Path(model))
    if arguments.what == "build":
        problems.write(problems.build(model, arguments.number), arguments.set)
        return 0
    if arguments.what == "train":
        return train_here(arguments, model)
    faults = (arguments.only or list(FAULTS)) if arguments.what == "planted" else [None]
    runs = [(fault, seed) for seed in arguments.seeds for fault in faults]
    found = [train_apart(arguments, model, fault, seed) for fault, seed in runs]
    return 0 if all(map(is_right, found)) else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "run", "planted", "table", "train"))
    parser.add_argument("--model", help="folder of the model, in the place of SmolLM2-135M-Instruct")
    parser.add_argument("--set", type=Path, help="where the problems are; the short ones where faults are planted")
    parser.add_argument("--number", type=int, default=8, help="problems of the set")
    parser.add_argument("--runs", type=Path, default=Path("outputs/sanity"), help="where run folders will be")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40, help="at most; a run ends once all is learnt")
    parser.add_argument("--only", nargs="+", choices=tuple(FAULTS), help="faults, instead of all")
    parser.add_argument("--preflight", action="store_true", help="check before the first step, as runs usually do")
    parser.add_argument("--fault", choices=tuple(FAULTS), help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def train_here(arguments: argparse.Namespace, model: str) -> int:
    from covey.system import machine

    machine.prepare()  # before torch is imported
    from benchmarks.real.sanity.training import train

    how = {"seed": arguments.seeds[0], "fault": arguments.fault, "preflight": arguments.preflight}
    found = train(model, arguments.set, arguments.runs, num_steps=arguments.steps, **how)
    arguments.found.write_text(json.dumps(found), encoding="utf-8")
    return 0


def train_apart(arguments: argparse.Namespace, model: str, fault: str | None, seed: int) -> dict[str, Any]:
    """Train one run in a process of its own, and keep what came of it beside the results that there are."""
    name = f"{fault or 'healthy'}-{arguments.set.stem}{'-checked' if arguments.preflight else ''}-{seed}"
    folder = arguments.runs / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".json")
    words = ["train", "--model", model, "--set", str(arguments.set), "--runs", str(folder), "--seeds", str(seed)]
    words += ["--found", str(file), *(["--fault", fault] if fault else [])]
    words += ["--steps", str(arguments.steps), *(["--preflight"] if arguments.preflight else [])]
    subprocess.run([sys.executable, "-m", "benchmarks.real.sanity", *words], check=True)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    print(row_of(found), flush=True)
    RESULTS.write_text(json.dumps({**read_results(), name: found}, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
