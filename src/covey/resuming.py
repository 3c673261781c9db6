"""Going on with a run: which folder, with which settings, from which checkpoint, and alone."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from covey import settings
from covey.checkpoint import complete_checkpoints, newest_valid, read_manifest
from covey.config import Config, ModelConfig
from covey.disk import writing
from covey.policy import distribution
from covey.run_folder import CONFIG, begun_at, claim, write_versions
from covey.summary import versions

LOGGER = logging.getLogger(__name__)
CHANGES = "changes.jsonl"
"""Settings that resumed runs went on with; config.yaml stays as the run was begun."""
LOCK = "run.lock"
ORIGIN_OF_PROMPTS = ("data", "environment", "seed")
"""Settings, or sections of them, that decide which prompts there are."""
CONTROL = ("resume", "resume_changes")
"""Settings that say how to resume; they are no part of the run's own settings."""
ORIGIN = ("name", "revision", *(field for field in vars(ModelConfig()) if field.startswith("nano_")))
"""Settings of the model that say where its weights came from when the run began; a saved policy has its own."""


def find_run(resume: str, root: Path) -> Path:
    """The run folder that `resume` means: a path, or "latest" for the one below `root` that was begun last, of those
    with a checkpoint."""
    if resume != "latest":
        folder = Path(resume)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"resume={resume} is no run folder (it has no {CONFIG}); resume=latest finds the newest")
        return folder
    saved = {path.parents[2] for path in root.glob("**/checkpoints/step-*/manifest.json")}
    runs = [folder for folder in saved if (folder / CONFIG).is_file()]
    if not runs:
        raise ValueError(f"resume=latest found no run with a checkpoint below {root}; resume=FOLDER names one")
    return max(runs, key=begun_at)


def settings_of(folder: Path, typed: Sequence[str]) -> DictConfig:
    """The settings of the run in `folder`, with what was typed besides `resume` applied to them.

    A typed setting that differs from the run's is refused by name unless resume_changes lists it. Raises ValueError.
    """
    saved = saved_settings(folder)
    wanted = saved.copy()
    changes: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(typed)):
        key, value = override.key_or_group, override.value()
        if key == "resume":
            continue
        if key == "resume_changes":
            changes = [str(name) for name in value] if isinstance(value, list) else [str(value)]
            continue
        if override.is_add() or override.is_delete() or _is_choice(saved, key):
            raise ValueError(f'"{override.input_line}" cannot change a run; resume takes the settings of {folder}')
        OmegaConf.update(wanted, key, value, merge=False)
    unknown = sorted(set(changes) - set(settings.setting_names()))
    if unknown:
        raise ValueError(f"resume_changes names no setting: {', '.join(unknown)}")
    different = [key for key in _leaves(wanted) if _read(saved, key) != _read(wanted, key)]
    refused = [key for key in different if not any(key == c or key.startswith(f"{c}.") for c in changes)]
    if refused:
        key = refused[0]
        raise ValueError(
            f"{key}={_read(wanted, key)} differs from {key}={_read(saved, key)} of {folder}; "
            f"resume_changes=[{key}] goes on with it, no longer bit for bit"
        )
    wanted.resume, wanted.resume_changes = str(folder), changes
    return wanted


def saved_settings(folder: Path) -> DictConfig:
    """The settings that the run in `folder` had last: those it was begun with and what was changed since."""
    saved = settings.load(folder / CONFIG)
    for line in _changes(folder):
        for key, change in line["changes"].items():
            OmegaConf.update(saved, key, change["to"], merge=False)
    return saved


def refuse_other_prompts(config: Config, folder: Path, checkpoint: Path, prompts: str) -> None:
    """ValueError where the run in `folder` had other `prompts` (`fingerprint.of_environment`) and resume_changes names
    nothing that they come from."""
    if _last_prompts(folder, checkpoint) in (None, prompts):
        return
    path = config.data.path
    key, chosen = ("environment.name", config.environment.name) if path is None else ("data.path", path)
    if not any(name.partition(".")[0] in ORIGIN_OF_PROMPTS for name in config.resume_changes):
        raise ValueError(
            f"the prompts of {key}={chosen} are not those that {folder} was trained on; "
            f"resume_changes=[{key}] goes on with them, no longer bit for bit"
        )
    LOGGER.info("the prompts of %s=%s are others from here on", key, chosen)


