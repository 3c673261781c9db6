"""Do the recipes for a laptop teach a real model something, on every seed, and only from their rewards?

    python -m benchmarks.real.recipes                                  # three recipes, three seeds, a control each
    python -m benchmarks.real.recipes --recipes brief --seeds 1 --kinds reward --at-once 2

The model is SmolLM2-135M-Instruct (benchmarks/real/models.py). A control is the run of seed 0 with the rewards of each
training group shuffled among its completions. Results are kept in benchmarks/results/real_recipes.json;
benchmarks/real/recipes.md is written from all of them. Exit code 1 where a held-out reward did not rise beyond its
interval, or a control's did.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.demo.runs import estimate, kept_with, machine, read_run
from benchmarks.real.models import ROOT, make_model, model_folder

RECIPES = ("brief", "json", "ifeval_small")
MODEL = "smollm2-135m"
RESULTS = ROOT / "benchmarks" / "results" / "real_recipes.json"
PAGE = ROOT / "benchmarks" / "real" / "recipes.md"
FRONT = ROOT / "README.md"
LONGEST = 3600.0
"""Seconds until a run is given up."""
NUM_SHOWN = 6
"""Answers that are shown before and after: those to the first held-out prompts."""

SAMPLES = "evaluation.num_samples=2"
"""Narrower intervals than the recipes' own."""
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By recipe, or recipe and ", control", and by seed."""


def run(recipe: str, seed: int, *, is_control: bool, num_threads: int) -> dict[str, Any]:
    """Train one seed in a process of its own. Return what the page and the figure need of its folder."""
    program = ["benchmarks.real.recipes", "--control-run"] if is_control else ["covey"]
    settings = [
        f"recipe={recipe}",
        f"seed={seed}",
        SAMPLES,
        f"model.name={model_folder(MODEL)}",
        "output.progress=false",
    ]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        command = [sys.executable, "-m", *program, "train", *settings, f"hydra.run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(settings)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return measured(folder, num_threads)


def measured(folder: Path, num_threads: int) -> dict[str, Any]:
    """Return estimates of a finished run, the rewards of its training steps, and its answers before and after."""
    summary, _, steps = read_run(folder)
    parts = ("before", "after", "gain")
    return {
        "reward": {part: summary[part]["reward_mean"] for part in parts},
        "greedy": {part: summary[part]["accuracy"] for part in parts},
        "steps": [round(row["sampled_reward_mean"], 4) for row in steps],
        "answers": answers(folder),
        "seconds": summary["seconds"],
        "versions": summary["versions"],
        "machine": f"{machine()}, {num_threads} thread{'s' if num_threads > 1 else ''} a run",
    }


def answers(folder: Path) -> list[dict[str, Any]]:
    """Return the greedy answers to the first held-out prompts, before and after."""
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    of_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["greedy"]:
            of_prompt.setdefault(row["prompt_id"], []).append(row)
    shown = sorted(of_prompt.items(), key=lambda entry: int(entry[0].rpartition("-")[2]))[:NUM_SHOWN]
    return [
        {
            "prompt": said[0]["prompt"][-1]["content"],
            "before": {"text": said[0]["completion"], "reward": said[0]["reward"]},
            "after": {"text": said[-1]["completion"], "reward": said[-1]["reward"]},
        }
        for _, said in shown
    ]


def run_control(arguments: Sequence[str]) -> int:
    """`covey` whose environments deal out the rewards of training groups at random; the held-out split is honest."""
    from covey.cli.main import main
    from covey.environments.reward_functions.settings import RewardFunctionsConfig
    from covey_tasks.ifeval.settings import IfevalConfig

    for kind in (RewardFunctionsConfig, IfevalConfig):
        kind.build = shuffled(kind.build)
    return main(arguments)


def shuffled(build: Any) -> Any:
    def built(settings: Any, run: Any, say: Any) -> Any:
        environment = build(settings, run, say)
        honest = environment.score_tokens

        async def score_tokens(prompt: Any, completions: Sequence[str], completion_ids: Any) -> Any:
            verdicts = await honest(prompt, completions, completion_ids)
            if prompt.id.startswith("train"):
                random.Random("\n".join([prompt.id, *completions])).shuffle(verdicts)
            return verdicts

        environment.score_tokens = score_tokens
        return environment

    return built


# ------------------------------------------------------------------------------------------------ the page


def has_risen(result: Mapping[str, Any]) -> bool:
    return bool(result["reward"]["gain"]["low"] > 0)


def row(name: str, seed: str, result: Mapping[str, Any]) -> str:
    reward, greedy = result["reward"], result["greedy"]
    cells = [
        name,
        seed,
        *(estimate(reward[part]) for part in ("before", "after")),
        estimate(reward["gain"], "+"),
        f"{100 * greedy['before']['value']:.0f} -> {100 * greedy['after']['value']:.0f}",
        "yes" if has_risen(result) else "no",
        f"{result['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def side_by_side(result: Mapping[str, Any]) -> str:
    """Return answers before and after as a table, with what each is worth."""
    lines = ["| asked | before | after |", "|---|---|---|"]
    for shown in result["answers"]:
        said = [f"{in_cell(shown[when]['text'])} ({shown[when]['reward']:.2f})" for when in ("before", "after")]
        lines.append(f"| {' | '.join([in_cell(shown['prompt']), *said])} |")
    return "\n".join(lines)


def in_cell(text: str, most: int = 160) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def page(results: Results) -> str:
    rows = [row(name, seed, found) for name, of_seed in sorted(results.items()) for seed, found in of_seed.items()]
    every = [found for of_seed in results.values() for found in of_seed.values()]
    machines, versions = "; ".join(sorted({found["machine"] for found in every})), every[0]["versions"]
    trained = {name: of_seed for name, of_seed in results.items() if "control" not in name}
    gains = [f"{name}: {spread(of_seed)}" for name, of_seed in sorted(trained.items())]
    shown = [f"## {name}\n\n{side_by_side(next(iter(of_seed.values())))}" for name, of_seed in sorted(trained.items())]
    return f"""# A real model on a laptop

