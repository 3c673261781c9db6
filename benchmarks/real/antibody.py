"""Does GRPO make the loops that a real masked model fills into antibodies more natural, for judges it was not paid by?

    python -m benchmarks.real.antibody              # seeds 0, 1, 2 and the control; writes benchmarks/real/antibody.md

AntiBERTy (26M weights) fills in CDR-H3 of human heavy chains in one pass. It is trained with the formulas, sampling and
schedule of the infill document, and paid by a judge that tells natural loops from its own and by rules of development.
Model, sequences and judges are made first, once, below --work. Results are kept in benchmarks/results/antibody.json;
the page is written from all of them. Exit code 1 where a seed's paid judge or the judge held out did not rise beyond
its interval, or the control's did.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.demo.runs import estimate, kept_with, machine, read_run, train
from benchmarks.real.antibody_judges import liabilities, make_judges
from benchmarks.real.antibody_rows import LIKE, write_rows
from benchmarks.real.models import ROOT, make_model, model_folder

RESULTS = ROOT / "benchmarks" / "results" / "antibody.json"
PAGE = ROOT / "benchmarks" / "real" / "antibody.md"
HERE = "benchmarks.real.antibody_judges"
WEIGHT = 0.5
"""Of the rules, beside the judge."""
NUM_SHOWN = 20
SETTINGS = (
    *("recipe=infill", "environment=reward_functions", "environment.in_process=true"),
    "environment.timeout=600",
    *("num_steps=16", "groups_per_step=8", "optimizer.lr=3e-5", "optimizer.warmup_steps=3"),
    *("evaluation.num_prompts=64", "evaluation.num_samples=4", "evaluation.every=0", "output.save_every=0"),
    *("algorithm.kl_coef=3", "sampling.max_tokens=32", "preflight.enabled=false"),
)
PARTS = {
    "natural": "judge that pays",
    "sound": "no liability",
    "held_out_judge": "judge held out",
    "counted": "counts, nats a letter",
}


def rewards(work: Path, *, is_control: bool) -> list[str]:
    """Return the settings of what pays, and of what looks on with weight 0."""
    judge = {name: f'{HERE}:Natural, args: {{folder: "{work / "judges" / name}"' for name in ("train", "test")}
    named = [
        f"{judge['train']}}}",
        f"{HERE}:sound, args: {{}}",
        f"{judge['test']}, name: held_out_judge}}",
        f'{HERE}:Counted, args: {{rows: "{work / "rows" / "test.jsonl"}"}}',
    ]
    weights = [1.0, WEIGHT, 0.0, 0.0]
    if is_control:
        named.append(f'{HERE}:Shuffled, args: {{folder: "{work / "judges" / "train"}", weight: {WEIGHT}}}')
        weights = [0.0, 0.0, 0.0, 0.0, 1.0]
    entries = ", ".join(f"{{function: {one}}}" for one in named)
    return [f"rewards=[{entries}]", f"reward_weights={weights}"]


def prepare(work: Path) -> dict[str, Any]:
    """Make model, rows and judges where they are not there, and return how many rows and how right the judges are."""
    facts = work / "facts.json"
    if not facts.is_file():
        make_model("antiberty", model_folder("antiberty"))
        counts = write_rows(work / "rows")
        judges = make_judges(str(model_folder("antiberty")), work / "rows", work / "judges")
        facts.write_text(json.dumps({"rows": counts, "judges": judges}))
    found: dict[str, Any] = json.loads(facts.read_text())
    return found


# ------------------------------------------------------------------------------------------------ what fills look like


def look(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Describe sampled fills, and nature's own loops in the same gaps under the same names with `nature_` before."""
    fills = [(row["prompt"], row["completion"], row["columns"]["loop"]) for row in rows]
    by_gap: dict[str, list[str]] = {}
    for prompt, fill, _ in fills:
        by_gap.setdefault(prompt, []).append(fill)
    pairs = [pair for group in by_gap.values() for pair in combinations(group, 2)]
    own = _of([(prompt, fill) for prompt, fill, _ in fills])
    nature = _of(list({prompt: (prompt, loop) for prompt, _, loop in fills}.values()))
    return {
        "identity": fmean(_same(fill, loop) for _, fill, loop in fills),
        "identity_of_siblings": fmean(_same(*pair) for pair in pairs),
        "different": len({fill for _, fill, _ in fills}) / len(fills),
        "composition_distance": _distance([fill for _, fill, _ in fills], [loop for _, _, loop in fills]),
        **own,
        **{f"nature_{name}": value for name, value in nature.items()},
    }


