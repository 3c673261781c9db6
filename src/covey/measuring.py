"""`covey evaluate`: with which settings a saved policy is measured, and what is said of that first."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from covey import usage
from covey.run_folder import run_of
from covey.settings import to_yaml

if TYPE_CHECKING:
    from covey.config import Config

NAME = "model.name="
TASK = ("environment", "rewards", "reward_weights", "data")
"""Settings that say what is measured."""
UNTRAINED = ("nano", "nano-masked")


def run_below(words: Sequence[str]) -> Path | None:
    """The run whose settings the words are laid over; None where they name no policy of a run, or choose a group."""
    names = [word.removeprefix(NAME) for word in words if word.startswith(NAME)]
    groups = usage.group_choices()
    chosen = [word for word in words if word.startswith("~") or word.lstrip("+").partition("=")[0] in groups]
    return None if len(names) != 1 or chosen else run_of(names[0])


def with_environment(words: Sequence[str]) -> tuple[list[str], str]:
    """The words, and before `model.name` the environment of its run, so that Hydra takes its settings; "" for none."""
    run = run_below(words)
    if run is None or any(word.startswith(("--config-name", "-cn")) for word in words):
        return list(words), ""
    name = OmegaConf.load(run / "config.yaml").environment.name
    if name not in usage.group_choices()["environment"]:
        return list(words), ""
    added = f"environment={name}"
    place = next(index for index, word in enumerate(words) if word.startswith(NAME))
    return [*words[:place], added, *words[place:]], added


def laid_over(run: Path, policy: str, typed: Sequence[str]) -> DictConfig:
    """The settings of the run, for the policy that it saved, and over them what was typed."""
    from covey import resuming

    wanted = resuming.settings_to_measure(run, policy)
    for override in OverridesParser.create().parse_overrides(list(typed)):
        OmegaConf.update(wanted, override.key_or_group, override.value(), merge=True, force_add=override.is_add())
    return wanted


def first_line(config: "Config", typed: Sequence[str], below: Path | None) -> str:
    """Whose settings these are, and what is measured on which environment."""
    on = f"environment={config.environment.name}"
    if below is not None:
        over = [word for word in typed if not word.startswith(NAME)]
        return f"settings of {below}: {on}" + (f"; over them: {' '.join(over)}" if over else "")
    if config.model.name in UNTRAINED:
        return f"an untrained policy (model={config.model.name}) on {on}; model.name=FOLDER measures another"
    run = run_of(config.model.name)
    return f"{config.model.name} on {on}" + (f", with the settings typed, not those of {run}" if run else "")


def unlike_the_run(run: Path, config: "Config", typed: Sequence[str]) -> list[str]:
    """What is measured otherwise than in the run that saved the policy: the task first, unless it was typed by name."""
    from covey import resuming

    then, now = resuming.saved_settings(run), OmegaConf.create(to_yaml(config))
    assert isinstance(now, DictConfig)
    others = resuming.unlike_the_run(run, config, typed)
    if then.environment.name != now.environment.name:
        return [f"environment={now.environment.name} (there {then.environment.name})", *others]
    there, here = dict(_task(then)), dict(_task(now))
    meant = {word.lstrip("+").partition("=")[0] for word in typed}
    names = [name for name in {**there, **here} if there.get(name) != here.get(name) and name not in meant]
    return [*(f"{name}={here.get(name)} (there {there.get(name)})" for name in names), *others]


def _task(node: DictConfig) -> Iterator[tuple[str, Any]]:
    for section in TASK:
        value = OmegaConf.to_container(node[section]) if OmegaConf.is_config(node[section]) else node[section]
        if isinstance(value, dict):
            yield from ((f"{section}.{name!s}", part) for name, part in value.items())
        else:
            yield section, value
