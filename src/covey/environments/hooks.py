"""Call what an environment has besides its judgements, so that an error says whose method raised it."""

import json
import logging
import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from covey.environments.base import Environment
from covey.system.lookup import describe
from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)


@contextmanager
def naming(environment: Environment, method: str) -> Iterator[None]:
    """Raise ValueError with environment, method and place for whatever is raised, but what ends a run on purpose."""
    try:
        yield
    except (RunStopped, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # foreign code
        raise ValueError(f"{type(environment).__name__}.{method} {describe(error)}") from error


def follow(environment: Environment, step: int, max_steps: int, epoch: float) -> None:
    """Tell the environment how far training is."""
    with naming(environment, "follow"):
        environment.follow(step, max_steps, epoch)


def metrics_of(environment: Environment) -> dict[str, float]:
    """Return what the environment has to log. None is nothing, and ValueError where another is no number."""
    with naming(environment, "metrics"):
        found: object = environment.metrics()
    name = type(environment).__name__
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}.metrics must return numbers by name, got a {type(found).__name__}")
    measured = {str(key): value for key, value in found.items() if value is not None}
    wrong = next((key for key, value in measured.items() if not isinstance(value, numbers.Real)), None)
    if wrong is not None:
        raise ValueError(f"{name}.metrics must return numbers by name, got {wrong}={measured[wrong]!r:.60}")
    return {key: float(value) for key, value in measured.items()}


def facts_of(environment: Environment) -> dict[str, Any]:
    """Return what the environment records of itself, as JSON gives it back. ValueError for what JSON cannot hold."""
    with naming(environment, "facts"):
        found: object = environment.facts()
    due = f"{type(environment).__name__}.facts must return plain values by name"
    if not isinstance(found, Mapping):
        raise ValueError(f"{due}, got a {type(found).__name__}")
    facts: dict[str, Any] = {}
    for name, value in found.items():
        try:
            facts[str(name)] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{due}, got {name}={value!r:.60}") from error
    return facts


def close(environment: Environment) -> None:
    """Close the environment. What that raises is a warning: all that it judged is known by then."""
    try:
        environment.close()
    except (Exception, SystemExit) as error:  # foreign code
        LOGGER.warning("%s.close %s", type(environment).__name__, describe(error))
