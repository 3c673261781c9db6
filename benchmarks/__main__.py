"""python -m benchmarks table | curves | real | gpu"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from benchmarks.speed import curves, gpu, sizes, table
from benchmarks.speed.cases import CASES, Case
from benchmarks.speed.contest import WorkerFailed


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    num_repetitions = arguments.repetitions or (1 if arguments.quick else 3)
    try:
        if arguments.what == "table":
            table.run(chosen(arguments.only, quick=arguments.quick), num_repetitions, say)
        elif arguments.what == "real":
            sizes.run(this_device(), arguments.only or (), num_repetitions, say, again=arguments.again)
        elif arguments.what == "curves":
            curves.run(num_repetitions, say)
        else:
            gpu.run(arguments.device, tiny=arguments.tiny, num_repetitions=num_repetitions, say=say)
    except (ValueError, WorkerFailed) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="How long a GRPO step takes here.")
    parser.add_argument("what", choices=("table", "curves", "real", "gpu"))
    parser.add_argument(
        "--only", action="append", metavar="CASE", help="a case, or words of a real one; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="real: measure cells again that are there")
    parser.add_argument("--repetitions", type=int, help="clean repetitions of a case (3; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="one repetition, only cases with a figure to reach")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen(names: Sequence[str] | None, *, quick: bool) -> Mapping[str, Case]:
    """The cases that were named, else all, or all quick ones."""
    unknown = sorted(set(names or ()) - set(CASES))
    if unknown:
        raise ValueError(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if names:
        return {name: CASES[name] for name in CASES if name in names}
    return {name: case.quick() if quick else case for name, case in CASES.items() if case.is_quick or not quick}


def this_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