def _of(fills: Sequence[tuple[str, str]]) -> dict[str, float]:
    letters = Counter("".join(fill for _, fill in fills))
    total = sum(letters.values())
    return {
        "share_of_GYS": sum(letters[letter] for letter in "GYS") / total,
        "longest_run": fmean(max(_runs(fill)) for _, fill in fills),
        "liable": fmean(bool(liabilities(prompt, fill)) for prompt, fill in fills),
    }


def _same(one: str, two: str) -> float:
    return sum(a == b for a, b in zip(one, two, strict=False)) / max(len(one), len(two))


def _distance(some: Sequence[str], others: Sequence[str]) -> float:
    """Return the total variation between two compositions: the share of letters that would have to change."""
    one, two = Counter("".join(some)), Counter("".join(others))
    letters = one.keys() | two.keys()
    return sum(abs(one[x] / one.total() - two[x] / two.total()) for x in letters) / 2


def _runs(text: str) -> list[int]:
    """Return how often each letter has stood in a row, where it stands."""
    found: list[int] = []
    for place, letter in enumerate(text):
        found.append(found[-1] + 1 if place and text[place - 1] == letter else 1)
    return found


def shown_fills(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return nature's loop and one sampled fill before and after of so many gaps, spread over the evaluation."""
    last = {row["prompt"]: row["completion"] for row in after}
    first = {row["prompt"]: row for row in before}
    chosen = list(first.values())[:: max(1, len(first) // NUM_SHOWN)][:NUM_SHOWN]
    return [[row["columns"]["loop"], row["completion"], last[row["prompt"]]] for row in chosen]


# ------------------------------------------------------------------------------------------------ runs


def run(seed: int, work: Path, *, is_control: bool, longest: float = 3000.0) -> dict[str, Any]:
    """Train with a seed, and return what the page needs."""
    folder = work / f"run-{'control-' * is_control}{seed}"
    words = [*SETTINGS, f"model.name={model_folder('antiberty')}", f"data.path={work / 'rows'}", f"seed={seed}"]
    train([*words, *rewards(work, is_control=is_control)], folder, os.environ, longest)
    return found_in(folder)


def found_in(folder: Path) -> dict[str, Any]:
    summary, _, steps = read_run(folder)
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    last = max(row["step"] for row in rows)
    sampled = {step: [row for row in rows if row["step"] == step and not row["greedy"]] for step in (0, last)}
    threads = os.environ.get("OMP_NUM_THREADS")
    return {
        **{when: summary[when]["reward_parts"] for when in ("before", "after", "gain")},
        "looks": {"before": look(sampled[0]), "after": look(sampled[last])},
        "fills": shown_fills(sampled[0], sampled[last]),
        "entropy": [steps[0]["entropy"], steps[-1]["entropy"]],
        "kl": steps[-1]["kl"],
        "rewards": [round(step["reward_mean"], 3) for step in steps],
        "seconds": summary["seconds"],
        "versions": summary["versions"],
        "machine": machine() + (f", OMP_NUM_THREADS={threads}" if threads else ""),
    }


def has_passed(name: str, result: Mapping[str, Any]) -> bool:
    """Both judges rose beyond their intervals; of the control neither did."""
    rose = [result["gain"][judge]["low"] > 0 for judge in ("natural", "held_out_judge")]
    return not any(rose) if name == "control" else all(rose)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control", type=int, nargs="*", default=[0], help="seeds of runs whose rewards are shuffled")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "antibody")
    asked = parser.parse_args(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    facts = prepare(asked.work.resolve())
    print(facts, flush=True)
    passed = []
    for name, seeds in {"trained": asked.seeds, "control": asked.control}.items():
        for seed in seeds:
            result = run(seed, asked.work.resolve(), is_control=name == "control")
            results = kept_with(RESULTS, name, seed, {**result, "facts": facts})
            print(name, seed, {part: estimate(result["gain"][part], "+") for part in PARTS}, flush=True)
            passed.append(has_passed(name, result))
            PAGE.write_text(page(results))
    return 0 if all(passed) else 1


# ------------------------------------------------------------------------------------------------ the page

LOOKS = {
    "liable": ("have a liability", 100.0),
    "identity": ("letters as in the true loop", 100.0),
    "identity_of_siblings": ("letters that two fills of a gap share", 100.0),
    "different": ("different loops", 100.0),
    "share_of_GYS": ("letters G, Y, S", 100.0),
    "composition_distance": ("letters by which the composition is off nature's", 100.0),
    "longest_run": ("longest run of one letter", 1.0),
}
"""What a table shows of fills -> (in words, scale): shares in percent."""


def gains(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    for name, runs in sorted(results.items(), reverse=True):
        for seed, result in sorted(runs.items()):
            cells = [f"{seed}{', rewards shuffled' * (name == 'control')}"]
            for part in PARTS:
                cells += [f"{result['before'][part]['value']:.3f} -> {result['after'][part]['value']:.3f}"]
                cells.append(estimate(result["gain"][part], "+"))
            cells += [f"{result['kl']:.3f}", f"{result['seconds']:.0f}"]
            yield f"| {' | '.join(cells)} |"


def looks(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    runs = {f"seed {seed}": run for seed, run in sorted(results["trained"].items())}
    runs |= {f"control {seed}": run for seed, run in sorted(results.get("control", {}).items())}
    yield f"| | nature | before | {' | '.join(runs)} |"
    yield "|---" * (3 + len(runs)) + "|"
    first = next(iter(runs.values()))["looks"]["before"]
    for name, (words, scale) in LOOKS.items():
        found = [first.get(f"nature_{name}"), first[name], *(run["looks"]["after"][name] for run in runs.values())]
        unit = ", %" if scale == 100 else ""
        yield f"| {words}{unit} | {' | '.join('' if x is None else f'{scale * x:.1f}' for x in found)} |"
    entropies = " | ".join(f"{run['entropy'][1]:.2f}" for run in runs.values())
    yield f"| entropy of a gap in training, nats | | {next(iter(runs.values()))['entropy'][0]:.2f} | {entropies} |"


CONTROL = " In the control the same rewards are dealt anew among the fills of a gap."


def page(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    _, first = min(results["trained"].items())
    rows, judges = first["facts"]["rows"], first["facts"]["judges"]
    machines = sorted({run["machine"] for runs in results.values() for run in runs.values()})
    right = {
        name: ", ".join(f"{100 * share:.0f} % ({kind})" for kind, share in judges[name].items())
        for name in ("train", "test")
    }
    own = ", ".join(f"{value:.2f} ({kind})" for kind, value in judges["own_likelihood"].items())
    columns = " | ".join(f"{words} | gain" for words in PARTS.values())
    fills = "\n".join(f"| {' | '.join(f'`{loop}`' for loop in three)} |" for three in first["fills"])
    return f"""# CDR-H3 of human antibodies, filled in by a real masked model

`python -m benchmarks.real.antibody`: AntiBERTy (BERT, 26M weights, MIT; [models.py](models.py)) fills in the loop
CDR-H3 of human heavy chains, all letters in one pass, and is trained by `recipe=infill` on the score of a
judge. The sequences are {sum(rows.values())} different variable domains of reads in the package abstar (MIT;
[antibody_rows.py](antibody_rows.py)): {rows["train"]} whose prompts are trained on, {rows["test"]} held out, none of
which is {100 * LIKE:.0f} % like any of the first. The policy never sees a true loop.

What pays is the probability that a loop is nature's, by a judge that covey trained on loops of the training families
against the untrained policy's, and {WEIGHT:g} for a whole loop without glycosylation motif, free cysteine, NG or DG
([antibody_judges.py](antibody_judges.py)). Two look on: a judge from another seed and the families held out, and counts
of letters in the loops held out (nats a letter; the true loop's own half left out). A judge ranks the natural loop of
the other's families above others in so many cases; the one that pays: {right["train"]}; the one held out:
{right["test"]}. "Likeliest" is the letter with the highest probability in each gap: mostly G and Y. The untrained
policy's own likelihood would be no judge, it likes that best: {own} nats a letter.

{len(first["rewards"])} steps of 8 gaps and 8 fills of each; 64 gaps held out, 4 fills of each; 95 % intervals,
gains paired over gaps.{CONTROL if "control" in results else ""} Measured
on {"; ".join(machines)},
beside much other work; torch {first["versions"]["torch"]}, transformers {first["versions"]["transformers"]}.

| seed | {columns} | KL | seconds |
|---{"|---" * (2 * len(PARTS) + 2)}|
{chr(10).join(gains(results))}

## What the fills look like

{chr(10).join(looks(results))}

Of the first seed, {len(first["fills"])} gaps held out: the true loop, and a sampled fill before and after.

| nature | before | after |
|---|---|---|
{fills}
"""


if __name__ == "__main__":
    sys.exit(main())
