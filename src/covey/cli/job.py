"""From the words of one job to checked settings: of a new run, a resumed one, a policy's run or a file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from covey.cli import help as usage
from covey.cli import measuring
from covey.config import compose as settings
from covey.config import unread
from covey.config.early import check_early
from covey.config.giving_way import give_way, overruled
from covey.config.schema import Config
from covey.config.validate import validate
from covey.run import folder as run_folder
from covey.run import saved_settings, trust
from covey.system import accelerate_launch, ranks
from covey.system.text.escaping import escape

ROOT = Path("outputs")
"""Where resume=latest looks."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one job of the command does, and what is said of it first."""

    config: Config
    old: Path | None
    """The run that is resumed."""
    changed: tuple[str, ...]
    """Values that gave way to what was typed, a line each."""
    first_lines: tuple[str, ...]
    notes: tuple[str, ...]
    """Warnings, once there is a log."""


def insert_environment(verb: str, words: Sequence[str], file: Path | None) -> tuple[list[str], str]:
    """Return the words and the one that is added: the environment that a run or a file has and nobody typed.

    It lets Hydra take settings of that environment. "" where none is added.
    """
    source = _source(verb, words, file)
    if source is None or any(word.startswith(("environment=", "--config-name", "-cn")) for word in words):
        return list(words), ""
    name = settings.read_yaml(source).environment.get("name")
    if name not in usage.group_choices()["environment"]:
        return list(words), ""
    added = f"environment={name}"
    place = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    return [*words[:place], added, *words[place:]], added


def _source(verb: str, words: Sequence[str], file: Path | None) -> Path | None:
    """Return the file whose settings the words are laid over, None where there is no single one."""
    if file is not None:
        return file
    resumed = [word.removeprefix("resume=") for word in words if word.startswith("resume=")]
    if verb in ("train", "config") and len(resumed) == 1 and resumed[0] != "null" and "," not in resumed[0]:
        return saved_settings.find_run(resumed[0].strip("'\""), ROOT) / run_folder.CONFIG
    run = measuring.base_run(words) if verb == "evaluate" else None
    return None if run is None else run / run_folder.CONFIG


def compose(verb: str, composed: DictConfig, typed: Sequence[str], file: Path | None) -> Job:
    """Return what a job does. ValueError, in one line, for whatever is wrong with its settings."""
    # Take the settings of the run or file that it begins with
    resume = composed.get("resume")
    run = _run_below(verb, typed, file)
    source, composed = _over_saved(verb, composed, typed, file, run)
    warnings: list[str] = []

    def look(config: Config) -> None:
        if verb != "config":
            warnings.extend(check_early(config, loads_model=verb != "judge"))

    # Check them, once what nobody typed has given way
    config = settings.to_unchecked(composed)
    names = {word.lstrip("+").partition("=")[0] for word in typed} - {"recipe"}
    # What a resumed run was begun with may not change behind its back.
    changed = [*give_way(config, names), *overruled(config, typed)] if resume is None else []
    validate(config, look)
    if verb != "config":  # which may be asked about WORLD_SIZE processes
        ranks.check_ranks()
    accelerate_launch.check(config.model.precision, config.model.device)
    if saved := run_folder.run_of(config.model.name):
        trust.check_links(Path(config.model.name), saved, trusted=config.trust_run)
    # Say what is about to happen
    first = [measuring.first_line(config, typed, run or file)] if verb == "evaluate" else []
    imported = [f"{key}={value}" for key, value in trust.named_code(asdict(config))]
    if source is not None and imported:
        first.append(escape(f"imports {', '.join(imported)}"))
    if verb != "evaluate":
        first.append(_loading(verb, config, source))
    notes = (*_notes(verb, config, typed), *warnings)
    lines = tuple(escape(line) for line in changed)
    return Job(config, source if resume is not None else None, lines, tuple(first), notes)


def _over_saved(
    verb: str, composed: DictConfig, typed: Sequence[str], file: Path | None, run: Path | None
) -> tuple[Path | None, DictConfig]:
    """Return the run or file that the job begins with, if any, and the composed settings over those saved there."""
    source = file or run
    if (resume := composed.get("resume")) is not None:
        if verb not in ("train", "config") or file is not None:
            needed = "no --config" if file is not None else f"covey train, got covey {verb}"
            raise ValueError(f"resume={resume} needs {needed}")
        resumed = saved_settings.find_run(resume, ROOT)
        return resumed, saved_settings.settings_of(resumed, typed)
    if source is not None:
        name = composed.model.name
        base = saved_settings.saved_in(source) if file else saved_settings.settings_to_measure(source, name)
        return source, saved_settings.apply_overrides(source, base, composed, typed)
    if composed.get("trust_run") and run_folder.run_of(composed.model.name) is None:
        raise ValueError("trust_run=true needs resume=RUN, --config FILE or the policy of a run, got none of them")
    return None, composed


def _loading(verb: str, config: Config, source: Path | None) -> str:
    """Say what takes the next seconds: imports, data and model come before anything else is heard."""
    settings_from = f", settings of {source}" if source is not None else ""
    model = "" if verb == "judge" else f"{config.model.name} for "
    return escape(f"loading {model}environment={config.environment.name}{settings_from}")


def _run_below(verb: str, typed: Sequence[str], file: Path | None) -> Path | None:
    """Return the run whose settings an evaluated policy takes."""
    is_plain = HydraConfig.get().job.config_name == "config"
    return measuring.base_run(typed) if verb == "evaluate" and is_plain and file is None else None


def _notes(verb: str, config: Config, typed: Sequence[str]) -> list[str]:
    """Return warnings: typed settings that the verb does not read, runs that are skipped, another task than trained."""
    idle = unread.check_typed(verb, config, typed, ranks.world_size())
    alone = " in one process" if ranks.world_size() == 1 else ""
    notes = [f"covey {verb}{alone} does not read {', '.join(idle)}"] if idle else []
    if "resume=latest" in typed:
        newer = run_folder.newer_trainings(Path(config.resume or ""), ROOT)
        notes += [f"resume=latest skips {path}, which is newer and has no checkpoint" for path in newer]
    if verb == "evaluate" and (run := run_folder.run_of(config.model.name)):
        other = measuring.diff_settings(run, config, typed)
        notes += [f"settings differ from the run in {run}: {', '.join(other)}"] if other else []
    return notes
