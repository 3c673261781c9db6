"""From one job's words to checked settings."""

import fnmatch
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from covey.cli import help as usage
from covey.cli.flags import RUNS, EvaluationAsked
from covey.cli.verbs import part
from covey.config import compose as settings
from covey.config.auto_adjust import adjust_unset_options, find_shadowed_presets
from covey.config.budget import resolve_budget
from covey.config.checks import refuse_idle_cold_start
from covey.config.early import BESIDE, check_early
from covey.config.engine_choice import this_machine
from covey.config.names import RUN_DIR
from covey.config.schema import Config, setting_names
from covey.config.validate import validate
from covey.environments import registry as environments
from covey.environments.registry import environment_names
from covey.policy.settings import NANO
from covey.run import folder as run_folder
from covey.run import trust
from covey.run.checkpoints import saved_settings
from covey.run.folder import run_of
from covey.system import accelerate_launch, ranks
from covey.system.lookup import read_table
from covey.system.text.escaping import escape

WITHOUT_POLICY = ("judge", "audit")
"""Verbs that load no policy."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the command, and the lines to print before it."""

    config: Config
    old: Path | None
    """The run that is resumed."""
    changed: tuple[str, ...]
    """Values that typed settings replaced, a line each."""
    first_lines: tuple[str, ...]
    notes: tuple[str, ...]
    """Warnings, once there is a log."""


def insert_environment(verb: str, words: Sequence[str], file: Path | None) -> tuple[list[str], str]:
    """Add the run's or file's environment to the words.

    It lets Hydra take settings of that environment. "" where none is added.
    """
    source = _source(verb, words, file)
    if source is None or any(word.startswith(("environment=", "--config-name", "-cn")) for word in words):
        return list(words), ""
    name = settings.read_yaml(source).environment.get("name")
    if name not in environment_names():
        return list(words), ""
    added = f"environment={name}"
    place = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    return [*words[:place], added, *words[place:]], added


def _source(verb: str, words: Sequence[str], file: Path | None) -> Path | None:
    """Return the single file whose settings the words override, else None."""
    if file is not None:
        return file
    resumed = [word.removeprefix("resume=") for word in words if word.startswith("resume=")]
    if verb in ("train", "config", "plan") and len(resumed) == 1 and resumed[0] != "null" and "," not in resumed[0]:
        return saved_settings.find_run(resumed[0].strip("'\""), RUNS) / run_folder.CONFIG
    run = base_run(words) if verb == "evaluate" else None
    return None if run is None else run / run_folder.CONFIG


def compose(verb: str, composed: DictConfig, typed: Sequence[str], file: Path | None) -> Job:
    """Compose a job. ValueError for any error in its settings."""
    resume = composed.get("resume")
    is_plain = HydraConfig.get().job.config_name == "config"
    run = base_run(typed) if verb == "evaluate" and is_plain and file is None else None
    source, composed = _over_saved(verb, composed, typed, file, run)
    warnings: list[str] = []

    def look(config: Config) -> None:
        if verb in ("config", "plan"):  # prints settings whose files lie on another machine
            warnings.extend(_missing(config))
        else:
            loads = verb not in WITHOUT_POLICY
            is_typed = source is None  # what a file names is imported once that was printed
            beside = BESIDE if loads else ()
            found = check_early(config, loads_model=loads, loads_beside=beside, imports_rewards=is_typed)
            warnings.extend(found)

    config = settings.to_unchecked(composed)
    names = {word.lstrip("+").partition("=")[0] for word in typed} - {"recipe"}
    # A resumed run keeps the settings that it began with: nothing is adjusted behind its back.
    machine = this_machine if verb == "train" and source is None else None
    changed = (
        [*adjust_unset_options(config, names, machine), *find_shadowed_presets(config, typed)] if resume is None else []
    )
    validate(config, look)
    if verb != "config":  # which may be asked about WORLD_SIZE processes
        ranks.check_ranks()
    accelerate_launch.check(config.model.precision, config.model.device)
    if saved := run_folder.run_of(config.model.name):
        trust.check_links(Path(config.model.name), saved, trusted=config.trust_run)
        trust.check_code(Path(config.model.name), saved, config.model.code, trusted=config.trust_run)
    first = [first_line(config, typed, run or file)] if verb == "evaluate" else []
    imported = [f"{key}={value}" for key, value in trust.named_code(asdict(config))]
    if source is not None and imported:
        first.append(escape(f"imports {', '.join(imported)}"))
    if verb != "evaluate":
        first.append(_loading(verb, config, source))
    notes = _notes(verb, config, typed)
    notes = [*([] if verb in ("config", "plan") else notes), *warnings]
    lines = tuple(escape(line) for line in changed)
    return Job(config, source if resume is not None else None, lines, tuple(first), tuple(notes))


