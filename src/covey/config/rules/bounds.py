"""Bounds that every number of the settings obeys: a slip of the finger is refused, not waited for."""

import math
from collections.abc import Iterator
from typing import Any, get_type_hints

from covey.config.schema import Config
from covey.system.section import Section

MOST = 10**9
"""Of any count that nothing below bounds more tightly."""
UNBOUNDED = ("bytes", "seed")
"""Last words of settings that may be larger."""
MOST_OF: dict[str, float] = {
    "lr": 100,
    "num_workers": 1024,
    "num_slots": 1024,
    "num_train": 10**7,
    "num_test": 10**7,
    "num_demonstrations": 10**7,
    "num_samples": 10**5,
    "batch_size": 10**6,
    "judge_lr": 100,
    "seed": 2**63 - 1,
    "problem_seed": 2**63 - 1,
}
"""Of settings of these names, in whatever section."""
MAY_BE_EMPTY = ("instruction",)
"""Texts of which "" is a value."""
LEAST_OF: dict[str, float] = {"seed": 0, "problem_seed": 0}
MAY_BE_INFINITE = ("algorithm.correction_max", "algorithm.kl_coef_max")
"""Bounds that may be off."""


def check_bounds(config: Config) -> None:
    """Refuse numbers that are not finite, counts that nobody means, and seeds that no generator takes."""
    for name, value in numbers(config, ""):
        last = name.rpartition(".")[2]
        if math.isnan(value) or (math.isinf(value) and name not in MAY_BE_INFINITE):
            raise ValueError(f"{name} must be a finite number, got {value}")
        most = MOST_OF.get(last, math.inf if isinstance(value, float) or last.endswith(UNBOUNDED) else MOST)
        if value > most:
            got = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            raise ValueError(f"{name} must be <= {most:,}, got {got}")
        if value < LEAST_OF.get(last, -math.inf):
            raise ValueError(f"{name} must be >= {LEAST_OF[last]}, got {value}")


def check_texts(config: Config) -> None:
    """Refuse texts that are empty where the default is null: `data.path=` would be one more way to say nothing."""
    for name, value in _texts(config, ""):
        if value is not None and not value.strip() and not name.endswith(MAY_BE_EMPTY):
            raise ValueError(f"{name} is empty; null leaves it out")


def _texts(section: Section, prefix: str) -> Iterator[tuple[str, str | None]]:
    """Yield the settings that hold a text or null."""
    kinds = get_type_hints(type(section))
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield from _texts(value, f"{prefix}{name}.")
        elif kinds[name] == str | None:
            yield f"{prefix}{name}", value


def numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Yield every number of settings with its dotted name, for list items that of the list."""
    if isinstance(value, Section):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
