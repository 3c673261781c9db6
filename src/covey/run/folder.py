"""The folder of a run: claimed once, with settings, versions, log."""

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from covey.run import trust
from covey.run.versions import versions
from covey.system import ranks
from covey.system.disk import as_written, atomic_file, cannot_write, catch_write_errors, no_follow, read_regular, sync
from covey.system.jsonl import read_object, write_json
from covey.system.lookup import YAML_LOADER
from covey.system.section import flat
from covey.system.text.format import one_line
from covey.system.text.masking import CleanRecords, without

CONFIG, CHANGES = "config.yaml", "changes.jsonl"
"""The settings that a run was begun with, and those that it was resumed with instead."""
VERSIONS = "versions.json"
FORMAT = 2
"""Format of run folders (versions.json); runs of format 2 with `output.traces` have proof.jsonl."""
LOCK, SUMMARY = "run.lock", "summary.json"
METRICS, ROLLOUTS, EVALUATIONS = "metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"
TRACES, UPDATES = "traces.jsonl", "updates.jsonl"
AUDIT = "audit.json"
"""Result of `covey audit`."""
SCHEDULE = "schedule.jsonl"
PROOF = "proof.jsonl"
"""Digests of each step, for `covey verify`."""
VERDICTS = "verdicts.jsonl"
"""Verdicts of every evaluation on every prompt (`covey_doctor.verdicts`)."""
ALWAYS_ROWS = (METRICS, ROLLOUTS, EVALUATIONS)
ROWS = (*ALWAYS_ROWS, TRACES, UPDATES, VERDICTS, SCHEDULE, PROOF)
"""Files of rows; the schedule is of runs with source=ray alone (`covey.rollouts.schedule`)."""
JOURNAL = "journal"
"""Folder of what was sampled since the last checkpoint (`covey.rollouts.saved.journal`)."""
STATUS = "status.json"
"""Present activity of trainer and samplers, with source=ray."""
OF_A_RUN = re.compile(r"/(?:checkpoints|journal|tensorboard|wandb|run\.\w+|[^/]*\.(?:jsonl?|log|html))$")
"""Files and folders that a run writes into its folder."""
EXITING = 0x4
"""Flag of a Linux process that has begun to end (PF_EXITING), as in /proc/PID/stat."""
LOG_ONLY = ("bitsandbytes", "py.warnings")
"""Loggers whose warnings do not concern a run."""


def create_run_folder(wanted: Path, config_yaml: str, *, exact: bool, trusted: bool = False) -> Path:
    """Make a folder this run alone owns and write config.yaml into it.

    Creating config.yaml is what claims a folder, so two processes never share one: where another run was faster, the
    next of TIME-2, TIME-3, ... is taken, or, with `exact` (the user named the folder), ValueError raised. ValueError
    also where no folder can be made, or one holds links to elsewhere in the place of what a run writes and is not
    `trusted`, WriteError where it cannot be written.
    """
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder}: the run folder cannot be made ({error.strerror}); name another") from error
        for path in filter(OF_A_RUN.search, map(str, folder.glob("*"))):
            trust.check_links(Path(path), folder, trusted=trusted)
        if _claim(folder, config_yaml):
            return folder
        if exact:
            check_unused(folder)
    raise AssertionError("unreachable")


def _claim(folder: Path, config_yaml: str) -> bool:
    """Write config.yaml; return False if another run has."""
    with catch_write_errors(folder / CONFIG):
        try:
            file = (folder / CONFIG).open("x", encoding="utf-8")
        except FileExistsError:
            return False
        with file:
            file.write(config_yaml)
            file.flush()
            os.fsync(file.fileno())  # without it no checkpoint of the run can be resumed
    trust.seal(folder)
    _sync_names(folder)
    return True


def names_in(folder: Path | str) -> list[str] | None:
    """Return a folder's entries, None if missing. ValueError if unreadable."""
    try:
        return os.listdir(folder) if os.path.isdir(folder) else None
    except OSError as error:
        raise ValueError(f"{folder}: the run folder cannot be read ({error.strerror}); name another") from error


def check_unused(folder: Path) -> None:
    """Refuse (ValueError) a folder that holds a run."""
    if os.path.lexists(folder / CONFIG):
        is_saved = any(folder.glob("checkpoints/step-*/manifest.json"))
        resumed = f"resume={folder} continues it, or" if is_saved else "it has no checkpoint to resume from:"
        raise ValueError(f"{folder} already holds a run ({CONFIG}); {resumed} name another folder")


