"""Resume a run: folder, settings, checkpoint and lock."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from covey.config import compose as settings
from covey.config.budget import resolve_budget
from covey.config.schema import Config
from covey.rollouts.saved.journal import journal_files
from covey.run import trust
from covey.run.checkpoints.checkpoint import SETTINGS, complete_checkpoints, newest_valid, read_manifest
from covey.run.checkpoints.manifest import step_of
from covey.run.checkpoints.saved_settings import as_saved, differences, is_named, saved_in, saved_settings
from covey.run.folder import (
    CHANGES,
    CONFIG,
    JOURNAL,
    LOCK,
    ROWS,
    changes_of,
    create_run_folder,
    spell_changes,
    write_versions,
)
from covey.run.versions import versions
from covey.system import collectives, ranks
from covey.system.disk import atomic_file, catch_write_errors, no_follow, put_back
from covey.system.jsonl import object_of
from covey.system.text.format import relative
from covey.system.text.masking import secrets_in

LOGGER = logging.getLogger(__name__)
ORIGIN_OF_PROMPTS = ("data", "environment", "seed")
"""Settings, or sections of them, that decide which prompts there are."""


def check_same_prompts(config: Config, folder: Path, checkpoint: Path, prompts: str) -> None:
    """Refuse other prompts, unless resume_changes names a setting behind them.

    `prompts` is this process's `fingerprint.prompt_hash`. ValueError.
    """
    # Prompts are compared by hash; checkpoints of old versions have none
    if _last_prompts(folder, checkpoint) in (None, prompts):
        return
    path = config.data.path
    key, chosen = ("environment.name", config.environment.name) if path is None else ("data.path", path)
    if not any(name.partition(".")[0] in ORIGIN_OF_PROMPTS for name in config.resume_changes):
        raise ValueError(
            f"the prompts of {key}={chosen} are not those that {folder} was trained on; "
            f"pass resume_changes=[{key}] to resume anyway (the run will not be bit-for-bit reproducible)"
        )
    LOGGER.info("prompts changed (%s=%s); new ones are used from this step on", key, chosen)


def check_same_run(config: Config, folder: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint with settings that the run never had. ValueError.

    It was copied from another run, unless resume_changes names the setting.
    """
    if config.trust_run or not ((folder / CONFIG).is_file() and (checkpoint / SETTINGS).is_file()):
        return  # settings edited by hand are trusted by a word
    had = [(key, change["to"]) for line in changes_of(folder) for key, change in line["changes"].items()]
    for key, (begun, saved) in differences(saved_in(folder / CONFIG), saved_in(checkpoint / SETTINGS)).items():
        if (key, saved) not in had and not is_named(key, config.resume_changes):
            raise ValueError(
                f"{checkpoint} was saved with {key}={saved} and is of another run: this one began with {key}={begun}; "
                f"remove it, or pass resume_changes=[{key}] to resume from it"
            )


def check_same_reference(config: Config, checkpoint: Path, reference: str) -> None:
    """Refuse another reference, unless resume_changes names `algorithm.reference_model`.

    `reference` is this process's `Run.reference_identity`. ValueError.
    """
    then = read_manifest(checkpoint).get("reference", "")
    if "" in (then, reference) or then == reference or "algorithm.reference_model" in config.resume_changes:
        return
    if config.algorithm.reference_model is None:
        raise ValueError(
            f"the reference of this run was {then}, and changed settings would make it {reference}: leave what the "
            "policy began with as it was (seed, model, cold_start, demonstrations)"
        )
    raise ValueError(
        f"algorithm.reference_model={config.algorithm.reference_model} holds other weights than when {checkpoint} was "
        "saved; pass resume_changes=[algorithm.reference_model] to resume anyway"
    )


def _last_prompts(folder: Path, checkpoint: Path) -> str | None:
    changed = [line["prompts"] for line in changes_of(folder) if "prompts" in line]
    return changed[-1] if changed else read_manifest(checkpoint).get("prompts")