def _missing(config: Config) -> list[str]:
    """List missing files, folders and functions; the hub is not asked."""
    try:
        check_early(config, asks_hub=False)
    except ValueError as error:
        return [f"covey train would refuse this here: {error}"]
    return []


def names_folder() -> bool:
    """Return True if the user named the run's folder."""
    return any(word.startswith(f"{RUN_DIR}=") for word in HydraConfig.get().overrides.hydra)


def _over_saved(
    verb: str, composed: DictConfig, typed: Sequence[str], file: Path | None, run: Path | None
) -> tuple[Path | None, DictConfig]:
    """Return the saved run or file, and the composed settings."""
    source = file or run
    if (resume := composed.get("resume")) is not None:
        if verb not in ("train", "config") or file is not None:
            needed = "no --config" if file is not None else f"covey train, got covey {verb}"
            raise ValueError(f"resume={resume} needs {needed}")
        resumed = saved_settings.find_run(resume, RUNS)
        return resumed, saved_settings.settings_of(resumed, typed)
    if source is not None:
        name = composed.model.name
        base = saved_settings.saved_in(source) if file else saved_settings.settings_to_measure(source, name)
        return source, saved_settings.apply_overrides(source, base, composed, typed)
    is_used = verb == "train" and names_folder()
    if composed.get("trust_run") and not is_used and run_folder.run_of(composed.model.name) is None:
        needed = "resume=RUN, --config FILE, hydra.run.dir=FOLDER or the policy of a run"
        raise ValueError(f"trust_run=true needs {needed}, got none of them")
    return None, composed


def _loading(verb: str, config: Config, source: Path | None) -> str:
    """Describe the work of the next seconds: imports, data, model."""
    settings_from = f", settings of {source}" if source is not None else ""
    model = "" if verb in WITHOUT_POLICY else f"{config.model.name} for "
    return escape(f"loading {model}environment={config.environment.name}{settings_from}")


def _notes(verb: str, config: Config, typed: Sequence[str]) -> list[str]:
    """Return warnings: unread settings, skipped runs, another task than trained."""
    idle = check_typed(verb, config, typed, ranks.world_size())
    alone = " in one process" if ranks.world_size() == 1 else ""
    notes = [f"covey {verb}{alone} does not read {', '.join(idle)}"] if idle else []
    if any(word.startswith("resume=") and word[7:].strip("'\"") == "latest" for word in typed):
        notes += run_folder.skipped_by_latest(Path(config.resume or ""), RUNS)
    if verb == "evaluate" and (run := run_folder.run_of(config.model.name)):
        other = diff_settings(run, config, typed)
        notes += [f"settings differ from the run in {run}: {', '.join(other)}"] if other else []
    return notes


def check_typed(verb: str, config: Config, typed: Iterable[str], num_processes: int) -> list[str]:
    """Return the typed settings that the verb does not read. ValueError for settings of a disabled cold start."""
    names = [word.lstrip("+").partition("=")[0] for word in typed]
    if verb not in ("evaluate", "cold-start", "judge"):
        refuse_idle_cold_start(config, names)
    unread = (*UNREAD.get(verb, ()), *(_TABLE["one_process"] if num_processes == 1 else ()))
    return [name for name in names if any(name == other or name.startswith(f"{other}.") for other in unread)]


def _expand(names: str | list[Any]) -> Iterator[str]:
    """Yield the settings that nested lists of names and patterns mean."""
    if isinstance(names, list):
        for name in names:
            yield from _expand(name)
    else:
        yield from fnmatch.filter(setting_names(), names) if "*" in names else [names]