def write_num_steps(folder: Path, num_steps: int) -> None:
    """Write the computed num_steps into config.yaml."""
    path = folder / CONFIG
    if not path.is_file():  # run by a program that has the settings
        return
    before = path.read_text(encoding="utf-8")
    after = re.sub(r"^num_steps: .*$", f"num_steps: {num_steps}", before, count=1, flags=re.MULTILINE)
    if after != before:
        is_own = trust.is_own(folder)
        with atomic_file(path) as file:
            file.write(after)
        if is_own:
            trust.seal(folder)


def _sync_names(folder: Path) -> None:
    """Sync a new folder's names against power cuts."""
    for path in (folder, *folder.absolute().parents[:3]):
        with contextlib.suppress(OSError):  # a folder above may belong to somebody else
            sync(path)


def changes_of(folder: Path) -> list[dict[str, Any]]:
    """Return each resume's changes. ValueError for a damaged file."""
    path = folder / CHANGES
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in read_regular(path, trust.MAX_BYTES).decode().split("\n") if line]
        if not all(isinstance(line["changes"], dict) and isinstance(line["after_step"], int) for line in lines):
            raise ValueError("a line holds no changes")
        if not all(isinstance(one, dict) and "to" in one for line in lines for one in line["changes"].values()):
            raise ValueError("a change does not say to what")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({str(error)[:100]})") from error
    return lines


def spell_changes(line: Mapping[str, Any]) -> list[str]:
    """Spell a resume's changes.

    >>> spell_changes({"after_step": 24, "changes": {"optimizer.lr": {"from": 2e-4, "to": 1e-3}}})
    ['optimizer.lr 0.0002 -> 0.001 from step 25']
    """
    first = line["after_step"] + 1
    return [
        f"{key} {change.get('from')} -> {change['to']} from step {first}" for key, change in line["changes"].items()
    ]


def begun_at(folder: Path) -> int:
    """Return when the run in `folder` was begun, in nanoseconds. Its settings are written then and never again."""
    return (folder / CONFIG).stat().st_mtime_ns


def is_running(folder: Path) -> bool:
    """Return True if the folder is locked, or unfinished without locks. Writes nothing there."""
    try:
        with open(folder / LOCK, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return not _is_ending(folder)
    except OSError:  # no locks here, or the file is not ours to look at
        return not (folder / SUMMARY).exists()
    return False


def _is_ending(folder: Path) -> bool:
    """Return True if the lock's owner is killed, its memory being freed."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # another machine's process, or no such file system
        owner = int(read_object(folder / LOCK).get("pid", 0))
        after_name = Path(f"/proc/{owner}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return bool(int(after_name[6]) & EXITING)
    return False


def run_of(policy: str) -> Path | None:
    """Return the run folder of a saved policy, else None.

    >>> run_of("Qwen/Qwen2.5-0.5B")
    """
    path = Path(policy)
    if path.name != "policy" or len(path.parents) < 3 or path.parents[1].name != "checkpoints":
        return None
    return path.parents[2] if (path.parents[2] / CONFIG).is_file() else None


def newer_trainings(folder: Path, root: Path) -> list[Path]:
    """Return later trainings below `root`, also by programs, oldest first."""
    begun = begun_at(folder)
    newer = [path.parent for path in root.glob(f"**/{CONFIG}") if path.stat().st_mtime_ns > begun]
    began_with = {path: str(read_object(path / VERSIONS, trust.MAX_BYTES).get("command", "covey")) for path in newer}
    other = re.compile(r"covey(?! train\b)")  # a program's folder has the program's name
    return sorted((path for path in newer if not other.match(began_with[path])), key=begun_at)


def skipped_by_latest(folder: Path, root: Path) -> list[str]:
    """Warn of the newer runs that resume=latest passes over for `folder`."""
    newer = newer_trainings(folder, root)
    return [f"resume=latest skips {path}, which is newer and has no checkpoint" for path in newer]


def last_settings(folder: Path, until: float = math.inf) -> dict[str, Any]:
    """Read a run's settings after `until` steps, by dotted name."""
    with as_written(folder / CONFIG):
        try:
            content = yaml.load(read_regular(folder / CONFIG, MAX_BYTES), YAML_LOADER)
        except yaml.YAMLError as error:
            raise ValueError(one_line(str(error))) from error
        found = flat(content if isinstance(content, dict) else {})
    for line in changes_of(folder):
        for name, change in line["changes"].items() if line["after_step"] <= until else ():
            kept = {key: value for key, value in found.items() if key != name and not key.startswith(f"{name}.")}
            found = kept | flat({name: change["to"]})
    return found


def begin_log(folder: Path, secrets: tuple[str, ...] = ()) -> None:
    """Send cleaned logs to covey.log, warnings also to the terminal.

    With several processes the first does; the others only write a log of their own.
    """
    number = ranks.rank()
    file = logging.StreamHandler(LogFile(folder / ranks.log_name(number)))
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file] if number else [file, _terminal()]
    for handler in handlers:
        handler.addFilter(CleanRecords(secrets))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # Bars of the hub and of transformers would tear the live panel and fill logs; a value the user set stays.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def write_versions(folder: Path, secrets: tuple[str, ...] = ()) -> None:
    """Write versions.json: the command and all versions; earlier starts stay."""
    earlier = read_object(folder / VERSIONS, trust.MAX_BYTES)
    command = " ".join([sys.argv[0], *map(shlex.quote, sys.argv[1:])])
    facts: dict[str, Any] = {"command": without(command, secrets)}
    if "command" in earlier:
        before = earlier.get("earlier_commands")
        facts["earlier_commands"] = [*(before if isinstance(before, list) else []), earlier["command"]]
    facts |= {"format": FORMAT, **versions()}
    write_json(folder / VERSIONS, facts)


