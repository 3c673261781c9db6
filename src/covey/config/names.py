"""Suggest settings for an unknown name."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from covey.system.lookup import read_table

TABLE = Path(__file__).with_name("names.yaml")


def named_elsewhere(name: str, known: Collection[str]) -> list[str]:
    """Return covey's names for a setting of TRL, verl or transformers, in the same section where that has it.

    >>> named_elsewhere("cold_start.learning_rate", ["optimizer.lr", "cold_start.lr"])
    ['cold_start.lr']
    """
    section, _, leaf = name.rpartition(".")
    if name in RUN_FOLDER or (section == "output" and leaf in RUN_FOLDER):
        return [RUN_DIR]
    if any(part == "teacher" or other_names().get(part) == TEACHER for part in section.split(".")):
        return list(TEACHER)
    own = other_names().get(leaf) or _by_letters().get(_letters(leaf), ())
    here = [f"{section}.{other.rpartition('.')[2]}" for other in own if "=" not in other]
    return [other for other in here if other in known] or list(own)


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return at most three names, the likeliest first.

    >>> nearest("lr", ["optimizer.lr", "seed"]), nearest("optimizer.MaxGradNorm", ["optimizer.max_grad_norm"])
    (['optimizer.lr'], ['optimizer.max_grad_norm'])
    """
    leaf = name.rpartition(".")[2]
    same_letters = [other for other in known if _letters(other) == _letters(name)]
    peers = [other for other in known if other.count(".") == name.count(".")]
    begun = sorted((other for other in peers if name.startswith(f"{other}_")), key=len, reverse=True)[:1]
    alike = difflib.get_close_matches(name, peers, n=1, cutoff=0.75)
    same_leaf = [other for other in known if _letters(other.rpartition(".")[2]) == _letters(leaf)]
    near_leaf = [one for one in known if difflib.SequenceMatcher(None, one.rpartition(".")[2], leaf).ratio() > 0.8]
    found = [*same_letters, *begun, *alike, *same_leaf, *near_leaf]
    return list(dict.fromkeys(found))[:3] or [one for one in peers if _has_word(one, name)][:3]


def _has_word(known: str, name: str) -> bool:
    """Return True if a setting of the section has nearly this word.

    >>> _has_word("data.prompt_column", "data.colum")
    True
    """
    (section, _, leaf), (own, _, other) = known.rpartition("."), name.rpartition(".")
    return section == own and bool(difflib.get_close_matches(other, leaf.split("_"), cutoff=0.8))


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the hint of a message, empty where no name is near.

    >>> did_you_mean("num_generation", ["group_size"])
    '; did you mean group_size?'
    """
    same = [other for other in known if _letters(other) == _letters(name)]
    names = same[:1] or named_elsewhere(name, known) or nearest(name, known)
    if not names and (alike := difflib.get_close_matches(name.rpartition(".")[2], other_names(), n=1, cutoff=0.85)):
        names = named_elsewhere(alike[0], known)
    said = NAMES_FOLDER if names == [RUN_DIR] else " or ".join(names)
    return f"; did you mean {said}?" if names else ""


RUN_DIR = "hydra.run.dir"
NAMES_FOLDER = f"{RUN_DIR}=FOLDER, which names the run's folder"
RUN_FOLDER = (
    *("dir", "folder", "log_dir", "logdir", "out", "out_dir", "output_dir", "output_folder", "run", "run_dir"),
    *("run_folder", "save_dir", "name", "output_path", "output.path"),
)
"""Names that people type for the folder of a run, which Hydra makes."""


TEACHER = ("algorithm.teacher",)
CLIP_RANGE = ("algorithm.loss_options.eps_low", "algorithm.loss_options.eps_high")


@cache
def other_names() -> dict[str, tuple[str, ...]]:
    """Return the settings by other systems' names."""
    return {name: tuple(here.split()) for here, names in read_table(TABLE).items() for name in names.split()}


@cache
def _by_letters() -> dict[str, tuple[str, ...]]:
    return {_letters(name): here for name, here in other_names().items()}


def explain_foreign(name: str, value: str, given: Mapping[str, str]) -> str:
    """Describe a foreign setting in covey's words, "" for unknown names.

    The package of translations is named alone, for the core imports nothing of it.
    """
    return str(import_module("covey_trl.translation").explain(name, value, given))


def refuse_foreign(unknown: Iterable[str], given: Mapping[str, str], known: Collection[str]) -> None:
    """Raise ValueError for settings of other systems, with covey's words.

    In the same line are names that are spelled otherwise here, for they would be refused next.
    """
    lines = {name: explain_foreign(name, given[name], given) for name in unknown}
    if any(lines.values()):
        hints = {name: did_you_mean(name, known).replace("; ", ", ") for name in lines}
        spelt = [lines[name] or f"unknown setting {name}{hint}" for name, hint in hints.items() if lines[name] or hint]
        raise ValueError("; ".join(dict.fromkeys(spelt)))
