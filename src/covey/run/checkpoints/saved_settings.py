"""Saved settings of runs and files, and overrides of them."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from covey.config import compose as settings
from covey.config.budget import BUDGETS
from covey.config.schema import Config, setting_names
from covey.policy.settings import ModelConfig
from covey.run import trust
from covey.run.folder import CONFIG, JOURNAL, begun_at, changes_of
from covey.system.disk import cache_folder
from covey.system.text.format import relative
from covey.system.text.masking import MASK, mask

CONTROL = ("resume", "resume_changes", "trust_run")
"""Settings that say how to resume; they are no part of the run's own settings."""
ORIGIN = ("name", "revision", *(field for field in vars(ModelConfig()) if field.startswith("nano_")))
"""Settings of the model that say where its weights came from when the run began; a saved policy has its own."""


def find_run(resume: str, root: Path) -> Path:
    """Return the run folder of `resume`: a path, or "latest" below `root`."""
    if resume != "latest":
        return _named_run(resume)
    saved = {path.parents[2] for path in root.glob("**/checkpoints/step-*/manifest.json")}
    saved |= {path.parents[1] for path in root.glob(f"**/{JOURNAL}/step-*.log")}
    runs = [folder for folder in saved if (folder / CONFIG).is_file()]
    if not runs:
        raise ValueError(f"resume=latest found no run with a checkpoint below {root}; resume=FOLDER names one")
    return max(runs, key=begun_at)


def _named_run(resume: str) -> Path:
    folder = Path(resume).expanduser()
    if resume and (folder / CONFIG).is_file():
        return folder
    own = [path for path in folder.absolute().parents[:4] if (path / CONFIG).is_file()]
    if resume and own and folder.exists():
        raise ValueError(f"resume={resume} is part of a run, whose newest checkpoint counts: resume={relative(own[0])}")
    fault = f"no run folder (it has no {CONFIG})" if folder.is_dir() else "no folder"
    raise ValueError(f"resume={resume} is {fault if resume else 'empty'}; resume=latest finds the newest run")


def settings_of(folder: Path, typed: Sequence[str], num_changes: int | None = None) -> DictConfig:
    """Return the settings of a run, after all its changes or some, with the typed ones applied.

    ValueError where a typed setting differs and resume_changes does not list it, and where the run is untrusted
    (`trust.check`).
    """
    overrides = parse_words(typed)
    control = {override.key_or_group: override.value() for override in overrides if override.key_or_group in CONTROL}
    trusted = control.get("trust_run") is True
    saved = with_own_caches(saved_settings(folder, num_changes), folder, trusted=trusted)
    wanted = saved.copy()
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key in CONTROL:
            continue
        if override.is_add() or override.is_delete() or is_choice(saved, key):
            raise ValueError(f'"{override.input_line}" cannot change a run; resume takes the settings of {folder}')
        OmegaConf.update(wanted, key, value, merge=False)
    _keep_one_budget(wanted, [override.key_or_group for override in overrides])
    named = control.get("resume_changes", [])
    changes = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    refuse_changes(folder, saved, wanted, changes)
    _refuse_masked(folder, wanted)
    _check_trust(folder, wanted, typed, trusted=trusted)
    trust.check_links(folder, folder, trusted=trusted)
    wanted.resume, wanted.resume_changes, wanted.trust_run = str(folder), changes, trusted
    return wanted


def _keep_one_budget(wanted: DictConfig, typed: Collection[str]) -> None:
    """Let a typed budget replace the run's. ValueError for two."""
    given = [name for name in BUDGETS if name in typed]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say twice how long the run is: give one of them")
    for name in BUDGETS[1:] if given else ():
        if name not in given:
            wanted[name] = None


def refuse_changes(folder: Path, saved: DictConfig, wanted: DictConfig, changes: Sequence[str]) -> None:
    """Refuse changed settings that `changes` does not name."""
    unknown = sorted(set(changes) - set(setting_names()))
    if unknown:
        raise ValueError(f"resume_changes names no setting: {', '.join(unknown)}")
    # How long the run is is one thing, whatever it is counted in
    named = {*changes, *(BUDGETS if set(changes) & set(BUDGETS) else ())}
    named |= {"num_steps"} if any(wanted[name] is not None for name in BUDGETS[1:]) else set()  # it follows
    for key, (then, now) in differences(saved, wanted).items():
        if key.startswith("cold_start.") and key != "cold_start.cache_dir":
            raise ValueError(f"{key}={now} cannot change a run, which began with {key}={then}")
        if not is_named(key, named):
            raise ValueError(
                f"{key}={now} differs from {key}={then} of {folder}; "
                f"pass resume_changes=[{key}] to resume anyway (the run will not be bit-for-bit reproducible)"
            )


def is_named(key: str, changes: Collection[str]) -> bool:
    """Return True if a setting or its section is in `changes`."""
    return any(key == change or key.startswith(f"{change}.") for change in changes)


def check_changes(config: Config, folder: Path) -> None:
    """Refuse a program's changed settings, as `refuse_changes` does."""
    if (folder / CONFIG).is_file():
        saved = with_own_caches(saved_settings(folder), folder, trusted=config.trust_run)
        refuse_changes(folder, saved, as_saved(config), config.resume_changes)


