"""A folder has few enough entries to be read at a glance."""

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 16
"""Entries of a folder, `__init__.py` among them."""
FULLER = {
    "src/covey": 22,  # the rooms of the architecture page, and the public modules
    "src/covey/config": 17,  # with the words of other systems and former names, as data
    "src/covey/policy/models": 17,  # loading a model, one trade each
    "src/covey_preflight": 19,  # a package of one folder, a check each
    "src/covey/policy": 17,  # a model, those it is compared with, its layers
    "src/covey/cluster": 17,  # roles and servers, a file each
    "src/covey/run": 17,  # parts, stages and records of one run
    "src/covey/rollouts": 19,  # prompts and their order, attempts, groups, texts for a teacher: a file each
    "src/covey/system": 17,  # what knows nothing of GRPO, a trade each
    "benchmarks": 17,  # a command each
    "benchmarks/real": 17,  # a measurement each, with its page
    "benchmarks/speed": 18,  # a measurement each, and their tables
    "benchmarks/results": 21,  # a file of each measurement
    "tests": 35,  # mirrors the packages, and has a page
    "tests/report": 18,
    "src/covey/engine/native": 17,  # one engine, a part each
    "tests/engine/native": 18,  # the same
    "tests/benchmarks": 17,  # a measurement each
    "tests/mutants/catalogue": 17,  # an area each
    "tests/golden/formulas": 17,  # the same formulas, by family
    "tests/rollouts": 17,
    "tests/golden/values": 49,  # a file of values for each formula
}
"""Folders that have more, how many, and why."""


def entries() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for top in ("src", "benchmarks", "tests", "docs", "examples"):
        for file in (ROOT / top).rglob("*"):
            path = file.relative_to(ROOT)
            if file.is_file() and not any(part.startswith(("__pycache__", ".")) for part in path.parts):
                for folder in list(path.parents)[:-1]:
                    found[folder.as_posix()].add(path.relative_to(folder).parts[0])
    return found


def test_no_folder_has_more_entries_than_are_read_at_a_glance() -> None:
    fuller = {folder: len(names) for folder, names in entries().items() if len(names) > FULLER.get(folder, MOST)}
    assert fuller == {}
