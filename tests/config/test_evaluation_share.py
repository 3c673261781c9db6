"""Every recipe evaluates for at most a tenth of its run, by the answers that it samples."""

from collections.abc import Mapping

import pytest

from covey.config.shelves import presets
from covey_report.plan.settings import derive_numbers

from .test_config import composed

MOST = 0.1
COST: Mapping[str, float] = {
    **dict.fromkeys(("brief", "json", "ifeval_small"), 0.55),
    **dict.fromkeys(("arithmetic", "arithmetic_curriculum"), 0.7),
}
"""Seconds of an evaluated answer over those of a trained one, which is sampled and trained on; at most 1 where it was
not measured (docs/use/real_models.md): with all weights, as the recipes have it."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gsm8k", "gsm8k_lora", "math"), ("data.path=rows.jsonl",)),
    **dict.fromkeys(("my_rewards", "my_rewards_reference_ratio"), ("data.path=rows.jsonl", "rewards=[think_format]")),
}
"""What a recipe must be told."""
TOO_SHORT = {"fizzbuzz"}
"""Ten answers in all, in words of the document: two looks at one prompt would be too many."""


def share_of_evaluation(recipe: str) -> float:
    """Return the evaluations' share of a run that the answers predict."""
    config = composed(f"recipe={recipe}", *NEEDED.get(recipe, ()))
    counts = derive_numbers(config)
    evaluated = counts["evaluations"] * counts["completions_per_evaluation"] * COST.get(recipe, 1.0)
    return evaluated / (evaluated + counts["rollouts_in_all"])


@pytest.mark.parametrize("recipe", sorted({*presets("recipe")} - TOO_SHORT))
def test_a_recipe_evaluates_for_at_most_a_tenth_of_its_run(recipe: str) -> None:
    assert 0 < share_of_evaluation(recipe) <= MOST


@pytest.mark.parametrize(("recipe", "share"), [("brief", 0.076), ("ifeval", 0.099), ("tldr_nano", 0.095)])
def test_the_share_is_that_of_the_answers(recipe: str, share: float) -> None:
    assert share_of_evaluation(recipe) == pytest.approx(share, abs=5e-4)