def settings_to_measure(folder: Path, policy: str) -> DictConfig:
    """Return a run's settings for its saved policy."""
    wanted = saved_settings(folder)
    for name in ORIGIN:
        OmegaConf.update(wanted, f"model.{name}", vars(ModelConfig())[name])
    wanted.model.name = policy
    return wanted


def apply_overrides(source: Path, base: DictConfig, composed: DictConfig, typed: Sequence[str]) -> DictConfig:
    """Return the settings of `source`, with the typed ones applied.

    A typed group replaces its section by Hydra's `composed` one. ValueError for an untrusted run (`trust.check`).
    """
    wanted = with_own_caches(base.copy(), source, trusted=composed.trust_run)
    for override in parse_words(typed):
        key = override.key_or_group
        if key == "recipe" or override.is_delete():
            raise ValueError(f'"{override.input_line}" cannot override settings of {source}, which has every setting')
        if override.is_add() or not is_choice(wanted, key):
            OmegaConf.update(wanted, key, override.value(), merge=True, force_add=override.is_add())
        else:
            wanted[key] = composed[key]
    # Controls of this command come from the command line, not from the saved run
    for name in CONTROL:
        wanted[name] = composed[name]
    _refuse_masked(source, wanted)
    _check_trust(source, wanted, typed, trusted=composed.trust_run)
    return wanted


def diff_settings(folder: Path, config: Config, typed: Sequence[str]) -> list[str]:
    """List changed, untyped settings of a measurement: model and sampling."""
    saved, wanted = saved_settings(folder), as_saved(config)
    meant = {*(f"model.{name}" for name in ORIGIN), *(word.lstrip("+").partition("=")[0] for word in typed)}
    names = [key for key in leaves(saved) if key.startswith(("model.", "sampling.")) and key not in meant]
    pairs = {key: (read(saved, key), read(wanted, key)) for key in names}
    return [f"{key}={now} (run: {then})" for key, (then, now) in pairs.items() if then != now]


def saved_settings(folder: Path, num_changes: int | None = None) -> DictConfig:
    """Return the run's last settings, or those after `num_changes` changes."""
    saved = saved_in(folder / CONFIG)
    for line in changes_of(folder)[:num_changes]:
        for key, change in line["changes"].items():
            OmegaConf.update(saved, key, change["to"], merge=False)
    return saved


def as_saved(config: Config) -> DictConfig:
    """Return settings as a run keeps them, secrets masked."""
    found = OmegaConf.create(settings.to_yaml(config))
    assert isinstance(found, DictConfig)
    return found


def saved_in(file: Path) -> DictConfig:
    """Return the settings of a file, without those of resuming."""
    saved = settings.load(file)
    for name in CONTROL:
        saved[name] = vars(Config())[name]
    return saved


def with_own_caches(saved: DictConfig, source: Path, *, trusted: bool) -> DictConfig:
    """Replace the caches of an untrusted run by your own, in place."""
    run = source.parent if source.name == CONFIG else source
    if run.is_dir() and not trusted and not trust.is_own(run):
        saved.cold_start.cache_dir = cache_folder()
        if "judge_cache_dir" in saved.environment:
            saved.environment.judge_cache_dir = cache_folder()
    return saved


def parse_words(words: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(words))


def _check_trust(source: Path, wanted: DictConfig, typed: Sequence[str], *, trusted: bool) -> None:
    content = OmegaConf.to_container(wanted, resolve=False)
    assert isinstance(content, dict)
    own = [str(text) for override in parse_words(typed) for _, text in trust.texts_in(override.value())]
    trust.check(source, {str(key): value for key, value in content.items()}, own, trusted=trusted)


def _refuse_masked(source: Path, wanted: DictConfig) -> None:
    for key in leaves(wanted):
        if MASK in str(read(wanted, key)):
            raise ValueError(f"{key} was saved in {source} without its secret; type it again: {key}=...")


def differences(saved: DictConfig, wanted: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return changed settings as (then, now), without secrets."""
    pairs = {key: (read(saved, key), mask(read(wanted, key), key)) for key in leaves(saved)}
    return {key: (then, now) for key, (then, now) in pairs.items() if then != now}


def is_choice(saved: DictConfig, key: str) -> bool:
    """Return True if the word chooses a file (model=nano)."""
    if (settings.CONF / key).is_dir():  # recipe=..., which is no setting
        return True
    try:
        found = OmegaConf.select(saved, key, throw_on_missing=True)
    except OmegaConfBaseException:
        return False
    return isinstance(found, DictConfig) and OmegaConf.get_type(found) is not dict


def leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of settings, without those of resuming."""
    for key in node:
        name = f"{prefix}{key!s}"
        if name in CONTROL:
            continue
        value = node[key]
        if isinstance(value, DictConfig) and OmegaConf.get_type(value) is not dict:
            yield from leaves(value, f"{name}.")
        else:
            yield name


def read(node: DictConfig, key: str) -> Any:
    """Return the value of a dotted setting as plain containers."""
    value = OmegaConf.select(node, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