![mean reward of every step: the seeds rise, shuffled rewards do not](../../docs/figures/front/real.svg)

SmolLM2-135M-Instruct (134,515,008 weights), trained by GRPO on rewards that are programs. Mean reward of sampled
answers to 48 held-out prompts, before and after, with 95 % intervals, the gain paired over prompts; greedy answers that
earn the full reward, in per cent. *Control*: the run of that seed with the rewards of each training group shuffled.

Measured by `python -m benchmarks.real.recipes` (`covey train recipe=RECIPE seed=SEED {SAMPLES}`) on {machines};
torch {versions["torch"]}, transformers {versions["transformers"]}. The weights are those of a package: four bits, put
back into plain numbers. Seconds are those of the whole run, beside whatever else the machine did.

| recipe | seed | before | after | gain | greedy, % | rose | seconds |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Gain in reward: {"; ".join(gains)}.

What the policy says to the first {NUM_SHOWN} held-out prompts, greedily, and what that earns (first seed):

{(chr(10) * 2).join(shown)}
"""


def spread(of_seed: Mapping[str, Mapping[str, Any]]) -> str:
    gains = [found["reward"]["gain"]["value"] for found in of_seed.values()]
    return f"median {median(gains):+.3f}, smallest {min(gains):+.3f}, largest {max(gains):+.3f} of {len(gains)} seeds"


def front(results: Results) -> str:
    """Return what the front page shows: answers to held-out questions, and the gains that go with them."""
    first = next(iter(results["brief"].values()))
    lines = ["| asked, never trained on | before | after |", "|---|---|---|"]
    for shown in first["answers"]:
        question = shown["prompt"].partition(" Answer in")[0]
        lines.append(f"| {' | '.join(in_cell(text, 110) for text in (question, *_texts(shown)))} |")
    control = "; ".join(estimate(found["reward"]["gain"], "+") for found in results.get("brief, control", {}).values())
    lines += ["", f"Gain in held-out reward: {spread(results['brief'])}; rewards shuffled within groups: {control}."]
    return "\n".join(lines)


def _texts(shown: Mapping[str, Any]) -> tuple[str, str]:
    return shown["before"]["text"], shown["after"]["text"]


def keep(name: str, seed: int, result: Mapping[str, Any]) -> None:
    """Add one result, and write page and front page anew."""
    write(kept_with(RESULTS, name, seed, result))


def write(results: Results) -> None:
    PAGE.write_text(page(results))
    begin, old, end = FRONT.read_text().partition("| asked, never trained on |")
    if old and "brief" in results:
        FRONT.write_text(begin + front(results) + "\n" + end.partition(" within groups: ")[2].partition("\n")[2])


def main() -> int:
    if sys.argv[1:2] == ["--control-run"]:
        return run_control(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", default=["reward", "control"], choices=["reward", "control"])
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other, which share the cores")
    options = parser.parse_args()
    make_model(MODEL, model_folder(MODEL))
    jobs = [(recipe, seed, False) for recipe in options.recipes for seed in options.seeds if "reward" in options.kinds]
    jobs += [(recipe, options.seeds[0], True) for recipe in options.recipes if "control" in options.kinds]
    num_threads = max(1, len(os.sched_getaffinity(0)) // options.at_once)
    good = []
    with ThreadPoolExecutor(options.at_once) as pool:
        found = pool.map(lambda job: run(job[0], job[1], is_control=job[2], num_threads=num_threads), jobs)
        for (recipe, seed, is_control), result in zip(jobs, found, strict=True):
            name = f"{recipe}, control" if is_control else recipe
            keep(name, seed, result)
            print(row(name, str(seed), result), flush=True)
            good.append(has_risen(result) is not is_control)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