def _last_prompts(folder: Path, checkpoint: Path) -> str | None:
    """Those the run went on with last, else those of the checkpoint; None where an earlier covey wrote it."""
    changed = [line["prompts"] for line in _changes(folder) if "prompts" in line]
    return changed[-1] if changed else read_manifest(checkpoint).get("prompts")


def _changes(folder: Path) -> list[dict[str, Any]]:
    path = folder / CHANGES
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def settings_to_measure(folder: Path, policy: str) -> DictConfig:
    """The settings of the run in `folder`, for the policy that it saved."""
    wanted = saved_settings(folder)
    for name in ORIGIN:
        OmegaConf.update(wanted, f"model.{name}", vars(ModelConfig())[name])
    wanted.model.name = policy
    return wanted


def unlike_the_run(folder: Path, config: Config, typed: Sequence[str]) -> list[str]:
    """What a saved policy is measured with that its run had otherwise, unless it was typed: model and sampling."""
    saved, wanted = saved_settings(folder), OmegaConf.create(settings.to_yaml(config))
    assert isinstance(wanted, DictConfig)
    meant = {*(f"model.{name}" for name in ORIGIN), *(word.lstrip("+").partition("=")[0] for word in typed)}
    names = [key for key in _leaves(saved) if key.startswith(("model.", "sampling.")) and key not in meant]
    pairs = {key: (_read(saved, key), _read(wanted, key)) for key in names}
    return [f"{key}={now} (there {then})" for key, (then, now) in pairs.items() if then != now]


def remember_changes(config: Config, folder: Path, checkpoint: Path, prompts: str) -> None:
    """Write down in what a run that goes on after `checkpoint` differs from how it was, settings and `prompts`, for the
    next time it is resumed."""
    if not (folder / CONFIG).is_file():  # `train` was called by a program, which has the settings
        return
    saved, wanted = saved_settings(folder), OmegaConf.create(settings.to_yaml(config))
    assert isinstance(wanted, DictConfig)
    pairs = {key: (_read(saved, key), _read(wanted, key)) for key in _leaves(saved)}
    changes = {key: {"from": before, "to": after} for key, (before, after) in pairs.items() if before != after}
    is_other = _last_prompts(folder, checkpoint) not in (None, prompts)
    if not changes and not is_other:
        return
    step = int(read_manifest(checkpoint)["step"])
    for key, change in changes.items():
        LOGGER.info("%s was %s and is %s after step %d", key, change["from"], change["to"], step)
    path = folder / CHANGES
    earlier = path.read_text(encoding="utf-8") if path.is_file() else ""
    line = {"after_step": step, "changes": changes} | ({"prompts": prompts} if is_other else {})
    _replace(path, [earlier, json.dumps(line) + "\n"])