def _terminal() -> logging.Handler:
    terminal = logging.StreamHandler(CurrentStderr())
    terminal.setLevel(logging.WARNING)
    terminal.addFilter(lambda record: not record.name.startswith(LOG_ONLY))
    terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    return terminal


@dataclass(slots=True)
class LogFile:
    """Appends to the log; a failure is reported once."""

    path: Path
    _failed: bool = False

    def write(self, text: str) -> None:
        try:
            with open(self.path, "a", encoding="utf-8", errors="replace", opener=no_follow) as file:
                file.write(text)
        except OSError as error:
            if not self._failed:
                print(f"WARNING: {cannot_write(self.path, error)}; the log has a gap", file=sys.stderr)
            self._failed = True

    def flush(self) -> None:
        """Do nothing, as every write is whole."""


@dataclass(frozen=True, slots=True)
class CurrentStderr:
    """Finds stderr at every write, as a live panel replaces it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def discard_if_empty(folder: Path, num_parents: int = 2) -> None:
    """Remove an empty folder, and its parents, of a refused run."""
    for path in [folder, *folder.parents[:num_parents]]:
        if not path.is_dir() or path.resolve() == Path.cwd() or any(path.iterdir()):
            return
        path.rmdir()


NOTHING_DONE = {*(CONFIG, VERSIONS, *ROWS, STATUS), *("covey.log", LOCK, "run.seal", SUMMARY)}
"""All that a run has written when the first step or look is yet to come."""
UNTIMED = "other"
"""The phase of a summary in which a run does nothing but begin and end."""


def discard_refused(
    folder: Path, num_parents: int = 2, *, keeps_checks: bool = True, before: Collection[str] | None = None
) -> bool:
    """Remove the folder of a refused run; return True if it was.

    Whoever warmed a policy up, sampled or called a reward function keeps the log, but without `keeps_checks` what the
    preflight did and wrote counts for nothing. A folder that was there stays, with the files that it held `before`.
    """
    if not folder.is_dir():  # moved or deleted while the run was going
        return False
    files = [path for path in folder.iterdir() if path.name not in (before or ())]
    checks = set() if keeps_checks else {"preflight", "preflight.json"}
    # Any row, checkpoint or report counts as something done, and a phase besides the start: it cost time
    done = {path.name for path in files} - NOTHING_DONE
    done |= {path.name for path in files if path.name in ALWAYS_ROWS and (not path.is_file() or path.stat().st_size)}
    if done - checks or {*(read_summary(folder) or {}).get("phases", {})} - {UNTIMED} - checks:
        return False
    for path in files:
        path.unlink()
    if before is None:
        discard_if_empty(folder, num_parents)
    return True


MAX_BYTES = 64 << 20
"""Maximum bytes of summary.json; no file that a run wrote is longer."""


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read summary.json, None without one. ValueError for a broken one."""
    path = folder / "summary.json"
    if not os.path.lexists(path):
        return None
    with as_written(path):
        found = json.loads(read_regular(path, MAX_BYTES))
        return dict(found)
