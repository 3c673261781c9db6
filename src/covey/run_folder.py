"""The folder of a run: claimed by exactly one run, begun with its settings, versions and log."""

import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from covey.summary import versions

CONFIG = "config.yaml"
LOG = "covey.log"
VERSIONS = "versions.json"
LOG_ONLY = ("bitsandbytes", "py.warnings")
"""Loggers whose warnings concern nobody who watches a run."""


def claim(wanted: Path, config_yaml: str, *, exact: bool) -> Path:
    """Make a folder this run alone owns and write config.yaml into it.

    Creating config.yaml is what claims a folder, so two processes never share one: where another run was faster, the
    next of TIME-2, TIME-3, ... is taken, or, with `exact` (the user named the folder), ValueError raised.
    """
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / CONFIG).open("x", encoding="utf-8") as file:
                file.write(config_yaml)
            return folder
        except FileExistsError:
            if exact:
                raise ValueError(f"{folder} already holds a run ({CONFIG}); name another hydra.run.dir") from None
    raise AssertionError("unreachable")


def begin(folder: Path) -> None:
    """Write versions.json and send the log to covey.log, warnings also to the terminal."""
    facts = {"command": " ".join([sys.argv[0], *map(shlex.quote, sys.argv[1:])]), **versions()}
    (folder / VERSIONS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    file = logging.FileHandler(folder / LOG, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler(CurrentStderr())
    terminal.setLevel(logging.WARNING)
    terminal.addFilter(lambda record: not record.name.startswith(LOG_ONLY))
    terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[file, terminal], force=True)
    logging.captureWarnings(True)
    # Bars of the hub and of transformers would tear the live panel and fill logs; a value the user set stays.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@dataclass(frozen=True, slots=True)
class CurrentStderr:
    """Looks stderr up at every write, so that a live panel, which replaces it, can move warnings above itself."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def discard_if_empty(folder: Path) -> None:
    """Remove the folder (and its parents) Hydra made for a run that was refused, as far as nothing is in them."""
    for path in [folder, *folder.parents[:2]]:
        if not path.is_dir() or path == Path.cwd() or any(path.iterdir()):
            return
        path.rmdir()