@contextmanager
def owned(config: Config, wanted: Path, *, exact: bool, old: Path | None = None) -> Iterator[Path]:
    """The folder of a run, which no other has: `old`, to go on in, or one made for it and begun with its settings.

    `exact` as for `claim`. ValueError where another run is in the folder.
    """
    text = settings.to_yaml(config)
    with ExitStack() as held:
        folder = distribution.from_first(lambda: old or claim(wanted, text, exact=exact))
        distribution.from_first(lambda: held.enter_context(alone_in(folder)))
        if distribution.is_first():
            write_versions(folder)
        yield folder


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; ValueError where another run has it. The lock of a process that died is free."""
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ValueError(f"{folder} is in use by {_owner(file.read())}") from None
        with writing(folder / LOCK):
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
            file.flush()
        yield


def drop_rows_after(path: Path, step: int, *, evaluated: bool = True) -> None:
    """Take rows of steps that will be done again out of a JSON-lines file, so that none is counted twice.

    The number of a row counts finished steps, so `step` is the last one that stays, with its evaluation if that is
    done (`evaluated`). A torn last line (the process was killed while writing it) goes too.
    """
    if not path.is_file():
        return
    path = path.resolve()  # a link stays one
    # Not splitlines(): completions may hold other characters that it takes for the end of a line.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as rows:
        kept = [line for line in rows if _is_past(line, step, evaluated)]
    _replace(path, kept)


def _replace(path: Path, lines: Sequence[str]) -> None:
    """Put a file in the place of another: whenever the process is killed, one of them is there, whole."""
    aside = path.with_name(f"{path.name}.partial")
    with writing(path):
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)


def resume_point(config: Config, folder: Path) -> Path | None:
    """The checkpoint to go on from, the logs cut back to it; None for a new run.

    ValueError where there is no checkpoint, or nothing left to do.
    """
    if config.resume is None:
        return None
    checkpoint = newest_valid(folder / "checkpoints")
    if checkpoint is None:
        if complete_checkpoints(folder / "checkpoints"):
            raise ValueError(f"no checkpoint in {folder} is undamaged; the log names what is wrong with each")
        raise ValueError(f"{folder} ended before its first checkpoint (output.save_every=N writes one every N steps)")
    manifest = read_manifest(checkpoint)
    step, evaluated = int(manifest["step"]), "score" in manifest
    if step > config.num_steps or (step == config.num_steps and evaluated):
        raise ValueError(f"{folder} is finished ({step} of {config.num_steps} steps): there is nothing to resume")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        drop_rows_after(folder / name, step, evaluated=evaluated)
    return checkpoint


def way_on(folder: Path) -> str:
    """What is left of a run that ended early, and the command that goes on with it."""
    here = Path.cwd()
    command = f"covey train resume={folder.relative_to(here) if folder.is_relative_to(here) else folder}"
    if not folder.is_dir():
        return f"{command} goes on when it is back"
    saved = complete_checkpoints(folder / "checkpoints")
    if not saved:
        return "no step is saved, so there is nothing to resume: covey train begins anew"
    return f"{command} goes on after step {int(saved[-1].name.removeprefix('step-'))}"


def changed_facts(checkpoint: Path) -> list[str]:
    """In what the process that goes on differs from the one that saved: code, packages, number of processes."""
    manifest = read_manifest(checkpoint)
    then, now = dict(manifest.get("versions", {})), versions()
    if "num_ranks" in manifest:
        then["processes"], now["processes"] = str(manifest["num_ranks"]), str(distribution.world_size())
    return [
        f"{name} was {then.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def _is_past(line: str, step: int, evaluated: bool) -> bool:
    if not line.endswith("\n"):
        return False
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:  # torn by a power cut; rows up to the checkpoint were synced before it
        return False
    if row["step"] == step and row.get("kind") == "evaluate":
        return evaluated
    return bool(row["step"] <= step)


def _owner(text: str) -> str:
    try:
        facts = json.loads(text)
        return f"process {facts['pid']}, started {facts['started']}"
    except (ValueError, KeyError):
        return "another process"


def _is_choice(saved: DictConfig, key: str) -> bool:
    """Whether the word chooses a file (model=nano) instead of setting a value."""
    if (settings.CONF / key).is_dir():  # recipe=..., which is no setting
        return True
    try:
        found = OmegaConf.select(saved, key, throw_on_missing=True)
    except OmegaConfBaseException:
        return False
    return isinstance(found, DictConfig) and OmegaConf.get_type(found) is not dict


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        name = f"{prefix}{key!s}"
        if name in CONTROL:
            continue
        value = node[key]
        if isinstance(value, DictConfig) and OmegaConf.get_type(value) is not dict:
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _read(node: DictConfig, key: str) -> Any:
    value = OmegaConf.select(node, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
