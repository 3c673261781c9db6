"""The page of settings tells what the user typed from what the recipe chose, what covey fitted, and defaults."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from covey.api.settings import make_config
from covey.config.schema import Config, group_choices
from covey.system.section import flat
from covey_report.logs.read import RunFiles
from covey_report.page.origins import command_of, settings_page

DEFAULTS = flat(asdict(Config()))
ARITHMETIC = {
    **{"num_steps": 350, "groups_per_step": 64, "sampling.max_tokens": 8, "optimizer.lr": 2e-4},
    **{"optimizer.warmup_steps": 10, "cold_start.enabled": True},
}


def origins(command: str, *earlier: str, **changed: Any) -> dict[str, tuple[str, str]]:
    """Name -> (origin, value of the recipe) of what is not as by default."""
    settings = DEFAULTS | {name.replace("__", "."): value for name, value in changed.items()}
    versions = {"command": command, "earlier_commands": list(earlier)}
    rows = settings_page(RunFiles(Path("run"), settings, versions))["rows"]
    return {name: (origin, base) for name, _, _, base, origin in rows if origin != "default"}


def test_what_was_typed_is_told_from_what_the_recipe_chose() -> None:
    found = origins(
        "covey train recipe=arithmetic num_steps=60 groups_per_step=64 hydra.run.dir=run",
        **ARITHMETIC | {"num_steps": 60, "optimizer.warmup_steps": 6},
    )
    assert found["num_steps"] == ("own", "350")
    assert found["groups_per_step"] == ("recipe", "64")  # typed, and no other than the recipe's
    assert found["optimizer.lr"] == ("recipe", "0.0002")
    assert found["optimizer.warmup_steps"] == ("fitted", "10")
    assert found["output.save_every"] == ("fitted", "50")  # the run has the default, the recipe has not
    assert "sampling.top_k" not in found


def test_a_setting_typed_at_its_default_over_a_recipe_is_the_users_own() -> None:
    assert origins("covey train recipe=arithmetic group_size=8 optimizer.lr=1e-6")["optimizer.lr"] == ("own", "0.0002")


def test_a_derived_recipe_merges_both_and_typed_values_override_presets() -> None:
    found = origins("covey train recipe=gsm8k_lora", **{"model.name": "Qwen/Qwen2.5-3B", "model.lora_rank": 7})
    assert found["model.name"] == ("recipe", "Qwen/Qwen2.5-3B")
    assert found["model.lora_rank"][0] == "fitted"
    typed = origins("covey train recipe=arithmetic algorithm=cispo", algorithm__loss="cispo")
    assert typed["algorithm.loss"] == ("recipe", "cispo")


KINDS = ("gsm8k_lora", "infill_nano", "tldr_reference_ratio_nano")
"""Recipes of recipes, of an engine that sets more than its name, and of other presets."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(one, marks=[] if one in KINDS else [pytest.mark.slow]) for one in group_choices()["recipe"]]
)
def test_the_recipe_of_the_page_is_the_recipe_of_the_command(recipe: str) -> None:
    settings = flat(asdict(make_config(None, {"recipe": recipe}).config))
    page = settings_page(RunFiles(Path("run"), settings, {"command": f"covey train recipe={recipe}"}))
    other = [row for row in page["rows"] if row[4] in ("own", "fitted")]
    assert other == []
    assert page["recipe"] == recipe


def test_commands_that_resumed_a_run_add_what_they_typed() -> None:
    found = origins("covey train resume=run num_steps=9", "covey train recipe=arithmetic seed=3", num_steps=9, seed=3)
    assert found["num_steps"] == ("own", "350")
    assert found["seed"] == ("own", "0")


@pytest.mark.parametrize("command", ["", "script.py recipe=arithmetic", "covey train 'recipe=arithmetic", None, 5])
def test_a_command_that_is_none_of_covey_train_says_nothing(command: Any) -> None:
    assert command_of({"command": command}) == command_of({})
    assert origins(command, num_steps=9) == {"num_steps": ("fitted", "100")}


@pytest.mark.parametrize("recipe", ["../../../etc/passwd", "mine", ""])
def test_a_recipe_that_is_not_coveys_own_has_no_values(recipe: str) -> None:
    assert origins(f"covey train recipe={recipe} seed=1", seed=1, num_steps=9) == {
        "seed": ("own", "0"),
        "num_steps": ("fitted", "100"),
    }


def test_a_file_of_settings_is_named() -> None:
    page = settings_page(
        RunFiles(Path("run"), dict(DEFAULTS), {"command": "covey train --config a/config.yaml seed=1"})
    )
    assert page["file"] == "a/config.yaml"
    assert json.loads(json.dumps(page))["presets"] == []
