"""Settings of a run whose policy fills in: the observations of settings_cases.py, on prompts with gaps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import settings_observed as see
from .settings_cases import CASES, HERE, Case, Observation

FILLS: dict[str, Any] = HERE | {
    "data.path": "gaps.jsonl",
    "data.test_fraction": 0.5,
    "model.name": "nano-masked",
    "model.kind": "masked",
    "model.nano_architecture": "modernbert",
    "engine.name": "fill",
}
SEEN: tuple[Observation, ...] = (
    *(see.rollouts, see.update, see.work, see.rows_at_once, see.coefficients, see.evaluation, see.policy),
)
"""Observations through which a policy, or its engine, is looked at."""
ELSEWHERE = (
    "environment.",
    "data.",
    "model.name",
    "model.revision",
    "model.code",
    "engine.name",
    "rewards",
    "curriculum.",
)
"""What says which prompts, rewards or policies these are: the same is said here."""
VALUES = {
    "model.nano_architecture": "bert",
    "model.lora_targets": ["Wqkv"],
    "algorithm.reference_model": "filler",
    "algorithm.teacher": "filler",
}
"""Of settings whose other value is one of policies that continue."""
MODELS = {"some/one": "some/filler"}
"""Of a hub, and those that fill in."""
NOT_READ = {
    "sampling.stop": "refused: nothing is written after a gap",
    "algorithm.mask_truncated": "refused: no fill is cut short",
    "engine.cache_bytes": "refused: nothing is cached",
    "engine.name": "refused: one engine fills in",
    "sampling.max_total_tokens": "refused: a prompt is as long as it is",
    "sampling.max_tokens": "refused by the engine: a prompt has as many gaps as it has",
}
"""test_a_setting_is_refused_where_nothing_would_read_it and tests/engine/test_fill.py hold these."""


def is_quick(name: str, case: Case) -> bool:
    """Whether it looks at how fills are drawn and read; the others look at what is computed of their log-probs."""
    return case.observe is not see.update or not name.startswith(("algorithm.", "optimizer."))


def filled_cases() -> Mapping[str, Case]:
    """The cases of settings that both kinds of policy have."""
    return {
        name: replace(case, context=FILLS | _filled(case.context), value=VALUES.get(name, case.value))
        for name, case in CASES.items()
        if isinstance(case, Case) and case.observe in SEEN and name not in NOT_READ
        if not any(key.startswith(ELSEWHERE) for key in (name, *case.context, *case.along))
    }


def _filled(context: Mapping[str, Any]) -> dict[str, Any]:
    """The same context, with models that fill in."""
    return {key: MODELS.get(value, value) if isinstance(value, str) else value for key, value in context.items()}
