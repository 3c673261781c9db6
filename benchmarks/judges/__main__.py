"""python -m benchmarks.judges: what graders of mathematics pay wrongly, refuse wrongly, and how long they take.

Cases are those of this repository's tests, whose right values are known: what public reports say graders get wrong, and
answers of all kinds; where COVEY_SHARED names a folder also labelled pairs and solutions of fine-tuned models. Most
libraries read boxes alone, so only boxed answers are compared, and answers of solutions are put into a box.

math-verify and TRL's reward are the installed ones; verl's two are written anew (module `verl`).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.judges.verl import equals_as_dapo, equals_as_verl
from covey_graders.math.judge import compare
from covey_graders.math.symbolic import trl_verdict

CASES = Path(__file__).parents[2] / "tests" / "graders" / "math"
PARSE_SECONDS, VERIFY_SECONDS = 5, 5


@dataclass(frozen=True)
class Case:
    """A completion, the reference answer, and whether it is right, by value alone and with nothing left to compute."""

    completion: str
    gold: str
    right: bool
    value: bool
    question: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a judge got wrong of a set, and the seconds of each verdict."""

    paid: list[Case]
    refused: list[Case]
    seconds: list[float]

    def row(self, judge: str, name: str) -> str:
        """Return a line of the table."""
        ordered = sorted(self.seconds)
        median, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        counts = f"{len(ordered)} | {len(self.paid)} | {len(self.refused)}"
        return f"| {name} | {judge} | {counts} | {1000 * median:.2f} | {1000 * p99:.1f} |"


def covey(case: Case) -> bool:
    return compare(case.completion, case.gold, case.question)


def covey_values(case: Case) -> bool:
    return compare(case.completion, case.gold, case.question, computed=False)


def math_verify(case: Case) -> bool:
    from math_verify import parse, verify

    gold = parse(f"${case.gold}$", parsing_timeout=PARSE_SECONDS)
    return verify(gold, parse(case.completion, parsing_timeout=PARSE_SECONDS), timeout_seconds=VERIFY_SECONDS)


def trl(case: Case) -> bool:
    gold = f"${case.gold}$"
    return bool(trl_verdict(case.completion, gold, parse_seconds=PARSE_SECONDS, verify_seconds=VERIFY_SECONDS))


def verl(case: Case) -> bool:
    return equals_as_verl(case.completion, case.gold)


def verl_dapo(case: Case) -> bool:
    """Judge the box as the line that DAPO's prompt asks for."""
    inside = case.completion.rpartition("\\boxed{")[2].rpartition("}")[0]
    return equals_as_dapo(f"Answer: {inside}", case.gold)


JUDGES: Mapping[str, Callable[[Case], bool]] = {
    "covey": covey,
    "covey, values": covey_values,
    "math-verify": math_verify,
    "TRL": trl,
    "verl": verl,
    "verl, DAPO": verl_dapo,
}


def outcome(judge: str, cases: Iterable[Case]) -> Outcome:
    """Judge every case once. An exception is a refusal."""
    found = Outcome([], [], [])
    for case in cases:
        began = time.perf_counter()
        try:
            verdict = JUDGES[judge](case)
        except Exception:
            verdict = False
        found.seconds.append(time.perf_counter() - began)
        # Only covey's own scheme asks that nothing is left to compute
        right = case.right if judge == "covey" else case.value
        if verdict != right:
            (found.paid if verdict else found.refused).append(case)
    return found


def sets() -> dict[str, list[Case]]:
    """Return the cases with a box, by the set they are of."""
    found = {
        "reports": [_case(row) for row in _rows(CASES / "report_cases.jsonl")],
        "answers": [_case(row) for row in _rows(CASES / "answer_cases.jsonl")],
    }
    shared = os.environ.get("COVEY_SHARED")
    if shared:
        pairs = _rows(Path(shared) / "data" / "math_answers.jsonl")
        found["labelled pairs"] = [_case(row | {"right": row["correct"]}) for row in pairs if not row["debatable"]]
        solutions = _rows(Path(shared) / "data" / "gsm8k" / "model_solutions.jsonl")
        found["GSM8K solutions"] = [_case(_boxed(row)) for row in solutions]
    return {name: [case for case in cases if "\\boxed{" in case.completion] for name, cases in found.items()}


def _rows(path: Path) -> Iterator[dict]:
    return map(json.loads, path.read_text().splitlines())


def _case(row: Mapping) -> Case:
    right = row["right"]
    return Case(row["completion"], row["gold"], right, row.get("value", right), row.get("question", ""))


def _boxed(row: Mapping) -> dict:
    body, _, number = row["completion"].rpartition("A: ")
    return {
        "completion": f"{body.strip()}\n\\boxed{{{number.strip()}}}",
        "gold": row["gold"],
        "right": row["is_correct"],
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judges", description="Which graders pay what wrongly.")
    parser.add_argument("--only", action="append", choices=tuple(JUDGES), help="a judge; may be repeated")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="name the first N wrong verdicts of each kind")
    arguments = parser.parse_args(argv)
    print(
        "| set | judge | cases | paid wrongly | refused wrongly | median ms | p99 ms |\n|---|---|---|---|---|---|---|"
    )
    for name, cases in sets().items():
        for judge in arguments.only or JUDGES:
            found = outcome(judge, cases)
            print(found.row(judge, name), flush=True)
            for kind, wrong in (("paid", found.paid), ("refused", found.refused)):
                for case in wrong[: arguments.show]:
                    print(f"    {kind}: {case.completion!r} for {case.gold!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