def log_setting_changes(
    config: Config, folder: Path, checkpoint: Path, prompts: str, say: Callable[[str], None] = LOGGER.info
) -> None:
    """Record and say the changes of settings and `prompts` since `checkpoint`."""
    if not (folder / CONFIG).is_file():  # `train` was called by a program, which has the settings
        return
    found = differences(saved_settings(folder), as_saved(config))
    changes = {key: {"from": then, "to": now} for key, (then, now) in found.items()}
    is_other = _last_prompts(folder, checkpoint) not in (None, prompts)
    if not changes and not is_other:
        return
    path, is_own = folder / CHANGES, trust.is_own(folder)
    earlier = path.read_text(encoding="utf-8") if path.is_file() else ""
    line = {"after_step": int(read_manifest(checkpoint)["step"]), "changes": changes}
    line |= {"prompts": prompts} if is_other else {}
    for text in spell_changes(line):
        say(text)
    with atomic_file(path) as file:
        file.write(earlier + json.dumps(line) + "\n")
    if is_own:
        trust.seal(folder)


@contextmanager
def locked_run_folder(config: Config, wanted: Path, *, exact: bool, old: Path | None = None) -> Iterator[Path]:
    """Hold a run's folder under its lock: `old`, or a new one.

    `exact` as for `claim`. ValueError where another run is in the folder, and where `old` is an untrusted link.
    """
    text, trusted = settings.to_yaml(config), config.trust_run
    with ExitStack() as held:
        if old is not None:
            collectives.run_on_rank0(lambda: trust.check_links(old, old, trusted=trusted))
        folder = collectives.run_on_rank0(lambda: old or create_run_folder(wanted, text, exact=exact, trusted=trusted))
        collectives.run_on_rank0(lambda: held.enter_context(run_lock(folder)))
        if collectives.is_main_process():
            write_versions(folder, tuple(secrets_in(asdict(config))))
            if trusted and old is not None:
                trust.seal(folder)
        yield folder


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock until its process ends. ValueError if taken."""
    with ExitStack() as held:
        with catch_write_errors(folder / LOCK):
            file = held.enter_context(open(folder / LOCK, "a+", encoding="utf-8", opener=no_follow))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"{folder} is in use by {_owner(file.read())}") from None
        except OSError as error:
            LOGGER.warning("%s cannot be locked (%s): see to it that no other run writes there", folder, error.strerror)
        with catch_write_errors(folder / LOCK):
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
            file.flush()
        yield


def truncate_jsonl(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Remove rows of steps that a resume repeats from a JSON-lines file.

    `step` is the last finished step that stays, with its evaluation if `evaluated`. A torn last line goes too.
    """
    if not path.is_file():
        return
    path = path.resolve()  # a link stays one
    # Not splitlines(): completions may hold other characters that it takes for the end of a line.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as rows:
        kept = [line for line in rows if _is_past(line, step, evaluated)]
    with atomic_file(path) as file:
        file.writelines(kept)


def resume_point(config: Config, folder: Path) -> Path | None:
    """Return the checkpoint to resume from, None for a new run.

    None also for one that has its journal alone. ValueError where there is no checkpoint, or nothing left to do.
    """
    if config.resume is None:
        return None
    put_back(folder / "checkpoints")
    checkpoint = newest_valid(folder / "checkpoints")
    if checkpoint is None:
        if complete_checkpoints(folder / "checkpoints"):
            raise ValueError(f"no checkpoint in {folder} is undamaged; the log names what is wrong with each")
        if is_journalled(config, folder):
            return None
        every = config.output.save_every
        when = f"after every {every} steps and every half an hour" if every else "at its end"
        raise ValueError(
            f"{folder} has no checkpoint to resume from: it saves one {when} (output.save_every); remove it and start "
            "again"
        )
    check_same_run(config, folder, checkpoint)
    # Refuse to resume a finished run; passes over the prompts are counted once these are there
    if config.num_epochs is None:
        check_unfinished(config, folder, checkpoint)
    return checkpoint