_TABLE = read_table(Path(__file__).with_name("unread.yaml"))
UNREAD = {verb: tuple(_expand(names)) for verb, names in _TABLE["verbs"].items()}
"""Settings that a verb does not read; the same words may serve several verbs."""


def evaluation_asked(against: str, typed: Sequence[str]) -> EvaluationAsked:
    """Return the options of `covey evaluate`; named data are measured whole."""
    names = {word.lstrip("+").partition("=")[0] for word in typed}
    parts = {"data.test_fraction", "data.test_split", "data.train_split"}
    return EvaluationAsked(against, "data.path" in names and not names & parts, "evaluation.num_prompts" in names)


NAME = "model.name="
TASK = ("environment", "rewards", "reward_weights", "data")
"""Settings of the measured task."""


def base_run(words: Sequence[str]) -> Path | None:
    """Return the run whose settings the words override. None where they name no policy of a run, or choose a group."""
    names = [word.removeprefix(NAME) for word in words if word.startswith(NAME)]
    groups = usage.group_choices()
    chosen = [word for word in words if word.startswith("~") or word.lstrip("+").partition("=")[0] in groups]
    return None if len(names) != 1 or chosen else run_of(names[0])


def first_line(config: Config, typed: Sequence[str], below: Path | None) -> str:
    """Describe the origin of the settings, and the measured environment."""
    on = f"environment={config.environment.name}"
    if below is not None:
        over = [word for word in typed if not word.startswith(NAME)]
        return f"settings of {below}: {on}" + (f"; over them: {' '.join(over)}" if over else "")
    if config.model.name in NANO:
        return f"an untrained policy (model={config.model.name}) on {on}; model.name=FOLDER measures another"
    run = run_of(config.model.name)
    return f"{config.model.name} on {on}" + (f", with the settings typed, not those of {run}" if run else "")


def diff_settings(run: Path, config: Config, typed: Sequence[str]) -> list[str]:
    """List differences to the run that saved the policy."""
    then, now = saved_settings.saved_settings(run), saved_settings.as_saved(config)
    others = saved_settings.diff_settings(run, config, typed)
    if then.environment.name != now.environment.name:
        return [f"environment={now.environment.name} (run: {then.environment.name})", *others]
    there, here = dict(_task(then)), dict(_task(now))
    meant = {word.lstrip("+").partition("=")[0] for word in typed}
    names = [name for name in {**there, **here} if there.get(name) != here.get(name) and name not in meant]
    return [*(f"{name}={here.get(name)} (run: {there.get(name)})" for name in names), *others]


def _task(node: DictConfig) -> Iterator[tuple[str, Any]]:
    for section in TASK:
        value = OmegaConf.to_container(node[section]) if OmegaConf.is_config(node[section]) else node[section]
        if isinstance(value, dict):
            yield from ((f"{section}.{name!s}", part) for name, part in value.items())
        else:
            yield section, value


def print_only(job: Job, asked: Any) -> None:
    """Print a plan, or all settings; notes go to stderr."""
    config, uncounted = with_counted_prompts(job.config)
    if asked is not None:
        print("".join(f"{line}\n" for line in uncounted), end="", file=sys.stderr, flush=True)
        part("plan")(config, asked)
        return
    print("".join(f"{line}\n" for line in (*job.changed, *job.notes, *uncounted)), end="", file=sys.stderr, flush=True)
    print(part("settings")(config), end="", flush=True)


def with_counted_prompts(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the settings with their epochs in steps, if known."""
    if config.num_epochs is None:
        return config, ()
    told = f"num_epochs={config.num_epochs:g} is counted when the run begins, here num_steps={config.num_steps}"
    if config.environment.slow_to_build:
        return config, (f"{told}: environment={config.environment.name} takes long to make",)
    from covey.environments.base import close_environment, naming  # imports torch

    # Built for the number of its prompts alone
    try:
        environment = environments.build(config)
        try:
            with naming(environment, "prompts"):
                num_prompts = len(environment.prompts("train"))
        finally:
            close_environment(environment)
    except ValueError as error:
        return config, (f"{told}: {error}",)
    return resolve_budget(config, num_prompts), ()
