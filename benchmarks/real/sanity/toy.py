"""The faults on the smallest model there is, in seconds: the recipe `arithmetic`, shortened.

python -m benchmarks.real.sanity.toy NAME hydra.run.dir=FOLDER
"""

import sys
from collections.abc import Sequence

from benchmarks.checks.doctor import planted
from benchmarks.real.sanity.faults import FAULTS

USUAL = ("num_steps=40", "groups_per_step=16", "evaluation.num_prompts=16", "evaluation.every=0")


def main(argv: Sequence[str]) -> int:
    name, *rest = argv
    planted.PLANTED[name] = planted.Planted(FAULTS[name].named_by, patch=FAULTS[name].plant)
    return planted.run_planted(name, [*USUAL, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
