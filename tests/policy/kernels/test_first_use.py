"""Kernels are compiled and loaded before the first step: none waits for a compiler, or for a disk."""

from typing import Any

import pytest

import covey
from covey.policy.kernels.compiler import load

from ...support.small import scripted, small_config, use


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__precision": "bfloat16"},
        {"model__lora_rank": 4},
        {"engine__weights": "int8"},
        {"algorithm__kl_coef": 0.1, "updates_per_batch": 2, "engine__speculation": "on"},
    ],
    ids=["float32", "bfloat16", "lora", "int8", "reference and drafts"],
)
def test_no_kernel_is_looked_for_inside_a_step(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    load.cache_clear()  # another test may have looked for all of them
    config = small_config(model__nano_num_heads=1, model__nano_hidden_size=32, preflight__enabled=False, **changes)
    with covey.build(config=config) as parts:

        def refuse(*given: object) -> None:
            raise AssertionError(f"looked for inside a step: {given[0]}")

        monkeypatch.setattr("covey.policy.kernels.compiler._build", refuse)
        for _ in range(2):
            parts.step(parts.take())
