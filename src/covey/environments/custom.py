"""Make an environment by the name of its factory."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from covey.environments.base import EnvironmentLike, faults_of
from covey.system.lookup import resolve


def make_custom(name: str, options: Mapping[str, Any]) -> EnvironmentLike:
    """Call a factory with its options. ValueError where they do not fit."""
    factory = resolve(name, {})
    check_arguments(factory, name, options)
    lacking = sorted(getattr(factory, "__abstractmethods__", ()))
    if lacking:
        raise ValueError(f"{name} must make an object with prompts and score, it lacks {', '.join(lacking)}")
    with faults_of(f"environment.factory={name}"):
        made = factory(**options)
    if not isinstance(made, EnvironmentLike):
        raise ValueError(f"{name} must make an object with prompts and score, got {type(made).__name__}")
    return made


def check_arguments(factory: Callable[..., Any], name: str, options: Mapping[str, Any], **more: Any) -> None:
    """Refuse options that do not fit the factory. `more` is covey's own."""
    try:
        with suppress(ValueError):  # some that are written in C have no signature
            inspect.signature(factory).bind(**options, **more)
    except TypeError as error:
        raise ValueError(f"environment.options={options} do not fit {name}: {error}") from error
