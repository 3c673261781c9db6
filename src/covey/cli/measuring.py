"""`covey evaluate`: with which settings a saved policy is measured, and what is said of that first."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from covey.cli import help as usage
from covey.config.compose import to_yaml
from covey.policy.settings import NANO
from covey.run import saved_settings
from covey.run.folder import run_of

if TYPE_CHECKING:
    from covey.config.schema import Config

NAME = "model.name="
TASK = ("environment", "rewards", "reward_weights", "data")
"""Settings that say what is measured."""


def base_run(words: Sequence[str]) -> Path | None:
    """Return the run whose settings the words override.

    None where they name no policy of a run, or choose a group.
    """
    names = [word.removeprefix(NAME) for word in words if word.startswith(NAME)]
    groups = usage.group_choices()
    chosen = [word for word in words if word.startswith("~") or word.lstrip("+").partition("=")[0] in groups]
    return None if len(names) != 1 or chosen else run_of(names[0])


def first_line(config: "Config", typed: Sequence[str], below: Path | None) -> str:
    """Describe whose settings these are, and what is measured on which environment."""
    on = f"environment={config.environment.name}"
    if below is not None:
        over = [word for word in typed if not word.startswith(NAME)]
        return f"settings of {below}: {on}" + (f"; over them: {' '.join(over)}" if over else "")
    if config.model.name in NANO:
        return f"an untrained policy (model={config.model.name}) on {on}; model.name=FOLDER measures another"
    run = run_of(config.model.name)
    return f"{config.model.name} on {on}" + (f", with the settings typed, not those of {run}" if run else "")


def diff_settings(run: Path, config: "Config", typed: Sequence[str]) -> list[str]:
    """List what differs from the run that saved the policy, the task first unless it was typed by name."""
    then, now = saved_settings.saved_settings(run), OmegaConf.create(to_yaml(config))
    assert isinstance(now, DictConfig)
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