def is_journalled(config: Config, folder: Path) -> bool:
    """Return True for a run that can begin again with its journal."""
    is_same = (folder / CONFIG).is_file() and not differences(saved_settings(folder), as_saved(config))
    return is_same and bool(journal_files(folder / JOURNAL))


def cut_rows(folder: Path, checkpoint: Path | None) -> None:
    """Drop the rows after a checkpoint; without one, all."""
    step, evaluated = (-1, False) if checkpoint is None else _progress(checkpoint)
    for name in ROWS:
        truncate_jsonl(folder / name, step, evaluated=evaluated)


def check_unfinished(config: Config, folder: Path, checkpoint: Path) -> None:
    """Refuse to resume a finished run. ValueError."""
    step, evaluated = _progress(checkpoint)
    if step > config.num_steps or (step == config.num_steps and evaluated):
        raise ValueError(
            f"{folder} is finished ({step} of {config.num_steps} steps): there is nothing to resume; "
            "num_steps=N resume_changes=[num_steps] trains on"
        )


def check_before_ranks(config: Config, old: Path | None) -> None:
    """Refuse to resume a finished run before ranks start. ValueError."""
    if old is None or config.num_epochs is not None or ranks.world_size() > 1:
        return
    saved = complete_checkpoints(old / "checkpoints")
    try:
        for checkpoint in saved[-1:]:
            check_unfinished(resolve_budget(config), old, checkpoint)
    except ValueError:
        if newest_valid(old / "checkpoints") == saved[-1]:  # else it goes on from an earlier one
            raise


def _progress(checkpoint: Path) -> tuple[int, bool]:
    manifest = read_manifest(checkpoint)
    return int(manifest["step"]), "score" in manifest


def resume_hint(folder: Path) -> str:
    """Return the state of an interrupted run, and its resume command."""
    command = f"covey train resume={relative(folder)}"
    if not folder.is_dir():
        return f"{command} continues when it is back"
    saved = complete_checkpoints(folder / "checkpoints")
    if not saved and journal_files(folder / JOURNAL):
        return f"no checkpoint was saved; {command} continues with the answers in its journal"
    if not saved:
        return f"no checkpoint was saved; remove {relative(folder)} and start again"
    return f"{command} continues after step {step_of(saved[-1])}"


def changed_facts(checkpoint: Path, code: Mapping[str, str]) -> list[str]:
    """List differences to the saving process: packages, processes, threads, and `code`.

    That is the model's, as `made.code_hashes` gives it.
    """
    manifest = read_manifest(checkpoint)
    then, now = dict(manifest.get("versions", {})), versions()
    then |= {f"code of the model in {name}": found for name, found in manifest.get("code", {}).items()}
    now |= {f"code of the model in {name}": found for name, found in code.items()}
    if "num_ranks" in manifest:
        then["processes"], now["processes"] = str(manifest["num_ranks"]), str(collectives.world_size())
    if "num_threads" in manifest:
        then["threads"], now["threads"] = str(manifest["num_threads"]), str(torch.get_num_threads())
    others = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    return [f"{name} was {then.get(name, 'absent')} and is {now.get(name, 'absent')}" for name in others]


def _is_past(line: str, step: int, evaluated: bool) -> bool:
    """Return True if a row stays; a torn one does not."""
    # A torn last line has no newline
    if not line.endswith("\n"):
        return False
    row = object_of(line)
    if type(row.get("step")) is not int:
        return False
    if row["step"] == step and row.get("kind") == "evaluate":
        return evaluated
    return bool(row["step"] <= step)


def _owner(text: str) -> str:
    facts = object_of(text)
    is_known = {"pid", "started"} <= facts.keys()
    return f"process {facts['pid']}, started {facts['started']}" if is_known else "another process"
